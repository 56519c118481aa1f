// The calls of a window of either engine: their arguments, their results, and the class that all windows are.
#include "bindings/calls.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <type_traits>

#include "base/status.h"
#include "bindings/arrays.h"
#include "bindings/call_parts.h"
#include "bindings/gil.h"
#include "engine/call_fields.h"
#include "memory/heap.h"
#include "weft/layout/checked.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace weft::bindings {
namespace {

template <auto kMember>
std::string name_of() {
  const fields::Name name = fields::member_name<kMember>();
  return {name.data, name.length};
}

template <class Value>
auto number_of(Value value) {
  if constexpr (std::is_enum_v<Value>) {
    return static_cast<int>(value);
  } else {
    return value;
  }
}

template <auto kMember, class Type>
void set(Type& self, nb::handle value) {
  auto& field = self.*kMember;
  using Field = std::remove_reference_t<decltype(field)>;
  field = static_cast<Field>(nb::cast<decltype(number_of(field))>(value));
}

template <class Type>
void set_field(Type& self, const std::string& name, nb::handle value) {
  bool is_known = false;
  visit_members<Type>([&]<auto kMember>() {
    if (is_known || name != name_of<kMember>()) return;
    is_known = true;
    set<kMember>(self, value);
  });
  if (!is_known) throw nb::attribute_error(("no field " + name).c_str());
}

// A struct as a class of Python's side that has its fields, is made of any of them by name, and has enums as plain numbers.
template <class Type>
void bind_fields(nb::module_& m, const char* name) {
  nb::class_<Type> bound(m, name);
  bound.def("__init__", [](Type* self, const nb::kwargs& given) {
    new (self) Type();
    for (const auto& [key, value] : given) set_field(*self, nb::cast<std::string>(key), value);
  });
  visit_members<Type>([&]<auto kMember>() {
    bound.def_prop_rw(
        name_of<kMember>().c_str(), [](const Type& self) { return number_of(self.*kMember); },
        [](Type& self, nb::handle value) { set<kMember>(self, value); });
  });
}

void bind_result(nb::module_& m) {
  nb::class_<DispatchResult>(m, "DispatchResult")
      .def_prop_ro("x", [](const DispatchResult& result) { return to_ndarray(result.x); })
      .def_prop_ro("scales", [](const DispatchResult& result) { return to_ndarray(result.scales); })
      .def_prop_ro("topk_idx", [](const DispatchResult& result) { return to_ndarray(result.topk_idx); })
      .def_prop_ro("topk_weights", [](const DispatchResult& result) { return to_ndarray(result.topk_weights); })
      .def_prop_ro("recv_plan", [](const DispatchResult& result) { return to_ndarray(result.recv_plan); })
      .def_ro("num_rows", &DispatchResult::num_rows)
      .def_ro("num_bad_ids", &DispatchResult::num_bad_ids)
      .def_ro("first_bad_id", &DispatchResult::first_bad_id)
      .def_ro("first_bad_at", &DispatchResult::first_bad_at)
      .def_ro("has_begun", &DispatchResult::has_begun)
      .def_ro("in_heap", &DispatchResult::in_heap)
      .def_ro("result_rows", &DispatchResult::result_rows)
      .def_ro("needed_tokens", &DispatchResult::needed_tokens)
      .def_ro("counts", &DispatchResult::counts)
      .def_ro("rows_sent", &DispatchResult::rows_sent)
      .def_ro("bytes_sent", &DispatchResult::bytes_sent);
}

// Numbers of Python's side beyond those of Dtype.
constexpr int kInt32 = 4, kInt64 = 5;

Array array_of(const CallWindow& window, const std::vector<i64>& shape, int dtype) {
  Array array;
  array.is_integer = dtype >= kInt32;
  array.is_int64 = dtype == kInt64;
  if (!array.is_integer) array.dtype = static_cast<Dtype>(dtype);
  array.shape = shape;
  array.gpu = window.gpu_index();
  return array;
}

u64 bytes_of(const Array& array) {
  const i64 item_bytes = array.is_integer ? (array.is_int64 ? 8 : 4) : dtype_bytes(array.dtype);
  CheckedSize num_bytes(static_cast<u64>(item_bytes));
  bool is_sound = true;
  for (i64 length : array.shape) {
    is_sound = is_sound && length >= 0;
    num_bytes = num_bytes * static_cast<u64>(length);
  }
  if (!is_sound || !num_bytes.ok)
    throw_invalid_argument("shape: lengths must be 0 or more, their product within 64 bits");
  return num_bytes.value;
}

// The calls that are made most often: a spec, and what differs from call to call. To make an object or to set one field from Python
// takes a good part of a launch's time, so the buffers come as plain numbers.

// `sizes` and `send_plan`: 0, or where they go, behind a call that found no room for them and returned None.
nb::object dispatch_first(CallWindow& window, const DispatchSpec& spec, u64 stream, i64 num_tokens, u64 x, u64 scales,
                          u64 topk_idx, u64 topk_weights, u64 overflow, nb::handle from_dlpack, u64 sizes,
                          u64 send_plan, u64 experts) {
  DispatchArgs args = first_args(spec, stream, num_tokens, x, scales, topk_idx, topk_weights, overflow);
  args.sizes = sizes;
  args.send_plan = send_plan;
  args.experts = experts;
  DispatchResult made = dispatch_unlocked(window, args);
  return first_made(window, made, from_dlpack);
}

nb::object dispatch_again(CallWindow& window, const DispatchSpec& spec, u64 stream, i64 num_tokens, u64 x, u64 scales,
                          u64 overflow, u64 sizes, u64 send_plan, u64 recv_plan, i64 recv_plan_len, i64 num_rows,
                          u64 out_x, u64 out_scales, nb::handle from_dlpack) {
  DispatchArgs args{spec, {}};
  args.stream = stream;
  args.num_tokens = num_tokens;
  args.x = x;
  args.scales = scales;
  args.overflow = overflow;
  args.sizes = sizes;
  args.send_plan = send_plan;
  args.recv_plan = recv_plan;
  args.recv_plan_len = recv_plan_len;
  args.num_rows = num_rows;
  args.out_x = out_x;
  args.out_scales = out_scales;
  const DispatchResult result = dispatch_unlocked(window, args);
  return nb::make_tuple(is_made(window, result), to_tensor(result.x, from_dlpack),
                        to_tensor(result.scales, from_dlpack), result.rows_sent, result.bytes_sent);
}

void combine_rows(CallWindow& window, const CombineSpec& spec, u64 stream, i64 num_tokens, u64 y, i64 num_rows,
                  u64 weights, u64 send_plan, u64 recv_plan, i64 recv_plan_len, u64 out, u64 bias, u64 side,
                  u64 side_out, u64 owner_weights, u64 owner_ids, bool owner_ids_are_int64) {
  CombineArgs args{spec, {}};
  args.stream = stream;
  args.num_tokens = num_tokens;
  args.y = y;
  args.num_rows = num_rows;
  args.weights = weights;
  args.send_plan = send_plan;
  args.recv_plan = recv_plan;
  args.recv_plan_len = recv_plan_len;
  args.out = out;
  args.bias = bias;
  args.side = side;
  args.side_out = side_out;
  args.owner_weights = owner_weights;
  args.owner_ids = owner_ids;
  args.owner_ids_are_int64 = owner_ids_are_int64;
  combine_unlocked(window, args);
}

Together together(const CallWindow& window, const std::vector<std::pair<std::vector<i64>, int>>& wanted) {
  Together all;
  CheckedSize end;
  for (const auto& [shape, dtype] : wanted) {
    all.arrays.push_back(array_of(window, shape, dtype));
    all.begins.push_back(align_up(end.value, Heap::kAlignment));
    end = CheckedSize(all.begins.back()) + CheckedSize(bytes_of(all.arrays.back()));
    if (!end.ok) throw_invalid_argument("shapes: their bytes must be within 64 bits");
  }
  all.num_bytes = end.value;
  return all;
}

void gradients(CallWindow& window, u64 stream, int dtype, i64 hidden, i64 num_rows, u64 rows, u64 y, u64 weights,
               u64 out, u64 grad_weights) {
  window.gradients({stream, static_cast<Dtype>(dtype), hidden, num_rows, rows, y, weights, out, grad_weights});
}

nb::dict stats(const CallWindow& window) {
  nb::dict all;
  for (const Count& count : window.counts()) {
    std::visit([&](const auto& value) { all[count.name] = nb::cast(value); }, count.value);
  }
  return all;
}

u64 timeout_ns(double seconds) {
  constexpr double kLongestS = 1e9;
  return static_cast<u64>(std::min(std::max(seconds, 0.0), kLongestS) * 1e9);
}

void bind_routing(nb::module_& m) {
  nb::class_<Routing>(m, "Routing")
      .def("tensor",
           [](const Routing& routing, const std::string& name, nb::handle from_dlpack) {
             const std::pair<const char*, const Array&> arrays[] = {{"sizes", routing.sizes},
                                                                    {"send_plan", routing.send_plan},
                                                                    {"recv_plan", routing.recv_plan},
                                                                    {"topk_weights", routing.topk_weights},
                                                                    {"topk_idx", routing.topk_idx}};
             for (const auto& [known, array] : arrays) {
               if (name == known) return to_tensor(array, from_dlpack);
             }
             throw_internal("a routing has no " + name);
           })
      .def("counts_of",  // of its first local experts: the head of its sizes
           [](const Routing& routing, i64 num_experts, nb::handle from_dlpack) {
             Array counts = routing.sizes;
             counts.shape = {num_experts};
             return to_tensor(counts, from_dlpack);
           })
      .def("picks",
           [](const Routing& routing, nb::handle from_dlpack) {
             return nb::make_tuple(to_tensor(routing.topk_idx, from_dlpack),
                                   to_tensor(routing.topk_weights, from_dlpack));
           })
      .def_prop_ro("places",
                   [](const Routing& routing) {
                     return nb::make_tuple(address_of(routing.sizes), address_of(routing.send_plan),
                                           address_of(routing.recv_plan), routing.recv_plan_len(),
                                           address_of(routing.topk_weights));
                   })
      .def_ro("num_bad_ids", &Routing::num_bad_ids)
      .def_ro("first_bad_id", &Routing::first_bad_id)
      .def_ro("first_bad_at", &Routing::first_bad_at)
      .def_ro("counts", &Routing::counts)
      .def_ro("is_captured", &Routing::is_captured)
      .def_ro("rows_sent", &Routing::rows_sent)
      .def_ro("bytes_sent", &Routing::bytes_sent);
}

nb::object empty(CallWindow& window, const std::vector<i64>& shape, int dtype, u64 stream) {
  Array array = array_of(window, shape, dtype);
  std::optional<Block> block = window.reserve(bytes_of(array), stream);
  if (!block) return nb::none();
  array.block = std::move(*block);
  return to_ndarray(array);
}

}  // namespace

