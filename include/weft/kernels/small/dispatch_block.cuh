// What all warps of a small-batch dispatch share, and how rows are split among blocks and warps.
#pragma once

#include "weft/config/small_dispatch_kernel.h"
#include "weft/kernels/route.cuh"
#include "weft/kernels/small/dispatch_args.h"
#include "weft/kernels/words.cuh"
#include "weft/transport/peers.cuh"

namespace weft::kernels {

template <SmallDispatchKernelConfig kConfig>
struct SmallDispatchState {
  static constexpr i32 kRanks = kConfig.num_ranks;
  static constexpr i32 kTopk = kConfig.top_k;
  static constexpr i32 kExperts = kConfig.num_experts;
  static constexpr i32 kLocal = kConfig.num_local_experts();
  static constexpr ExpertPlacement kPlacement = kConfig.experts();
  static constexpr i32 kRowBytes = kConfig.wire_row_bytes();
  static constexpr i32 kScaleBytes = kConfig.scale_row_bytes;
  static constexpr i32 kWarps = SmallDispatchKernelConfig::kWarps;
  static constexpr i32 kThreads = kWarps * 32;
  static constexpr i32 kSteps = (kTopk + 31) / 32;  // picks of a lane
  static constexpr u32 kAll = 0xffffffffu;
  static constexpr u32 kMeeting = 1;  // a barrier
  using Id = typename IdType<kConfig.topk_is_int64>::Type;
  using Scales = ShortRow<max_of(kScaleBytes, 1)>;  // of a row

  const SmallDispatchKernelArgs& a;
  i32* shared;
  transport::Flight flight;
  i32 warp, lane;

  __device__ i32 rank() const { return a.view.rank; }
  __device__ transport::DirectPeers peers() const { return transport::DirectPeers(a.view); }
  __device__ static void meet() { ptx::bar_sync(kMeeting, static_cast<u32>(kThreads)); }  // the warps that move rows
  __device__ bool is_peer(i32 other) const { return other < kRanks && other != rank() && flight.is_active(other); }
  __device__ u8* slot_row(i32 owner, i32 source, i32 token) const {
    return (peers().heap(owner) + a.view.layout.small_row(flight.turn.sequence, source, token)).address();
  }
  // Progress words of the token's picks, which say by themselves that they are there: n = kNoPick, or kFirstPick + expert.
  __device__ u64* slot_picks(i32 owner, i32 source, i32 token) const {
    return reinterpret_cast<u64*>((peers().control(owner) + a.view.layout.small_picks).address()) +
           a.view.layout.small_pick(flight.turn.sequence, source, token);
  }
  static constexpr u32 kNoPick = 1, kFirstPick = 2;
  static_assert(kExperts + kFirstPick <= sync::kMaxProgress);
  __device__ bool is_there(u64 pick) const { return sync::progress_in(pick, flight.turn) != 0; }
  __device__ float* slot_weights(i32 owner, i32 source, i32 token) const {
    return reinterpret_cast<float*>((peers().heap(owner) + a.view.layout.small_weights).address()) +
           a.view.layout.small_pick(flight.turn.sequence, source, token);
  }

  __device__ const Id* own_ids() const { return static_cast<const Id*>(a.topk_idx); }

  // `work(rank)` for the ranks in a mask. Each rank and each warp begins with another, so that all links are busy: where all
  // send to the same rank at a time, a quarter of the bandwidth is lost (measured with bulk stores).
  template <class Work>
  __device__ void for_ranks(const GpuRankMask& ranks, const Work& work) const {
    i32 to = (rank() + 1 + warp) % kRanks;
#pragma unroll 1
    for (i32 turn = 0; turn < kRanks; ++turn) {
      if (ranks.has(to)) work(to);
      to = to + 1 == kRanks ? 0 : to + 1;
    }
  }

  // The local expert, -1: not here.
  __device__ i32 local_of(i64 id) const { return kPlacement.local_on(rank(), id); }
  // Of a word that is there.
  __device__ i32 local_of_pick(u64 pick) const {
    const i32 n = static_cast<i32>(sync::progress_in(pick, flight.turn));
    const i32 local = n - static_cast<i32>(kFirstPick) - kPlacement.expert_of(rank(), 0);
    return n >= static_cast<i32>(kFirstPick) && local >= 0 && local < kLocal ? local : -1;
  }

  // ---- units. A unit is a part of a token's row; blocks take units in turn, the warps of a block share each of theirs. The
  // same on sender and receiver, so that the blocks of a number meet.

  __device__ i32 num_units() const {
    const i32 all = a.max_tokens * a.num_parts;
    return max((all - static_cast<i32>(blockIdx.x) + kConfig.num_blocks - 1) / kConfig.num_blocks, 0);
  }
  __device__ i32 unit(i32 nth) const { return static_cast<i32>(blockIdx.x) + nth * kConfig.num_blocks; }
  __device__ i32 token_of(i32 unit) const { return unit / a.num_parts; }
  __device__ i32 part_of(i32 unit) const { return unit % a.num_parts; }

  // Calls `work(source, nth unit, first step, stride)` for the share of this warp in the rows of `num_sources` ranks; a row is
  // cut into steps of one access a lane.
  template <class Work>
  __device__ void share(i32 num_sources, const Work& work) const {
    const i32 units = num_units();
    const i32 rows = num_sources * units;
    const i32 warps_each = max(kWarps / max(rows, 1), 1);
    for (i32 piece = warp; piece < rows * warps_each; piece += kWarps) {
      const i32 row = piece / warps_each, slice = piece % warps_each;
      const i32 source = row / units, nth = row % units;
      work(source, nth, part_of(unit(nth)) + a.num_parts * slice, a.num_parts * warps_each);
    }
  }
};

}  // namespace weft::kernels
