// How many picks each expert has, how many tokens each rank, and which ranks a token goes to: of this rank's ids, local.
#pragma once

#include "weft/config/base.h"

namespace weft {

// Addresses are numbers, as in engine/call.h.
struct CountPicks {
  u64 topk_idx = 0;    // [num_tokens, top_k]; ids out of range count nowhere
  u64 experts = 0;     // i32 [num_experts], added to
  u64 ranks = 0;       // i32 [num_ranks], added to: a token counts once a rank
  u64 is_in_rank = 0;  // u8 [num_tokens, num_ranks], written: 0 or 1
  i64 num_tokens = 0;
  i32 top_k = 0;
  i32 num_experts = 0;
  i32 num_ranks = 0;
  bool is_int64 = true;
};

// Error kInvalidArgument: a number makes no sense, or an address is missing.
void check_count_picks(const CountPicks& call);

// In memory of the host.
void count_picks(const CountPicks& call);

}  // namespace weft
