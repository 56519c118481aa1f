#include "engine/nvlink/node_rail.h"

#include <algorithm>
#include <string>

#include "base/status.h"
#include "engine/nvlink/dispatch_config.h"
#include "engine/rail_memory.h"

namespace weft::nvlink {
namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& need) {
  throw_unsupported(what + " between nodes on GPUs; need: " + need);
}

void check_call(const GpuWindowShape& shape, const CallSpec& spec, i64 record_bytes) {
  if (record_bytes > shape.landing_row_bytes) {
    refuse("rows of " + std::to_string(record_bytes) + " bytes",
           "at most " + std::to_string(shape.landing_row_bytes) + " in this window");
  }
  if (!spec.is_small && spec.layout != Layout::kRankMajor && shape.top_k > 32) {
    refuse("more than 32 picks by expert", "rank_major");
  }
}

}  // namespace

RailMap rail_map(const GpuWindowShape& shape, u64 active) {
  return {shape.num_ranks, static_cast<i32>(shape.node_ranks), active};
}

RailLayout rail_layout(const GpuWindowShape& shape) {
  return make_rail_layout(rail_shape(shape, shape.num_blocks, shape.landing_row_bytes));
}

u64 rail_argument(const GpuWindowShape& shape) {
  const auto end_of = [&](auto rail) {
    rail.layout = rail_layout(shape);
    return align_up(rail.num_bytes(shape.num_ranks), kCacheLine);
  };
  return has_gin(shape) ? end_of(transport::GinRail()) : end_of(transport::BlockRail());
}

u64 rail_bytes(const GpuWindowShape& shape) {
  if (!has_nodes(shape)) return 0;
  return rail_argument(shape) + (has_gin(shape) ? sizeof(transport::GinRail) : sizeof(transport::BlockRail));
}

i64 forward_plan_len(const GpuWindowShape& shape) {
  if (!has_nodes(shape)) return 0;
  return gpu_forward_plan_len(shape.num_ranks - 1, shape.max_tokens, static_cast<i32>(shape.node_ranks), shape.top_k);
}

i64 landing_rows_a_token(const GpuWindowShape& shape, u64 active) {
  const RailMap map = rail_map(shape, active);
  i64 most_parts = 1;
  for (i32 rank = 0; rank < shape.num_ranks; ++rank) {
    i64 num_parts = 1;
    for (i32 source = 0; source < shape.num_ranks && map.is_active(rank); ++source) {
      const bool is_away = map.is_active(source) && !map.are_mates(rank, source);
      num_parts += is_away && map.forwarder(source, map.node(rank)) == rank ? 1 : 0;
    }
    most_parts = std::max(most_parts, num_parts);
  }
  return most_parts * shape.node_ranks;
}

i64 ring_records(const GpuWindowShape& shape, i32 record_bytes) {
  const RailLayout rail = rail_layout(shape);
  return static_cast<i64>(rail.slot_bytes / static_cast<u64>(record_bytes)) * rail.num_slots;
}

void refuse_small(const std::string& what) { refuse(what, "more SMs, fewer tokens, or mode=\"throughput\""); }

void check_nodes(const GpuWindowShape& shape, const DispatchSpec& spec) {
  if (!has_nodes(shape)) return;
  const i64 scale_bytes = wire_scale_bytes(spec);
  check_call(shape, spec, wire_row_bytes(spec) + scale_bytes);
  if (spec.tells_need) refuse("a call that tells of too many tokens", "max_tokens as large as the largest batch");
  if (!spec.is_small && spec.quantize == Quantize::kNone && (scale_bytes % 16 != 0 || spec.scale_stride > 0))
    refuse("scales of " + std::to_string(scale_bytes) + " bytes", "rows of scales of a multiple of 16 bytes");
}

void check_nodes(const GpuWindowShape& shape, const CombineSpec& spec) {
  if (!has_nodes(shape)) return;
  check_call(shape, spec, spec.hidden * dtype_bytes(spec.dtype));
  if (spec.has_side && spec.adds_side) refuse("side values of all ranks", "side_lanes=\"own\"");
  if (spec.order != SumOrder::kRank) refuse("this order", "order=\"rank\"");
  if (spec.sum_domain != shape.node_ranks)
    refuse("sum_domain " + std::to_string(spec.sum_domain), std::to_string(shape.node_ranks));
}

}  // namespace weft::nvlink
