#include "engine/cpu/rows.h"

#include <algorithm>
#include <cstring>

#include "engine/cpu/formats.h"
#include "weft/ptx/convert.h"
#include "weft/ptx/fp8_scale.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace weft::cpu {
namespace {

constexpr i64 kChunk = 512;  // elements summed at a time: the accumulators stay in the first-level cache

#if defined(__SSE2__)
void stream_bytes(u8* place, const u8* source, u64 num_bytes) {
  u64 offset = 0;
  for (; offset + 64 <= num_bytes; offset += 64) {
    const __m128i* from = reinterpret_cast<const __m128i*>(source + offset);
    __m128i* to = reinterpret_cast<__m128i*>(place + offset);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a), _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c), _mm_stream_si128(to + 3, d);
  }
  std::memcpy(place + offset, source + offset, num_bytes - offset);
}
#endif

inline __attribute__((always_inline)) void add_e4m3(const u8* row, const float* scales, i64 first, i64 count,
                                                    float* total) {
  for (i64 group = 0; group < count; group += kQuantizeGroup) {
    const float scale = scales[(first + group) / kQuantizeGroup];
    const i64 end = std::min<i64>(group + kQuantizeGroup, count);
    for (i64 idx = group; idx < end; ++idx) total[idx] += scale * ptx::e4m3_to_float(row[first + idx]);
  }
}

template <class Format>
inline __attribute__((always_inline)) void add_bias(const RowSum& sum, i64 first, i64 count, float* total) {
  if (sum.bias != nullptr && sum.bias_is_fp32) {
    const float* bias = static_cast<const float*>(sum.bias) + first;
    for (i64 idx = 0; idx < count; ++idx) total[idx] += bias[idx];
  } else if (sum.bias != nullptr) {
    const auto* bias = static_cast<const typename Format::Storage*>(sum.bias) + first;
    for (i64 idx = 0; idx < count; ++idx) total[idx] += Format::load(bias[idx]);
  }
}

template <class Format>
inline __attribute__((always_inline)) void sum_rows_of(const RowSum& sum, void* result) {
  using Storage = typename Format::Storage;
  alignas(64) float total[kChunk];
  for (i64 first = 0; first < sum.hidden; first += kChunk) {
    const i64 count = std::min(kChunk, sum.hidden - first);
    for (i64 idx = 0; idx < count; ++idx) total[idx] = 0.0f;
    if (sum.bias_is_first) add_bias<Format>(sum, first, count, total);
    for (i32 row = 0; row < sum.num_rows; ++row) {
      if (sum.scales != nullptr) {
        add_e4m3(static_cast<const u8*>(sum.rows[row]), sum.scales[row], first, count, total);
        continue;
      }
      const Storage* elements = static_cast<const Storage*>(sum.rows[row]) + first;
      if (sum.weights != nullptr) {
        const float weight = sum.weights[row];
        for (i64 idx = 0; idx < count; ++idx) total[idx] += weight * Format::load(elements[idx]);
      } else {
        for (i64 idx = 0; idx < count; ++idx) total[idx] += Format::load(elements[idx]);
      }
    }
    if (!sum.bias_is_first) add_bias<Format>(sum, first, count, total);
    if (sum.result_is_fp32) {
      std::copy_n(total, count, static_cast<float*>(result) + first);
      continue;
    }
    Storage* place = static_cast<Storage*>(result) + first;
    for (i64 idx = 0; idx < count; ++idx) place[idx] = Format::store(total[idx]);
  }
}

WEFT_CLONES void sum_rows_bf16(const RowSum& sum, void* result) { sum_rows_of<Bf16>(sum, result); }
WEFT_CLONES void sum_rows_fp16(const RowSum& sum, void* result) { sum_rows_of<Fp16>(sum, result); }
WEFT_CLONES void sum_rows_fp32(const RowSum& sum, void* result) { sum_rows_of<Fp32>(sum, result); }

template <class Format>
inline __attribute__((always_inline)) void add_row_of(const void* row, const float* weight, i64 hidden, float* total) {
  const auto* elements = static_cast<const typename Format::Storage*>(row);
  if (weight == nullptr) {
    for (i64 idx = 0; idx < hidden; ++idx) total[idx] += Format::load(elements[idx]);
    return;
  }
  const float factor = *weight;
  for (i64 idx = 0; idx < hidden; ++idx) total[idx] += factor * Format::load(elements[idx]);
}

