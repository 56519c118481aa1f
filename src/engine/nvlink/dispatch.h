// One dispatch call on GPUs.
#pragma once

#include <optional>

#include "engine/nvlink/window.h"

namespace weft::nvlink {

class DispatchCall {
 public:
  DispatchCall(Window& window, const DispatchArgs& args, const Poll& poll);
  DispatchResult run();

 private:
  const Kernel& prepare();
  void reserve();
  void cancel();
  kernels::DispatchKernelArgs kernel_arguments(const Window::Turn& turn) const;
  void place_rows(const Kernel& kernel);
  u64 landing_scales() const;
  bool fits_landing() const;
  bool is_staged() const;
  DispatchResult staged_result();
  DispatchResult heap_result();
  Array rows(std::optional<Block>& block, Dtype dtype, i64 row_bytes);
  Array part(u64 first, std::vector<i64> shape) const;
  i64 send_plan_len() const;
  i64 recv_plan_len() const;

  // What a first dispatch makes beside the rows lies in one block: offsets there.
  struct Routing {
    u64 table = 0, send_plan = 0, sizes = 0, weights = 0, ids = 0, num_bytes = 0;
  };

  Window& w_;
  const DispatchArgs& a_;
  const Poll& poll_;
  const i64 row_bytes_, scale_bytes_;  // on the wire
  const i64 id_bytes_;
  const bool is_by_expert_;
  const bool is_exact_;   // the number of rows is not known before the peers have counted
  const bool is_spread_;  // by expert: a second kernel places rows
  i64 most_rows_ = 0;     // that the result can have
  i64 room_ = 0;          // rows that there is room for; 0: all goes to the landing
  i64 num_rows_ = 0;      // of the result
  std::optional<Block> x_, scales_, routing_;
  Routing at_;
};

}  // namespace weft::nvlink
