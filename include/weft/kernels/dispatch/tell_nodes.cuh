// Dispatch with nodes: one lane of a block follows its items in their order as their stores are complete; it puts chunks and gives
// credits (docs/protocols/nodes.md, step 5).
#pragma once

#include "weft/kernels/dispatch/nodes.cuh"
#include "weft/kernels/post.cuh"

namespace weft::kernels {

template <DispatchKernelConfig kConfig>
class DispatchTellNodes : public DispatchNodes<kConfig> {
 public:
  using Base = DispatchState<kConfig>;
  using Items = DispatchNodes<kConfig>;
  using Base::a, Base::s, Base::lane;

  __device__ explicit DispatchTellNodes(const Base& base) : Items(base) {}

  __device__ void run() {
    if (lane != 0) return;
    for (i32 item = 0; tell_item(item % kStoreWarps, item / kStoreWarps); ++item) {
    }
    for (u32& num_told : s.num_told) ptx::st_release_cta(&num_told, kAllArrived);  // nobody waits
  }

 private:
  // Items take turns between the warps that store. False: there are no more, or nothing more may be said.
  __device__ bool tell_item(i32 store_warp, i32 j) {
    u32 arrived = 0;
    sync::CopyPause<> pause(&a.view.host->timeout_ns);  // who deals items out may wait for a peer
    const auto look = [&] {
      arrived = ptx::ld_acquire_cta(&s.num_arrived[store_warp]);
      return (arrived & kAllArrived) != 0 || static_cast<i32>(arrived) > j;
    };
    if (sync::wait_until(look, pause) != sync::WaitResult::kReady) {
      this->fail(transport::ErrorCause::kDeadline, Phase::kSend, this->rank());
      return false;
    }
    if (arrived == kPostStops || static_cast<i32>(arrived & ~kAllArrived) <= j) return false;
    if (this->has_failed()) return false;  // R9
    // What bulk stores have written is put by another thread than the one that has seen them complete.
    ptx::fence_proxy_async_global();
    const i32 token = s.sent[store_warp][j % kRemembered];
    if (token <= kArrivedRow) {
      this->tell_done(kArrivedRow - token);
    } else {
      for (i32 node = 0; node < Items::kNodes; ++node) {
        if (this->goes_to(node, token)) this->tell_stored(node);
      }
    }
    ptx::st_release_cta(&s.num_told[store_warp], static_cast<u32>(j) + 1);
    return true;
  }
};

}  // namespace weft::kernels
