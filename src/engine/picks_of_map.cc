#include "engine/picks_of_map.h"

#include <string>

#include "base/status.h"
#include "engine/call.h"

namespace weft {
namespace {

template <class Weight>
void picks_of_rows(const PicksOfMap& call) {
  const u8* chosen = memory_at<const u8>(call.chosen);
  const Weight* probs = memory_at<const Weight>(call.probs);
  i64* ids = memory_at<i64>(call.topk_idx);
  Weight* weights = memory_at<Weight>(call.topk_weights);
  const bool has_probs = probs != nullptr;
  for (i64 token = 0; token < call.num_tokens; ++token) {
    i32 num_picks = 0;
    for (i32 expert = 0; expert < call.num_experts; ++expert) {
      if (chosen[expert] == 0) continue;
      if (num_picks < call.top_k) {
        ids[num_picks] = expert;
        if (has_probs) weights[num_picks] = probs[expert];
      }
      ++num_picks;
    }
    for (i32 k = num_picks; k < call.top_k; ++k) {
      ids[k] = -1;
      if (has_probs) weights[k] = 0;
    }
    if (num_picks > call.top_k) ids[0] = call.num_experts;
    chosen += call.num_experts;
    ids += call.top_k;
    if (has_probs) probs += call.num_experts, weights += call.top_k;
  }
}

}  // namespace

void check_picks_of_map(const PicksOfMap& call) {
  const bool is_sound = call.num_tokens >= 0 && call.num_experts >= 1 && call.top_k >= 1 &&
                        (call.weight_bytes == 2 || call.weight_bytes == 4);
  if (!is_sound) {
    throw_invalid_argument("picks of a map of " + std::to_string(call.num_tokens) + " tokens and " +
                           std::to_string(call.num_experts) + " experts, " + std::to_string(call.top_k) +
                           " a token, with weights of " + std::to_string(call.weight_bytes) +
                           " bytes; allowed: an expert and a pick at least, weights of 2 or 4 bytes");
  }
  const bool has_weights = call.probs == 0 || call.topk_weights != 0;
  if (call.num_tokens > 0 && (call.chosen == 0 || call.topk_idx == 0 || !has_weights)) {
    throw_invalid_argument("picks of a map: an address is missing");
  }
}

void picks_of_map(const PicksOfMap& call) {
  check_picks_of_map(call);
  if (call.weight_bytes == 2) {
    picks_of_rows<u16>(call);
  } else {
    picks_of_rows<u32>(call);
  }
}

}  // namespace weft
