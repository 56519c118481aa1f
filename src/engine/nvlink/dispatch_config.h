// What the arguments of a dispatch on GPUs say before it is made: its kernel, its operation, the sizes of what it makes.
#pragma once

#include <tuple>

#include "engine/call.h"
#include "weft/config/kernel.h"
#include "weft/config/operation.h"
#include "weft/layout/gpu_window.h"

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

}  // namespace weft::nvlink
