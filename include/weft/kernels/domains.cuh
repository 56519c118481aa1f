// Sums of domains: what an owner does between the contributions of a domain and its total (config/order.h).
#pragma once

#include "weft/kernels/numbers.cuh"
#include "weft/ptx/fp8_scale.h"

namespace weft::kernels {

template <Order kOrder, Dtype kDtype>
struct Domains {
  using Row = Numbers<kDtype>;
  static constexpr i32 kVector = Row::kVector;

  // Of the ranks in `left`, which has one, those in the domain of the first.
  __device__ static u32 first_of(u32 left) {
    const i32 first = kOrder.domain_of(__ffs(static_cast<i32>(left)) - 1) * kOrder.sum_domain;
    return left & ((1u << kOrder.sum_domain) - 1u) << first;
  }

  // Adds a vector of a domain's sum as it would travel. By all lanes of a warp: their vectors stand side by side, and the first
  // lane's begins a group of FP8. A lane behind the end of the row has zeros, or a vector of the row's last group.
  __device__ static void add(const float (&sum)[kVector], float (&total)[kVector]) {
    float values[kVector];
    if constexpr (kOrder.sum_is_fp8) {
      const ptx::Fp8WireScale wire = scale_of(sum);
#pragma unroll
      for (i32 at = 0; at < kVector; ++at) values[at] = sum[at] * wire.factor;
      Codes::unpack(Codes::pack(values), values);
#pragma unroll
      for (i32 at = 0; at < kVector; ++at) total[at] = ptx::add_exact_product(total[at], values[at], wire.scale);
    } else {
      Row::unpack(Row::pack(sum), values);
#pragma unroll
      for (i32 at = 0; at < kVector; ++at) total[at] += values[at];
    }
  }

  // The same vector where it travels: to `codes`, from the row's first, and to the scales of its chunk.
  __device__ static void store(const float (&sum)[kVector], u8* codes, i32 element, float* scales, bool has_it) {
    const ptx::Fp8WireScale wire = scale_of(sum);
    float values[kVector];
#pragma unroll
    for (i32 at = 0; at < kVector; ++at) values[at] = sum[at] * wire.factor;
    if (!has_it) return;
    Codes::store(codes, element, values);
    if (element % kQuantizeGroup == 0) scales[element / kQuantizeGroup] = wire.scale;
  }

 private:
  using Codes = Fp8Numbers<kVector>;

  // Of the group that the lane's vector is of, by all lanes.
  __device__ static ptx::Fp8WireScale scale_of(const float (&sum)[kVector]) {
    constexpr i32 kLanes = kQuantizeGroup / kVector;  // that share a group
    float largest = Row::magnitude(sum);
#pragma unroll
    for (i32 step = 1; step < kLanes; step *= 2) {
      largest = ptx::max_nan(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    }
    return ptx::fp8_wire_scale(ptx::float_bits(largest));
  }
};

}  // namespace weft::kernels
