// The two halves of a handle of a GPU dispatch, int32 arrays in device memory. Self-contained: they survive later calls.
#pragma once

#include "weft/config/base.h"
#include "weft/config/operation.h"
#include "weft/config/route.h"

namespace weft {

// Where this rank's tokens went: mask [T] | row | destination
//   mask: GpuRankMask, bit r: rank r holds a row of the token
//   row:  rank_major [T, R]: row on rank r; the others [T, K]: row of the pick (masked: local expert * capacity + row); -1: none
//   destination [T, K]: rank that holds the pick, -1: none
template <class Int>
struct GpuSendPlan {
  Int* base;
  i64 num_tokens;
  i32 width;  // R or K

  // Ranks that hold a row of the token.
  WEFT_HD constexpr GpuRankMask ranks(i64 token) const { return GpuRankMask{static_cast<u32>(base[token])}; }
  WEFT_HD constexpr void set_ranks(i64 token, const GpuRankMask& ranks) const {
    base[token] = static_cast<i32>(ranks.word);
  }
  WEFT_HD constexpr Int* row() const { return base + num_tokens; }
  WEFT_HD constexpr Int* destination() const { return base + num_tokens * (1 + width); }
};

WEFT_HD constexpr i64 gpu_send_plan_len(i64 num_tokens, i32 top_k, i32 num_ranks, Layout layout) {
  return num_tokens * (1 + (layout == Layout::kRankMajor ? num_ranks : top_k) + top_k);
}

// What came from whom: num_tokens [16] of each source | made_by, dropped, 14 unused | row [R, max_tokens, W], W = 1 (rank_major) or K
//   dropped: picks of this rank's experts for which the result had no room; a dispatch that repeats the routing drops them again
//   made_by: low bits of the sequence of the dispatch that made the plan, the same on all ranks
//   row: where the token's row, or pick k, of the source lies in this rank's result; -1 = nowhere
//   Entries of tokens that the source does not have are undefined.
constexpr i32 kGpuDroppedRow =
    -2;  // small batches: this rank has the pick's expert, but its capacity had no room for it
constexpr i32 kGpuPlanHeader = 32;  // int32s
constexpr i32 kGpuPlanMadeBy = 16;  // place of made_by; at least kMaxGpuRanks
constexpr i32 kGpuPlanDropped = 17;

template <class Int>
struct GpuRecvPlan {
  Int* base;
  i64 max_tokens;
  i32 width;

  WEFT_HD constexpr Int* num_tokens() const { return base; }
  WEFT_HD constexpr Int* row(i32 source, i64 token) const {
    return base + kGpuPlanHeader + (source * max_tokens + token) * width;
  }
};

WEFT_HD constexpr i64 gpu_recv_plan_len(i64 max_tokens, i32 top_k, i32 num_ranks, Layout layout) {
  return kGpuPlanHeader + num_ranks * max_tokens * (layout == Layout::kRankMajor ? 1 : top_k);
}

// With nodes: members | 31 unused | of each source that this rank forwards for, in the order of ranks: row [max_tokens, node_ranks] |
// come [(max_tokens + 31) / 32] | pick [max_tokens, K] u8
//   members: GpuRankMask of the dispatch that made the plan: with others, others forward
//   row: where the token's row lies on each mate (of a small batch 0)
//   come: a bit for each token that came here; undefined where the source has no token
//   pick: of each pick of a token that came, the index of the mate that has a row of it, or kNoMate
constexpr i32 kNoForward = -1;     // the token did not come here
constexpr i32 kForwardNoRow = -2;  // it came, and this mate has no row of it
constexpr u8 kNoMate = 0xff;
constexpr i32 kGpuForwardHeader = 32;  // int32s

template <class Int>
struct GpuForwardPlan {
  Int* base;
  i64 max_tokens;
  i32 node_ranks;
  i32 top_k;

  WEFT_HD constexpr Int& members() const { return base[0]; }
  WEFT_HD constexpr Int* row(i32 nth, i64 token) const {
    return base + kGpuForwardHeader + nth * source_len() + token * node_ranks;
  }
  WEFT_HD constexpr Int* come(i32 nth) const { return row(nth, max_tokens); }
  WEFT_HD const u8* pick(i32 nth, i64 token) const {
    return reinterpret_cast<const u8*>(come(nth) + come_len()) + token * top_k;
  }
  WEFT_HD void set_pick(i32 nth, i64 token, i32 k, u8 mate) const {
    reinterpret_cast<u8*>(come(nth) + come_len())[token * top_k + k] = mate;
  }
  WEFT_HD constexpr i64 come_len() const { return (max_tokens + 31) / 32; }
  WEFT_HD constexpr i64 source_len() const {
    return max_tokens * node_ranks + come_len() + (max_tokens * top_k + 3) / 4;
  }
};

// For a rank that forwards for at most so many.
WEFT_HD constexpr i64 gpu_forward_plan_len(i32 num_sources, i64 max_tokens, i32 node_ranks, i32 top_k) {
  return kGpuForwardHeader + num_sources * GpuForwardPlan<i32>{nullptr, max_tokens, node_ranks, top_k}.source_len();
}

}  // namespace weft
