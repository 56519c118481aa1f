// The part of weft._native that compiles kernels without a window: `weft cache prebuild` and the link limits of `weft bench`.
#include "bindings/jit.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "base/status.h"
#include "bindings/gil.h"
#include "engine/nvlink/combine.h"
#include "engine/nvlink/count_picks.h"
#include "engine/nvlink/dispatch_config.h"
#include "engine/nvlink/gradients.h"
#include "engine/nvlink/need_room.h"
#include "engine/nvlink/picks_of_map.h"
#include "engine/nvlink/place_rows.h"
#include "engine/nvlink/small_combine.h"
#include "engine/nvlink/small_dispatch.h"
#include "engine/nvlink/stage_rows.h"
#include "engine/nvlink/unload.h"
#include "jit/compiler.h"
#include "jit/loaded_kernel.h"
#include "weft/config/base.h"
#include "weft/kernels/link_limit.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace weft::bindings {
namespace {

constexpr i32 kLinkSharedBytes = 200 * 1024;  // every GPU with bulk copies has them
constexpr i32 kMaxLinkStages = 12;

std::string render_link_limit(i32 row_bytes, bool is_pull) {
  if (row_bytes < 16 || row_bytes % 16 != 0 || row_bytes > kLinkSharedBytes / 2) {
    throw_invalid_argument("row_bytes=" + std::to_string(row_bytes) + ": allowed are multiples of 16 up to " +
                           std::to_string(kLinkSharedBytes / 2));
  }
  const i32 num_stages = std::min(kLinkSharedBytes / row_bytes, kMaxLinkStages);
  return "#include \"weft/kernels/link_limit.cuh\"\nconstexpr weft::kernels::LinkLimitConfig kConfig{.row_bytes = " +
         std::to_string(row_bytes) + ", .num_stages = " + std::to_string(num_stages) +
         ", .is_pull = " + (is_pull ? "true" : "false") +
         "};\nextern \"C\" __global__ void __launch_bounds__(weft::kernels::kLinkLimitThreads, 1)\n    "
         "weft_kernel(const __grid_constant__ weft::kernels::LinkLimitArgs args) {\n"
         "  weft::kernels::link_limit<kConfig>(args);\n}\n";
}

void launch_link_limit(const jit::LoadedKernel& kernel, const std::vector<u64>& peers, i64 num_rows, u32 num_blocks,
                       u64 stream) {
  kernels::LinkLimitArgs args;
  if (peers.empty() || peers.size() > kernels::kMaxLinkPeers) throw_invalid_argument("peers: 1 to 15 addresses");
  args.num_peers = static_cast<i32>(peers.size());
  for (size_t idx = 0; idx < peers.size(); ++idx) args.peer[idx] = reinterpret_cast<u8*>(peers[idx]);
  args.num_rows = num_rows;
  kernel.launch(num_blocks, reinterpret_cast<cuda::Stream>(stream), &args);
}

GpuWindowShape shape_of(i32 num_ranks, i32 num_experts, i32 top_k, i64 max_tokens) {
  GpuWindowShape shape;
  shape.num_ranks = num_ranks;
  shape.num_experts = num_experts;
  shape.top_k = top_k;
  shape.max_tokens = max_tokens;
  return shape;
}

}  // namespace

void bind_jit(nb::module_& m) {
  using Guard = nb::call_guard<ReleasedGil>;
  m.def(
      "compile_kernel",
      [](const std::string& source, const std::string& arch, const std::string& nvrtc, const std::string& include,
         const std::string& cache) {
        std::string cubin;
        {
          const ReleasedGil release;
          cubin = jit::Compiler(jit::CompilerPaths{nvrtc, include, cache}, arch).cubin(source);
        }
        return nb::bytes(cubin.data(), cubin.size());
      },
      "source"_a, nb::kw_only(), "arch"_a, "nvrtc"_a, "include"_a, "cache"_a);
  m.def(
      "render_dispatch",
      [](const DispatchSpec& spec, i32 num_ranks, i32 num_experts, i32 top_k, i64 max_tokens, int shared_bytes) {
        const GpuWindowShape shape = shape_of(num_ranks, num_experts, top_k, max_tokens);
        return nvlink::render(nvlink::kernel_config(shape, spec, shared_bytes));
      },
      "spec"_a, nb::kw_only(), "num_ranks"_a, "num_experts"_a, "top_k"_a, "max_tokens"_a, "shared_bytes"_a);
  m.def(
      "render_small_dispatch",
      [](const DispatchSpec& spec, i32 num_ranks, i32 num_experts, i32 top_k, i64 max_tokens, int shared_bytes) {
        GpuWindowShape shape = shape_of(num_ranks, num_experts, top_k, max_tokens);
        shape.small_tokens = max_tokens;
        return nvlink::render(nvlink::small_kernel(shape, spec, shared_bytes));
      },
      "spec"_a, nb::kw_only(), "num_ranks"_a, "num_experts"_a, "top_k"_a, "max_tokens"_a, "shared_bytes"_a);
  m.def(
      "render_combine",
      [](const CombineSpec& spec, i32 num_ranks, i32 num_experts, i32 top_k, bool has_push, int shared_bytes) {
        const GpuWindowShape shape = shape_of(num_ranks, num_experts, top_k, 0);
        return nvlink::render(nvlink::kernel_config(shape, spec, has_push, shared_bytes));
      },
      "spec"_a, nb::kw_only(), "num_ranks"_a, "num_experts"_a, "top_k"_a, "has_push"_a, "shared_bytes"_a);
  m.def(
      "render_small_combine",
      [](const CombineSpec& spec, i32 num_ranks, i32 num_experts, i32 top_k) {
        return nvlink::render(nvlink::small_kernel(shape_of(num_ranks, num_experts, top_k, 0), spec));
      },
      "spec"_a, nb::kw_only(), "num_ranks"_a, "num_experts"_a, "top_k"_a);
  m.def("render_place_rows", &nvlink::render_place_rows);
  m.def("render_stage_rows", &nvlink::render_stage_rows);
  m.def("render_unload", &nvlink::render_unload);
  m.def("render_gradients", &nvlink::render_gradients);
  m.def("render_count_picks", &nvlink::render_count_picks);
  m.def("render_picks_of_map", &nvlink::render_picks_of_map);
  m.def("render_need_room", &nvlink::render_need_room);
  m.def("kernel_symbol", &nvlink::symbol_of, "source"_a);
  m.def("render_link_limit", &render_link_limit, nb::kw_only(), "row_bytes"_a, "is_pull"_a);
  nb::class_<jit::LoadedKernel>(m, "LinkLimitKernel")
      .def(nb::new_([](int gpu, const nb::bytes& cubin) {
             return std::make_shared<jit::LoadedKernel>(gpu, std::string(cubin.c_str(), cubin.size()),
                                                        kernels::kLinkLimitThreads, kLinkSharedBytes);
           }),
           "gpu"_a, "cubin"_a)
      .def("launch", &launch_link_limit, nb::kw_only(), "peers"_a, "num_rows"_a, "num_blocks"_a, "stream"_a, Guard());
}

}  // namespace weft::bindings
