// The two halves of a handle, as int32 arrays that tensors can hold: where the tokens of this rank went (send plan), and
// what came from whom (receive plan). Self-contained, so they survive later calls and serve any number of times.
#pragma once

#include "weft/config/base.h"
#include "weft/config/operation.h"
#include "weft/layout/checked.h"

namespace weft::cpu {

struct PlanHeader {
  i32 magic = 0;
  i32 epoch = 0;
  i32 layout = 0;
  i32 num_ranks = 0;
  i32 num_local_experts = 0;
  i32 top_k = 0;
  i32 num_tokens = 0;     // send plan: T of this rank; receive plan: picks that found no room here
  i32 num_meta_rows = 0;  // receive plan: M, (token, source) pairs received
  i32 num_rows = 0;       // receive plan: rows that hold data
  i32 alignment = 1;
  i64 capacity = kNoCapacity;
  u64 window_hash = 0;
  i32 sequence = 0;  // of the dispatch that made it: both halves carry the same
  i32 rank = 0;
};
static_assert(sizeof(PlanHeader) == 64);

constexpr i32 kSendPlanMagic = 0x57464c53;  // "SLFW"
constexpr i32 kRecvPlanMagic = 0x57464c52;  // "RLFW"
constexpr i64 kPlanHeaderInts = sizeof(PlanHeader) / sizeof(i32);

// header | row_start [R] | num_rows_to [R] | expert [T, K] | slot [T, R] | pick_row [T, K]
//   row_start: rank_major: first row of this source on rank d.  num_rows_to: (token, d) pairs, dropped ones included
//   expert: global id, -1 = none.  slot: how many earlier tokens went to d, -1 = none
//   pick_row: row on the destination (masked: expert * capacity + row), -1 = dropped; not used in rank_major
template <class Int>
struct SendPlanView {
  Int* base;
  i64 num_tokens, top_k, num_ranks;

  Int* row_start() const { return base + kPlanHeaderInts; }
  Int* num_rows_to() const { return row_start() + num_ranks; }
  Int* expert() const { return num_rows_to() + num_ranks; }
  Int* slot() const { return expert() + num_tokens * top_k; }
  Int* pick_row() const { return slot() + num_tokens * num_ranks; }
};

inline i64 send_plan_len(i64 num_tokens, i64 top_k, i64 num_ranks) {
  return kPlanHeaderInts + 2 * num_ranks + num_tokens * (2 * top_k + num_ranks);
}

// header | source_offset [R + 1] | token [M] of its source | expert [M, K] local ids, -1 = none | row [M, K] as pick_row above
//   the first two padded to 16 bytes. Sources find `token` before `expert`, whose place they are told
constexpr i64 padded_ints(i64 count) { return static_cast<i64>(align_up(static_cast<u64>(count), 4)); }

// Where these lie, in int32s.
struct RecvPlanPlaces {
  i64 num_meta_rows, top_k, num_ranks;

  i64 source_offset() const { return kPlanHeaderInts; }
  i64 token() const { return source_offset() + padded_ints(num_ranks + 1); }
  i64 expert() const { return token() + padded_ints(num_meta_rows); }
  i64 row() const { return expert() + num_meta_rows * top_k; }
};

template <class Int>
struct RecvPlanView {
  Int* base;
  i64 num_meta_rows, top_k, num_ranks;

  RecvPlanPlaces places() const { return {num_meta_rows, top_k, num_ranks}; }
  Int* source_offset() const { return base + places().source_offset(); }
  Int* token() const { return base + places().token(); }
  Int* expert() const { return base + places().expert(); }
  Int* row() const { return base + places().row(); }
};

inline i64 recv_plan_len(i64 num_meta_rows, i64 top_k, i64 num_ranks, Layout layout) {
  return kPlanHeaderInts + padded_ints(num_ranks + 1) + padded_ints(num_meta_rows) +
         num_meta_rows * top_k * (layout == Layout::kRankMajor ? 1 : 2);
}

// In a window with nodes the receive plan goes on: number of forward plans, then these, each part from a multiple of 4. A forward plan
// is the send plan of the rows that came from a rank of another node for which this one forwards (header: rank, num_tokens). It
// has places in this node alone.
struct ForwardPlans {
  i32* base;  // of the receive plan
  i64 begin;  // its length without them
  i64 end;    // with them

  static i64 ints_of(i64 num_rows, i64 top_k, i64 num_ranks) {
    return padded_ints(send_plan_len(num_rows, top_k, num_ranks));
  }
  i64 first() const { return padded_ints(begin) + 4; }
  i32& count() const { return base[padded_ints(begin)]; }
  // visit(send plan) of each. False: the array does not hold what it says.
  template <class Visit>
  bool for_each(i64 top_k, i64 num_ranks, const Visit& visit) const {
    if (first() > end) return false;
    i64 at = first();
    for (i32 idx = 0; idx < count(); ++idx) {
      if (end - at < kPlanHeaderInts) return false;
      const auto& header = *reinterpret_cast<const PlanHeader*>(base + at);
      if (header.magic != kSendPlanMagic || header.num_tokens < 0 || header.rank < 0 || header.rank >= num_ranks)
        return false;
      const i64 length = ints_of(header.num_tokens, top_k, num_ranks);
      if (end - at < length) return false;
      visit(SendPlanView<i32>{base + at, header.num_tokens, top_k, num_ranks}, header.rank);
      at += length;
    }
    return at == end;
  }
};

// Rows of the tensor that dispatch gave, and that combine takes (masked: over all experts).
inline i64 result_rows(const PlanHeader& recv) {
  if (static_cast<Layout>(recv.layout) == Layout::kMasked) return recv.num_local_experts * recv.capacity;
  return recv.capacity >= 0 ? recv.capacity : recv.num_rows;
}

// Error kInvalidState if the arrays are no handle of this window and epoch, or not the two halves of one handle.
struct PlanIdentity {
  u64 window_hash;
  i32 epoch;
  i32 rank;
  bool has_nodes;
};
void check_plans(const i32* send_plan, const i32* recv_plan, i64 recv_plan_len, i64 num_tokens, Layout layout,
                 i64 capacity, const PlanIdentity& identity);

}  // namespace weft::cpu
