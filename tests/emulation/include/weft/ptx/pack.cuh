// Stands in for include/weft/ptx/pack.cuh, on the integer arithmetic of ptx/convert.h.
#pragma once

#include "weft/ptx/convert.h"

namespace weft::ptx {

inline u32 pack_bf16x2(float low, float high) {
  return float_to_bf16(low) | static_cast<u32>(float_to_bf16(high)) << 16;
}
inline u32 pack_fp16x2(float low, float high) {
  return float_to_fp16(low) | static_cast<u32>(float_to_fp16(high)) << 16;
}
inline u32 e4m3x2_to_fp16x2(u16 packed) {
  return pack_fp16x2(e4m3_to_float(static_cast<u8>(packed & 0xff)), e4m3_to_float(static_cast<u8>(packed >> 8)));
}
inline float unpack_fp16(u16 value) { return fp16_to_float(value); }
inline u32 multiply_bf16x2(u32 left, u32 right) {
  const auto product = [&](u32 shift) {
    return bf16_to_float(static_cast<u16>(left >> shift)) * bf16_to_float(static_cast<u16>(right >> shift));
  };
  return pack_bf16x2(product(0), product(16));
}
inline float add_exact_product(float sum, float left, float right) { return std::fma(left, right, sum); }
inline float magnitude(float value) { return std::fabs(value); }

// PTX: +0 is larger than -0.
inline float max_nan(float left, float right) {
  if (std::isnan(left) || std::isnan(right)) return bits_float(0x7fffffffu);
  if (left == right) return std::signbit(left) ? right : left;
  return left > right ? left : right;
}

// With the sign that PTX says, which nobody may rely on.
inline u32 max_magnitude_bf16x2(u32 left, u32 right) {
  const auto larger = [&](u32 shift) {
    return max_nan(bf16_to_float(static_cast<u16>(left >> shift & 0x7fffu)),
                   bf16_to_float(static_cast<u16>(right >> shift & 0x7fffu)));
  };
  return pack_bf16x2(larger(0), larger(16)) ^ ((left ^ right) & 0x80008000u);
}
inline u32 max_magnitude_fp16x2(u32 left, u32 right) {
  const auto larger = [&](u32 shift) {
    return max_nan(fp16_to_float(static_cast<u16>(left >> shift & 0x7fffu)),
                   fp16_to_float(static_cast<u16>(right >> shift & 0x7fffu)));
  };
  return pack_fp16x2(larger(0), larger(16)) ^ ((left ^ right) & 0x80008000u);
}

}  // namespace weft::ptx
