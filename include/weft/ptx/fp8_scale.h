// The scale of a group of values that become e4m3. One text for every engine, since its bits are part of the contract:
//   a = max(largest magnitude, 1e-4), scale = a / 448, q = e4m3(x * (448 / a)); UE8M0: scale = 2^ceil(log2(a / 448)) from the
//   exponent bits, q = e4m3(x * 2^-e); powers of two are that scale as fp32. A NaN in a group makes its scale and all its
//   values NaN. Combine: fp8_wire_scale.
#pragma once

#include "weft/config/base.h"
#include "weft/config/operation.h"
#include "weft/ptx/convert.h"

namespace weft::ptx {

struct Fp8Scale {
  float factor = 1.0f;  // what values are multiplied by
  u32 bits = 0;         // of the fp32 scale, or the UE8M0 byte
};

WEFT_HD constexpr i32 fp8_scale_bytes(Quantize format) { return scales_are_floats(format) ? 4 : 1; }

constexpr float kLargestE4m3 = 448.0f;
constexpr u32 kNanBits = 0x7fc00000u;

// a. `amax_bits`: bits of the largest magnitude; for non-negative floats the order of the bits is that of the values, and
// a NaN is above infinity.
WEFT_HD inline float fp8_amax(u32 amax_bits) {
  const float largest = bits_float(amax_bits);
  return amax_bits > 0x7f800000u ? bits_float(kNanBits) : largest < 1e-4f ? 1e-4f : largest;
}

WEFT_HD inline Fp8Scale fp8_scale(u32 amax_bits, Quantize format) {
  constexpr u32 kE8m0Nan = 255;
  const bool is_nan = amax_bits > 0x7f800000u;
  const float amax = fp8_amax(amax_bits);
  const float scale = amax / kLargestE4m3;
  if (format == Quantize::kFp8) return {kLargestE4m3 / amax, float_bits(scale)};
  // 2^ceil(log2(scale)) from the bits; amax >= 1e-4 keeps the scale a normal number.
  const u32 bits = float_bits(scale);
  const u32 biased = is_nan ? kE8m0Nan : (bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1u : 0u);
  const float factor = biased >= kE8m0Nan ? bits_float(kNanBits) : bits_float((254u - biased) << 23);
  if (format == Quantize::kFp8Ue8m0) return {factor, biased};
  return {factor, biased >= kE8m0Nan ? kNanBits : biased << 23};
}

// Of what a rank contributes in combine, on the wire: scale = 2^ceil(log2(a / 448)), but 2^119 at most. So the product of a code
// and the scale is exact and finite, and may be added in the same instruction. An infinity in a group counts as a NaN.
struct Fp8WireScale {
  float factor, scale;
};

WEFT_HD inline Fp8WireScale fp8_wire_scale(u32 amax_bits) {
  constexpr u32 kMostBiased = 119 + 127;
  const u32 bits = float_bits(fp8_amax(amax_bits));
  if (bits >= 0x7f800000u) return {bits_float(kNanBits), bits_float(kNanBits)};
  const u32 ceiled = ((bits + 0x1fffffu) >> 23) - 8;  // 448 = 1.75 * 2^8: a larger mantissa carries into the exponent
  const u32 biased = ceiled < kMostBiased ? ceiled : kMostBiased;
  return {bits_float((254u - biased) << 23), bits_float(biased << 23)};
}

}  // namespace weft::ptx
