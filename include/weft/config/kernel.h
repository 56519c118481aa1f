// Structural configuration of the GPU kernels: one value is one compiled kernel, rendered into its source and cache key.
// What changes between calls (counts, offsets, T) is in the arguments and compiles nothing.
#pragma once

#include "weft/config/base.h"
#include "weft/config/operation.h"

namespace weft {

// Warps that store rows, groups of warps that sum them. A stage belongs to one of them for good: who waits for phase n of
// a barrier has then seen phase n - 1 end, without which a wait by parity could pass a phase too early.
constexpr i32 kStoreWarps = 2;
constexpr i32 kSumGroups = 2;

struct DispatchKernelConfig {
  i32 num_ranks = 1;
  i32 num_experts = 1;
  i32 top_k = 1;
  i32 num_blocks = 1;
  i32 row_bytes = 16;             // of x
  i32 scale_row_bytes = 0;        // on the wire, of any size; 0: none
  i32 hidden = 16;                // elements of a row, when quantised
  i32 num_stages = 2;             // rows that a block holds in shared memory
  i32 num_groups = 1;             // of 32 tokens, as many as the largest call has
  i32 num_periods = 1;            // expert_major, masked: chunks of tokens that a block has
  i32 chunk_tokens = 32;          // tokens of a chunk
  i32 num_quantize_warps = 0;     // more than 0: rows are quantised on the way
  Dtype dtype = Dtype::kBytes;    // of x, when quantised
  Quantize quantize = Quantize::kNone;
  Layout layout = Layout::kRankMajor;
  bool topk_is_int64 = true;      // type of the ids that come in and go out
  bool is_cached = false;         // the routing comes from a handle

  WEFT_HD constexpr i32 num_local_experts() const { return num_experts / num_ranks; }
  WEFT_HD constexpr bool is_by_expert() const { return layout != Layout::kRankMajor; }
  WEFT_HD constexpr i32 wire_row_bytes() const { return quantize == Quantize::kNone ? row_bytes : hidden; }
  WEFT_HD constexpr i32 stage_bytes() const { return (row_bytes + scale_row_bytes + 127) / 128 * 128; }
};

struct CombineKernelConfig {
  i32 num_ranks = 1;
  i32 num_blocks = 1;
  i32 hidden = 8;
  i32 chunk = 8;       // elements of a row that a stage holds of every rank
  i32 num_stages = 2;  // a multiple of kSumGroups
  Dtype dtype = Dtype::kBf16;

  WEFT_HD constexpr i32 chunk_bytes() const { return chunk * dtype_bytes(dtype); }
  WEFT_HD constexpr i32 stage_bytes() const { return (num_ranks * chunk_bytes() + 127) / 128 * 128; }
  WEFT_HD constexpr i32 num_chunks() const { return (hidden + chunk - 1) / chunk; }
};

}  // namespace weft
