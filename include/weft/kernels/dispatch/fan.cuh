// Dispatch by expert, third part: a row crosses the wire once; here the receiver copies it to the places of its other picks,
// while later rows are still on their way (docs/protocols/nvlink-dispatch.md, step 5). In bulk: loaded into shared memory once,
// stored from there to every place. Plain stores would hold up every release of the SM. Rows of this rank itself are not
// concerned: they go to all their places from the stage that they are sent from.
#pragma once

#include "weft/kernels/dispatch/stages.cuh"

namespace weft::kernels {

template <DispatchKernelConfig kConfig>
class DispatchFan : public DispatchState<kConfig> {
 public:
  using Base = DispatchState<kConfig>;
  using Base::a, Base::s, Base::flight, Base::lane, Base::rank;
  using Base::kRanks, Base::kTopk, Base::kLocal, Base::kRowBytes, Base::kScaleBytes;
  static constexpr i32 kSteps = (kTopk + 31) / 32;    // picks of a lane
  static constexpr i32 kBatch = kSteps == 1 ? 4 : 2;  // tokens whose entries are asked for together
  static constexpr i32 kFanWarps = kConfig.num_fan_warps();
  static constexpr i32 kDepth = kConfig.fan_depth();
  static constexpr bool kAlignedScales = kScaleBytes % 16 == 0;
  static constexpr bool kBulkScales = kAlignedScales && (kConfig.is_quantized() || kScaleBytes > kMostScalesByThreads);
  // A lane holds a piece of them between load and store.
  static constexpr bool kHeldScales = kScaleBytes > 0 && !kBulkScales;
  using ScaleRow = ShortRow<kHeldScales ? kScaleBytes : 16>;

  __device__ DispatchFan(const Base& base, const i32* recv_plan, i32 fan_warp)
      : Base(base), plan_{recv_plan, base.a.view.layout.max_tokens, kTopk}, fan_warp_(fan_warp) {}

  // Batches of the tokens of this block's queue on each source, in the order in which they come, dealt out to the warps.
  __device__ void run() {
    if (this->is_staged(rank())) return;  // the host unloads the landing
    zero_holes();
    i32 most = 0;
    for (i32 source = 0; source < kRanks; ++source) {
      if (source != rank()) most = max(most, this->queue_len(block(), s.num_tokens[source]));
    }
    constexpr i32 kSources = max_of(kRanks - 1, 1);
    const i32 num_batches = kRanks > 1 ? (most + kBatch - 1) / kBatch * kSources : 0;
    for (i32 batch = fan_warp_; batch < num_batches; batch += kFanWarps) {
      const i32 source = (rank() + 1 + batch % kSources) % kRanks;
      const i32 first = batch / kSources * kBatch;
      const i32 end = min(first + kBatch, this->queue_len(block(), s.num_tokens[source]));
      if (first < end && !fan_batch(source, first, end)) {
        s.has_failed = 1;
        break;
      }
    }
    if (num_begun_ > 0) finish_copy();
    ptx::bulk_wait_all();
    ptx::fence_proxy_async_global();
  }

 private:
  // Waits for the items and does what they ask for.
  __device__ bool fan_batch(i32 source, i32 first, i32 end) {
    const i32 queue_begin = this->queue_begin(block(), s.num_tokens[source]);
    bool has_come = true;
    if (lane < end - first) {
      has_come = transport::wait_token(a.view, flight, source, queue_begin + first + lane);
    }
    if (__all_sync(0xffffffffu, has_come ? 1 : 0) == 0) return false;
    __syncwarp();  // all lanes read what some have acquired
    // Rows that bulk stores of another GPU have written are loaded in bulk by this lane.
    if (lane == 0) ptx::fence_proxy_async_global();
    i32 row[kBatch][kSteps];
    float weight[kBatch][kSteps];
#pragma unroll
    for (i32 idx = 0; idx < kBatch; ++idx) {
      const i64 token = queue_begin + first + idx;
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
        if (!kConfig.is_cached && row[idx][step] >= 0) this->own_weights()[row[idx][step]] = weight[idx][step];
      }
    }
#pragma unroll 1
    for (i32 idx = 0; idx < kBatch; ++idx) {
      // A register array can't be indexed at run time: the first entry moves out, the others move up.
      begin_copy(row[0]);
#pragma unroll
      for (i32 rest = 0; rest + 1 < kBatch; ++rest) {
#pragma unroll
        for (i32 step = 0; step < kSteps; ++step) row[rest][step] = row[rest + 1][step];
      }
    }
    return true;
  }

