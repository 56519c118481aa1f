// Elements of a row as floats and back, for loops that the compiler vectorises. Included by .cc files alone.
#pragma once

#include "weft/config/base.h"
#include "weft/ptx/convert.h"

// One binary for every x86-64, faster where AVX2 is there; no fused multiply-add in either (-ffp-contract=off).
// Sanitisers run before the resolver of a clone could, so their builds have one version.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define WEFT_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define WEFT_CLONES
#endif

namespace weft::cpu {

struct Bf16 {
  using Storage = u16;
  static float load(u16 value) { return ptx::bf16_to_float(value); }
  static u16 store(float value) { return ptx::float_to_bf16(value); }
};
struct Fp16 {
  using Storage = u16;
  static float load(u16 value) { return ptx::fp16_to_float(value); }
  static u16 store(float value) { return ptx::float_to_fp16(value); }
};
struct Fp32 {
  using Storage = float;
  static float load(float value) { return value; }
  static float store(float value) { return value; }
};

template <class Format>
inline __attribute__((always_inline)) void load_chunk(const void* row, i64 first, i64 count, float* values) {
  const auto* elements = static_cast<const typename Format::Storage*>(row) + first;
  for (i64 idx = 0; idx < count; ++idx) values[idx] = Format::load(elements[idx]);
}

}  // namespace weft::cpu
