// Run-time arguments of combine for small batches: a plain struct that the host fills and passes by value.
#pragma once

#include "weft/config/base.h"
#include "weft/layout/small_split.h"
#include "weft/transport/view.h"

namespace weft::kernels {

struct SmallCombineKernelArgs {
  transport::WindowView view;
  u16 print = 0;       // fingerprint of the operation
  u32 object = 0;      // number of the ExpertParallel that calls
  i32 num_tokens = 0;  // of this rank
  i32 max_tokens = 0;  // of any rank in this call; at most the small_tokens of the window
  SmallSplit split;
  const u8* rows = nullptr;  // this rank's expert output
  i64 num_rows = 0;
  const float* weights = nullptr;  // by expert: [num_rows], or null: 1
  const float* side = nullptr;     // rank_major [num_rows, K], else [num_rows]
  const i32* send_plan = nullptr;  // of num_tokens tokens
  const i32* recv_plan = nullptr;
  i64 recv_plan_tokens = 0;  // most tokens of a source that the plan has room for
  const u8* bias = nullptr;  // in the dtype of the rows or float, or null
  i64 bias_row_bytes = 0;    // 0: one row for all tokens
  bool bias_is_fp32 = false;
  u8* out = nullptr;                     // [num_tokens, hidden]
  float* side_out = nullptr;             // [num_tokens, K]
  const float* owner_weights = nullptr;  // by pick: [num_tokens, K], or null: 1
  // Beside owner_weights, or null: a pick whose word, the upper one of an id of two, is below 0 is absent.
  const i32* owner_ids = nullptr;
  i32 owner_id_words = 1;
  const void* rail = nullptr;         // with nodes: a BlockRail or GinRail
  const i32* forward_plan = nullptr;  // with nodes: GpuForwardPlan
};

}  // namespace weft::kernels