  // The row is at the place of the first pick. If there are others, it is loaded, while the one before it is stored.
  __device__ void begin_copy(const i32 (&row)[kSteps]) {
    i32 other[kSteps];  // the places that it must still get to
    i32 primary = -1, num_others = 0;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      const u32 picks = __ballot_sync(0xffffffffu, row[step] >= 0);
      other[step] = row[step];
      num_others += __popc(picks);
      if (primary >= 0 || picks == 0) continue;
      const i32 first = __ffs(static_cast<i32>(picks)) - 1;
      primary = __shfl_sync(0xffffffffu, row[step], first);
      if (lane == first) other[step] = -1;
    }
    if (num_others < 2) return;
    if (kDepth == 1 && num_begun_ > 0) finish_copy();
    ptx::bulk_wait_read<0>();
    __syncwarp();
    const i32 idx = stage_index(num_begun_);
    if (lane == 0) {
      ptx::mbarrier_arrive_expect(&s.fan_full[idx], kRowBytes + (kBulkScales ? kScaleBytes : 0));
      ptx::bulk_load(this->fan_stage(idx), place_of(primary), kRowBytes, &s.fan_full[idx]);
      if constexpr (kScaleBytes > 0 && kBulkScales) {
        ptx::bulk_load(this->fan_stage(idx) + kRowBytes, scales_of(primary), kScaleBytes, &s.fan_full[idx]);
      }
    }
    [[maybe_unused]] ScaleRow scales;
    if constexpr (kHeldScales) scales = ScaleRow(scales_of(primary), lane, true);
    if (kDepth > 1 && num_begun_ > 0) finish_copy();
    if constexpr (kHeldScales) scales_ = scales;
    ++num_begun_;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) other_[step] = other[step];
  }

  // The row begun last goes to its places.
  __device__ void finish_copy() {
    const i32 n = num_begun_ - 1;
    const i32 idx = stage_index(n);
    const bool is_loaded = this->wait_local(&s.fan_full[idx], static_cast<u32>(n / kDepth) & 1u);
    if (__all_sync(0xffffffffu, is_loaded ? 1 : 0) == 0) return;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      if constexpr (kHeldScales) store_short(scales_, other_[step] >= 0 ? scales_of(other_[step]) : nullptr);
      if (other_[step] < 0) continue;
      ptx::bulk_store(place_of(other_[step]), this->fan_stage(idx), kRowBytes);
      if constexpr (kScaleBytes > 0 && kBulkScales) {
        ptx::bulk_store(scales_of(other_[step]), this->fan_stage(idx) + kRowBytes, kScaleBytes);
      }
    }
    __syncwarp();
    ptx::bulk_commit();
  }

  // Rows between the end of a group and the begin of the next hold zeros (masked: only their weights do).
  __device__ void zero_holes() {
    if constexpr (!kConfig.is_cached) {
      constexpr i32 kWarps = kFanWarps * kConfig.num_blocks;
      const i32 first = static_cast<i32>(blockIdx.x) * kFanWarps + fan_warp_;
      for (i32 local = first; local < kLocal; local += kWarps) {
        const i32 shift = kConfig.layout == Layout::kMasked ? local * static_cast<i32>(a.capacity) : 0;
        zero_weights(this->hole_begin()[local] + shift, this->hole_end()[local] + shift, 32, lane);
      }
      if (kConfig.layout == Layout::kExpertMajor && a.capacity >= 0) {
        zero_weights(this->hole_end()[kLocal - 1], a.capacity, kWarps * 32, first * 32 + lane);
      }
    }
    if constexpr (kConfig.layout == Layout::kExpertMajor) {
      if (a.zeroes_holes) zero_rows();
    }
  }

  __device__ void zero_weights(i64 begin, i64 end, i32 num_threads, i32 thread) {
    for (i64 row = begin + thread; row < end; row += num_threads) this->own_weights()[row] = 0.0f;
  }

  // Every block has a share of every hole. Few stores at a time: rows are on their way too.
  __device__ void zero_rows() {
    constexpr i32 kBlocks = kConfig.num_blocks;
    u8* zeros = this->fan_stage(stage_index(0));
    for (i32 at = lane * 16; at < kConfig.fan_stage_bytes(); at += 32 * 16) {
      *reinterpret_cast<Piece<16>*>(zeros + at) = Piece<16>{};
    }
    ptx::fence_proxy_async_shared();
    __syncwarp();
    for (i32 local = fan_warp_; local < kLocal; local += kFanWarps) {
      const i32 begin = this->hole_begin()[local] + (static_cast<i32>(blockIdx.x) + local) % kBlocks;
      for (i64 row = begin + lane * kBlocks; row < this->hole_end()[local]; row += 32 * kBlocks) {
        ptx::bulk_store(place_of(row), zeros, kRowBytes);
        if constexpr (kScaleBytes > 0 && !kAlignedScales) {
          using Unit = Piece<piece_bytes(kScaleBytes)>;
          auto* units = reinterpret_cast<Unit*>(scales_of(row));
          for (i32 idx = 0; idx < kScaleBytes / static_cast<i32>(sizeof(Unit)); ++idx) units[idx] = Unit{};
        }
      }
      if constexpr (kScaleBytes > 0 && kAlignedScales) zero_scales(local, zeros);
      __syncwarp();
      ptx::bulk_commit();
      ptx::bulk_wait_read<1>();
    }
    ptx::bulk_wait_read<0>();
    __syncwarp();
  }

  // Scales of a hole lie side by side: one block zeroes them, as many at a time as a stage has zeros for.
  __device__ void zero_scales(i32 local, const u8* zeros) {
    constexpr i32 kPiece = kConfig.fan_stage_bytes();
    if ((block() + local) % kConfig.num_blocks != 0) return;
    const i64 end = static_cast<i64>(this->hole_end()[local]) * kScaleBytes;
    i64 at = static_cast<i64>(this->hole_begin()[local]) * kScaleBytes + lane * kPiece;
    for (; at < end; at += 32 * kPiece) {
      ptx::bulk_store(s.scales[rank()].own() + at, zeros, static_cast<u32>(min(static_cast<i64>(kPiece), end - at)));
    }
  }

  __device__ static i32 block() { return static_cast<i32>(blockIdx.x); }
  __device__ i32 stage_index(i32 n) const { return fan_warp_ * kDepth + n % kDepth; }
  __device__ u8* place_of(i64 row) const { return s.x[rank()].own() + row * kRowBytes; }
  __device__ u8* scales_of(i64 row) const { return s.scales[rank()].own() + row * kScaleBytes; }
  __device__ i32 num_places() const {
    return kConfig.layout == Layout::kMasked ? s.limit[rank()] * kLocal : s.limit[rank()];
  }
  __device__ const float* landed_weights() const { return reinterpret_cast<const float*>(s.weights[rank()].own()); }

  const GpuRecvPlan<const i32> plan_;
  const i32 fan_warp_;
  i32 num_begun_ = 0;  // rows
  ScaleRow scales_;    // of the row begun last
  i32 other_[kSteps];  // of the row begun last: places of this lane's picks that it must still get to, -1: none
};

}  // namespace weft::kernels
