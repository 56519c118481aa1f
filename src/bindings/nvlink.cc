// The part of weft._native for GPUs. Addresses and streams are plain numbers.
#include "bindings/nvlink.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "base/clock.h"
#include "bindings/calls.h"
#include "bindings/gil.h"
#include "engine/nvlink/count_picks.h"
#include "engine/nvlink/picks_of_map.h"
#include "engine/nvlink/window.h"
#include "weft/layout/gpu_plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace weft::bindings {
namespace {

using nvlink::Window;
using Guard = nb::call_guard<ReleasedGil>;

std::shared_ptr<Window> make_gpu_window(std::shared_ptr<Communicator> comm, std::shared_ptr<nvlink::Gpu> gpu,
                                        i32 num_experts, i32 top_k, i64 max_tokens, i64 landing_row_bytes,
                                        i32 num_blocks, u64 heap_bytes, i64 small_tokens, i64 node_ranks,
                                        const nvlink::NcclPaths& nccl, std::optional<int> traffic_class,
                                        double timeout_s) {
  GpuWindowShape shape;
  shape.num_ranks = comm->num_ranks();
  shape.num_experts = num_experts;
  shape.top_k = top_k;
  shape.num_blocks = num_blocks;
  shape.max_tokens = max_tokens;
  shape.landing_row_bytes = landing_row_bytes;
  shape.small_tokens = small_tokens;
  shape.node_ranks = node_ranks > 0 && node_ranks < shape.num_ranks ? node_ranks : 0;
  shape.network = shape.node_ranks > 0 && !nccl.library.empty() ? 1 : 0;
  const ReleasedGil release;
  const nvlink::WindowMemory memory{heap_bytes, nccl, traffic_class.value_or(nccl::kUndefined)};
  return std::make_shared<Window>(std::move(comm), std::move(gpu), shape, memory, deadline_after_s(timeout_s),
                                  signal_poll());
}

void bind_gpu_window(nb::module_& m) {
  nb::class_<nvlink::NcclPaths>(m, "NcclPaths")
      .def(nb::new_([](std::string library, std::string prologue, std::vector<std::string> includes) {
             return std::make_shared<nvlink::NcclPaths>(nvlink::NcclPaths{library, prologue, includes});
           }),
           nb::kw_only(), "library"_a, "prologue"_a, "includes"_a);
  nb::class_<Window, CallWindow>(m, "GpuWindow")
      .def(nb::new_(&make_gpu_window), "comm"_a, "gpu"_a, nb::kw_only(), "num_experts"_a, "top_k"_a, "max_tokens"_a,
           "landing_row_bytes"_a, "num_blocks"_a, "heap_bytes"_a, "small_tokens"_a = 0, "node_ranks"_a = 0,
           "nccl"_a = nvlink::NcclPaths(), "traffic_class"_a = nb::none(), "timeout_s"_a = 100.0)
      .def(
          "receive", [](Window& window, u64 stream) { window.receive(stream, signal_poll()); }, "stream"_a, Guard())
      .def("unload", &Window::unload, "to"_a, Guard())
      .def("check", &Window::check, Guard())
      .def("copy_waited_ns", &Window::copy_waited_ns, "to"_a, "stream"_a, Guard())
      .def("take_bad_ids",
           [](Window& window) -> std::optional<std::tuple<i64, i64, i64>> {
             const std::optional<nvlink::BadIds> seen = window.take_bad_ids();
             if (!seen) return std::nullopt;
             return std::make_tuple(seen->count, seen->first_id, seen->first_at);
           })
      .def_prop_ro("forward_plan_len", &Window::forward_plan_len)
      .def_prop_ro("network", &Window::network_text)
      .def_prop_ro("heap_used", &Window::heap_used);
}

std::tuple<u64, u64> window_bytes(i32 num_ranks, i32 num_experts, i32 top_k, i64 max_tokens, i64 landing_row_bytes,
                                  i32 num_blocks, i64 small_tokens) {
  const GpuWindowLayout layout = GpuWindowLayout::make(
      {num_ranks, num_experts, top_k, num_blocks, max_tokens, landing_row_bytes, small_tokens}, num_ranks);
  if (!layout.ok) throw_invalid_argument("no window between GPUs has this shape");
  return {layout.control_bytes, layout.landing_bytes};
}

// `gpu`: None: in memory of the host.
void count_picks(const std::shared_ptr<nvlink::Gpu>& gpu, u64 stream, i64 num_tokens, i32 top_k, i32 num_experts,
                 i32 num_ranks, bool is_int64, u64 topk_idx, u64 experts, u64 ranks, u64 is_in_rank) {
  const CountPicks call{topk_idx, experts, ranks, is_in_rank, num_tokens, top_k, num_experts, num_ranks, is_int64};
  const ReleasedGil release;
  if (gpu == nullptr) return weft::count_picks(call);
  nvlink::count_picks(*gpu, stream, call);
}

// `gpu`: None: in memory of the host.
void picks_of_map(const std::shared_ptr<nvlink::Gpu>& gpu, u64 stream, i64 num_tokens, i32 num_experts, i32 top_k,
                  i32 weight_bytes, u64 chosen, u64 probs, u64 topk_idx, u64 topk_weights) {
  const PicksOfMap call{chosen, probs, topk_idx, topk_weights, num_tokens, num_experts, top_k, weight_bytes};
  const ReleasedGil release;
  if (gpu == nullptr) return weft::picks_of_map(call);
  nvlink::picks_of_map(*gpu, stream, call);
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
  bind_gpu_window(m);
  m.def("gpu_leave_graphs_to_the_exit", &nvlink::leave_graphs_to_the_exit, nb::call_guard<ReleasedGil>());
  m.def("gpu_record_stream", &nvlink::ReceiveHeap::record_stream, "ptr"_a, "stream"_a);
  m.def(
      "gpu_send_plan_len",
      [](i64 num_tokens, i32 top_k, i32 num_ranks, int layout) {
        return gpu_send_plan_len(num_tokens, top_k, num_ranks, static_cast<Layout>(layout));
      },
      "num_tokens"_a, "top_k"_a, "num_ranks"_a, "layout"_a);
  m.attr("gpu_plan_header") = kGpuPlanHeader;
  m.attr("gpu_plan_dropped") = kGpuPlanDropped;
  m.def("count_picks", &count_picks, "gpu"_a.none(), "stream"_a, "num_tokens"_a, "top_k"_a, "num_experts"_a,
        "num_ranks"_a, "is_int64"_a, "topk_idx"_a, "experts"_a, "ranks"_a, "is_in_rank"_a);
  m.def("picks_of_map", &picks_of_map, "gpu"_a.none(), "stream"_a, "num_tokens"_a, "num_experts"_a, "top_k"_a,
        "weight_bytes"_a, "chosen"_a, "probs"_a, "topk_idx"_a, "topk_weights"_a);
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
