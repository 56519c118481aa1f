// Dispatch by expert: one warp of a block tells the ranks which of its rows have arrived, and when all have, sends the header: a peer
// need not wait for what is copied here (docs/protocols/nvlink-dispatch.md, step 4).
#pragma once

#include "weft/kernels/dispatch/block.cuh"
#include "weft/kernels/post.cuh"

namespace weft::kernels {

template <DispatchKernelConfig kConfig>
class DispatchTell : public DispatchState<kConfig> {
 public:
  using Base = DispatchState<kConfig>;
  using Base::a, Base::s, Base::flight, Base::lane;
  using Base::kRanks;
  static constexpr i32 kLanesEach = 32 / kStoreWarps;  // that tell of what a store warp has stored

  __device__ explicit DispatchTell(const Base& base) : Base(base) {}

  __device__ void run() {
    if (!tell_arrived()) {
      if (lane % kLanesEach == 0) ptx::st_release_cta(&s.num_told[lane / kLanesEach], kAllArrived);  // nobody waits
      return;
    }
    if (this->is_peer(lane)) this->peers().notify(Phase::kSend, flight, lane, static_cast<i32>(blockIdx.x));
  }

 private:
  // Tells the ranks what has arrived, one fence for all that is new: lanes 0 to 15 of store warp 0, the others of warp 1.
  __device__ bool tell_arrived() {
    const i32 mine = lane / kLanesEach;
    u32 seen = 0, num_told = 0;
    while (__any_sync(0xffffffffu, (seen & kAllArrived) == 0 ? 1 : 0) != 0) {
      const u32 read = sync::wait_any_change(&s.num_arrived[mine], seen);
      if (__any_sync(0xffffffffu, read != seen) == 0) {  // the GPU has gone wrong: nothing more is said to anyone
        if (lane == 0) this->fail(transport::ErrorCause::kDeadline, Phase::kSend, this->rank());
        return false;
      }
      if (__any_sync(0xffffffffu, read == kPostStops) != 0) return false;
      // Lanes may have read the word at different times, and share out what is new: one of them says what that is.
      const u32 now = __shfl_sync(0xffffffffu, read, mine * kLanesEach);
      __syncwarp();  // all lanes see what that one has acquired
      // What bulk stores have written is released by another thread than the one that has seen them complete.
      ptx::fence_proxy_async_global();
      ptx::fence_sys();
      const u32 num_arrived = now & ~kAllArrived;
      for (u32 item = num_told + static_cast<u32>(lane % kLanesEach); item < num_arrived; item += kLanesEach) {
        const i32 token = s.sent[mine][item % kRemembered];
        for (i32 to = 0; to < kRanks; ++to) {
          if (this->is_peer(to)) this->peers().post_token(flight, to, token);
        }
      }
      seen = now;
      num_told = num_arrived;
      __syncwarp();  // all lanes have read what they told
      if (lane % kLanesEach == 0) ptx::st_release_cta(&s.num_told[mine], num_told);
    }
    return true;
  }
};

}  // namespace weft::kernels
