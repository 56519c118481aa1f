// Run-time arguments of the kernel that counts picks: a plain struct that the host passes by value.
#pragma once

#include "weft/config/base.h"

namespace weft::kernels {

constexpr i32 kCountThreads = 256;
constexpr i32 kCountBlocksPerSm = 4;

struct CountPicksArgs {
  const void* topk_idx = nullptr;  // [num_tokens, top_k]
  i32* experts = nullptr;          // [num_experts], added to
  i32* ranks = nullptr;            // [num_ranks], added to
  u8* is_in_rank = nullptr;        // [num_tokens, num_ranks], written: 0 or 1
  i64 num_tokens = 0;
  i32 top_k = 0;
  i32 num_experts = 0;
  i32 num_ranks = 0;  // at most 64
  bool is_int64 = true;
};

}  // namespace weft::kernels
