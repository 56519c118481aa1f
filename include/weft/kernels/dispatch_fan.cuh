// Dispatch by expert, third part: a row crosses the wire once; here the receiver copies it to the places of its other picks,
// while later rows are still on their way (docs/protocols/nvlink-dispatch.md, step 5). Plain loads and stores by kFanWarps
// warps: they need no shared memory, which all goes to what is sent, and are many, since a row takes a microsecond.
#pragma once

#include "weft/kernels/dispatch_send.cuh"

namespace weft::kernels {

template <DispatchKernelConfig kConfig>
class DispatchFan : public DispatchState<kConfig> {
 public:
  using Base = DispatchState<kConfig>;
  using Base::a, Base::s, Base::flight, Base::lane, Base::rank;
  using Base::kRanks, Base::kTopk, Base::kLocal, Base::kRowBytes, Base::kScaleBytes;
  static constexpr i32 kSteps = (kTopk + 31) / 32;    // picks of a lane
  static constexpr i32 kBatch = kSteps == 1 ? 8 : 2;  // items whose entries are asked for together

  __device__ DispatchFan(const Base& base, const i32* recv_plan, i32 fan_warp)
      : Base(base), plan_{recv_plan, base.a.view.layout.max_tokens, kTopk}, fan_warp_(fan_warp) {}

  // Batches of all channels (source, store warp) in the order in which they come, dealt out to the warps.
  __device__ void run() {
    if (this->is_staged(rank())) return;  // the host unloads the landing
    zero_holes();
    i32 most = 0;
    for (i32 source = 0; source < kRanks; ++source) most = max(most, this->num_items(0, s.num_tokens[source]));
    const i32 num_batches = (most + kBatch - 1) / kBatch * kRanks * kStoreWarps;
    for (i32 batch = fan_warp_; batch < num_batches; batch += kFanWarps) {
      const i32 source = batch % kRanks, store_warp = batch / kRanks % kStoreWarps;
      const i32 first = batch / (kRanks * kStoreWarps) * kBatch;
      const i32 end = min(first + kBatch, this->num_items(store_warp, s.num_tokens[source]));
      if (first < end && !fan_batch(source, store_warp, first, end)) {
        s.has_failed = 1;
        return;
      }
    }
  }

 private:
  // Waits for the items and does what they ask for.
  __device__ bool fan_batch(i32 source, i32 store_warp, i32 first, i32 end) {
    bool has_come = true;
    if (lane == 0) {
      has_come = transport::wait_progress(a.view, flight, source, static_cast<i32>(blockIdx.x), store_warp,
                                          static_cast<u32>(end));
    }
    if (__shfl_sync(0xffffffffu, has_come ? 1 : 0, 0) == 0) return false;
    i32 row[kBatch][kSteps];
    float weight[kBatch][kSteps];
#pragma unroll
    for (i32 idx = 0; idx < kBatch; ++idx) {
      const i64 token = this->token_of(store_warp, first + idx);
#pragma unroll
      for (i32 step = 0; step < kSteps; ++step) {
        const i32 k = step * 32 + lane;
        const bool is_here = first + idx < end && k < kTopk;
        row[idx][step] = is_here ? plan_.row(source, token)[k] : -1;
        if constexpr (!kConfig.is_cached) {
          const i64 slot = (source * a.view.layout.max_tokens + token) * kTopk + k;
          weight[idx][step] = is_here ? landed_weights()[slot] : 0.0f;
        }
      }
    }
#pragma unroll
    for (i32 idx = 0; idx < kBatch; ++idx) {
#pragma unroll
      for (i32 step = 0; step < kSteps; ++step) {
        if (row[idx][step] >= num_places()) row[idx][step] = -1;  // R19
        if (!kConfig.is_cached && row[idx][step] >= 0) own_weights()[row[idx][step]] = weight[idx][step];
      }
    }
#pragma unroll 1
    for (i32 idx = 0; idx < kBatch; ++idx) {
      // A register array can't be indexed at run time: the first entry moves out, the others move up.
      copy_to_picks(row[0]);
#pragma unroll
      for (i32 rest = 0; rest + 1 < kBatch; ++rest) {
#pragma unroll
        for (i32 step = 0; step < kSteps; ++step) row[rest][step] = row[rest + 1][step];
      }
    }
    return true;
  }

