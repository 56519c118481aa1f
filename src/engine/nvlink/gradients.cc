#include "engine/nvlink/gradients.h"

#include <algorithm>

#include "engine/nvlink/window.h"
#include "weft/kernels/gradients_arguments.h"

namespace weft::nvlink {
namespace {

const char* const kGradientsSource =
    "#include \"weft/kernels/gradients.cuh\"\n"
    "namespace weft {\n"
    "__global__ void __launch_bounds__(weft::kernels::kGradientThreads, 4)\n"
    "    gradients_kernel(const __grid_constant__ weft::kernels::GradientKernelArgs args) {\n"
    "  weft::ptx::wait_for_kernel_before();\n"
    "  weft::kernels::gradients(args);\n"
    "}\n"
    "}  // namespace weft\n";
static_assert(kernels::kGradientBlocksPerSm == 4, "as the source has it");

constexpr i64 kMostHidden = i64{1} << 28;  // far below what its counters hold

const Kernel& gradient_kernel(Gpu& gpu) { return gpu.kernels->prepare(kGradientsSource, kernels::kGradientThreads, 0); }

void check_args(const GradientArgs& args) {
  const i64 row_bytes = args.hidden * dtype_bytes(args.dtype);
  if (args.dtype == Dtype::kBytes || args.num_rows < 0 || args.hidden <= 0 || args.hidden > kMostHidden ||
      row_bytes % 16 != 0) {
    throw_invalid_argument("gradients of " + std::to_string(args.num_rows) + " rows of " + std::to_string(args.hidden) +
                           " elements; allowed: rows of a multiple of 16 bytes");
  }
  if ((args.rows | args.y | args.out) % 16 != 0) {
    throw_invalid_argument("gradients: rows do not begin at multiples of 16 bytes");
  }
  const bool has_all = args.rows != 0 && args.weights != 0 && args.out != 0;
  if (args.num_rows > 0 && (!has_all || (args.y != 0 && args.grad_weights == 0))) {
    throw_invalid_argument("gradients: an address is missing");
  }
}

}  // namespace

std::string render_gradients() { return kGradientsSource; }

// Ranks on one GPU must not load a kernel while others wait, and only some of them may need this one.
void Window::prepare_gradients() {
  if (comm_->is_local()) gradient_kernel(*gpu_);
}

// It works on tensors alone, which hold their memory: no other call of the window has to know of it.
void Window::gradients(const GradientArgs& args) {
  if (closed_) throw_invalid_state("the window is closed");
  check_args(args);
  const cuda::ContextScope scope(gpu_->context);
  const cuda::RelaxedCaptureScope relaxed;
  const Kernel& kernel = gradient_kernel(*gpu_);
  if (args.num_rows == 0) return;  // warmup
  const Capture capture = capture_of(args.stream);
  if (capture.is_active) keep_for_graph(capture);  // the graph needs the kernel's code

  kernels::GradientKernelArgs kernel_args;
  kernel_args.rows = reinterpret_cast<const u8*>(args.rows);
  kernel_args.y = reinterpret_cast<const u8*>(args.y);
  kernel_args.weights = reinterpret_cast<const float*>(args.weights);
  kernel_args.out = reinterpret_cast<u8*>(args.out);
  kernel_args.grad_weights = reinterpret_cast<float*>(args.grad_weights);
  kernel_args.num_rows = args.num_rows;
  kernel_args.hidden = static_cast<i32>(args.hidden);
  kernel_args.dtype = args.dtype;
  const i64 most_blocks = i64{kernels::kGradientBlocksPerSm} * gpu_->kernels->num_multiprocessors();
  const i64 rows_per_block = kernels::kGradientThreads / 32;
  const i64 num_blocks = std::min(most_blocks, (args.num_rows + rows_per_block - 1) / rows_per_block);
  void* params[] = {&kernel_args};
  cuda::LaunchAttribute early{cuda::kMayBeginEarly, 0, 1, {}};
  const cuda::LaunchConfig config{{static_cast<unsigned>(num_blocks), 1, 1},
                                  {kernel.num_threads, 1, 1},
                                  kernel.shared_bytes,
                                  reinterpret_cast<cuda::Stream>(args.stream),
                                  &early,
                                  1};
  cuda::check(cuda::driver().launch(&config, kernel.function, params, nullptr), "cuLaunchKernelEx");
}

}  // namespace weft::nvlink
