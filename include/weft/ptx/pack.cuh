// Conversions between float and pairs of narrow numbers, one instruction each: the bits of ptx/convert.h but for those of a
// NaN. Round to nearest even, subnormals kept. Device only, sm_90 and later; PTX ISA 7.8, "cvt".
#pragma once

#include "weft/config/base.h"

namespace weft::ptx {

__device__ inline u32 pack_bf16x2(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ inline u32 pack_fp16x2(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Exact.
__device__ inline u32 e4m3x2_to_fp16x2(u16 packed) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(packed));
  return halves;
}

__device__ inline float unpack_fp16(u16 value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
  return wide;
}

__device__ inline u32 multiply_bf16x2(u32 left, u32 right) {
  u32 product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(left), "r"(right));
  return product;
}

// sum + left * right, where the product is exact: the bits of two instructions in one.
__device__ inline float add_exact_product(float sum, float left, float right) {
  float total;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(total) : "f"(left), "f"(right), "f"(sum));
  return total;
}

__device__ inline float magnitude(float value) {
  float positive;
  asm("abs.f32 %0, %1;" : "=f"(positive) : "f"(value));
  return positive;
}

// NaN if one of them is.
__device__ inline float max_nan(float left, float right) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(left), "f"(right));
  return larger;
}

// Larger magnitudes, NaN if one of the two is; their signs mean nothing.
__device__ inline u32 max_magnitude_bf16x2(u32 left, u32 right) {
  u32 larger;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(left), "r"(right));
  return larger;
}

__device__ inline u32 max_magnitude_fp16x2(u32 left, u32 right) {
  u32 larger;
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(left), "r"(right));
  return larger;
}

}  // namespace weft::ptx
