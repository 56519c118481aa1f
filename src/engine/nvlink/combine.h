// One combine call on GPUs.
#pragma once

#include "engine/nvlink/window.h"
#include "weft/kernels/combine/args.h"

namespace weft::nvlink {

// The kernel of this call, for blocks of `shared_bytes`. `has_push`: this rank's rows are not pulled. Error kUnsupported: it
// does not fit.
CombineKernelConfig kernel_config(const GpuWindowShape& shape, const CombineSpec& spec, bool has_push,
                                  int shared_bytes);

// With FP8 on the wire; not where it is the sums of domains that are rounded to it.
bool contributions_are_fp8(const GpuWindowShape& shape, const CombineSpec& spec);

// `wire_row_bytes`: of a contribution on its way.
OperationConfig combine_operation(const CombineSpec& spec, i64 wire_row_bytes, bool is_brought = false);

class CombineCall {
 public:
  CombineCall(Window& window, const CombineArgs& args, const Poll& poll);
  void run();

 private:
  CombineKernelConfig config(bool has_push) const;
  bool is_pulled() const;
  bool brings() const;
  void bring(const Kernel& kernel) const;
  i64 rows_in_landing() const;
  i64 tokens_in_landing(const CombineKernelConfig& config) const;
  const Kernel& prepare(const CombineKernelConfig& config);
  kernels::CombineKernelArgs kernel_arguments() const;

  Window& w_;
  const CombineArgs& a_;
  const Poll& poll_;
  const bool may_be_pulled_;  // equal on all ranks
  bool is_brought_ = false;   // equal on all ranks: nobody pushes
};

}  // namespace weft::nvlink
