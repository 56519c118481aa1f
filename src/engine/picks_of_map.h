// The ids and weights that a routing map stands for: of this rank, local.
#pragma once

#include "weft/config/base.h"

namespace weft {

// Addresses are numbers, as in engine/call.h.
struct PicksOfMap {
  u64 chosen = 0;        // u8 [num_tokens, num_experts]: 0 or else
  u64 probs = 0;         // [num_tokens, num_experts] of weight_bytes; 0: there are none
  u64 topk_idx = 0;      // i64 [num_tokens, top_k], written: ascending, -1 behind them
  u64 topk_weights = 0;  // [num_tokens, top_k] of weight_bytes, written: 0 behind those of the picks
  i64 num_tokens = 0;
  i32 num_experts = 0;
  i32 top_k = 0;         // of a row with more the first are taken, and the first id becomes num_experts: out of range
  i32 weight_bytes = 4;  // 2 or 4
};

// Error kInvalidArgument: a number makes no sense, or an address is missing.
void check_picks_of_map(const PicksOfMap& call);

// In memory of the host.
void picks_of_map(const PicksOfMap& call);

}  // namespace weft
