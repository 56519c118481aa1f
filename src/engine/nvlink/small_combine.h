// One combine of a small batch on GPUs, or one half of it (docs/protocols/nvlink-small.md).
#pragma once

#include "engine/nvlink/window.h"
#include "weft/config/small_kernel.h"
#include "weft/kernels/small/combine_args.h"

namespace weft::nvlink {

// The kernel of this call.
SmallCombineKernelConfig small_kernel(const GpuWindowShape& shape, const CombineSpec& spec);

class SmallCombineCall {
 public:
  SmallCombineCall(Window& window, const CombineArgs& args, const Poll& poll);
  void run();

 private:
  void check() const;
  void check_rings() const;
  const Kernel& prepare();
  kernels::SmallCombineKernelArgs kernel_arguments() const;

  Window& w_;
  const CombineArgs& a_;
  const Poll& poll_;
  const SmallCombineKernelConfig config_;
};

}  // namespace weft::nvlink
