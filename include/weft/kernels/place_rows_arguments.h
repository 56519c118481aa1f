// Run-time arguments of the kernel that places rows behind a dispatch by expert: a plain struct that the host passes by value.
#pragma once

#include "weft/config/base.h"

namespace weft::kernels {

constexpr i32 kPlaceThreads = 512;  // with their registers one block fills an SM

// Of tokens 0 to kStraightOf - 1 of each kStraightOf, so many have their own rows stored straight to all places.
constexpr i32 kStraightOf = 16;

struct PlaceKernelArgs {
  const u64* broken = nullptr;  // a word of the window: not 0 if the dispatch has failed; then nothing is done
  const i32* table = nullptr;   // receive plan (layout/gpu_plan.h)
  i64 table_tokens = 0;         // that each source has room for there
  i32 max_tokens = 0;           // of any rank in this call
  i32 num_sources = 1;
  i32 top_k = 1;
  i32 rank = 0;
  i32 num_straight = 0;  // of kStraightOf: see above
  i64 num_rows = 0;      // of the result
  u8* x = nullptr;       // the result: a row lies at the place of the token's first pick here
  u8* scales = nullptr;
  i64 row_bytes = 0;  // a multiple of 16
  i64 scale_row_bytes = 0;
  const float* landed_weights = nullptr;  // [num_sources, table_tokens, top_k]
  float* weights = nullptr;               // [num_rows], or null: they are there from an earlier dispatch
  // Groups of the result, and what lies between them.
  const i32* counts = nullptr;   // [num_groups]
  const i32* offsets = nullptr;  // [num_groups + 1]
  i32 num_groups = 1;
  bool is_masked = false;
  i64 capacity = -1;        // -1: none
  bool zeroes_rows = true;  // of holes; their weights always
};

}  // namespace weft::kernels
