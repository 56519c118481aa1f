// Run-time arguments of the kernels: plain structs that the host fills and passes by value.
#pragma once

#include "weft/layout/payload.h"
#include "weft/transport/host_words.h"

namespace weft::kernels {

constexpr i32 kDispatchThreads = 256;
constexpr i32 kSumThreads = 256;
constexpr i32 kCombineThreads = kSumThreads + 32;  // and one warp that loads

struct DispatchKernelArgs {
  transport::WindowView view;
  const u8* x = nullptr;
  const u8* scales = nullptr;
  const void* topk_idx = nullptr;
  const float* topk_weights = nullptr;  // null: 1
  i32 num_tokens = 0;
  Placement placement;  // of this rank's result: x, scales, ids (meta_idx), weights (meta_weights), room in rows
  // Written for this rank.
  i32* slot = nullptr;           // [T, R] send plan
  i32* row_start = nullptr;      // [R] send plan
  i32* num_rows_to = nullptr;    // [R] send plan
  i32* source_offset = nullptr;  // [R + 1] receive plan
  i32* counts = nullptr;         // [L]
  i32* offsets = nullptr;        // [R + 1]
  i32* num_rows = nullptr;
  u32* num_ended = nullptr;
};

struct CombineKernelArgs {
  transport::WindowView view;
  u64 rows_offset = 0;  // heap offset of row 0 of this rank's expert output
  i64 num_rows = 0;
  const i32* slot = nullptr;       // [T, R] send plan
  const i32* row_start = nullptr;  // [R] send plan
  i32 num_tokens = 0;
  const u8* bias = nullptr;  // in the dtype of the rows or float, or null
  i64 bias_row_bytes = 0;    // 0: one row for all tokens
  bool bias_is_fp32 = false;
  u8* out = nullptr;  // [T, hidden]
  u32* num_ended = nullptr;
};

}  // namespace weft::kernels
