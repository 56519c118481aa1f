// Run-time arguments of the kernels: plain structs that the host fills and passes by value.
#pragma once

#include "weft/layout/gpu_plan.h"
#include "weft/layout/gpu_window.h"
#include "weft/transport/host_words.h"

namespace weft::kernels {

constexpr i32 kSumThreads = 256;
constexpr i32 kCombineThreads = kSumThreads + 32;  // and one warp that loads

struct DispatchKernelArgs {
  transport::WindowView view;
  u16 print = 0;             // fingerprint of the operation
  bool fits_landing = true;  // a row and its scales fit a row of the landing
  u64 ticket = 0;            // more than 0: the host waits for the number of rows under this name
  const u8* x = nullptr;
  const u8* scales = nullptr;
  const void* topk_idx = nullptr;
  const float* topk_weights = nullptr;  // null: 1
  i32 num_tokens = 0;
  i32 chunk_tokens = 1;  // expert_major, masked: tokens that a block takes at a time
  i32 alignment = 1;
  i64 capacity = kNoCapacity;
  GpuPlacement placement;  // of this rank's result
  i32* send_plan = nullptr;
  i32* recv_plan = nullptr;  // where the placement or the landing has it; read if cached
  // Written for this rank.
  i32* counts = nullptr;   // [L]
  i32* offsets = nullptr;  // [R + 1] or [L + 1]
  i32* num_rows = nullptr;
  i64* overflow = nullptr;  // added to
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
