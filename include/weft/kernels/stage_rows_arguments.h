// Run-time arguments of the kernel that brings rows into the landing before a combine: a plain struct that the host passes by value.
#pragma once

#include "weft/config/base.h"

namespace weft::kernels {

constexpr i32 kStageThreads = 512;  // with their registers one block fills an SM

struct StageKernelArgs {
  const i32* table = nullptr;  // receive plan of rank_major (layout/gpu_plan.h)
  i64 table_tokens = 0;        // that each source has room for there
  i32 max_tokens = 0;          // of any rank in this call
  i32 num_sources = 1;
  i32 rank = 0;
  const u8* rows = nullptr;  // this rank's expert output
  u8* landing = nullptr;
  i64 num_rows = 0;   // that both have room for
  i64 row_bytes = 0;  // a multiple of 16
};

}  // namespace weft::kernels
