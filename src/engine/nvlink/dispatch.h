// One dispatch call on GPUs.
#pragma once

#include <optional>
#include <tuple>

#include "engine/nvlink/window.h"
#include "weft/layout/gpu_plan.h"

namespace weft::nvlink {

// The kernel of this call, for blocks of `shared_bytes`. Error kUnsupported: it does not fit.
DispatchKernelConfig kernel_config(const GpuWindowShape& shape, const DispatchSpec& spec, int shared_bytes);

// Bytes of a row, and of its scales, as they travel.
i64 wire_row_bytes(const DispatchSpec& spec);
i64 wire_scale_bytes(const DispatchSpec& spec);
// Whether the kernel tells the host how many picks each local expert gets: asked for, of exact sizes, and there is room for them.
bool tells_counts(const GpuWindowShape& shape, const DispatchSpec& spec);
// Of a result, if all ranks send what they may. Error kInvalidArgument: more than have numbers.
i64 most_rows(const GpuWindowShape& shape, const DispatchSpec& spec);
// Of counts, offsets and the number of rows together.
i64 sizes_len(const GpuWindowShape& shape, Layout layout);
std::tuple<i32*, i32*, i32*> parts_of_sizes(const GpuWindowShape& shape, Layout layout, u64 sizes);
OperationConfig dispatch_operation(const DispatchSpec& spec, bool is_spread = false);

// What the configurations of both dispatch kernels have in common.
template <class Config>
void describe_rows(Config& config, const GpuWindowShape& shape, const DispatchSpec& spec) {
  config.num_ranks = shape.num_ranks;
  config.num_experts = shape.num_experts;
  config.top_k = shape.top_k;
  config.num_blocks = spec.num_blocks;
  config.row_bytes = static_cast<i32>(spec.row_bytes);
  config.scale_row_bytes = static_cast<i32>(wire_scale_bytes(spec));
  config.quantize = spec.quantize;
  if (spec.quantize != Quantize::kNone) {
    config.hidden = static_cast<i32>(spec.hidden);
    config.dtype = spec.dtype;
  }
  config.layout = spec.layout;
  config.tells_counts = tells_counts(shape, spec);
  config.topk_is_int64 = spec.topk_is_int64;
}

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
