// Rows as numbers: vectors of elements from shared memory to float and back, in the row's type or as scaled FP8.
// Products are rounded before they are added (the kernels are compiled without fused multiply-add).
#pragma once

#include "weft/config/kernel.h"
#include "weft/ptx/convert.h"
#include "weft/ptx/pack.cuh"

namespace weft::kernels {

struct alignas(16) Packed {
  u32 word[4];
};

template <Dtype kDtype>
struct Numbers {
  static constexpr i32 kBytes = dtype_bytes(kDtype);
  static constexpr i32 kVector = 16 / kBytes;  // elements of a 16-byte access

  __device__ static void unpack(const Packed& packed, float (&values)[kVector]) {
#pragma unroll
    for (i32 word = 0; word < 4; ++word) {
      if constexpr (kDtype == Dtype::kFp32) {
        values[word] = ptx::bits_float(packed.word[word]);
      } else if constexpr (kDtype == Dtype::kBf16) {
        values[2 * word] = ptx::bits_float(packed.word[word] << 16);
        values[2 * word + 1] = ptx::bits_float(packed.word[word] & 0xffff0000u);
      } else {
        values[2 * word] = ptx::unpack_fp16(static_cast<u16>(packed.word[word]));
        values[2 * word + 1] = ptx::unpack_fp16(static_cast<u16>(packed.word[word] >> 16));
      }
    }
  }

  // What unpack_scaled multiplies by, a power of two, in a word.
  __device__ static u32 factor_word(float factor) {
    return kDtype == Dtype::kBf16 ? ptx::pack_bf16x2(factor, factor) : ptx::float_bits(factor);
  }

  // Each times the factor; bf16: two at a time, exact but for numbers far below the least e4m3.
  __device__ static void unpack_scaled(const Packed& packed, u32 factor, float (&values)[kVector]) {
    if constexpr (kDtype == Dtype::kBf16) {
      Packed scaled;
#pragma unroll
      for (i32 word = 0; word < 4; ++word) scaled.word[word] = ptx::multiply_bf16x2(packed.word[word], factor);
      unpack(scaled, values);
    } else {
      unpack(packed, values);
#pragma unroll
      for (i32 at = 0; at < kVector; ++at) values[at] *= ptx::bits_float(factor);
    }
  }

  __device__ static Packed pack(const float* values) {
    Packed packed;
#pragma unroll
    for (i32 word = 0; word < 4; ++word) {
      if constexpr (kDtype == Dtype::kFp32) {
        packed.word[word] = ptx::float_bits(values[word]);
      } else if constexpr (kDtype == Dtype::kBf16) {
        packed.word[word] = ptx::pack_bf16x2(values[2 * word], values[2 * word + 1]);
      } else {
        packed.word[word] = ptx::pack_fp16x2(values[2 * word], values[2 * word + 1]);
      }
    }
    return packed;
  }

  // The largest; NaN if there is one.
  __device__ static float magnitude(const float (&values)[kVector]) {
    float largest = 0.0f;
#pragma unroll
    for (i32 at = 0; at < kVector; ++at) largest = ptx::max_nan(largest, ptx::magnitude(values[at]));
    return largest;
  }

  // Words of elements, in the row's type and exact. Of two the larger magnitudes; their signs mean nothing.
  __device__ static u32 larger(u32 left, u32 right) {
    if constexpr (kDtype == Dtype::kBf16) return ptx::max_magnitude_bf16x2(left, right);
    if constexpr (kDtype == Dtype::kFp16) return ptx::max_magnitude_fp16x2(left, right);
    return ptx::float_bits(ptx::max_nan(ptx::magnitude(ptx::bits_float(left)), ptx::magnitude(ptx::bits_float(right))));
  }
  __device__ static u32 larger_of(const Packed& packed) {
    return larger(larger(packed.word[0], packed.word[1]), larger(packed.word[2], packed.word[3]));
  }
  // Of an element of a word, the bits of its magnitude as a float.
  __device__ static u32 magnitude_bits(u32 word, i32 which) {
    if constexpr (kDtype == Dtype::kFp32) return word & 0x7fffffffu;
    const u32 bits = (which != 0 ? word >> 16 : word) & 0x7fffu;
    return kDtype == Dtype::kBf16 ? bits << 16 : ptx::float_bits(ptx::unpack_fp16(static_cast<u16>(bits)));
  }

  __device__ static Packed load(const u8* row, i32 element) {
    return *reinterpret_cast<const Packed*>(row + element * kBytes);
  }
};

// As many e4m3 numbers as a vector of kDtype has, in the low words.
template <i32 kCount>
struct Fp8Numbers {
  static_assert(kCount % 4 == 0);
  struct alignas(kCount) Codes {
    u32 word[kCount / 4];
  };

  __device__ static Codes load(const u8* row, i32 element) { return *reinterpret_cast<const Codes*>(row + element); }

  __device__ static void unpack(const Codes& codes, float (&values)[kCount]) {
#pragma unroll
    for (i32 pair = 0; pair < kCount / 2; ++pair) {
      const u32 halves = ptx::e4m3x2_to_fp16x2(static_cast<u16>(codes.word[pair / 2] >> (pair % 2 * 16)));
      values[2 * pair] = ptx::unpack_fp16(static_cast<u16>(halves));
      values[2 * pair + 1] = ptx::unpack_fp16(static_cast<u16>(halves >> 16));
    }
  }

  __device__ static Codes pack(const float* values) {
    Codes codes;
#pragma unroll
    for (i32 word = 0; word < kCount / 4; ++word) {
      codes.word[word] = ptx::floats_to_e4m3(values[4 * word], values[4 * word + 1]) |
                         static_cast<u32>(ptx::floats_to_e4m3(values[4 * word + 2], values[4 * word + 3])) << 16;
    }
    return codes;
  }

  __device__ static void store(u8* row, i32 element, const float* values) {
    *reinterpret_cast<Codes*>(row + element) = pack(values);
  }
};

}  // namespace weft::kernels
