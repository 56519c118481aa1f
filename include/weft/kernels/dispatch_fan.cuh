// Dispatch by expert, third part: a row crosses the wire once; here the receiver copies it to the places of its other picks,
// while later rows are still on their way (docs/protocols/nvlink-dispatch.md, step 6). kStoreWarps warps, each follows the
// store warp of its number in the block of its number on every rank.
#pragma once

#include "weft/kernels/dispatch_send.cuh"

namespace weft::kernels {

template <DispatchKernelConfig kConfig>
class DispatchFan : public DispatchState<kConfig> {
 public:
  using Base = DispatchState<kConfig>;
  using Base::a, Base::s, Base::flight, Base::lane, Base::rank;
  using Base::kRanks, Base::kTopk, Base::kLocal, Base::kRowBytes, Base::kScaleBytes;
  static constexpr i32 kStages = kConfig.num_fan_stages;
  static constexpr i32 kLag = kStages / 2;  // rows between the load of one and its stores
  static constexpr i32 kSteps = (kTopk + 31) / 32;
  static constexpr i32 kBatch = kSteps == 1 ? 8 : 2;  // items whose entries are asked for together
  static constexpr bool kBulkScales = kScaleBytes % 16 == 0;

  __device__ DispatchFan(const Base& base, i32* recv_plan, i32 fan_warp)
      : Base(base), plan_{recv_plan, base.a.view.layout.max_tokens, kTopk}, fan_warp_(fan_warp) {}

  __device__ void run() {
    if (this->is_staged(rank())) return;  // the host unloads the landing
    zero_holes();
    i32 most = 0;
    for (i32 source = 0; source < kRanks; ++source) most = max(most, this->num_items(fan_warp_, s.num_tokens[source]));
    bool is_well = true;
    for (i32 first = 0; first < most && is_well; first += kBatch) {
      for (i32 source = 0; source < kRanks && is_well; ++source) {
        const i32 end = min(first + kBatch, this->num_items(fan_warp_, s.num_tokens[source]));
        if (first < end) is_well = fan_batch(source, first, end);
      }
    }
    if (is_well) {
      for (i32 idx = 0; idx < kLag && is_well; ++idx) is_well = finish_oldest();
    }
    if (!is_well) s.has_failed = 1;
    if (lane == 0) {
      ptx::bulk_wait_all();
      ptx::fence_proxy_async();
    }
  }

 private:
  struct Copy {
    i32 primary = -1;  // the row that is here; -1: nothing to do
    i32 row[kSteps];   // the others, a lane a pick; -1: none
    i32 stage = 0;
    u32 parity = 0;
  };

  // Waits for the items and does what they ask for.
  __device__ bool fan_batch(i32 source, i32 first, i32 end) {
    bool has_come = true;
    if (lane == 0) {
      has_come = transport::wait_progress(a.view, flight, source, static_cast<i32>(blockIdx.x), fan_warp_, static_cast<u32>(end));
      ptx::fence_proxy_async();
    }
    if (__shfl_sync(0xffffffffu, has_come ? 1 : 0, 0) == 0) return false;
    i32 row[kBatch][kSteps];
    float weight[kBatch][kSteps];
#pragma unroll
    for (i32 idx = 0; idx < kBatch; ++idx) {
      const i64 token = this->token_of(fan_warp_, first + idx);
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
      if (!fan_item(row[idx], weight[idx])) return false;
    }
    return true;
  }

  __device__ bool fan_item(const i32 (&row)[kSteps], const float (&weight)[kSteps]) {
    Copy copy;
    i32 num_picks = 0;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      const bool is_pick = row[step] >= 0 && row[step] < num_places();  // R19
      if (!kConfig.is_cached && is_pick) own_weights()[row[step]] = weight[step];
      const u32 picks = __ballot_sync(0xffffffffu, is_pick);
      copy.row[step] = is_pick ? row[step] : -1;
      if (copy.primary < 0 && picks != 0) {
        const i32 leader = __ffs(static_cast<i32>(picks)) - 1;
        copy.primary = __shfl_sync(0xffffffffu, row[step], leader);
        if (lane == leader) copy.row[step] = -1;
      }
      num_picks += __popc(picks);
    }
    if (num_picks < 2) return true;
    if (!finish_oldest()) return false;
    copy.stage = fan_warp_ * kStages + num_copies_ % kStages;
    copy.parity = static_cast<u32>(num_copies_ / kStages) & 1u;
    ++num_copies_;
    if (lane == 0) load(copy);
    pending_[kLag - 1] = copy;
    return true;
  }

