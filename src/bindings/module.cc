// The Python module weft._native: raw pointers and plain numbers in, arrays out. Python's side is python/weft/_native.pyi.
// Every call that may wait releases the GIL and looks for Ctrl-C at least every 100 ms.
#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstring>

#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "bindings/calls.h"
#include "bindings/gil.h"
#include "bindings/jit.h"
#include "bindings/known_calls.h"
#include "bindings/nvlink.h"
#include "bootstrap/build.h"
#include "bootstrap/control_plane.h"
#include "engine/communicator.h"
#include "engine/cpu/plan.h"
#include "engine/cpu/window.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace weft::bindings {
namespace {

void check_signals() {
  const Visit visit;
  if (!visit) return;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

std::vector<std::byte> to_bytes(const nb::bytes& bytes) {
  const auto* data = reinterpret_cast<const std::byte*>(bytes.c_str());
  return {data, data + bytes.size()};
}

// Exceptions: Python gives a function that makes them, so that this module knows none of its classes.
nb::object& error_factory() {
  static auto* factory = new nb::object();  // outlives the interpreter on purpose: no Python call at exit
  return *factory;
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    if (!error_factory().is_valid()) {
      PyErr_SetString(PyExc_RuntimeError, error.text.c_str());
      return;
    }
    nb::object made =
        error_factory()(static_cast<int>(error.code), error.text, error.op, error.sequence, error.peers, error.reason);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
  }
}

void bind_bootstrap(nb::module_& m) {
  nb::class_<Listener>(m, "Listener")
      .def(
          "__init__",
          [](Listener* self, bool has_door, std::string interface, int port, const std::string& machine) {
            const DoorOptions door{std::move(interface), static_cast<uint16_t>(port)};
            new (self) Listener(has_door ? &door : nullptr, machine);
          },
          "has_door"_a = false, "interface"_a = "", "port"_a = 0, "machine"_a = "")
      .def("endpoint", [](const Listener& listener) {
        return nb::bytes(reinterpret_cast<const char*>(&listener.endpoint()), sizeof(Endpoint));
      });
  const auto text = [](const nb::bytes& bytes) { return std::string(bytes.c_str(), bytes.size()); };
  nb::class_<Decider>(m, "Decider")
      .def(nb::init<>())
      .def("next",
           [](Decider& decider) -> nb::object {
             std::optional<Decider::Request> request;
             {
               const ReleasedGil release;
               request = decider.next();
             }
             if (!request) return nb::none();
             return nb::make_tuple(request->number, request->key, request->expected, request->desired);
           })
      .def(
          "answer",
          [text](Decider& decider, u64 number, const nb::bytes& value) { decider.answer(number, text(value)); },
          "number"_a, "value"_a)
      .def("fail", &Decider::fail, "number"_a, "why"_a)
      .def("close", &Decider::close);
  nb::class_<LocalHub>(m, "LocalHub")
      .def(nb::init<int>(), "num_ranks"_a)
      .def_prop_ro("num_ranks", &LocalHub::num_ranks);
}

std::shared_ptr<Communicator> connect(int rank, const std::vector<nb::bytes>& endpoints, Listener& listener,
                                      double timeout_s, u32 first_epoch, std::shared_ptr<Decider> decider,
                                      const nb::bytes& secret, int max_ranks) {
  std::vector<Endpoint> parsed;
  for (size_t idx = 0; idx < endpoints.size(); ++idx) {
    parsed.push_back(parse_endpoint(to_bytes(endpoints[idx]), "the endpoint of rank " + std::to_string(idx)));
  }
  const Across across{std::move(decider), to_bytes(secret)};
  const ReleasedGil release;
  return Communicator::create(connect_processes(rank, parsed, std::move(listener), deadline_after_s(timeout_s),
                                                signal_poll(), across, {max_ranks}),
                              first_epoch);
}

std::shared_ptr<Communicator> join(const std::string& address, int slot, Listener& listener, double timeout_s) {
  return Communicator::join(
      join_processes(address, slot, std::move(listener), deadline_after_s(timeout_s), signal_poll()));
}

const char* name_of(WantedChange::State state) {
  switch (state) {
    case WantedChange::State::kPreparing: return "preparing";
    case WantedChange::State::kProposed: return "proposed";
    case WantedChange::State::kCommitted: return "committed";
    case WantedChange::State::kWithdrawn: return "withdrawn";
  }
  return "withdrawn";
}

nb::tuple tuple_of(const WantedChange& wanted) {
  return nb::make_tuple(name_of(wanted.state), wanted.epoch, wanted.reason);
}

// How many boundaries have ended, and what the last one has changed if the caller has not heard of it: it knows of `known`.
nb::tuple ended_boundary(const Communicator& comm, u64 known) {
  const auto [count, done] = comm.ended_boundary();
  if (count == known || !done) return nb::make_tuple(count, nb::none());
  return nb::make_tuple(count, nb::make_tuple(done->epoch, done->id, done->boundary, done->added, done->removed,
                                              done->active, done->map_hash, static_cast<double>(done->waited_ns) * 1e-3,
                                              static_cast<double>(done->installed_ns) * 1e-3));
}

// One that has ended before, in a call that was interrupted behind it, is not passed again.
nb::tuple boundary(Communicator& comm, double timeout_s, bool stands_by, u64 known) {
  if (comm.ended_boundary().count == known) {
    const ReleasedGil release;
    comm.boundary(deadline_after_s(timeout_s), signal_poll(), stands_by);
  }
  return ended_boundary(comm, known);
}

void bind_changes(nb::class_<Communicator>& communicator) {
  communicator
      .def_static("join", &join, "address"_a, "slot"_a, "listener"_a, "timeout_s"_a, nb::call_guard<ReleasedGil>())
      .def_prop_ro("is_open", &Communicator::is_open)
      .def_prop_ro("is_solo", &Communicator::is_solo)
      .def("address", &Communicator::address)
      .def("boundary", &boundary, "timeout_s"_a, "stands_by"_a, "known"_a)
      .def("ended_boundary", &ended_boundary, "known"_a)
      .def("map_hashes", &Communicator::map_hashes, "first"_a, "last"_a)
      .def("set_meeting_text",
           [](Communicator& comm, const nb::bytes& text) { comm.set_meeting_text({text.c_str(), text.size()}); })
      .def("meeting_texts",
           [](const Communicator& comm) {
             nb::dict by_rank;
             for (const auto& [rank, text] : comm.meeting_texts().by_rank) {
               by_rank[nb::int_(rank)] = nb::bytes(text.data(), text.size());
             }
             return nb::make_tuple(comm.meeting_texts().epoch, by_rank);
           })
      .def(
          "propose",
          [](Communicator& comm, std::vector<int> admit, std::vector<int> remove, std::vector<int> suspend, u64 id,
             double timeout_s, bool together, u64 map_hash) {
            comm.propose({std::move(admit), std::move(remove), std::move(suspend), id, together, map_hash},
                         deadline_after_s(timeout_s));
          },
          "admit"_a, "remove"_a, "suspend"_a, "id"_a, "timeout_s"_a, "together"_a, "map_hash"_a = 0,
          nb::call_guard<ReleasedGil>())
      .def("wanted_change", [](Communicator& comm) { return tuple_of(comm.wanted_change()); })
      .def("withdraw_change", [](Communicator& comm) { return tuple_of(comm.withdraw_change()); })
      .def(
          "await_change",
          [](Communicator& comm, double timeout_s) {
            WantedChange wanted;
            {
              const ReleasedGil release;
              wanted = comm.await_change(deadline_after_s(timeout_s), signal_poll());
            }
            return tuple_of(wanted);
          },
          "timeout_s"_a)
      .def("show_stage", &Communicator::show_stage, "epoch"_a, "number"_a, "stage"_a)
      .def("stages", &Communicator::stages, "epoch"_a, "number"_a, "ranks"_a)
      .def(
          "ready", [](Communicator& comm, double timeout_s) { comm.ready(deadline_after_s(timeout_s), signal_poll()); },
          "timeout_s"_a, nb::call_guard<ReleasedGil>())
      .def("joining_ranks", &Communicator::joining_ranks)
      .def("prepared_ranks", &Communicator::prepared_ranks)
      .def("leaving_ranks", &Communicator::leaving_ranks)
      .def("members", &Communicator::members)
      .def("set_contract", &Communicator::set_contract, "contract"_a)
      .def(
          "ask_contract",
          [](Communicator& comm, double timeout_s, const std::vector<int>& of) {
            return comm.ask_contract(deadline_after_s(timeout_s), signal_poll(), of);
          },
          "timeout_s"_a, "of"_a = std::vector<int>(), nb::call_guard<ReleasedGil>());
}

std::vector<nb::bytes> exchange(Communicator& comm, u64 tag, const nb::bytes& payload, double timeout_s) {
  const std::vector<std::byte> mine = to_bytes(payload);
  std::vector<Parcel> parcels;
  {
    const ReleasedGil release;
    parcels = comm.exchange(kCallerTag | tag, mine, {}, deadline_after_s(timeout_s), signal_poll());
  }
  std::vector<nb::bytes> all;
  for (const Parcel& parcel : parcels)
    all.emplace_back(reinterpret_cast<const char*>(parcel.bytes.data()), parcel.bytes.size());
  return all;
}

void bind_communicator(nb::module_& m) {
  nb::class_<Communicator> communicator(m, "Communicator");
  bind_changes(communicator);
  communicator
      .def_static("connect", &connect, "rank"_a, "endpoints"_a, "listener"_a, "timeout_s"_a, "first_epoch"_a = 1,
                  "decider"_a.none() = std::shared_ptr<Decider>(), "secret"_a = nb::bytes(""), "max_ranks"_a = 0)
      .def_static(
          "local",
          [](std::shared_ptr<LocalHub> hub, int rank, u32 first_epoch) {
            return Communicator::create(connect_threads(std::move(hub), rank), first_epoch);
          },
          "hub"_a, "rank"_a, "first_epoch"_a = 1)
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("num_ranks", &Communicator::num_ranks)
      .def_prop_ro("epoch", &Communicator::epoch)
      .def_prop_ro("active_ranks", [](const Communicator& comm) { return comm.active_ranks(); })
      .def(
          "is_near", [](const Communicator& comm, int rank) { return comm.is_near(rank); }, "rank"_a)
      .def("check_one_machine", &Communicator::check_one_machine, "what"_a)
      .def("broken", &Communicator::is_broken)
      .def("raise_if_broken", &Communicator::raise_if_broken)
      .def("raise_if_evicted", &Communicator::raise_if_evicted)
      .def(
          "meet", [](Communicator& comm, double timeout_s) { comm.meet(deadline_after_s(timeout_s), signal_poll()); },
          "timeout_s"_a, nb::call_guard<ReleasedGil>())
      .def("exchange", &exchange, "tag"_a, "payload"_a, "timeout_s"_a)
      .def(
          "rebuild",
          [](Communicator& comm, std::vector<int> ranks, double timeout_s) {
            comm.rebuild(std::move(ranks), deadline_after_s(timeout_s), signal_poll());
          },
          "ranks"_a, "timeout_s"_a, nb::call_guard<ReleasedGil>())
      .def(
          "recover",
          [](Communicator& comm, const std::vector<int>& evict, int min_ranks, double timeout_s,
             const std::optional<std::vector<int>>& spares) {
            comm.recover(evict, min_ranks, spares, deadline_after_s(timeout_s), signal_poll());
          },
          "evict"_a, "min_ranks"_a, "timeout_s"_a, "spares"_a.none() = nb::none(), nb::call_guard<ReleasedGil>())
      .def("group",
           [](const Communicator& comm) {
             const GroupId group = comm.group();
             return nb::bytes(reinterpret_cast<const char*>(group.data()), group.size());
           })
      .def("incarnation", &Communicator::incarnation, "rank"_a)
      .def("evicted_ranks", &Communicator::evicted_ranks)
      .def("safe_to_delete", &Communicator::safe_to_delete)
      .def("detections",
           [](const Communicator& comm) {
             nb::list all;
             for (const Detection& seen : comm.detections()) {
               all.append(nb::make_tuple(seen.rank, detection_channel_name(seen.channel), seen.time_ns));
             }
             return all;
           })
      .def("has_ended", &Communicator::has_ended, "rank"_a, nb::call_guard<ReleasedGil>())
      .def("abort", &Communicator::abort, "reason"_a, nb::call_guard<ReleasedGil>())
      .def("note_refusal", &Communicator::note_refusal, "text"_a, nb::call_guard<ReleasedGil>())
      .def("close", &Communicator::close, "why"_a = "", nb::call_guard<ReleasedGil>());
}

std::shared_ptr<cpu::Window> make_window(std::shared_ptr<Communicator> comm, i32 num_experts, i32 top_k, i64 max_tokens,
                                         i64 max_row_bytes, u64 heap_bytes, u64 staging_bytes, double timeout_s,
                                         u64 most_heap_bytes, u64 number, i64 node_ranks) {
  WindowShape shape;
  shape.num_ranks = comm->num_ranks();
  shape.num_experts = num_experts;
  shape.top_k = top_k;
  shape.max_tokens = max_tokens;
  shape.max_row_bytes = max_row_bytes;
  shape.staging_bytes = staging_bytes;
  shape.node_ranks = node_ranks;
  const ReleasedGil release;
  if (number != 0) {  // of a newcomer, which makes it alone
    return std::make_shared<cpu::Window>(std::move(comm), shape, heap_bytes, number, deadline_after_s(timeout_s),
                                         signal_poll(), most_heap_bytes);
  }
  return std::make_shared<cpu::Window>(std::move(comm), shape, heap_bytes, deadline_after_s(timeout_s), signal_poll(),
                                       most_heap_bytes);
}

void bind_window(nb::module_& m) {
  using cpu::Window;
  nb::class_<Window, CallWindow>(m, "CpuWindow")
      .def(nb::new_(&make_window), "comm"_a, nb::kw_only(), "num_experts"_a, "top_k"_a, "max_tokens"_a,
           "max_row_bytes"_a, "heap_bytes"_a, "staging_bytes"_a = 0, "timeout_s"_a = 100.0, "most_heap_bytes"_a = 0,
           "number"_a = 0, "node_ranks"_a = 0)
      .def(
          "resize",
          [](Window& window, u64 heap_bytes, double timeout_s) {
            window.resize(heap_bytes, deadline_after_s(timeout_s), signal_poll());
          },
          "heap_bytes"_a, "timeout_s"_a, nb::call_guard<ReleasedGil>())
      .def("release_memory", &Window::release_memory, nb::call_guard<ReleasedGil>())
      .def("owns", [](const Window& window, uintptr_t ptr) { return window.owns(pointer<void>(ptr)); }, "ptr"_a);
}

}  // namespace

