// Run-time arguments of the kernel for the gradients of a weighted combine: a plain struct that the host passes by value.
#pragma once

#include "weft/config/base.h"
#include "weft/config/operation.h"

namespace weft::kernels {

constexpr i32 kGradientThreads = 256;
constexpr i32 kGradientBlocksPerSm = 4;

// Rows have `hidden` elements, and begin and end at multiples of 16 bytes.
struct GradientKernelArgs {
  const u8* rows = nullptr;        // [num_rows, hidden], gradient of the token of each row
  const u8* y = nullptr;           // [num_rows, hidden], the expert output; null: weights need no gradient
  const float* weights = nullptr;  // [num_rows]
  u8* out = nullptr;               // [num_rows, hidden], may be `rows`
  float* grad_weights = nullptr;   // [num_rows]; not written without y
  i64 num_rows = 0;
  i32 hidden = 0;
  Dtype dtype = Dtype::kBf16;
};

}  // namespace weft::kernels
