// What is done to the bytes of one row: copy it to several places, quantise it, sum several into one.
#pragma once

#include "weft/config/base.h"
#include "weft/config/operation.h"

namespace weft::cpu {

// Stores one row to `num_places` places. `streaming`: past the caches; then finish_streaming() comes before the signal.
void copy_row(const void* source, u64 num_bytes, u8* const* places, i32 num_places, bool streaming);

// Orders streaming stores before whatever this thread stores next.
void finish_streaming();

// Groups of kQuantizeGroup elements, the last may be shorter (DESIGN of the bits: docs/semantics.md).
//   row [hidden] bf16, fp16 or fp32; data [hidden] e4m3; scales: float or biased exponent byte per group
void quantize_row(Dtype dtype, const void* row, i64 hidden, Quantize format, u8* data, void* scales);
// What a rank adds to a token, as it travels with FP8 on the wire (ptx::fp8_wire_scale).
void quantize_contribution(const float* sum, i64 hidden, u8* data, float* scales);

WEFT_HD constexpr i64 num_scales(i64 hidden) { return (hidden + kQuantizeGroup - 1) / kQuantizeGroup; }
WEFT_HD constexpr i64 scale_bytes(i64 hidden, Quantize format) {
  return num_scales(hidden) * (scales_are_floats(format) ? 4 : 1);
}

// sum = 0; sum += [weights[r] *] rows[r] in order; sum += bias (or before the rows); all in float, each product and sum rounded; one rounding
// to `dtype` at the end. rows [num_rows] of [hidden] in `dtype`, with `scales` in e4m3.
struct RowSum {
  const void* const* rows = nullptr;
  const float* weights = nullptr;        // null: plain sum
  const float* const* scales = nullptr;  // [num_rows] of [num_scales(hidden)]: a value is scale * e4m3. No weights then
  bool result_is_fp32 = false;           // else in `dtype`
  i32 num_rows = 0;
  const void* bias = nullptr;  // [hidden] or null
  bool bias_is_fp32 = false;   // else in `dtype`
  bool bias_is_first = false;
  i64 hidden = 0;
  Dtype dtype = Dtype::kFp32;
};
void sum_rows(const RowSum& sum, void* result);

// The same in steps, for a row that is added when it comes: total [hidden] += [weight *] row; then rounded to `dtype`.
void add_row(Dtype dtype, const void* row, const float* weight, i64 hidden, float* total);
void round_row(Dtype dtype, const float* total, i64 hidden, void* result);

}  // namespace weft::cpu
