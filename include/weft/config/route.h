// Who is where: which way leads to a peer, and which rank holds an expert.
#pragma once

#include "weft/config/base.h"

namespace weft {

enum class Route : u8 {
  kDirect = 0,  // its memory is mapped: load and store
  kLoop = 1     // rings that a network empties, here one without hardware (transport/rail_loop.cuh)
};

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
