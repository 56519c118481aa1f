// Dispatch between GPUs that reach each other by load and store, one launch a call.
// docs/protocols/nvlink-dispatch.md is the page to this file; in short:
//   count   each block counts its share and tells the others; block 0 sends counts and the place of the result to every peer
//   send    each block stores its tokens' rows straight to their final places, ids and weights or a table of rows along
//   fan     by expert: received rows are copied to the places of their other picks as they arrive
//   done    one header a peer; a block waits for the peers' blocks of its own number, so the call ends with the last row (R20)
#pragma once

#include "weft/kernels/dispatch/count.cuh"
#include "weft/kernels/dispatch/fan.cuh"
#include "weft/kernels/dispatch/forward_picks.cuh"
#include "weft/kernels/dispatch/forward_plan.cuh"
#include "weft/kernels/dispatch/ids_out.cuh"
#include "weft/kernels/dispatch/messages.cuh"
#include "weft/kernels/dispatch/plan.cuh"
#include "weft/kernels/dispatch/quantize.cuh"
#include "weft/kernels/dispatch/send.cuh"
#include "weft/kernels/dispatch/tell.cuh"
#include "weft/kernels/dispatch/tell_nodes.cuh"

namespace weft::kernels {

template <DispatchKernelConfig kConfig>
class Dispatch {
 public:
  static constexpr i32 kFirstQuantizer = 1 + kStoreWarps;
  static constexpr i32 kFirstOther = kFirstQuantizer + kConfig.num_quantize_warps;
  static_assert(kConfig.num_stages % kStoreWarps == 0);
  static_assert(!kConfig.has_nodes() || !kConfig.has_fan(), "docs/protocols/nodes.md");
  static_assert(!kConfig.has_nodes() || kConfig.is_quantized() || kConfig.scale_row_bytes % 16 == 0);
  static_assert(kConfig.num_stages % (kConfig.is_quantized() ? kConfig.num_quantize_warps : 1) == 0);

  __device__ explicit Dispatch(const DispatchState<kConfig>& state)
      : state_(state), count_(state), send_(state), warp_(state.warp), lane_(state.lane) {}

  __device__ void run() {
    const DispatchKernelArgs& a = state_.a;
    const transport::Flight& flight = state_.flight;
    if (flight.is_dead) return;
    init_shared();
    bool is_counted = true;
    if (warp_ > 0) {
      is_counted = count_.count_tokens();
      if (blockIdx.x == 0 && is_counted) count_.send_counts();
      if constexpr (kConfig.has_nodes()) {
        DispatchMessages<kConfig> messages(state_);
        messages.count_nodes();
        if (blockIdx.x == 0 && is_counted) is_counted = messages.exchange();
      }
    } else if (lane_ == 0) {
      // With nodes where a row goes is not known yet.
      if constexpr (!kConfig.has_nodes()) send_.load_rows(true);
    }
    constexpr i32 kFirstWaiting = 32;  // the first warp may still be loading
    const transport::Verdict so_far = is_counted ? transport::Verdict::kOk : transport::Verdict::kBroken;
    transport::Verdict verdict;
    if constexpr (kConfig.has_nodes()) {
      verdict = state_.nodes().wait_calls(kFirstWaiting, so_far);
    } else {
      verdict = transport::wait_all(a.view, Phase::kCount, flight, 0, kFirstWaiting, so_far);
    }
    const bool goes_on = verdict == transport::Verdict::kOk && count_.find_places();
    if (!goes_on) {
      if (warp_ == 0 && lane_ == 0) send_.drain();
      if (verdict != transport::Verdict::kBroken && state_.s.has_failed == 0) end();
      return;
    }
    play_role();
    __syncthreads();
    if (state_.s.has_failed != 0) return;
    if constexpr (!kConfig.has_fan()) {
      const i32 peer = static_cast<i32>(threadIdx.x);
      if (state_.is_peer(peer)) state_.peers().notify(Phase::kSend, flight, peer, static_cast<i32>(blockIdx.x));
    }
    const i32 block = static_cast<i32>(blockIdx.x);
    if constexpr (kConfig.has_nodes()) {
      verdict = transport::wait_all(a.view, Phase::kSend, state_.nodes().among_mates(), block);
    } else {
      verdict = transport::wait_all(a.view, Phase::kSend, flight, block);
    }
    if (verdict == transport::Verdict::kOk) end();
  }

