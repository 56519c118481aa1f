// Run-time arguments of the unload kernel: plain structs that the host fills and passes by value.
#pragma once

#include "weft/config/base.h"

namespace weft::kernels {

constexpr i32 kUnloadThreads = 256;

struct UnloadKernelArgs {
  const u8* rows = nullptr;  // row 0 of the landing
  u64 row_stride = 0;
  const u8* scales = nullptr;
  u64 scale_stride = 0;
  const float* weights = nullptr;  // [num_sources * max_tokens, top_k]; rank_major: not used
  const i32* table = nullptr;  // receive plan (layout/gpu_plan.h); null: row n of the landing is row n of the result
  i64 max_tokens = 0;
  i32 num_sources = 1;
  i32 top_k = 1;
  i64 num_rows = 0;  // of the result
  // The result.
  u8* x = nullptr;
  u8* x_scales = nullptr;
  float* x_weights = nullptr;  // [num_rows], or null
  i64 row_bytes = 0;
  i64 scale_row_bytes = 0;
};

}  // namespace weft::kernels