const Poll& signal_poll() {
  static const auto* poll = new Poll(check_signals);  // for threads that are still in a wait when the process ends
  return *poll;
}

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a daemon thread of the program may hold objects when the process ends
  nb::register_exception_translator(translate);
  have_no_threads_after_fork();
  m.def("version", [] { return WEFT_VERSION; });
  m.def("build_info", [] {
    nb::dict info;
    info["compiler"] = __VERSION__;
    info["cplusplus"] = static_cast<i64>(__cplusplus);
    info["sources"] = sources_text(this_build());
    return info;
  });
  m.def("keep_other_threads_out", &keep_other_threads_out);
  m.def("threads_away", &threads_away);
  m.def("stay_if_kept_out", &stay_if_kept_out);
  m.def("raise_system_error", &throw_system_error, "action"_a, "error_number"_a);
  m.def("set_error_factory", [](nb::object factory) { error_factory() = std::move(factory); }, "factory"_a.none());
  m.def(
      "set_log_sink",
      [](nb::object sink) {
        LogSink native;
        if (!sink.is_none()) {
          auto* held = new nb::object(std::move(sink));  // as error_factory: outlives the interpreter
          native = [held](int level, const std::string& text) {
            const nb::gil_scoped_acquire gil;
            (*held)(level, text);
          };
        }
        const ReleasedGil release;  // calls under way may wait for it
        set_log_sink(std::move(native));
      },
      "sink"_a.none());
  m.def(
      "send_plan_len",
      [](i64 num_tokens, i64 top_k, i64 num_ranks, i64) { return cpu::send_plan_len(num_tokens, top_k, num_ranks); },
      "num_tokens"_a, "top_k"_a, "num_ranks"_a, "num_local_experts"_a);
  m.attr("recv_plan_num_meta_rows") = offsetof(cpu::PlanHeader, num_meta_rows) / sizeof(i32);
  m.attr("recv_plan_dropped") = offsetof(cpu::PlanHeader, num_tokens) / sizeof(i32);
  m.def(
      "recv_plan_places",
      [](i64 num_meta_rows, i64 top_k, i64 num_ranks) {
        const cpu::RecvPlanPlaces places{num_meta_rows, top_k, num_ranks};
        return nb::make_tuple(places.source_offset(), places.token(), places.row());
      },
      "num_meta_rows"_a, "top_k"_a, "num_ranks"_a);
  m.def(
      "window_bytes",
      [](i32 num_ranks, i32 num_experts, i32 top_k, i64 max_tokens, i64 max_row_bytes, u64 staging_bytes) {
        const WindowLayout layout =
            WindowLayout::make({num_ranks, num_experts, top_k, 1, max_tokens, max_row_bytes, staging_bytes});
        if (!layout.ok) throw_invalid_argument("no window has this shape");
        return std::pair{layout.staging, layout.total_bytes - layout.staging};
      },
      "num_ranks"_a, "num_experts"_a, "top_k"_a, "max_tokens"_a, "max_row_bytes"_a, "staging_bytes"_a = 0);
  bind_bootstrap(m);
  bind_communicator(m);
  bind_calls(m);
  bind_known_calls(m);
  bind_window(m);
  bind_nvlink(m);
  bind_jit(m);
}

}  // namespace weft::bindings
