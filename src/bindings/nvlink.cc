// The part of weft._native for GPUs. Addresses and streams are plain numbers.
#include "bindings/nvlink.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "base/clock.h"
#include "bindings/arrays.h"
#include "bindings/gil.h"
#include "engine/nvlink/window.h"
#include "weft/layout/gpu_plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace weft::bindings {
namespace {

using nvlink::Window;
using Guard = nb::call_guard<ReleasedGil>;

std::shared_ptr<Window> make_window(std::shared_ptr<Communicator> comm, std::shared_ptr<nvlink::Gpu> gpu,
                                    i32 num_experts, i32 top_k, i64 max_tokens, i64 landing_row_bytes, i32 num_blocks,
                                    u64 heap_bytes, i64 small_tokens, double timeout_s) {
  GpuWindowShape shape;
  shape.num_ranks = comm->num_ranks();
  shape.num_experts = num_experts;
  shape.top_k = top_k;
  shape.num_blocks = num_blocks;
  shape.max_tokens = max_tokens;
  shape.landing_row_bytes = landing_row_bytes;
  shape.small_tokens = small_tokens;
  const ReleasedGil release;
  return std::make_shared<Window>(std::move(comm), std::move(gpu), shape, heap_bytes, deadline_after_s(timeout_s),
                                  signal_poll());
}

// An enum as the plain number that Python's side has.
template <class Args, class Base, class Enum>
void def_number(nb::class_<Args>& args, const char* name, Enum Base::* field) {
  args.def_prop_rw(
      name, [field](const Args& self) { return static_cast<int>(self.*field); },
      [field](Args& self, int value) { self.*field = static_cast<Enum>(value); });
}

template <class Args>
void bind_call_args(nb::class_<Args>& args) {
  using nvlink::CallArgs;
  def_number<Args, CallArgs>(args, "layout", &CallArgs::layout);
  args.def(nb::init<>())
      .def_rw("alignment", &Args::alignment)
      .def_rw("capacity", &Args::capacity)
      .def_rw("max_tokens", &Args::max_tokens)
      .def_rw("hidden", &Args::hidden)
      .def_rw("num_tokens", &Args::num_tokens)
      .def_rw("num_blocks", &Args::num_blocks)
      .def_rw("object", &Args::object)
      .def_rw("timeout_ns", &Args::timeout_ns)
      .def_rw("stream", &Args::stream)
      .def_rw("is_small", &Args::is_small)
      .def_rw("sends", &Args::sends)
      .def_rw("receives", &Args::receives);
}

nvlink::CallArgs call_args(int layout, i64 alignment, i64 capacity, i64 max_tokens, i64 hidden, i64 num_tokens,
                           i32 num_blocks, u64 timeout_ns, u64 stream, bool is_small) {
  return {.layout = static_cast<Layout>(layout),
          .alignment = alignment,
          .capacity = capacity,
          .max_tokens = max_tokens,
          .hidden = hidden,
          .num_tokens = num_tokens,
          .num_blocks = num_blocks,
          .timeout_ns = timeout_ns,
          .stream = stream,
          .is_small = is_small};
}

// What every call has comes in one go: to set a field from Python takes as long as to pass ten numbers.
void bind_dispatch_args(nb::module_& m) {
  using Args = nvlink::DispatchArgs;
  nb::class_<Args> args(m, "GpuDispatchArgs");
  bind_call_args(args);
  args.def("__init__", [](Args* args, int layout, i64 alignment, i64 capacity, i64 max_tokens, i64 hidden,
                          i64 num_tokens, i32 num_blocks, u64 timeout_ns, u64 stream, bool is_small, u64 x,
                          i64 row_bytes, int dtype, int quantize) {
    new (args) Args();
    static_cast<nvlink::CallArgs&>(*args) = call_args(layout, alignment, capacity, max_tokens, hidden, num_tokens,
                                                      num_blocks, timeout_ns, stream, is_small);
    args->x = x;
    args->row_bytes = row_bytes;
    args->dtype = static_cast<Dtype>(dtype);
    args->quantize = static_cast<Quantize>(quantize);
  });
  def_number<Args, Args>(args, "dtype", &Args::dtype);
  def_number<Args, Args>(args, "quantize", &Args::quantize);
  args.def_rw("x", &Args::x)
      .def_rw("row_bytes", &Args::row_bytes)
      .def_rw("scales", &Args::scales)
      .def_rw("scale_row_bytes", &Args::scale_row_bytes)
      .def_rw("scale_stride", &Args::scale_stride)
      .def_rw("scales_are_fp32", &Args::scales_are_fp32)
      .def_rw("topk_idx", &Args::topk_idx)
      .def_rw("topk_is_int64", &Args::topk_is_int64)
      .def_rw("topk_weights", &Args::topk_weights)
      .def_rw("cached", &Args::cached)
      .def_rw("send_plan", &Args::send_plan)
      .def_rw("recv_plan", &Args::recv_plan)
      .def_rw("num_rows", &Args::num_rows)
      .def_rw("counts", &Args::counts)
      .def_rw("offsets", &Args::offsets)
      .def_rw("num_rows_out", &Args::num_rows_out)
      .def_rw("overflow", &Args::overflow)
      .def_rw("zeroes_holes", &Args::zeroes_holes)
      .def_rw("spread_blocks", &Args::spread_blocks)
      .def_rw("makes_send_plan", &Args::makes_send_plan)
      .def_rw("room", &Args::room)
      .def_rw("scale_word_bytes", &Args::scale_word_bytes)
      .def_rw("out_x", &Args::out_x)
      .def_rw("out_scales", &Args::out_scales)
      .def_rw("out_ids", &Args::out_ids)
      .def_rw("out_weights", &Args::out_weights);
}

void bind_combine_args(nb::module_& m) {
  using Args = nvlink::CombineArgs;
  nb::class_<Args> args(m, "GpuCombineArgs");
  bind_call_args(args);
  args.def("__init__",
           [](Args* args, int layout, i64 alignment, i64 capacity, i64 max_tokens, i64 hidden, i64 num_tokens,
              i32 num_blocks, u64 timeout_ns, u64 stream, bool is_small, u64 y, i64 num_rows, int dtype, u64 weights,
              u64 send_plan, u64 recv_plan, u64 out, bool wire_is_fp8) {
             new (args) Args();
             static_cast<nvlink::CallArgs&>(*args) = call_args(layout, alignment, capacity, max_tokens, hidden,
                                                               num_tokens, num_blocks, timeout_ns, stream, is_small);
             args->y = y;
             args->num_rows = num_rows;
             args->dtype = static_cast<Dtype>(dtype);
             args->weights = weights;
             args->send_plan = send_plan;
             args->recv_plan = recv_plan;
             args->out = out;
             args->wire_is_fp8 = wire_is_fp8;
           });
  def_number<Args, Args>(args, "dtype", &Args::dtype);
  args.def_rw("y", &Args::y)
      .def_rw("num_rows", &Args::num_rows)
      .def_rw("weights", &Args::weights)
      .def_rw("side", &Args::side)
      .def_rw("has_side", &Args::has_side)
      .def_rw("bias", &Args::bias)
      .def_rw("bias_is_2d", &Args::bias_is_2d)
      .def_rw("bias_is_fp32", &Args::bias_is_fp32)
      .def_rw("out", &Args::out)
      .def_rw("side_out", &Args::side_out)
      .def_rw("send_plan", &Args::send_plan)
      .def_rw("recv_plan", &Args::recv_plan)
      .def_rw("wire_is_fp8", &Args::wire_is_fp8);
}

void bind_results(nb::module_& m) {
  using nvlink::DispatchResult;
  using nvlink::UnloadArgs;
  nb::class_<DispatchResult>(m, "GpuDispatchResult")
      .def_prop_ro("x", [](const DispatchResult& result) { return to_ndarray(result.x); })
      .def_prop_ro("scales", [](const DispatchResult& result) { return to_ndarray(result.scales); })
      .def_prop_ro("topk_idx", [](const DispatchResult& result) { return to_ndarray(result.topk_idx); })
      .def_prop_ro("topk_weights", [](const DispatchResult& result) { return to_ndarray(result.topk_weights); })
      .def_prop_ro("recv_plan", [](const DispatchResult& result) { return to_ndarray(result.recv_plan); })
      .def_ro("has_begun", &DispatchResult::has_begun)
      .def_ro("in_heap", &DispatchResult::in_heap)
      .def_ro("result_rows", &DispatchResult::result_rows);
  nb::class_<UnloadArgs>(m, "GpuUnloadArgs")
      .def(nb::init<>())
      .def_rw("x", &UnloadArgs::x)
      .def_rw("scales", &UnloadArgs::scales)
      .def_rw("topk_idx", &UnloadArgs::topk_idx)
      .def_rw("topk_weights", &UnloadArgs::topk_weights)
      .def_rw("recv_plan", &UnloadArgs::recv_plan);
}

nb::dict stats(const Window& window) {
  const nvlink::WindowStats& seen = window.stats();
  nb::dict all;
  all["num_dispatches"] = seen.num_dispatches;
  all["num_combines"] = seen.num_combines;
  all["num_staged"] = seen.num_staged;
  all["wait_us"] = microseconds(window.waited_ns());
  all["heap_bytes"] = window.heap_bytes();
  all["heap_used"] = window.heap_used();
  all["heap_peak"] = window.heap_peak();
  all["control_bytes"] = window.layout().control_bytes;
  all["landing_bytes"] = window.layout().landing_bytes;
  return all;
}

void bind_window(nb::module_& m) {
  nb::class_<Window> window(m, "GpuWindow");
  bind_nvlink_calls(m, window);
  window
      .def(nb::new_(&make_window), "comm"_a, "gpu"_a, nb::kw_only(), "num_experts"_a, "top_k"_a, "max_tokens"_a,
           "landing_row_bytes"_a, "num_blocks"_a, "heap_bytes"_a, "small_tokens"_a = 0, "timeout_s"_a = 100.0)
      .def(
          "dispatch",
          [](Window& window, const nvlink::DispatchArgs& args) { return window.dispatch(args, signal_poll()); },
          "args"_a, Guard())
      .def("unload", &Window::unload, "args"_a, Guard())
      .def(
          "combine", [](Window& window, const nvlink::CombineArgs& args) { window.combine(args, signal_poll()); },
          "args"_a, Guard())
      .def(
          "gradients",
          [](Window& window, u64 stream, int dtype, i64 hidden, i64 num_rows, u64 rows, u64 y, u64 weights, u64 out,
             u64 grad_weights) {
            window.gradients(
                {stream, static_cast<Dtype>(dtype), hidden, num_rows, rows, y, weights, out, grad_weights});
          },
          "stream"_a, "dtype"_a, "hidden"_a, "num_rows"_a, "rows"_a, "y"_a, "weights"_a, "out"_a, "grad_weights"_a,
          Guard())
      .def("check", &Window::check, Guard())
      .def("take_bad_ids",
           [](Window& window) -> std::optional<std::tuple<i64, i64, i64>> {
             const std::optional<nvlink::BadIds> seen = window.take_bad_ids();
             if (!seen) return std::nullopt;
             return std::make_tuple(seen->count, seen->first_id, seen->first_at);
           })
      .def("stats", &stats)
      .def_prop_ro("heap_used", &Window::heap_used)
      .def_prop_ro("heap_peak", &Window::heap_peak)
      .def_prop_ro("id", &Window::id)
      .def("close", &Window::close, Guard());
}

std::tuple<u64, u64> window_bytes(i32 num_ranks, i32 num_experts, i32 top_k, i64 max_tokens, i64 landing_row_bytes,
                                  i32 num_blocks, i64 small_tokens) {
  const GpuWindowLayout layout = GpuWindowLayout::make(
      {num_ranks, num_experts, top_k, num_blocks, max_tokens, landing_row_bytes, small_tokens}, num_ranks);
  if (!layout.ok) throw_invalid_argument("no window between GPUs has this shape");
  return {layout.control_bytes, layout.landing_bytes};
}

}  // namespace