  __device__ void load(const Copy& copy) {
    // The stores of kStages copies ago must have read the stage; those of kLag copies are not even committed.
    ptx::bulk_wait_read<kStages - kLag>();
    constexpr i32 kScalesHere = kBulkScales ? kScaleBytes : 0;
    ptx::mbarrier_arrive_expect(&s.fan_full[copy.stage], kRowBytes + kScalesHere);
    ptx::bulk_load(this->fan_stage(copy.stage), s.x[rank()] + static_cast<i64>(copy.primary) * kRowBytes, kRowBytes,
                   &s.fan_full[copy.stage]);
    if constexpr (kScalesHere > 0) {
      ptx::bulk_load(this->fan_stage(copy.stage) + kRowBytes,
                     s.scales[rank()] + static_cast<i64>(copy.primary) * kScaleBytes, kScaleBytes,
                     &s.fan_full[copy.stage]);
    }
  }

  // Stores the copy that was begun kLag copies ago; a bulk group for each, even if there is nothing to do.
  __device__ bool finish_oldest() {
    const Copy copy = pending_[0];
#pragma unroll
    for (i32 idx = 0; idx + 1 < kLag; ++idx) pending_[idx] = pending_[idx + 1];
    pending_[kLag - 1].primary = -1;
    if (copy.primary >= 0 && !this->wait_local(&s.fan_full[copy.stage], copy.parity)) return false;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      u32 others = __ballot_sync(0xffffffffu, copy.primary >= 0 && copy.row[step] >= 0);
      while (others != 0) {
        const i32 row = __shfl_sync(0xffffffffu, copy.row[step], __ffs(static_cast<i32>(others)) - 1);
        others &= others - 1;
        store(copy, row);
      }
    }
    if (lane == 0) ptx::bulk_commit();
    return true;
  }

  __device__ void store(const Copy& copy, i32 row) {
    const u8* stage = this->fan_stage(copy.stage);
    if (lane == 0) ptx::bulk_store(s.x[rank()] + static_cast<i64>(row) * kRowBytes, stage, kRowBytes);
    if constexpr (kScaleBytes > 0 && kBulkScales) {
      if (lane == 0) ptx::bulk_store(s.scales[rank()] + static_cast<i64>(row) * kScaleBytes, stage + kRowBytes, kScaleBytes);
    } else if constexpr (kScaleBytes > 0) {
      u8* scales = s.scales[rank()];
      copy_short<kScaleBytes>(scales + static_cast<i64>(row) * kScaleBytes,
                              scales + static_cast<i64>(copy.primary) * kScaleBytes, lane);
    }
  }

  // Rows between the end of a group and the begin of the next hold zeros (masked: only their weights do).
  __device__ void zero_holes() {
    constexpr i32 kWarps = kStoreWarps * kConfig.num_blocks;
    const i32 first = static_cast<i32>(blockIdx.x) * kStoreWarps + fan_warp_;
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
    constexpr i32 kPiece = piece_bytes(kBytes);
    auto* pieces = reinterpret_cast<Piece<kPiece>*>(rows + begin * kBytes);
    for (i64 idx = lane; idx < (end - begin) * (kBytes / kPiece); idx += 32) pieces[idx] = Piece<kPiece>{};
  }

  __device__ i32 num_places() const {
    return kConfig.layout == Layout::kMasked ? s.limit[rank()] * kLocal : s.limit[rank()];
  }
  __device__ float* own_weights() const { return reinterpret_cast<float*>(a.view.heap[rank()] + a.placement.weights); }
  __device__ const float* landed_weights() const { return reinterpret_cast<const float*>(s.weights[rank()]); }

  const GpuRecvPlan<const i32> plan_;
  const i32 fan_warp_;
  i32 num_copies_ = 0;
  Copy pending_[kLag > 0 ? kLag : 1] = {};
};

}  // namespace weft::kernels
