#include "engine/cpu/gradients.h"

#include <algorithm>

#include "engine/cpu/formats.h"

namespace weft::cpu {
namespace {

// The order of the sum is that of a warp: 32 lanes, each with one vector of 16 bytes in turn.
constexpr i64 kLanes = 32;

template <class Format>
inline __attribute__((always_inline)) float row_gradients(const typename Format::Storage* row,
                                                          const typename Format::Storage* y, float weight, i64 hidden,
                                                          typename Format::Storage* out) {
  constexpr i64 kVector = 16 / static_cast<i64>(sizeof(typename Format::Storage));
  constexpr i64 kTurn = kLanes * kVector;
  alignas(64) float values[kTurn], products[kTurn];
  alignas(64) float sums[kLanes] = {};
  for (i64 first = 0; first < hidden; first += kTurn) {
    const i64 count = std::min(kTurn, hidden - first);
    load_chunk<Format>(row, first, count, values);
    for (i64 idx = 0; idx < count; ++idx) out[first + idx] = Format::store(weight * values[idx]);
    if (y == nullptr) continue;
    load_chunk<Format>(y, first, count, products);
    for (i64 idx = 0; idx < count; ++idx) products[idx] *= values[idx];
    std::fill(products + count, products + kTurn, 0.0f);  // adds nothing: a sum that began at +0 is never -0
    for (i64 at = 0; at < kVector; ++at) {
      for (i64 lane = 0; lane < kLanes; ++lane) sums[lane] += products[lane * kVector + at];
    }
  }
  for (i64 step = kLanes / 2; step > 0; step /= 2) {
    for (i64 lane = 0; lane < step; ++lane) sums[lane] += sums[lane + step];
  }
  return sums[0];
}

template <class Format>
inline __attribute__((always_inline)) void all_gradients(const GradientArgs& args) {
  using Storage = typename Format::Storage;
  for (i64 row = 0; row < args.num_rows; ++row) {
    const i64 first = row * args.hidden;
    const Storage* y = args.y == 0 ? nullptr : memory_at<Storage>(args.y) + first;
    const float sum =
        row_gradients<Format>(memory_at<Storage>(args.rows) + first, y, memory_at<float>(args.weights)[row],
                              args.hidden, memory_at<Storage>(args.out) + first);
    if (y != nullptr) memory_at<float>(args.grad_weights)[row] = sum;
  }
}

WEFT_CLONES void gradients_bf16(const GradientArgs& args) { all_gradients<Bf16>(args); }
WEFT_CLONES void gradients_fp16(const GradientArgs& args) { all_gradients<Fp16>(args); }
WEFT_CLONES void gradients_fp32(const GradientArgs& args) { all_gradients<Fp32>(args); }

}  // namespace

void gradients(const GradientArgs& args) {
  switch (args.dtype) {
    case Dtype::kBf16: return gradients_bf16(args);
    case Dtype::kFp16: return gradients_fp16(args);
    default: return gradients_fp32(args);
  }
}

}  // namespace weft::cpu
