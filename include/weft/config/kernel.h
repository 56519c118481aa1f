// Structural configuration of the GPU kernels: one value is one compiled kernel, rendered into its source and cache key.
// What changes between calls (counts, offsets, T) is in the arguments and compiles nothing.
#pragma once

#include "weft/config/base.h"
#include "weft/config/operation.h"

namespace weft {

// Warps that store rows, groups of warps that sum them. A stage belongs to one of them for good: who waits for phase n of
// a barrier has then seen phase n - 1 end, without which a wait by parity could pass a phase too early.
constexpr i32 kStoreWarps = 2;
constexpr i32 kFanWarps = 6;  // that copy received rows to the places of their other picks
constexpr i32 kSumGroups = 2;

struct DispatchKernelConfig {
  i32 num_ranks = 1;
  i32 num_experts = 1;
  i32 top_k = 1;
  i32 num_blocks = 1;
  i32 row_bytes = 16;       // of x
  i32 scale_row_bytes = 0;  // on the wire, of any size; 0: none
  i32 hidden = 16;          // elements of a row, when quantised
  i32 num_stages = 2;       // rows that a block holds to send, a multiple of kStoreWarps and of num_quantize_warps
  i32 num_groups = 1;       // rank_major: of 32 tokens, as many as the largest call has
  i32 num_quantize_warps = 0;
  Dtype dtype = Dtype::kBytes;  // of x, when quantised
  Quantize quantize = Quantize::kNone;
  Layout layout = Layout::kRankMajor;
  bool topk_is_int64 = true;  // type of the ids that come in and go out
  bool is_cached = false;     // the routing comes from a handle

  // Runs of tokens that a block takes when rows are placed by expert: few, since each needs a count for every expert.
  static constexpr i32 kPeriods = 8;

  WEFT_HD constexpr i32 num_local_experts() const { return num_experts / num_ranks; }
  WEFT_HD constexpr bool is_by_expert() const { return layout != Layout::kRankMajor; }
  WEFT_HD constexpr bool is_quantized() const { return quantize != Quantize::kNone; }
  WEFT_HD constexpr i32 wire_row_bytes() const { return is_quantized() ? hidden : row_bytes; }
  // A row as it comes in, or as it goes out: quantised in place, with its scales behind the wider of the two.
  WEFT_HD constexpr i32 scales_at() const { return (row_bytes + 15) / 16 * 16; }
  WEFT_HD constexpr i32 stage_bytes() const { return (scales_at() + scale_row_bytes + 127) / 128 * 128; }
  // Who goes where. rank_major: a ballot and a prefix sum for each group and rank; else counts for each period and expert.
  WEFT_HD constexpr i32 index_bytes() const {
    const i32 holes = is_by_expert() ? 2 * num_local_experts() * 4 : 0;
    const i32 groups = is_by_expert() ? 2 * kPeriods * num_experts * 4 : num_groups * num_ranks * 8;
    const i32 counts = (is_by_expert() ? 3 : 1) * num_experts * 4;
    return (holes + (is_cached ? 0 : groups + counts) + 127) / 128 * 128;
  }
  WEFT_HD constexpr i32 shared_bytes() const { return index_bytes() + num_stages * stage_bytes(); }
  // Load, store, quantise, and those that write ids (rank_major) or copy what arrives and tell what has gone; many in all,
  // since all count.
  WEFT_HD constexpr i32 num_warps() const {
    const i32 busy = 1 + kStoreWarps + num_quantize_warps + (is_by_expert() ? kFanWarps + 1 : 2);
    return busy < 16 ? 16 : busy;
  }
  WEFT_HD constexpr i32 num_threads() const { return num_warps() * 32; }
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
