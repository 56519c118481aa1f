// One dispatch of a small batch on GPUs, or one half of it (docs/protocols/nvlink-small.md).
#pragma once

#include "engine/nvlink/window.h"
#include "weft/config/small_dispatch_kernel.h"
#include "weft/kernels/small/dispatch_args.h"

namespace weft::nvlink {

// The kernel of this call. Error kUnsupported: its blocks do not fit `shared_bytes`.
struct SmallDispatchKernel {
  SmallDispatchKernelConfig config;
  i32 num_places = 0;  // entries of the receive plan that a block keeps
};
SmallDispatchKernel small_kernel(const GpuWindowShape& shape, const DispatchSpec& spec, int shared_bytes);

class SmallDispatchCall {
 public:
  SmallDispatchCall(Window& window, const DispatchArgs& args, const Poll& poll);
  // result_rows: rows of the result; -1 where this half does not know.
  DispatchResult run();

 private:
  void check() const;
  void check_rings() const;
  const Kernel& prepare();
  i32 num_parts() const;
  kernels::SmallDispatchKernelArgs kernel_arguments(const Window::Turn& turn) const;
  bool is_exact() const { return a_.receives && a_.capacity < 0 && !a_.cached; }

  Window& w_;
  const DispatchArgs& a_;
  const Poll& poll_;
};

}  // namespace weft::nvlink
