#include "engine/nvlink/picks_of_map.h"

#include <algorithm>

#include "engine/nvlink/gpu.h"
#include "weft/kernels/picks_of_map_arguments.h"

namespace weft::nvlink {
namespace {

const char* const kMapSource =
    "#include \"weft/kernels/picks_of_map.cuh\"\n"
    "namespace weft {\n"
    "__global__ void __launch_bounds__(weft::kernels::kMapThreads, 4)\n"
    "    picks_of_map_kernel(const __grid_constant__ weft::kernels::PicksOfMapArgs args) {\n"
    "  weft::ptx::wait_for_kernel_before();\n"
    "  weft::kernels::picks_of_map(args);\n"
    "}\n"
    "}  // namespace weft\n";
static_assert(kernels::kMapBlocksPerSm == 4, "as the source has it");

}  // namespace

std::string render_picks_of_map() { return kMapSource; }

void picks_of_map(Gpu& gpu, u64 stream, const PicksOfMap& call) {
  check_picks_of_map(call);
  const cuda::ContextScope scope(gpu.context);
  const cuda::RelaxedCaptureScope relaxed;
  const Kernel& kernel = gpu.kernels->prepare(kMapSource, kernels::kMapThreads, 0);
  if (call.num_tokens == 0) return;
  kernels::PicksOfMapArgs args;
  args.chosen = reinterpret_cast<const u8*>(call.chosen);
  args.probs = reinterpret_cast<const void*>(call.probs);
  args.topk_idx = reinterpret_cast<i64*>(call.topk_idx);
  args.topk_weights = reinterpret_cast<void*>(call.topk_weights);
  args.num_tokens = call.num_tokens;
  args.num_experts = call.num_experts;
  args.top_k = call.top_k;
  args.weight_bytes = call.weight_bytes;
  const i64 most_blocks = i64{kernels::kMapBlocksPerSm} * gpu.kernels->num_multiprocessors();
  constexpr i64 kTokens = kernels::kMapThreads / 32;  // of a block at a time
  const i64 num_blocks = std::min(most_blocks, (call.num_tokens + kTokens - 1) / kTokens);
  void* params[] = {&args};
  cuda::LaunchAttribute early{cuda::kMayBeginEarly, 0, 1, {}};
  const cuda::LaunchConfig config{{static_cast<unsigned>(num_blocks), 1, 1},
                                  {kernel.num_threads, 1, 1},
                                  kernel.shared_bytes,
                                  reinterpret_cast<cuda::Stream>(stream),
                                  &early,
                                  1};
  cuda::check(cuda::driver().launch(&config, kernel.function, params, nullptr), "cuLaunchKernelEx");
}

}  // namespace weft::nvlink
