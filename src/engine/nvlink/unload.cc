// Results that found no room in the heap: from the landing into ordinary tensors.
#include "engine/nvlink/unload.h"

#include "engine/nvlink/window.h"
#include "weft/kernels/unload_arguments.h"
#include "weft/layout/gpu_plan.h"

namespace weft::nvlink {
namespace {

// One kernel for all shapes: what differs is in its arguments.
const char* const kUnloadSource =
    "#include \"weft/kernels/unload.cuh\"\n"
    "namespace weft {\n"
    "__global__ void __launch_bounds__(weft::kernels::kUnloadThreads, 2)\n"
    "    unload_kernel(const __grid_constant__ weft::kernels::UnloadKernelArgs args) {\n"
    "  weft::ptx::wait_for_kernel_before();\n"
    "  weft::kernels::unload(args);\n"
    "}\n"
    "}  // namespace weft\n";

const Kernel& unload_kernel(Gpu& gpu) { return gpu.kernels->prepare(kUnloadSource, kernels::kUnloadThreads, 0); }

}  // namespace

std::string render_unload() { return kUnloadSource; }

// Ranks on one GPU must not load a kernel while others wait, and only some of them may need this one.
void Window::prepare_unload() {
  if (comm_->is_local()) unload_kernel(*gpu_);
}

void Window::unload(const DispatchBuffers& to) {
  if (closed_) throw_invalid_state("the window is closed");
  if (!staged_.is_there) throw_invalid_state("unload: the last call of this window left nothing in the landing");
  const StagedRows staged = std::exchange(staged_, StagedRows());
  const cuda::ContextScope scope(gpu_->context);
  const cuda::RelaxedCaptureScope relaxed;
  const cuda::Driver& driver = cuda::driver();
  const auto stream = reinterpret_cast<cuda::Stream>(staged.stream);
  const u64 heap = heap_->memory().address();
  const bool is_by_expert = staged.layout != Layout::kRankMajor;
  const auto copy = [&](u64 place, u64 from, i64 num_bytes) {
    if (place == 0 || num_bytes == 0) return;
    cuda::check(driver.copy_async(place, heap + from, static_cast<u64>(num_bytes), stream), "cuMemcpyDtoDAsync");
  };
  const auto fill = [&](u64 place, u8 byte, i64 num_bytes) {
    if (place == 0 || num_bytes == 0) return;
    cuda::check(driver.memset_async(place, byte, static_cast<u64>(num_bytes), stream), "cuMemsetD8Async");
  };
  const auto zero = [&](u64 place, i64 num_bytes) { fill(place, 0, num_bytes); };
  const i64 landing_rows = shape_.num_ranks * shape_.max_tokens;
  const i64 num_rows = is_by_expert ? staged.num_rows : std::min(staged.num_rows, landing_rows);
  if (is_by_expert) {
    // Holes; the tails of masked groups are undefined.
    if (staged.layout == Layout::kExpertMajor && staged.zeroes_holes) {
      zero(to.out_x, staged.num_rows * staged.row_bytes);
      zero(to.out_scales, staged.num_rows * staged.scale_row_bytes);
    }
    if (!staged.is_cached) zero(to.out_weights, staged.num_rows * 4);
  } else if (!staged.is_cached) {
    copy(to.out_ids, layout_.landing_ids, num_rows * shape_.top_k * staged.id_bytes);
    copy(to.out_weights, layout_.landing_weights, num_rows * shape_.top_k * 4);
    // A capacity beyond what all ranks can send: ids -1, weights 0.
    const i64 num_kept = num_rows * shape_.top_k, num_rest = (staged.num_rows - num_rows) * shape_.top_k;
    fill(to.out_ids + static_cast<u64>(num_kept * staged.id_bytes), 0xff, num_rest * staged.id_bytes);
    zero(to.out_weights + static_cast<u64>(num_kept * 4), num_rest * 4);
  }
  if (!staged.is_cached) {
    copy(to.recv_plan, layout_.landing_table,
         gpu_recv_plan_len(staged.max_tokens, shape_.top_k, shape_.num_ranks, staged.layout) * 4);
  }

  kernels::UnloadKernelArgs kernel_args;
  kernel_args.rows = heap_->memory().data() + staged.rows;
  kernel_args.row_stride = staged.row_stride;
  kernel_args.scales = heap_->memory().data() + staged.scales;
  kernel_args.scale_stride = staged.scale_stride;
  kernel_args.weights = reinterpret_cast<const float*>(heap + layout_.landing_weights);
  if (is_by_expert) {
    kernel_args.table =
        reinterpret_cast<const i32*>(staged.is_cached ? staged.recv_plan : heap + layout_.landing_table);
  }
  kernel_args.max_tokens = staged.max_tokens;
  kernel_args.num_sources = shape_.num_ranks;
  kernel_args.top_k = shape_.top_k;
  kernel_args.num_rows = num_rows;
  kernel_args.x = reinterpret_cast<u8*>(to.out_x);
  kernel_args.x_scales = reinterpret_cast<u8*>(to.out_scales);
  kernel_args.x_weights = staged.is_cached ? nullptr : reinterpret_cast<float*>(to.out_weights);
  kernel_args.row_bytes = staged.row_bytes;
  kernel_args.scale_row_bytes = staged.scale_row_bytes;
  if (num_rows == 0) return note_work(staged.stream);
  start(unload_kernel(*gpu_), gpu_->kernels->num_multiprocessors(), staged.stream, &kernel_args);
}

}  // namespace weft::nvlink
