// Gradients of a weighted combine at this rank's rows, behind the dispatch that has brought the gradient of each row's token.
#pragma once

#include "weft/config/base.h"
#include "weft/config/operation.h"

namespace weft::cpu {

struct GradientArgs {
  Dtype dtype = Dtype::kFp32;  // of rows, y and out
  i64 hidden = 0;
  i64 num_rows = 0;
  const void* rows = nullptr;      // [num_rows, hidden], gradient of the token of each row
  const void* y = nullptr;         // [num_rows, hidden], or null: weights need no gradient
  const float* weights = nullptr;  // [num_rows]
  void* out = nullptr;             // [num_rows, hidden], may be `rows`
  float* grad_weights = nullptr;   // [num_rows]; not written without y
};

// out = weight * row, rounded once; grad_weights: the dot product of row and y, added as on GPUs (kernels/gradients.cuh).
void gradients(const GradientArgs& args);

}  // namespace weft::cpu