void bind_nvlink(nb::module_& m) {
  // Not by nb::init: a shared_ptr to it must hold no Python object (gpu.h).
  nb::class_<nvlink::Gpu>(m, "Gpu")
      .def(nb::new_([](int index, std::string nvrtc, std::string include, std::string cache) {
             const ReleasedGil release;
             return std::make_shared<nvlink::Gpu>(index, jit::CompilerPaths{nvrtc, include, cache});
           }),
           "index"_a, nb::kw_only(), "nvrtc"_a, "include"_a, "cache"_a)
      .def_ro("index", &nvlink::Gpu::index)
      .def_prop_ro("num_sms", [](const nvlink::Gpu& gpu) { return gpu.kernels->num_multiprocessors(); });
  bind_dispatch_args(m);
  bind_combine_args(m);
  bind_results(m);
  bind_window(m);
  m.def("gpu_leave_graphs_to_the_exit", &nvlink::leave_graphs_to_the_exit, nb::call_guard<ReleasedGil>());
  m.def("gpu_record_stream", &nvlink::ReceiveHeap::record_stream, "ptr"_a, "stream"_a);
  m.def(
      "gpu_send_plan_len",
      [](i64 num_tokens, i32 top_k, i32 num_ranks, int layout) {
        return gpu_send_plan_len(num_tokens, top_k, num_ranks, static_cast<Layout>(layout));
      },
      "num_tokens"_a, "top_k"_a, "num_ranks"_a, "layout"_a);
  m.def(
      "gpu_recv_plan_len",
      [](i64 max_tokens, i32 top_k, i32 num_ranks, int layout) {
        return gpu_recv_plan_len(max_tokens, top_k, num_ranks, static_cast<Layout>(layout));
      },
      "max_tokens"_a, "top_k"_a, "num_ranks"_a, "layout"_a);
  m.def("gpu_window_bytes", &window_bytes, nb::kw_only(), "num_ranks"_a, "num_experts"_a, "top_k"_a, "max_tokens"_a,
        "landing_row_bytes"_a, "num_blocks"_a, "small_tokens"_a);
}

}  // namespace weft::bindings
