#include "engine/nvlink/dispatch_config.h"

#include <algorithm>
#include <climits>
#include <string>

#include "base/status.h"
#include "engine/address.h"
#include "engine/nvlink/node_rail.h"
#include "engine/nvlink/place_rows.h"
#include "weft/layout/checked.h"
#include "weft/ptx/fp8_scale.h"
#include "weft/sync/header.h"
#include "weft/transport/host_words.h"

namespace weft::nvlink {

i64 wire_row_bytes(const DispatchSpec& spec) { return spec.quantize == Quantize::kNone ? spec.row_bytes : spec.hidden; }

i64 wire_scale_bytes(const DispatchSpec& spec) {
  if (spec.quantize == Quantize::kNone) return spec.scale_row_bytes;
  return (spec.hidden + kQuantizeGroup - 1) / kQuantizeGroup * ptx::fp8_scale_bytes(spec.quantize);
}

DispatchKernelConfig kernel_config(const GpuWindowShape& shape, const DispatchSpec& spec, int shared_bytes) {
  DispatchKernelConfig config;
  describe_rows(config, shape, spec);
  config.num_groups = static_cast<i32>((shape.max_tokens + 31) / 32);
  if (has_nodes(shape)) {
    config.route = route_of(shape);
    config.node_ranks = static_cast<i32>(shape.node_ranks);
  }
  config.is_cached = spec.cached;
  config.is_spread = is_spread(shape, spec);
  if (config.most_counted() >= sync::kMaxProgress) {
    throw_unsupported("dispatch of " + std::to_string(shape.max_tokens) + " tokens a call with top_k " +
                      std::to_string(shape.top_k) + " on " + std::to_string(config.num_blocks) +
                      " SMs: a block counts 2^24 - 2 picks at most; need: more SMs or fewer tokens a call");
  }
  return with_stages(config, shared_bytes);
}

bool tells_counts(const GpuWindowShape& shape, const DispatchSpec& spec) {
  return spec.tells_counts && spec.receives && spec.capacity < 0 && !spec.cached &&
         shape.num_local_experts() <= transport::kMostToldCounts;
}

OperationConfig dispatch_operation(const DispatchSpec& spec, bool is_spread) {
  OperationConfig operation;
  operation.kind = OpKind::kDispatch;
  operation.layout = spec.layout;
  operation.quantize = spec.quantize;
  operation.dtype = spec.quantize == Quantize::kNone ? spec.dtype : Dtype::kBytes;
  operation.is_cached = spec.cached ? 1 : 0;
  operation.mode = static_cast<u8>(spec.num_blocks);  // blocks of the same number meet, so there must be as many
  operation.is_small = spec.is_small ? 1 : is_spread ? 2 : 0;
  operation.alignment = static_cast<u32>(spec.alignment);
  operation.hidden = static_cast<u32>(spec.hidden);
  operation.capacity = spec.capacity;
  operation.max_tokens = spec.max_tokens;
  operation.row_bytes = wire_row_bytes(spec);
  operation.scale_row_bytes = wire_scale_bytes(spec);
  return operation;
}

i64 sizes_len(const GpuWindowShape& shape, Layout layout) {
  return shape.num_local_experts() + (layout == Layout::kRankMajor ? shape.num_ranks : shape.num_local_experts()) + 2;
}

std::tuple<i32*, i32*, i32*> parts_of_sizes(const GpuWindowShape& shape, Layout layout, u64 sizes) {
  const auto at = [&](i64 idx) { return memory_at<i32>(sizes + 4 * static_cast<u64>(idx)); };
  return {at(0), at(shape.num_local_experts()), at(sizes_len(shape, layout) - 1)};
}

// Row numbers are int32 on the device (R17), of rows beyond the capacity too.
i64 most_rows(const GpuWindowShape& shape, const DispatchSpec& spec) {
  const u64 num_local = static_cast<u64>(shape.num_local_experts());
  CheckedSize rows = CheckedSize(static_cast<u64>(shape.num_ranks)) * static_cast<u64>(spec.max_tokens);
  if (spec.layout != Layout::kRankMajor) {
    rows = rows * static_cast<u64>(shape.top_k) +
           CheckedSize(num_local) * static_cast<u64>(std::max<i64>(spec.alignment - 1, 0));
  }
  const bool has_numbers = rows.ok && rows.value <= INT_MAX;
  if (spec.capacity >= 0) {
    rows = CheckedSize(static_cast<u64>(spec.capacity)) * (spec.layout == Layout::kMasked ? num_local : 1);
  }
  if (!has_numbers || !rows.ok || rows.value > INT_MAX) {
    throw_invalid_argument(
        "a result could have more than 2147483647 rows; allowed are fewer tokens, a smaller alignment or "
        "a smaller capacity");
  }
  return static_cast<i64>(rows.value);
}

}  // namespace weft::nvlink
