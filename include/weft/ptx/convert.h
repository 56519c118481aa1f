// Conversions between float and the narrow formats, in integer arithmetic with round to nearest even, so that host and
// device give the same bits. Any NaN becomes a quiet NaN. No branch on data, so that g++ vectorises loops over them.
//   bf16, fp16: IEEE-like, overflow to infinity.  e4m3: OCP 8-bit floating point specification 1.0, "FN": no infinities,
//   largest 448 (0x7e), NaN 0x7f; values beyond 448 saturate.
#pragma once

#include "weft/config/base.h"

namespace weft::ptx {

WEFT_HD inline u32 float_bits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  return __builtin_bit_cast(u32, value);
#endif
}

WEFT_HD inline float bits_float(u32 bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

WEFT_HD inline float bf16_to_float(u16 value) { return bits_float(static_cast<u32>(value) << 16); }

WEFT_HD inline u16 float_to_bf16(float value) {
  const u32 bits = float_bits(value);
  const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const u32 quiet = (bits >> 16) | 0x40u;
  return static_cast<u16>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

WEFT_HD inline float fp16_to_float(u16 value) {
  const u32 magnitude = static_cast<u32>(value & 0x7fffu) << 13;
  const u32 sign = static_cast<u32>(value & 0x8000u) << 16;
  // Exponent re-biased by an exact multiplication, which also normalises subnormals.
  const u32 scaled = float_bits(bits_float(magnitude) * 0x1p112f);
  const u32 special = magnitude | 0x7f800000u;  // infinity and NaN
  return bits_float((magnitude >= 0x0f800000u ? special : scaled) | sign);
}

WEFT_HD inline u16 float_to_fp16(float value) {
  const u32 bits = float_bits(value);
  const u32 sign = (bits >> 16) & 0x8000u;
  const u32 magnitude = bits & 0x7fffffffu;
  // Normal results: re-bias and round to even in integers; a carry runs into the exponent, up to infinity.
  const u32 normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results: adding 0.5 leaves value / 2^-24 in the low mantissa bits, rounded to even by the addition.
  const u32 subnormal = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
  u32 result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x47800000u ? 0x7c00u : result;                                // 65536 and above, infinity
  result = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : result;  // NaN
  return static_cast<u16>(result | sign);
}

WEFT_HD inline u8 float_to_e4m3(float value) {
  const u32 bits = float_bits(value);
  const u32 sign = (bits >> 24) & 0x80u;
  const u32 magnitude = bits & 0x7fffffffu;
  const u32 normal = (magnitude - 0x3c000000u + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  // Below 2^-6: adding 2^14 leaves value / 2^-9 in the low mantissa bits, rounded to even by the addition.
  const u32 subnormal = float_bits(bits_float(magnitude) + 0x1p14f) - 0x46800000u;
  u32 result = magnitude < 0x3c800000u ? subnormal : normal;
  result = magnitude >= 0x43e00000u ? 0x7eu : result;  // 448 and above
  result = magnitude > 0x7f800000u ? 0x7fu : result;   // NaN
  return static_cast<u8>(result | sign);
}

// Two at once, the first in the low byte. A NaN may differ in its sign from float_to_e4m3.
WEFT_HD inline u16 floats_to_e4m3(float first, float second) {
#if defined(__CUDA_ARCH__)
  u16 packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(packed) : "f"(first), "f"(second));
  return packed;
#else
  return static_cast<u16>(float_to_e4m3(first) | float_to_e4m3(second) << 8);
#endif
}

WEFT_HD inline float e4m3_to_float(u8 value) {
  // Exponent re-biased by an exact multiplication, which also normalises subnormals.
  const u32 magnitude = static_cast<u32>(value & 0x7fu) << 20;
  const u32 scaled = float_bits(bits_float(magnitude) * 0x1p120f);
  const u32 result = (value & 0x7fu) == 0x7fu ? 0x7fc00000u : scaled;
  return bits_float(result | static_cast<u32>(value & 0x80u) << 24);
}

}  // namespace weft::ptx
