// Which physical expert a pick of a logical one goes to: an int32 array that Python's side makes for one rank and one set of
// active ranks (python/weft/call/experts.py, docs/protocols/expert-map.md). Only choices are listed that the rule leaves.
#pragma once

#include "weft/config/base.h"

namespace weft::cpu {

// num_logical | digest of the map, low and high | 0 | first [num_logical + 1] | physical ids
struct ExpertTable {
  const i32* base;

  i64 num_logical() const { return base[0]; }
  u64 digest() const { return static_cast<u64>(static_cast<u32>(base[2])) << 32 | static_cast<u32>(base[1]); }
  bool contains(i64 id) const { return id >= 0 && id < num_logical(); }
  // -1: no active rank has it.
  i64 replica_of(i64 id, i64 token, i64 rank) const {
    const i32* first = base + 4;
    const i64 count = first[id + 1] - first[id];
    return count == 0 ? -1 : first[num_logical() + 1 + first[id] + (token + rank) % count];
  }
};

}  // namespace weft::cpu
