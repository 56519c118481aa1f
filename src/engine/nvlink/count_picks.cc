#include "engine/nvlink/count_picks.h"

#include <algorithm>

#include "engine/nvlink/gpu.h"
#include "weft/kernels/count_picks_arguments.h"

namespace weft::nvlink {
namespace {

const char* const kCountSource =
    "#include \"weft/kernels/count_picks.cuh\"\n"
    "namespace weft {\n"
    "__global__ void __launch_bounds__(weft::kernels::kCountThreads, 4)\n"
    "    count_picks_kernel(const __grid_constant__ weft::kernels::CountPicksArgs args) {\n"
    "  weft::ptx::wait_for_kernel_before();\n"
    "  weft::kernels::count_picks(args);\n"
    "}\n"
    "}  // namespace weft\n";
static_assert(kernels::kCountBlocksPerSm == 4, "as the source has it");

}  // namespace

std::string render_count_picks() { return kCountSource; }

void count_picks(Gpu& gpu, u64 stream, const CountPicks& call) {
  check_count_picks(call);
  const cuda::ContextScope scope(gpu.context);
  const cuda::RelaxedCaptureScope relaxed;
  const Kernel& kernel = gpu.kernels->prepare(kCountSource, kernels::kCountThreads, 0);
  if (call.num_tokens == 0) return;
  kernels::CountPicksArgs args;
  args.topk_idx = reinterpret_cast<const void*>(call.topk_idx);
  args.experts = reinterpret_cast<i32*>(call.experts);
  args.ranks = reinterpret_cast<i32*>(call.ranks);
  args.is_in_rank = reinterpret_cast<u8*>(call.is_in_rank);
  args.num_tokens = call.num_tokens;
  args.top_k = call.top_k;
  args.num_experts = call.num_experts;
  args.num_ranks = call.num_ranks;
  args.is_int64 = call.is_int64;
  const i64 most_blocks = i64{kernels::kCountBlocksPerSm} * gpu.kernels->num_multiprocessors();
  const i64 num_blocks = std::min(most_blocks, (call.num_tokens + kernels::kCountThreads - 1) / kernels::kCountThreads);
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