 private:
  __device__ void init_shared() {
    DispatchShared<kConfig>& s = state_.s;
    const i32 thread = static_cast<i32>(threadIdx.x);
    if (thread == 0) {
      s.staged = s.with_int64 = GpuRankMask::none();
      s.has_failed = s.bad_source = s.is_given_up = s.has_bad_ids = 0;
      for (i32 store_warp = 0; store_warp < kStoreWarps; ++store_warp) {
        s.num_arrived[store_warp] = s.num_told[store_warp] = 0;
      }
      s.own_rows = 0;
      s.bad_ids.clear();
    }
    if (thread < kConfig.num_stages) {
      ptx::mbarrier_init(&s.full[thread], 1);
      ptx::mbarrier_init(&s.ready[thread], 1);
      ptx::mbarrier_init(&s.empty[thread], 1);
    }
    if (thread < DispatchKernelConfig::kPeriods) s.num_planned[thread] = 0;
    if constexpr (kConfig.has_nodes()) DispatchNodes<kConfig>(state_).init();
    if (thread < kConfig.num_fan_stages) ptx::mbarrier_init(&s.fan_full[thread], 1);
    if (thread < 32) ptx::fence_mbarrier_init();
    count_.clear();
    __syncthreads();
  }

  __device__ void play_role() {
    if (warp_ == 0) {
      if (lane_ == 0) send_.load_rows(false);
    } else if (warp_ < kFirstQuantizer) {
      send_.store_rows(warp_ - 1);
    } else if (warp_ < kFirstOther) {
      if constexpr (kConfig.is_quantized()) DispatchQuantize<kConfig>(state_).run(warp_ - kFirstQuantizer);
    } else {
      if (blockIdx.x == 0) count_.write_counts(kFirstOther);
      if constexpr (kConfig.is_by_expert()) {
        constexpr i32 kFirstPlanner = kFirstOther + (kConfig.has_tell() ? 1 : 0);
        if constexpr (kConfig.has_fan()) {
          if (warp_ == kFirstOther) {
            DispatchTell<kConfig>(state_).run();
            return;
          }
        }
        if constexpr (kConfig.has_nodes()) {
          if (warp_ == kFirstOther) {
            DispatchTellNodes<kConfig>(state_).run();
            return;
          }
        }
        const i32 planner = warp_ - kFirstPlanner;
        if constexpr (!kConfig.is_cached) {
          DispatchPlan<kConfig>(state_).run(planner, kConfig.num_warps() - kFirstPlanner);
        }
        if constexpr (kConfig.has_nodes() && !kConfig.is_cached) {
          DispatchForwardPicks<kConfig>(state_).run(planner, kConfig.num_warps() - kFirstPlanner);
        }
        if constexpr (kConfig.has_fan()) {
          i32* plan = kConfig.is_cached ? state_.a.recv_plan : count_.recv_plan();
          if (planner < kConfig.num_fan_warps()) DispatchFan<kConfig>(state_, plan, planner).run();
        }
      } else {
        constexpr i32 kFirst = kFirstOther + (kConfig.has_nodes() ? 1 : 0);
        if constexpr (kConfig.has_nodes()) {
          if (warp_ == kFirstOther) {
            DispatchTellNodes<kConfig>(state_).run();
            return;
          }
          if constexpr (!kConfig.is_cached) {
            DispatchForwardPlan<kConfig>(state_).run(warp_ - kFirst, kConfig.num_warps() - kFirst);
          }
        }
        if constexpr (kConfig.scale_row_bytes > kConfig.staged_scale_bytes()) send_.store_scales(kFirst);
        if constexpr (!kConfig.is_cached) DispatchIdsOut<kConfig>(state_).run(kFirst);
      }
    }
  }

  __device__ void end() {
    if (!transport::is_last_block(state_.a.view, transport::num_blocks<kConfig>())) return;
    if (state_.s.is_given_up == 0) count_.recount_kept();
    const i32 block = static_cast<i32>(threadIdx.x);
    if (kConfig.is_by_expert() && block < kConfig.num_blocks) *state_.queue_word(block) = 0;
    transport::end_flight(state_.a.view, state_.flight);
  }

  DispatchState<kConfig> state_;
  DispatchCount<kConfig> count_;
  DispatchSend<kConfig> send_;
  const i32 warp_, lane_;
};

template <DispatchKernelConfig kConfig>
__device__ void dispatch(const DispatchKernelArgs& args) {
  extern __shared__ __align__(128) u8 dynamic[];
  __shared__ DispatchShared<kConfig> shared;
  transport::with_route<kConfig.route>(args, [&] {
    const DispatchState<kConfig> state{
        args,
        shared,
        dynamic,
        transport::begin_flight(args.view, args.print, args.object, kConfig.is_cached ? args.recv_plan : nullptr),
        static_cast<i32>(threadIdx.x / ptx::kWarpLanes),
        static_cast<i32>(threadIdx.x % ptx::kWarpLanes)};
    Dispatch<kConfig>(state).run();
  });
}

}  // namespace weft::kernels
