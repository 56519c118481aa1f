// How combine for small batches shares a call out among blocks and warps; the same on every rank.
//
// A row is cut into parts of whole granules, a granule being what a warp moves with one 16-byte access of each lane. A unit is
// (token, part), numbered token * num_parts + part, and belongs to block unit mod num_blocks; a warp takes a unit at a time.
#pragma once

#include "weft/config/base.h"
#include "weft/config/operation.h"
#include "weft/config/small_kernel.h"

namespace weft {

struct SmallSplit {
  i32 num_parts = 1;
  i32 part = 0;  // elements; the last part of a row may have fewer

  // Elements of a granule: whole groups that share an FP8 scale.
  WEFT_HD static constexpr i32 granule(Dtype dtype) { return 32 * 16 / dtype_bytes(dtype); }

  // Units of a block among those of `num_tokens` tokens.
  WEFT_HD constexpr i32 num_units(i32 num_tokens, i32 block, i32 num_blocks) const {
    const i32 left = num_tokens * num_parts - block;
    return left > 0 ? (left + num_blocks - 1) / num_blocks : 0;
  }

  // The width that ends first, by the rounds that the warps of the busiest block need to send and to add.
  WEFT_HD static constexpr SmallSplit make(const SmallCombineKernelConfig& config, i32 max_tokens, i32 num_blocks) {
    // Granules that a warp could move while it waits for a load; in wide parts it waits for the rows of a token two times.
    constexpr i32 kLatency = 4;
    const i32 width = granule(config.dtype);
    const i32 granules = (config.hidden + width - 1) / width;
    SmallSplit best;
    i64 best_cost = 0;
    for (i32 part = 1; part <= SmallCombineKernelConfig::kVectors; ++part) {
      const SmallSplit split{(granules + part - 1) / part, part * width};
      const i64 units = split.num_units(max_tokens, 0, num_blocks);
      const i64 cost = (rounds(units * config.num_ranks) + rounds(units)) * ((part > 1 ? 2 : 1) * kLatency + part);
      if (part == 1 || cost < best_cost) {
        best = split;
        best_cost = cost;
      }
    }
    return best;
  }

 private:
  WEFT_HD static constexpr i64 rounds(i64 jobs) {
    return (jobs + SmallCombineKernelConfig::kWorkers - 1) / SmallCombineKernelConfig::kWorkers;
  }
};
static_assert(SmallSplit::granule(Dtype::kFp32) % kQuantizeGroup == 0);

}  // namespace weft
