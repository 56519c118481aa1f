// Who is where: which way leads to a peer, sets of ranks, and which rank holds an expert.
#pragma once

#include "weft/config/base.h"

namespace weft {

enum class Route : u8 {
  kDirect = 0,  // its memory is mapped: load and store
  kLoop = 1,    // rings that a network empties, here one without hardware (transport/rail_loop.cuh)
  kNodes = 2,   // that of a rank of this node is mapped; rails lead to other nodes (transport/rail_block.cuh)
  kGin = 3      // the same; rails go over NCCL's network (transport/rail_gin.cuh)
};

// Ranks are in nodes.
WEFT_HD constexpr bool leads_to_nodes(Route route) { return route == Route::kNodes || route == Route::kGin; }

// A set of ranks of a domain of at most kDomain, a bit each. Trivial, so that it may lie in shared memory; none() is the empty
// set. One word for now: what packs it into a word of a window or a plan asks for `word`, and does not compile with a larger one.
template <i32 kDomain>
struct RankMask {
  static_assert(kDomain >= 1 && kDomain <= 32, "a larger domain needs more words here, in the window and in the plans");
  u32 word;

  WEFT_HD static constexpr RankMask none() { return {0}; }
  WEFT_HD static constexpr RankMask only(i32 rank) { return {1u << rank}; }
  // 0 .. num_ranks - 1.
  WEFT_HD static constexpr RankMask first(i32 num_ranks) { return {num_ranks < 32 ? (1u << num_ranks) - 1 : ~0u}; }

  // 1: the rank is in it.
  WEFT_HD constexpr u32 bit(i32 rank) const { return word >> rank & 1u; }
  WEFT_HD constexpr bool has(i32 rank) const { return (word >> rank & 1u) != 0; }
  // Also of -1, where the answer says nothing.
  WEFT_HD constexpr bool has_or_any(i32 rank) const { return (word >> (rank & 31) & 1u) != 0; }

  WEFT_HD constexpr RankMask& operator|=(const RankMask& other) {
    word |= other.word;
    return *this;
  }
  WEFT_HD constexpr RankMask operator&(const RankMask& other) const { return {word & other.word}; }
};

constexpr i32 kMaxGpuRanks = 16;  // ranks of one scale-up domain that a kernel addresses directly
using GpuRankMask = RankMask<kMaxGpuRanks>;

// Which rank holds an expert: equal consecutive runs. The only place that knows.
struct ExpertPlacement {
  i32 num_ranks = 1;
  i32 num_local_experts = 1;

  WEFT_HD constexpr i32 num_experts() const { return num_ranks * num_local_experts; }
  WEFT_HD constexpr bool contains(i64 expert) const { return expert >= 0 && expert < num_experts(); }
  WEFT_HD constexpr i32 rank_of(i32 expert) const { return expert / num_local_experts; }
  WEFT_HD constexpr u32 rank_of(u32 expert) const { return expert / static_cast<u32>(num_local_experts); }
  WEFT_HD constexpr i32 local_id(i32 expert) const { return expert % num_local_experts; }
  WEFT_HD constexpr i32 expert_of(i32 rank, i32 local) const { return rank * num_local_experts + local; }
  // Of an expert or of no id at all: the local number on `rank`, -1: not there.
  WEFT_HD constexpr i32 local_on(i32 rank, i64 id) const {
    const i64 local = id - static_cast<i64>(rank) * num_local_experts;
    return local >= 0 && local < num_local_experts ? static_cast<i32>(local) : -1;
  }
};

}  // namespace weft