template <class Format>
inline __attribute__((always_inline)) void round_row_of(const float* total, i64 hidden, void* result) {
  auto* place = static_cast<typename Format::Storage*>(result);
  for (i64 idx = 0; idx < hidden; ++idx) place[idx] = Format::store(total[idx]);
}

WEFT_CLONES void load_group(Dtype dtype, const void* row, i64 first, i64 count, float* values) {
  if (dtype == Dtype::kBf16) return load_chunk<Bf16>(row, first, count, values);
  if (dtype == Dtype::kFp16) return load_chunk<Fp16>(row, first, count, values);
  load_chunk<Fp32>(row, first, count, values);
}

// Largest magnitude as bits: for non-negative floats the order of the bits is the order of the values, and a NaN is above
// infinity, so it wins as it must.
WEFT_CLONES u32 largest_magnitude_bits(const float* values, i64 count) {
  u32 largest = 0;
  for (i64 idx = 0; idx < count; ++idx) largest = std::max(largest, ptx::float_bits(values[idx]) & 0x7fffffffu);
  return largest;
}

WEFT_CLONES void scale_to_e4m3(const float* values, i64 count, float factor, u8* data) {
  for (i64 idx = 0; idx < count; ++idx) data[idx] = ptx::float_to_e4m3(values[idx] * factor);
}

// The multiplier of one group; its scale is stored.
float store_scale(u32 amax_bits, Quantize format, void* scales, i64 group) {
  const ptx::Fp8Scale scale = ptx::fp8_scale(amax_bits, format);
  if (scales_are_floats(format)) {
    static_cast<float*>(scales)[group] = ptx::bits_float(scale.bits);
  } else {
    static_cast<u8*>(scales)[group] = static_cast<u8>(scale.bits);
  }
  return scale.factor;
}

// `scale_of(largest magnitude as bits, group)`: stores the scale, returns what values are multiplied by.
template <class ScaleOf>
void quantize_groups(Dtype dtype, const void* row, i64 hidden, u8* data, const ScaleOf& scale_of) {
  alignas(64) float values[kQuantizeGroup];
  for (i64 group = 0; group < num_scales(hidden); ++group) {
    const i64 first = group * kQuantizeGroup;
    const i64 count = std::min<i64>(kQuantizeGroup, hidden - first);
    load_group(dtype, row, first, count, values);
    scale_to_e4m3(values, count, scale_of(largest_magnitude_bits(values, count), group), data + first);
  }
}

}  // namespace

void copy_row(const void* source, u64 num_bytes, u8* const* places, i32 num_places, bool streaming) {
  const u8* bytes = static_cast<const u8*>(source);
  for (i32 idx = 0; idx < num_places; ++idx) {
#if defined(__SSE2__)
    if (streaming) {
      stream_bytes(places[idx], bytes, num_bytes);
      continue;
    }
#endif
    std::memcpy(places[idx], bytes, num_bytes);
  }
  static_cast<void>(streaming);
}

void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

void quantize_row(Dtype dtype, const void* row, i64 hidden, Quantize format, u8* data, void* scales) {
  quantize_groups(dtype, row, hidden, data,
                  [&](u32 amax_bits, i64 group) { return store_scale(amax_bits, format, scales, group); });
}

void quantize_contribution(const float* sum, i64 hidden, u8* data, float* scales) {
  quantize_groups(Dtype::kFp32, sum, hidden, data, [&](u32 amax_bits, i64 group) {
    const ptx::Fp8WireScale scale = ptx::fp8_wire_scale(amax_bits);
    scales[group] = scale.scale;
    return scale.factor;
  });
}

void sum_rows(const RowSum& sum, void* result) {
  switch (sum.dtype) {
    case Dtype::kBf16: return sum_rows_bf16(sum, result);
    case Dtype::kFp16: return sum_rows_fp16(sum, result);
    default: return sum_rows_fp32(sum, result);
  }
}

WEFT_CLONES void add_row(Dtype dtype, const void* row, const float* weight, i64 hidden, float* total) {
  if (dtype == Dtype::kBf16) return add_row_of<Bf16>(row, weight, hidden, total);
  if (dtype == Dtype::kFp16) return add_row_of<Fp16>(row, weight, hidden, total);
  add_row_of<Fp32>(row, weight, hidden, total);
}

WEFT_CLONES void round_row(Dtype dtype, const float* total, i64 hidden, void* result) {
  if (dtype == Dtype::kBf16) return round_row_of<Bf16>(total, hidden, result);
  if (dtype == Dtype::kFp16) return round_row_of<Fp16>(total, hidden, result);
  round_row_of<Fp32>(total, hidden, result);
}

}  // namespace weft::cpu
