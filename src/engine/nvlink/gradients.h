// Gradients of a weighted combine at this rank's rows: nothing is sent.
#pragma once

#include <string>

#include "weft/config/base.h"
#include "weft/config/operation.h"

namespace weft::nvlink {

// Device addresses. Rows are multiples of 16 bytes, at multiples of 16.
struct GradientArgs {
  u64 stream = 0;
  Dtype dtype = Dtype::kBf16;
  i64 hidden = 0;
  i64 num_rows = 0;
  u64 rows = 0;          // [num_rows, hidden], gradient of the token of each row
  u64 y = 0;             // [num_rows, hidden], or 0: weights need no gradient
  u64 weights = 0;       // float [num_rows]
  u64 out = 0;           // [num_rows, hidden], may be `rows`
  u64 grad_weights = 0;  // float [num_rows]; not written without y
};

std::string render_gradients();  // the source of its kernel

}  // namespace weft::nvlink
