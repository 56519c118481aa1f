// Dispatch with quantisation: rows are rewritten in their stages between load and store (docs/protocols/nvlink-dispatch.md,
// step 4). num_quantize_warps warps, a row each.
#pragma once

#include "weft/kernels/dispatch/block.cuh"
#include "weft/ptx/fp8_scale.h"

namespace weft::kernels {

template <DispatchKernelConfig kConfig>
class DispatchQuantize : public DispatchState<kConfig> {
 public:
  using Base = DispatchState<kConfig>;
  using Base::s, Base::lane;

  __device__ explicit DispatchQuantize(const Base& base) : Base(base) {}

  __device__ void run(i32 quantizer) {
    for (i32 n = quantizer;; n += kConfig.num_quantize_warps) {
      const i32 idx = n % kConfig.num_stages;
      const u32 parity = (n / kConfig.num_stages) & 1;
      const bool is_loaded =
          kConfig.has_nodes() ? this->wait_long(&s.full[idx], parity) : this->wait_local(&s.full[idx], parity);
      if (__all_sync(0xffffffffu, is_loaded ? 1 : 0) == 0) return;
      const bool has_ended = kConfig.has_nodes() ? s.token[idx] == kEndOfItems : s.token[idx] < 0;
      const bool is_as_given =
          kConfig.has_nodes() ? s.token[idx] >= 0 : !has_ended;  // it comes from another node as FP8
      if (is_as_given) quantize_row(this->stage(idx));
      ptx::fence_proxy_async_shared();  // bulk stores read what was written here
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&s.ready[idx]);
      if (has_ended) return;
    }
  }

 private:
  static constexpr i32 kElements = 8;           // of a lane at a time
  static constexpr i32 kStep = 32 * kElements;  // of the warp
  static constexpr i32 kSteps = 4;
  static constexpr i32 kGroupLanes = kQuantizeGroup / kElements;

  // Reads run ahead of writes: a step reads bytes [i * kStep * width, ...) and writes [i * kStep, ...). Several steps at a
  // time, since each is a chain of dependent instructions. Divisions, the longest of them, are made for all steps at once: each
  // lane has the scale of a group of one step.
  __device__ void quantize_row(u8* stage) {
    constexpr i32 kBytes = dtype_bytes(kConfig.dtype);
    static_assert(kSteps <= kGroupLanes);
    const i32 own_step = lane % kSteps, group = lane / kGroupLanes;
#pragma unroll 1
    for (i32 first = 0; first < kConfig.hidden; first += kSteps * kStep) {
      float values[kSteps][kElements];
#pragma unroll
      for (i32 step = 0; step < kSteps; ++step) {
        const i32 column = first + step * kStep + lane * kElements;
#pragma unroll
        for (i32 idx = 0; idx < kElements; ++idx) values[step][idx] = 0.0f;
        if (column < kConfig.hidden) load_floats<kConfig.dtype>(stage + column * kBytes, values[step]);
      }
      __syncwarp();
      u32 own_largest = 0;
#pragma unroll
      for (i32 step = 0; step < kSteps; ++step) {
        const u32 largest = largest_of_group(values[step]);
        own_largest = own_step == step ? largest : own_largest;
      }
      const ptx::Fp8Scale scale = ptx::fp8_scale(own_largest, kConfig.quantize);
      const i32 own_column = first + own_step * kStep + group * kQuantizeGroup;
      if (lane % kGroupLanes < kSteps && own_column < kConfig.hidden) store_scale(stage, own_column, scale.bits);
      const u32 own_factor = ptx::float_bits(scale.factor);
#pragma unroll
      for (i32 step = 0; step < kSteps; ++step) {
        const float factor = ptx::bits_float(__shfl_sync(0xffffffffu, own_factor, group * kGroupLanes + step));
        const i32 column = first + step * kStep + lane * kElements;
        if (column < kConfig.hidden) store_codes(stage + column, values[step], factor);
      }
    }
  }

  // Bits of the largest magnitude.
  __device__ static u32 largest_of_group(const float (&values)[kElements]) {
    u32 largest = 0;
#pragma unroll
    for (i32 idx = 0; idx < kElements; ++idx) largest = max(largest, ptx::float_bits(values[idx]) & 0x7fffffffu);
#pragma unroll
    for (i32 step = 1; step < kGroupLanes; step *= 2) {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    }
    return largest;
  }

  __device__ static void store_codes(u8* to, const float (&values)[kElements], float factor) {
    struct alignas(8) Packed {
      u16 pair[4];
    } packed;
#pragma unroll
    for (i32 idx = 0; idx < 4; ++idx) {
      packed.pair[idx] = ptx::floats_to_e4m3(values[2 * idx] * factor, values[2 * idx + 1] * factor);
    }
    *reinterpret_cast<Packed*>(to) = packed;
  }

  __device__ static void store_scale(u8* stage, i32 column, u32 bits) {
    u8* scales = stage + kConfig.scales_at();
    if constexpr (scales_are_floats(kConfig.quantize)) {
      reinterpret_cast<u32*>(scales)[column / kQuantizeGroup] = bits;
    } else {
      scales[column / kQuantizeGroup] = static_cast<u8>(bits);
    }
  }
};

}  // namespace weft::kernels
