// Tells ranks how far a block's stores to them have come (docs/protocols/nvlink-combine.md), and what that has in common with
// dispatch_tell.cuh.
#pragma once

#include "weft/sync/block_wait.cuh"
#include "weft/transport/nvlink.cuh"

namespace weft::kernels {

constexpr u32 kPostStops = ~0u;  // in a word of `arrived`: the warp has failed, nothing more is posted

constexpr i32 kPostLanes = 16;
static_assert(kPostLanes >= kMaxGpuRanks);

// By one warp that has nothing else to do, since a release waits for everything that is under way. arrived[w]: how many items of
// store warp w have arrived, written by a release in the block after `wait_group`. Lanes 0 to 15 tell the ranks of warp 0, the
// others of warp 1, all at once: one fence and one wait serve all of them. `last`: the number of the lane's warp after
// which nothing more comes. Returns whether all was told.
__device__ inline bool post_arrivals(const transport::WindowView& view, const transport::Flight& flight, i32 num_ranks,
                                     const u32 (&arrived)[2], u32 last, i32 first_channel) {
  const i32 lane = static_cast<i32>(threadIdx.x % ptx::kWarpLanes);
  const i32 mine = lane / kPostLanes, peer = lane % kPostLanes;
  const bool has_peer = peer < num_ranks && flight.is_active(peer);
  u32 posted = 0;
  while (__any_sync(0xffffffffu, posted < last)) {
    const u32 now = sync::wait_any_change(&arrived[mine], posted);
    const bool is_over = __any_sync(0xffffffffu, now != posted) == 0 || __any_sync(0xffffffffu, now == kPostStops) != 0;
    if (is_over) return false;
    // What bulk stores have written is released by another thread than the one that has seen them complete.
    ptx::fence_proxy_async();
    if (has_peer && now != posted) {
      transport::post(view, flight, peer, static_cast<i32>(blockIdx.x), first_channel + mine, now);
    }
    posted = now;
    __syncwarp();
  }
  return true;
}

}  // namespace weft::kernels
