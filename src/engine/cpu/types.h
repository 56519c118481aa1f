// Plain structs that cross the binding: raw pointers and numbers only.
#pragma once

#include "engine/array.h"
#include "weft/config/operation.h"

namespace weft::cpu {

struct DispatchArgs {
  const void* x = nullptr;       // [num_tokens] rows of row_bytes
  const void* scales = nullptr;  // [num_tokens] rows of scale_row_bytes, or null
  i64 num_tokens = 0;
  const void* topk_idx = nullptr;  // [num_tokens, top_k]; not read when cached
  bool topk_is_int64 = false;
  const float* topk_weights = nullptr;  // [num_tokens, top_k] or null: 1
  i32* send_plan = nullptr;             // written, or read when cached
  const i32* recv_plan = nullptr;       // read when cached
  i64 recv_plan_len = 0;
  bool cached = false;
  Dtype dtype = Dtype::kBytes;  // of x
  Layout layout = Layout::kRankMajor;
  Quantize quantize = Quantize::kNone;
  i64 row_bytes = 0;
  i64 scale_row_bytes = 0;
  i64 hidden = 0;
  i64 alignment = 1;
  bool zeroes_holes = true;  // expert_major
  i64 capacity = kNoCapacity;
  i64 max_tokens = 0;
  u8 mode = 0;
  u64 timeout_ns = 0;
  u64 object = 0;           // number of the ExpertParallel among those of the window
  i32* counts = nullptr;    // [num_local_experts] written
  i32* offsets = nullptr;   // [num_ranks + 1] or [num_local_experts + 1] written
  i32* num_rows = nullptr;  // written
  i64* overflow = nullptr;  // added to; of a cached call it may be null: nobody counts
};

struct DispatchResult {
  Array x, scales, topk_idx, topk_weights, recv_plan;
  i64 num_rows = 0;
  i64 num_bad_ids = 0;
  i64 first_bad_id = 0;
  i64 first_bad_at = 0;  // flat position in topk_idx
  bool in_heap = true;
  i64 rows_sent = 0;   // to other ranks
  i64 bytes_sent = 0;  // to other ranks
};

struct CombineArgs {
  const void* y = nullptr;         // rows of hidden elements in the layout of the dispatch
  i64 num_rows = 0;                // of y, all of them
  const float* weights = nullptr;  // per row of y ([N] or [L, C]), or null: plain sum
  bool has_side = false;
  const float* side = nullptr;  // rank_major [N, top_k], expert_major [N], masked [L, C]; may be null if empty
  const void* bias = nullptr;   // [hidden] or [num_tokens, hidden], or null
  bool bias_is_2d = false;
  bool bias_is_fp32 = false;
  void* out = nullptr;        // [num_tokens, hidden] written
  float* side_out = nullptr;  // [num_tokens, top_k] written if side
  i64 num_tokens = 0;
  const i32* send_plan = nullptr;
  const i32* recv_plan = nullptr;
  i64 recv_plan_len = 0;
  Dtype dtype = Dtype::kBf16;
  Layout layout = Layout::kRankMajor;
  i64 capacity = kNoCapacity;
  i64 hidden = 0;
  i64 alignment = 1;
  i64 max_tokens = 0;
  u64 object = 0;            // number of the ExpertParallel among those of the window
  bool wire_is_fp8 = false;  // contributions travel as e4m3 with a float scale per kQuantizeGroup values
  u8 mode = 0;
  u64 timeout_ns = 0;
};

}  // namespace weft::cpu
