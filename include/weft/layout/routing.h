// From counts to row numbers: the arithmetic that sender and receiver share, so that each computes the same places.
#pragma once

#include "weft/config/base.h"
#include "weft/config/operation.h"
#include "weft/config/route.h"

namespace weft {

WEFT_HD constexpr i64 clamp_count(i64 value, i64 limit) { return value < 0 ? 0 : value > limit ? limit : value; }

WEFT_HD constexpr i64 align_rows(i64 rows, i64 alignment) { return (rows + alignment - 1) / alignment * alignment; }

// First row of local expert `expert` for each source, and the end of each group.
//   counts  [num_ranks, num_local_experts] picks by source
//   starts  [num_ranks, num_local_experts] written: first row of (source, expert) in the result
//   offsets [num_local_experts + 1]        written: first row of each group, before any clipping to the capacity
// expert_major: groups start at multiples of `alignment`, the last is padded too. masked: group l starts at l * capacity
// and starts count from the group's own first row. Returns the rows of the result, without capacity.
// NOLINTNEXTLINE(readability-function-size): counts with their shape, how to place them, and two results
WEFT_HD inline i64 place_by_expert(const i32* counts, i32 num_ranks, i32 num_local_experts, Layout layout,
                                   i64 alignment, i64 capacity, i64* starts, i64* offsets) {
  i64 next = 0;
  for (i32 expert = 0; expert < num_local_experts; ++expert) {
    offsets[expert] = layout == Layout::kMasked ? expert * capacity : next;
    i64 row = layout == Layout::kMasked ? 0 : next;
    for (i32 source = 0; source < num_ranks; ++source) {
      starts[source * num_local_experts + expert] = row;
      row += counts[source * num_local_experts + expert];
    }
    next = layout == Layout::kMasked ? (expert + 1) * capacity : align_rows(row, alignment);
  }
  offsets[num_local_experts] = next;
  return next;
}

// rank_major: rows by source rank. offsets [num_ranks + 1] written. Returns their number.
WEFT_HD inline i64 place_by_rank(const i64* num_rows, i32 num_ranks, i64* offsets) {
  offsets[0] = 0;
  for (i32 source = 0; source < num_ranks; ++source) offsets[source + 1] = offsets[source] + num_rows[source];
  return offsets[num_ranks];
}

}  // namespace weft
