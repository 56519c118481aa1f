// Structural configuration of the GPU kernels: one value is one compiled kernel, rendered into its source and cache key.
// What changes between calls (counts, offsets, T) is in the arguments and compiles nothing.
#pragma once

#include "weft/config/base.h"
#include "weft/config/operation.h"

namespace weft {

struct DispatchKernelConfig {
  i32 num_ranks = 1;
  i32 num_experts = 1;
  i32 top_k = 1;
  i32 num_blocks = 1;
  i32 row_bytes = 16;         // on the wire
  i32 scale_row_bytes = 0;    // on the wire, a multiple of 16
  i32 num_stages = 2;         // rows that a block holds in shared memory, a multiple of kStoreWarps
  i32 num_groups = 1;         // of 32 tokens, as many as the largest call has
  bool topk_is_int64 = true;  // type of the ids that come in and go out
  bool is_cached = false;     // the routing comes from a handle

  WEFT_HD constexpr i32 num_local_experts() const { return num_experts / num_ranks; }
  WEFT_HD constexpr i32 stage_bytes() const { return (row_bytes + scale_row_bytes + 127) / 128 * 128; }
  // Who goes where: a ballot and a prefix sum for each group and rank.
  WEFT_HD constexpr i32 group_bytes() const { return (num_groups * num_ranks * 8 + 127) / 128 * 128; }
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

// Warps that store rows, groups of warps that sum them. A stage belongs to one of them for good: who waits for phase n of
// a barrier has then seen phase n - 1 end, without which a wait by parity could pass a phase too early.
constexpr i32 kStoreWarps = 2;
constexpr i32 kSumGroups = 2;

constexpr i32 kMaxGpuRanks = 16;  // ranks of one scale-up domain that a kernel addresses directly

}  // namespace weft