void bind_calls(nb::module_& m) {
  using Guard = nb::call_guard<ReleasedGil>;
  bind_fields<DispatchSpec>(m, "DispatchSpec");
  bind_fields<DispatchBuffers>(m, "DispatchBuffers");
  bind_fields<CombineSpec>(m, "CombineSpec");
  bind_fields<CombineBuffers>(m, "CombineBuffers");
  bind_result(m);
  bind_routing(m);
  const nb::class_<Together> opaque(m, "Together");  // Python hands it back as it is
  nb::class_<CallWindow>(m, "Window")
      .def_prop_ro("is_retired", &CallWindow::is_retired)
      .def(
          "dispatch",
          [](CallWindow& window, const DispatchSpec& spec, const DispatchBuffers& buffers) {
            return window.dispatch({spec, buffers}, signal_poll());
          },
          "spec"_a, "buffers"_a, Guard())
      .def(
          "combine",
          [](CallWindow& window, const CombineSpec& spec, const CombineBuffers& buffers) {
            window.combine({spec, buffers}, signal_poll());
          },
          "spec"_a, "buffers"_a, Guard())
      .def("dispatch_first", &dispatch_first, "spec"_a, "stream"_a, "num_tokens"_a, "x"_a, "scales"_a, "topk_idx"_a,
           "topk_weights"_a, "overflow"_a, "from_dlpack"_a, "sizes"_a = 0, "send_plan"_a = 0, "experts"_a = 0)
      .def("dispatch_again", &dispatch_again, "spec"_a, "stream"_a, "num_tokens"_a, "x"_a, "scales"_a, "overflow"_a,
           "sizes"_a, "send_plan"_a, "recv_plan"_a, "recv_plan_len"_a, "num_rows"_a, "out_x"_a, "out_scales"_a,
           "from_dlpack"_a)
      .def("together", &together, "wanted"_a)
      .def("dispatch_small", &dispatch_small, "spec"_a, "wanted"_a, "stream"_a, "num_tokens"_a, "x"_a, "scales"_a,
           "topk_idx"_a, "topk_weights"_a, "overflow"_a, "room"_a, "out_x"_a, "out_scales"_a)
      .def("combine_rows", &combine_rows, "spec"_a, "stream"_a, "num_tokens"_a, "y"_a, "num_rows"_a, "weights"_a,
           "send_plan"_a, "recv_plan"_a, "recv_plan_len"_a, "out"_a, "bias"_a, "side"_a, "side_out"_a,
           "owner_weights"_a = 0, "owner_ids"_a = 0, "owner_ids_are_int64"_a = false)
      .def("gradients", &gradients, "stream"_a, "dtype"_a, "hidden"_a, "num_rows"_a, "rows"_a, "y"_a, "weights"_a,
           "out"_a, "grad_weights"_a, Guard())
      .def("empty", &empty, "shape"_a, "dtype"_a, "stream"_a = 0)
      .def(
          "barrier",
          [](CallWindow& window, double deadline_s) { window.barrier(timeout_ns(deadline_s), signal_poll()); },
          "deadline_s"_a, Guard())
      .def("stats", &stats)
      .def_prop_ro("id", &CallWindow::id)
      .def("close", &CallWindow::close, Guard());
}

}  // namespace weft::bindings
