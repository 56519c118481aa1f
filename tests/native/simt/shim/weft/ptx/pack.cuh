// include/weft/ptx/pack.cuh without its instructions, for simulated blocks.
#pragma once

#include <cmath>
#include <cstdlib>

#include "weft/config/base.h"
#include "weft/ptx/convert.h"

namespace weft::ptx {

inline u32 pack_bf16x2(float low, float high) {
  return float_to_bf16(low) | static_cast<u32>(float_to_bf16(high)) << 16;
}
inline u32 pack_fp16x2(float low, float high) {
  return float_to_fp16(low) | static_cast<u32>(float_to_fp16(high)) << 16;
}
inline u32 e4m3x2_to_fp16x2(u16 packed) {
  return pack_fp16x2(e4m3_to_float(static_cast<u8>(packed)), e4m3_to_float(static_cast<u8>(packed >> 8)));
}
inline float unpack_fp16(u16 value) { return fp16_to_float(value); }
inline float magnitude(float value) { return std::fabs(value); }
inline float max_nan(float left, float right) {
  return std::isnan(left) || std::isnan(right) ? std::nanf("") : left > right ? left : right;
}
inline u32 max_nan_bf16x2(u32, u32) { std::abort(); }
inline u32 max_nan_fp16x2(u32, u32) { std::abort(); }

}  // namespace weft::ptx
