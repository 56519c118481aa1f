#include "engine/nvlink/stage_rows.h"

#include "engine/nvlink/combine.h"
#include "engine/nvlink/window.h"
#include "weft/kernels/stage_rows_arguments.h"

namespace weft::nvlink {
namespace {

const char* const kStageSource =
    "#include \"weft/kernels/stage_rows.cuh\"\n"
    "namespace weft {\n"
    "__global__ void __launch_bounds__(weft::kernels::kStageThreads, 1)\n"
    "    stage_rows_kernel(const __grid_constant__ weft::kernels::StageKernelArgs args) {\n"
    "  weft::ptx::wait_for_kernel_before();\n"
    "  weft::kernels::stage_rows(args);\n"
    "}\n"
    "}  // namespace weft\n";

// Where it was measured to be faster than a push (docs/decisions/0039).
constexpr i32 kMostStageRanks = 2;

}  // namespace

bool is_brought(const GpuWindowShape& shape, const CombineSpec& spec) {
  if (spec.layout != Layout::kRankMajor || spec.is_small || spec.stage_blocks == 0 || has_nodes(shape)) return false;
  if (contributions_are_fp8(shape, spec)) return false;
  return shape.num_ranks > 1 && (spec.stage_blocks > 0 || shape.num_ranks <= kMostStageRanks);
}

const Kernel& stage_rows_kernel(Gpu& gpu) {
  const cuda::RelaxedCaptureScope relaxed;
  return gpu.kernels->prepare(kStageSource, kernels::kStageThreads, 0);
}

std::string render_stage_rows() { return kStageSource; }

// Ranks on one GPU must not load a kernel while others wait, and only some of them may need this one.
void Window::prepare_stage_rows() {
  if (comm_->is_local()) stage_rows_kernel(*gpu_);
}

}  // namespace weft::nvlink
