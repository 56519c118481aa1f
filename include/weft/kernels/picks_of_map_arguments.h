// Run-time arguments of the kernel that makes picks of a routing map: a plain struct that the host passes by value.
#pragma once

#include "weft/config/base.h"

namespace weft::kernels {

constexpr i32 kMapThreads = 256;
constexpr i32 kMapBlocksPerSm = 4;

struct PicksOfMapArgs {
  const u8* chosen = nullptr;    // [num_tokens, num_experts]: 0 or else
  const void* probs = nullptr;   // [num_tokens, num_experts] of weight_bytes; nullptr: there are none
  i64* topk_idx = nullptr;       // [num_tokens, top_k], written
  void* topk_weights = nullptr;  // [num_tokens, top_k] of weight_bytes, written where there are probs
  i64 num_tokens = 0;
  i32 num_experts = 0;
  i32 top_k = 0;
  i32 weight_bytes = 4;  // 2 or 4
};

}  // namespace weft::kernels
