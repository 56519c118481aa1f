#include "engine/nvlink/combine_config.h"

#include <algorithm>
#include <string>

#include "base/status.h"
#include "weft/layout/checked.h"

namespace weft::nvlink {
namespace {

constexpr i32 kStaticBytes = 4 * 1024;  // of the kernel's own variables and what the driver keeps
// Bytes that one slot holds: small enough for many in flight, large enough for few waits; more where few blocks pull rows and
// nothing else wants the memory (nvlink-combine.md).
constexpr i32 kSlotBytes = 7168;
constexpr i32 kPullSlotBytes = 14336;
constexpr i32 kFewBlocks = 8;

// `width`: most rows of an item.
i32 slots_in(i32 num_bytes, i32 slot_bytes, i32 width) {
  constexpr i32 kMostSlots = 48;
  return std::clamp(num_bytes / slot_bytes, 0, std::max(kMostSlots, 2 * width));
}

// As many as the registers of an SM allow (nvlink-combine.md); FP8 with units that are not whole takes more of them.
i32 most_sum_warps(const CombineKernelConfig& config) {
  const i32 side = config.has_side ? 1 : 0;
  const bool has_whole_units = config.hidden % config.sum_unit() == 0 && config.sum_chunk() % config.sum_unit() == 0;
  if (config.wire_is_fp8 && config.is_by_expert() && !has_whole_units) return 5 - side;
  if (!config.is_by_expert()) return (has_whole_units ? 16 : 14) - side;
  return (config.wire_is_fp8 ? 9 : 12) - side;
}

i32 fewest_reduce_slots(const CombineKernelConfig& config) {
  return config.contributions() + (config.contributions() + 1) / 2;
}

// A ring for each group that adds where a contribution is a row, as long as each ring holds an item with half another behind it,
// or two and a half items where rows are pushed: there a single ring was faster with fewer (decision 0032).
void share_out_rings(CombineKernelConfig& config) {
  const i32 most = config.is_by_expert() || config.has_nodes() ? 1 : config.reduce_groups();
  const i32 slots = config.has_push() ? (5 * config.num_ranks + 1) / 2 : fewest_reduce_slots(config);
  config.reduce_rings = config.reduce_slots >= slots * most ? most : 1;
  config.reduce_slots -= config.reduce_slots % config.reduce_rings;
}

// Whether every item fits with another behind it, and there are warps enough, or any if `is_last`.
bool is_enough(const CombineKernelConfig& config, bool is_last) {
  if (config.reduce_slots < fewest_reduce_slots(config)) return false;
  if (config.makes_partials()) return config.sum_warps >= (is_last ? 1 : most_sum_warps(config) / 2);
  return config.has_push() ? config.push_slots >= 4 : is_last || config.reduce_slots >= 3 * config.num_ranks;
}

void share_out(CombineKernelConfig& config, bool has_push, i32 room) {
  config.push_slots = config.sum_warps = 0;
  if (has_push && config.has_partials()) {
    config.sum_warps = 1;
    room -= config.plan_bytes();
    const i32 most = (room - fewest_reduce_slots(config) * config.reduce_slot_bytes()) / config.sum_warp_bytes();
    config.sum_warps = std::clamp(most, 1, most_sum_warps(config));
    config.reduce_slots =
        slots_in(room - config.sum_warps * config.sum_warp_bytes(), config.reduce_slot_bytes(), config.num_ranks);
  } else if (has_push) {
    config.push_slots = 1;
    config.reduce_rings = 1;
    room -= config.plan_bytes() + config.pick_weights_bytes();
    config.push_slots = slots_in(room / 2, config.push_slot_bytes(), config.contributions());
    config.reduce_slots = config.push_slots;
  } else {
    config.reduce_slots = slots_in(room, config.reduce_slot_bytes(), config.num_ranks);
  }
}

}  // namespace

CombineKernelConfig with_slots(CombineKernelConfig config, bool has_push, int shared_bytes) {
  i32 unit = config.wire_is_fp8 || config.order.sum_is_fp8 ? kQuantizeGroup : 16 / dtype_bytes(config.dtype);
  // Nothing is asked where all units are whole.
  if (config.wire_is_fp8 && config.hidden % config.most_of_unit() == 0) unit = config.most_of_unit();
  const i32 most_chunks = (config.hidden + unit - 1) / unit;
  const i32 slot_bytes = has_push || config.num_blocks > kFewBlocks ? kSlotBytes : kPullSlotBytes;
  i32 fewest_chunks = (config.row_bytes() + slot_bytes - 1) / slot_bytes;
  if (config.wire_is_fp8 && !config.is_by_expert()) {  // a row goes out unit by unit and is added in few parts
    fewest_chunks = (config.hidden + config.most_of_unit() - 1) / config.most_of_unit();
    for (i32 more = fewest_chunks; more < 2 * fewest_chunks; ++more) {
      if (config.hidden % (more * kQuantizeGroup) == 0) {
        fewest_chunks = more;  // all alike
        break;
      }
    }
    config.slot_chunks = std::clamp(kSlotBytes * fewest_chunks / config.hidden, 1, fewest_chunks);
  }
  for (i32 num_chunks = std::max(fewest_chunks, 1);; num_chunks *= 2) {
    const i32 chunks = std::min(num_chunks, most_chunks);
    const i32 elements = (config.hidden + chunks - 1) / chunks;
    config.chunk = (elements + unit - 1) / unit * unit;
    share_out(config, has_push, shared_bytes - kStaticBytes);
    share_out_rings(config);
    if (is_enough(config, chunks == most_chunks)) return config;
    if (chunks == most_chunks) break;
  }
  throw_unsupported("combine of " + std::to_string(config.plan_width()) + " rows a token on " +
                    std::to_string(config.num_ranks) +
                    " ranks does not fit the shared memory of an SM; need: " + "fewer experts a token");
}

i64 tokens_in_landing(const CombineKernelConfig& config, const GpuWindowLayout& layout, i64 rows_a_token) {
  const u64 token_bytes = static_cast<u64>(rows_a_token) * static_cast<u64>(config.wire_row_bytes());
  return static_cast<i64>((layout.landing_ids - layout.landing_rows) / token_bytes);
}

}  // namespace weft::nvlink
