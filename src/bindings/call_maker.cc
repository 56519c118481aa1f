// Calls that are known, from a plan and what was given to the result of the native call (call_results.cc).
#include "bindings/call_maker.h"

#include <utility>

#include "base/clock.h"
#include "base/status.h"
#include "bindings/arrays.h"
#include "bindings/names.h"
#include "bindings/objects.h"
#include "engine/communicator.h"

namespace nb = nanobind;

namespace weft::bindings {
namespace {

bool are_equal(nb::handle one, nb::handle other) {
  const int found = PyObject_RichCompareBool(one.ptr(), other.ptr(), Py_EQ);
  if (found < 0) throw nb::python_error();
  return found != 0;
}

// What a call holds meanwhile. No signal handler of Python runs between the lines of C++.
class Alone {
 public:
  explicit Alone(nb::object lock)
      : lock_(std::move(lock)), holds_(is_true(call_method(lock_, names().acquire, nb::handle(Py_False)).ptr())) {}
  ~Alone() {
    if (!holds_) return;
    PyObject* done = PyObject_CallMethodObjArgs(lock_.ptr(), names().release, nullptr);
    if (done == nullptr) PyErr_Clear();
    Py_XDECREF(done);
  }
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;
  explicit operator bool() const { return holds_; }

 private:
  nb::object lock_;
  bool holds_;
};

template <class Type>
Type* native_of(nb::handle object) {
  Type* found = nullptr;
  return object.is_valid() && nb::try_cast(object, found) ? found : nullptr;
}

}  // namespace

CallMaker::CallMaker(nb::handle calls, const ExchangeApi* api, const nb::dict& of)
    : api_(api),
      calls_(nb::borrow(calls)),
      calls_fields_(fields_of_object(calls)),
      comm_fields_(fields_of_object(of["comm"])),
      handle_type_(of["Handle"]),
      weighted_type_(of["Weighted"]),
      dispatched_type_(of["Dispatched"]),
      quantized_type_(of["Quantized"]),
      event_type_(of["Event"]),
      process_type_(of["Process"]),
      tensor_type_(of["Tensor"]),
      plan_type_(of["Plan"]),
      torch_c_(of["torch_c"]),
      new_object_(of["new"]),
      num_modes_(of["num_modes"]),
      transforms_(of["transforms"]),
      is_profiled_(of["is_profiled"]),
      recorders_(of["recorders"]),
      quantized_of_(of["quantized_of"]),
      works_(of["works"]) {}

bool CallMaker::stands_alone() const {
  const nb::object num_modes = num_modes_();
  return !is_true(num_modes.ptr()) && nb::object(transforms_()).is_none() && !is_true(recorders_.ptr());
}

PyObject* CallMaker::fields_of(nb::handle handle) const {
  if (handle.type().ptr() != handle_type_.ptr()) return nullptr;
  const nb::object fields = fields_of_object(handle);  // which the handle holds
  const bool is_own = field(fields, names().tie) == field(calls_fields_, names().token);
  return is_own ? fields.ptr() : nullptr;
}

CallMaker::Handled CallMaker::handled(nb::handle fields) {
  const Names& n = names();
  const auto get = [&](PyObject* name) {
    PyObject* found = field(fields, name);
    return nb::borrow(found == nullptr ? Py_None : found);
  };
  return {get(n.call), get(n.lead), get(n.num_tokens)};
}

i64 CallMaker::top_k() const { return PyLong_AsLongLong(field(calls_fields_, names().top_k)); }

std::shared_ptr<const Way> CallMaker::way_of(nb::handle plan) const {
  if (plan.type().ptr() != plan_type_.ptr()) return nullptr;
  const auto has = [&](const char* name) { return is_true(nb::object(plan.attr(name)).ptr()); };
  const nb::object call = plan.attr("call"), work = plan.attr("work");
  const bool is_special = has("has_scope") || has("finishes") || has("parts") || has("is_tracked");
  auto way = std::make_shared<Way>();
  size_t kind = 0;
  for (; kind < nb::len(works_) && !work.is(nb::object(works_[kind])); ++kind) continue;
  if (is_special || kind >= nb::len(works_)) return nullptr;
  way->kind = static_cast<Way::Kind>(kind);
  way->plan = nb::borrow(plan);
  way->window = plan.attr("window");
  way->call = call;
  way->lead = plan.attr("lead");
  way->shapes = plan.attr("shapes");
  way->memory = plan.attr("memory");
  way->data_dtype = plan.attr("data_dtype");
  way->scale_dtype = plan.attr("scale_dtype");
  way->spec = plan.attr("spec");
  way->dispatch = native_of<DispatchSpec>(way->spec);
  way->combine = native_of<CombineSpec>(way->spec);
  way->overflow = nb::cast<u64>(nb::object(plan.attr("overflow")));
  way->room = nb::cast<i64>(nb::object(plan.attr("room")));
  way->hidden = nb::cast<i64>(nb::object(plan.attr("hidden")));
  way->strides = nb::make_tuple(way->hidden, 1);
  way->capacity = nb::cast<i64>(nb::object(call.attr("capacity")));
  way->waits = has("waits");
  way->is_small = has("is_small");
  way->weighted = has("weighted");
  way->no_scale_columns = has("no_scale_columns");
  way->tells_counts = is_true(nb::object(call.attr("tells_counts")).ptr());
  const bool has_spec = way->kind == Way::Kind::kSum ? way->combine != nullptr : way->dispatch != nullptr;
  return has_spec && way->hidden > 0 ? way : nullptr;
}

bool CallMaker::is_this_epoch() const {
  const auto* native = native_of<Communicator>(field(comm_fields_, names().native_comm));
  PyObject* epoch = field(calls_fields_, names().epoch);
  return native != nullptr && epoch != nullptr && PyLong_AsLongLong(epoch) == static_cast<i64>(native->epoch());
}

// What Runner.run and Communicator.alone look at; if anything is unusual they decide.
bool CallMaker::is_ready(const Way& way) const {
  const Names& n = names();
  if (is_true(field(calls_fields_, n.closed)) || is_true(field(calls_fields_, n.names_ranges))) return false;
  if (is_true(nb::object(is_profiled_()).ptr()) || is_true(attribute(process_type_, n.is_ending).ptr())) return false;
  for (PyObject* name : {n.comm_closed, n.is_asleep, n.has_refused, n.ended}) {
    if (is_true(field(comm_fields_, name))) return false;
  }
  PyObject* pid = field(comm_fields_, n.pid_of_comm);
  if (pid == nullptr || !are_equal(pid, attribute(process_type_, n.pid))) return false;
  return is_this_epoch() && is_none(field(fields_of_object(way.window), n.half));
}

// The current one of the window's GPU, and `event`: what completes behind it. As in Runner.run.
u64 CallMaker::stream_of(const Way& way, nb::object& event) const {
  const Names& n = names();
  const nb::object last = nb::borrow(field(calls_fields_, n.last));
  event = attribute(last, n.event);
  const nb::object streams = nb::borrow(field(fields_of_object(way.window), n.streams));
  if (streams.is_none()) return 0;
  const nb::object number = attribute(torch_c_, n.current_stream)(attribute(streams, n.index));
  nb::object at = attribute(streams, n.last);
  if (!are_equal(number, attribute(streams, n.last_handle))) at = nb::object(attribute(streams, n.begin)())[0];
  if (!attribute(event, n.event_of_torch).is_none() || !attribute(event, n.stream).is(at)) {
    event = event_type_(at);
    if (PyObject_SetAttr(last.ptr(), n.event, event.ptr()) != 0) throw nb::python_error();
  }
  return nb::cast<u64>(number);
}

nb::object CallMaker::make(const Way& way, const Given& given) const {
  if (!is_ready(way)) return {};
  const Names& n = names();
  const nb::object native = attribute(way.window, n.native);
  auto* window = native_of<CallWindow>(native);
  if (window == nullptr) return {};
  const bool is_sum = way.kind == Way::Kind::kSum;
  Routing* routing = nullptr;
  nb::object kept = nb::none();  // holds the routing
  if (given.fields.is_valid()) {
    PyObject* made = field(given.fields, n.made);
    kept = made == nullptr ? nb::object(nb::none()) : nb::borrow(made);
    routing = native_of<Routing>(kept);
    if (routing == nullptr) return {};
  }
  const Alone alone(nb::borrow(field(comm_fields_, n.busy)));
  if (!alone) return {};
  if (way.waits || !is_none(field(calls_fields_, n.bad_ids))) {
    calls_.attr("before_call")(is_sum ? "combine" : "dispatch");
  }
  const u64 begin = now_ns();
  nb::object event, result;
  const u64 stream = stream_of(way, event);
  if (is_sum) {
    result = make_sum(way, given, *window, *routing, stream);
  } else {
    Made made;
    switch (way.kind) {
      case Way::Kind::kFirst: made = make_first(way, given, *window, stream); break;
      case Way::Kind::kSmall: made = make_small(way, given, *window, stream); break;
      default: made = make_again(way, given, *window, *routing, stream); break;
    }
    if (!way.data_dtype.is_none()) made.rows = quantized(way, made.rows, made.scales);
    result = new_object_(dispatched_type_);
    set_fields(fields_of_object(result), {{n.x, made.rows},
                                          {n.handle, given.handle.is_valid() ? given.handle : made.handle},
                                          {n.overflow, field(calls_fields_, n.overflow)},
                                          {n.event, event},
                                          {n.calls, calls_},
                                          {n.half, nb::none()}});
  }
  const nb::object counters = fields_of_object(field(calls_fields_, n.counters));
  add_to(counters, is_sum ? n.num_combines : n.num_dispatches, nb::int_(1));
  add_to(counters, is_sum ? n.combine_s : n.dispatch_s, nb::float_(static_cast<double>(now_ns() - begin) * 1e-9));
  return result;
}

// For what is left to methods of the Runner.
void CallMaker::set_plan(const Way& way, const Given& given) {
  way.plan.attr("num_tokens") = given.num_tokens;
  way.plan.attr("places") = nb::make_tuple(given.places[0], given.places[1], given.places[2], given.places[3]);
}

CallMaker::Made CallMaker::made_by(const nb::object& found) {
  Made made;
  made.rows = found[0];
  made.scales = found[1];
  made.handle = found[2];
  return made;
}

CallMaker::Made CallMaker::make_first(const Way& way, const Given& given, CallWindow& window, u64 stream) const {
  const auto& at = given.places;
  const nb::object from_dlpack = attribute(torch_c_, names().from_dlpack);
  DispatchResult found = dispatch_unlocked(
      window, first_args(*way.dispatch, stream, given.num_tokens, at[0], at[1], at[2], at[3], way.overflow));
  const bool is_usual = found.has_begun && found.needed_tokens == 0 && is_made(window, found) && found.num_bad_ids == 0;
  nb::object counts;
  if (is_usual && way.tells_counts) counts = counts_of(window, found);
  if (!is_usual || (way.tells_counts && !counts.is_valid())) {
    set_plan(way, given);
    const nb::object places =
        nb::make_tuple(way.spec, stream, given.num_tokens, at[0], at[1], at[2], at[3], way.overflow, from_dlpack);
    return made_by(calls_.attr("_first")(way.plan, stream, nb::none(), nb::none(), nb::none(), nb::none(),
                                         nb::make_tuple(places, first_made(window, found, from_dlpack))));
  }
  count_sent(window, found);
  Made made;
  made.rows = to_tensor(found.x, from_dlpack);
  made.scales = to_tensor(found.scales, from_dlpack);
  made.handle = new_handle(way, given, found.result_rows, nb::cast(routing_of(found)));
  if (counts.is_valid()) set_fields(fields_of_object(made.handle), {{names().counts, counts}});
  return made;
}

CallMaker::Made CallMaker::make_small(const Way& way, const Given& given, CallWindow& window, u64 stream) const {
  const auto& at = given.places;
  Made made;
  fill_ordinary(way, way.lead, made);
  PyObject* known = PyDict_GetItem(way.memory.ptr(), nb::int_(given.num_tokens).ptr());
  nb::object memory = known == nullptr ? nb::object(nb::none()) : nb::borrow(known);
  if (memory.is_none()) {
    set_plan(way, given);
    memory = calls_.attr("_memory")(way.plan);
  }
  const nb::object found =
      dispatch_small(window, *way.dispatch, nb::cast<const Together&>(memory), stream, given.num_tokens, at[0], at[1],
                     at[2], at[3], way.overflow, way.room, made.rows_at, made.scales_at);
  if (way.tells_counts || way.capacity < 0 || PyTuple_Check(found.ptr()) == 0) {
    set_plan(way, given);
    const nb::object into = nb::make_tuple(made.rows_at, made.scales_at);
    return made_by(calls_.attr("_first_small")(way.plan, stream, nb::none(), nb::none(), nb::none(), nb::none(),
                                               nb::make_tuple(made.rows, made.scales, into, found)));
  }
  made.handle = new_handle(way, given, 0, nb::object(found[1]));
  return made;
}

CallMaker::Made CallMaker::make_again(const Way& way, const Given& given, CallWindow& window, const Routing& routing,
                                      u64 stream) const {
  const Names& n = names();
  PyObject* known_lead = field(given.fields, n.lead);
  const nb::object lead = is_true(known_lead) ? nb::borrow(known_lead) : nb::object(given.handle.attr("rows_shape"));
  Made made;
  DispatchArgs args =
      first_args(*way.dispatch, stream, given.num_tokens, given.places[0], given.places[1], 0, 0, way.overflow);
  args.sizes = address_of(routing.sizes);
  args.send_plan = address_of(routing.send_plan);
  args.recv_plan = address_of(routing.recv_plan);
  args.recv_plan_len = routing.recv_plan_len();
  args.num_rows = 1;
  for (const nb::handle length : nb::borrow<nb::tuple>(lead)) args.num_rows *= nb::cast<i64>(length);
  if (way.is_small) fill_ordinary(way, lead, made);
  args.out_x = made.rows_at;
  args.out_scales = made.scales_at;
  const DispatchResult found = dispatch_unlocked(window, args);
  count_sent(window, found);
  if (way.is_small) return made;
  if (!is_made(window, found)) {
    set_plan(way, given);
    const nb::object beside = calls_.attr("_again_beside")(way.plan, lead, given.handle);
    made.rows = beside[0];
    made.scales = beside[1];
    return made;
  }
  const nb::object from_dlpack = attribute(torch_c_, n.from_dlpack);
  made.rows = to_tensor(found.x, from_dlpack);
  made.scales = to_tensor(found.scales, from_dlpack);
  return made;
}

nb::object CallMaker::make_sum(const Way& way, const Given& given, CallWindow& window, const Routing& routing,
                               u64 stream) const {
  // With strides new_empty takes two thirds of its time.
  nb::object total = given.out.is_valid() ? nb::borrow(given.out)
                                          : call_method(given.y, names().new_empty_strided,
                                                        nb::make_tuple(given.num_tokens, way.hidden), way.strides);
  CombineArgs args{*way.combine, {}};
  args.stream = stream;
  args.num_tokens = given.num_tokens;
  args.y = given.places[0];
  args.num_rows = given.num_values / way.hidden;
  args.weights = way.weighted ? address_of(routing.topk_weights) : 0;
  args.send_plan = address_of(routing.send_plan);
  args.recv_plan = address_of(routing.recv_plan);
  args.recv_plan_len = routing.recv_plan_len();
  args.out = given.out.is_valid() ? given.out_at : address(total);
  args.owner_weights = given.owner_weights;
  args.owner_ids = given.owner_ids;
  args.owner_ids_are_int64 = given.owner_ids_are_int64;
  combine_unlocked(window, args);
  return total;
}

}  // namespace weft::bindings
