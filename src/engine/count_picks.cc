#include "engine/count_picks.h"

#include <string>

#include "base/status.h"
#include "engine/call.h"

namespace weft {
namespace {

template <class Id>
void count_ids(const CountPicks& call) {
  const Id* ids = memory_at<const Id>(call.topk_idx);
  i32* const experts = memory_at<i32>(call.experts);
  i32* const ranks = memory_at<i32>(call.ranks);
  u8* is_in_rank = memory_at<u8>(call.is_in_rank);
  const i32 num_local = call.num_experts / call.num_ranks;
  for (i64 token = 0; token < call.num_tokens; ++token, ids += call.top_k, is_in_rank += call.num_ranks) {
    for (i32 rank = 0; rank < call.num_ranks; ++rank) is_in_rank[rank] = 0;
    for (i32 k = 0; k < call.top_k; ++k) {
      const i64 id = ids[k];
      if (id < 0 || id >= call.num_experts) continue;
      ++experts[id];
      u8& is_here = is_in_rank[id / num_local];
      ranks[id / num_local] += is_here != 0 ? 0 : 1;
      is_here = 1;
    }
  }
}

}  // namespace

void check_count_picks(const CountPicks& call) {
  const bool is_sound = call.num_tokens >= 0 && call.top_k >= 0 && call.num_ranks >= 1 && call.num_ranks <= kMaxRanks &&
                        call.num_experts >= call.num_ranks && call.num_experts % call.num_ranks == 0;
  if (!is_sound) {
    throw_invalid_argument("counts of " + std::to_string(call.num_tokens) + " tokens with " +
                           std::to_string(call.top_k) + " picks of " + std::to_string(call.num_experts) +
                           " experts on " + std::to_string(call.num_ranks) +
                           " ranks; allowed: 1 to 64 ranks, experts a multiple of them");
  }
  const bool has_ids = call.topk_idx != 0 || call.top_k == 0;
  if (call.num_tokens > 0 && (!has_ids || call.experts == 0 || call.ranks == 0 || call.is_in_rank == 0)) {
    throw_invalid_argument("counts of picks: an address is missing");
  }
}

void count_picks(const CountPicks& call) {
  check_count_picks(call);
  if (call.is_int64) {
    count_ids<i64>(call);
  } else {
    count_ids<i32>(call);
  }
}

}  // namespace weft