  // The row is at the place of the first pick.
  __device__ void copy_to_picks(const i32 (&row)[kSteps]) {
    u32 picks[kSteps];
    i32 primary = -1;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      picks[step] = __ballot_sync(0xffffffffu, row[step] >= 0);
      if (primary >= 0 || picks[step] == 0) continue;
      primary = __shfl_sync(0xffffffffu, row[step], __ffs(static_cast<i32>(picks[step])) - 1);
      picks[step] &= picks[step] - 1;
    }
    u32 num_others = 0;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) num_others += __popc(picks[step]);
    if (num_others == 0) return;
    copy_row<kRowBytes>(s.x[rank()], primary, row, picks);
    if constexpr (kScaleBytes > 0) copy_row<kScaleBytes>(s.scales[rank()], primary, row, picks);
  }

  // As much as registers hold at a time.
  template <i32 kBytes>
  __device__ void copy_row(u8* rows, i32 primary, const i32 (&row)[kSteps], const u32 (&picks)[kSteps]) {
    using Unit = Piece<piece_bytes(kBytes)>;
    constexpr i32 kUnits = kBytes / static_cast<i32>(sizeof(Unit));
    constexpr i32 kHeld = kUnits < 32 * 14 ? (kUnits + 31) / 32 : 14;
    const Unit* from = reinterpret_cast<const Unit*>(rows + static_cast<i64>(primary) * kBytes);
#pragma unroll 1
    for (i32 first = 0; first < kUnits; first += 32 * kHeld) {
      Unit held[kHeld];
#pragma unroll
      for (i32 idx = 0; idx < kHeld; ++idx) {
        const i32 unit = first + idx * 32 + lane;
        if (unit < kUnits) held[idx] = from[unit];
      }
#pragma unroll
      for (i32 step = 0; step < kSteps; ++step) {
        for (u32 others = picks[step]; others != 0; others &= others - 1) {
          const i32 to = __shfl_sync(0xffffffffu, row[step], __ffs(static_cast<i32>(others)) - 1);
          Unit* place = reinterpret_cast<Unit*>(rows + static_cast<i64>(to) * kBytes);
#pragma unroll
          for (i32 idx = 0; idx < kHeld; ++idx) {
            const i32 unit = first + idx * 32 + lane;
            if (unit < kUnits) place[unit] = held[idx];
          }
        }
      }
    }
  }

  // Rows between the end of a group and the begin of the next hold zeros (masked: only their weights do).
  __device__ void zero_holes() {
    constexpr i32 kWarps = kFanWarps * kConfig.num_blocks;
    const i32 first = static_cast<i32>(blockIdx.x) * kFanWarps + fan_warp_;
    for (i32 local = first; local < kLocal; local += kWarps) {
      const i32 shift = kConfig.layout == Layout::kMasked ? local * static_cast<i32>(a.capacity) : 0;
      const i64 begin = this->hole_begin()[local] + shift, end = this->hole_end()[local] + shift;
      if constexpr (!kConfig.is_cached) zero_weights(begin, end, 32, lane);
      if constexpr (kConfig.layout == Layout::kExpertMajor) {
        zero_rows<kRowBytes>(s.x[rank()], begin, end);
        if constexpr (kScaleBytes > 0) zero_rows<kScaleBytes>(s.scales[rank()], begin, end);
      }
    }
    if (kConfig.layout != Layout::kExpertMajor || kConfig.is_cached || a.capacity < 0) return;
    zero_weights(this->hole_end()[kLocal - 1], a.capacity, kWarps * 32, first * 32 + lane);
  }

  __device__ void zero_weights(i64 begin, i64 end, i32 num_threads, i32 thread) {
    for (i64 row = begin + thread; row < end; row += num_threads) own_weights()[row] = 0.0f;
  }

  template <i32 kBytes>
  __device__ void zero_rows(u8* rows, i64 begin, i64 end) {
    using Unit = Piece<piece_bytes(kBytes)>;
    auto* units = reinterpret_cast<Unit*>(rows + begin * kBytes);
    const i64 num_units = (end - begin) * (kBytes / static_cast<i32>(sizeof(Unit)));
    for (i64 idx = lane; idx < num_units; idx += 32) units[idx] = Unit{};
  }

  __device__ i32 num_places() const {
    return kConfig.layout == Layout::kMasked ? s.limit[rank()] * kLocal : s.limit[rank()];
  }
  __device__ float* own_weights() const { return reinterpret_cast<float*>(a.view.heap[rank()] + a.placement.weights); }
  __device__ const float* landed_weights() const { return reinterpret_cast<const float*>(s.weights[rank()]); }

  const GpuRecvPlan<const i32> plan_;
  const i32 fan_warp_;
};

}  // namespace weft::kernels
