// Waits of a thread block: one lane polls and the block hears of it; local barriers of bulk loads, bounded too (R7).
#pragma once

#include "weft/layout/window.h"
#include "weft/ptx/bulk.cuh"
#include "weft/ptx/clock.h"
#include "weft/ptx/memory.h"
#include "weft/ptx/thread.cuh"
#include "weft/sync/copy_pause.h"

namespace weft::sync {

// A Pause for one lane. Cycles tell when to look at the words in host memory, every 50 us (docs/decisions/0019), and every 400 us
// the GPU's timer, which SMs read one after the other, tells whether the deadline is over (0023). It counts from the first
// unsuccessful look.
class LanePause {
 public:
  // A bit of `abort_mask` in the word `abort` ends the wait. `sleep_ns`: between two looks, where many warps wait and a
  // microsecond does not count. `waited_ns`, unless null: what arrive() adds the length of the wait to.
  __device__ LanePause(const u64* abort, u64 abort_mask, const u64* timeout_ns, u32 sleep_ns = 0,
                       u64* waited_ns = nullptr)
      : abort_(abort), abort_mask_(abort_mask), timeout_ns_(timeout_ns), waited_ns_(waited_ns), sleep_ns_(sleep_ns) {}

  __device__ PauseResult turn() {
    if (sleep_ns_ != 0)
      ptx::nanosleep(sleep_ns_);  // check: allow sleeping: a lane among many, not a thread of the host
    if (start_cycle_ == 0) start_cycle_ = ptx::cycles();
    if (++num_turns_ % kLooks != 0 || ns_since_start() < quiet_ns_) return PauseResult::kLookAgain;
    quiet_ns_ = ns_since_start() + kQuietNs;
    if ((ptx::ld_relaxed_sys(abort_) & abort_mask_) != 0) return PauseResult::kAbort;
    if (++num_quiet_ % kQuietsOfTimer != 0) return PauseResult::kLookAgain;
    const u64 now = ptx::globaltimer_ns();
    if (start_ns_ == 0) start_ns_ = now - ns_since_start();
    return now - start_ns_ >= ptx::ld_relaxed_sys(timeout_ns_) ? PauseResult::kDeadline : PauseResult::kLookAgain;
  }

  // At the look that finds it, within the loop: behind the loop a lane would read the clock when the last lane has left it.
  // Nobody waits for the addition, but a fence behind it does.
  __device__ void arrive() {
    if (waited_ns_ == nullptr || start_cycle_ == 0) return;
    atomicAdd(waited_ns_, start_ns_ == 0 ? ns_since_start() : ptx::globaltimer_ns() - start_ns_);
  }

 protected:
  __device__ bool has_waited() const { return start_cycle_ != 0; }
  __device__ u64 ns_of_wait() const { return start_ns_ == 0 ? ns_since_start() : ptx::globaltimer_ns() - start_ns_; }

 private:
  __device__ u64 ns_since_start() const { return (ptx::cycles() - start_cycle_) / ptx::kCyclesPerNs; }

  static constexpr u64 kQuietNs = 50000;
  static constexpr u32 kQuietsOfTimer = 8;
  static constexpr u32 kLooks = 16;
  const u64* abort_;
  u64 abort_mask_;
  const u64* timeout_ns_;
  u64* waited_ns_;
  u32 sleep_ns_;
  u64 start_cycle_ = 0, start_ns_ = 0;
  u64 quiet_ns_ = kQuietNs;
  u32 num_turns_ = 0, num_quiet_ = 0;
};

// The same, which keeps the length of the wait instead, if `is_noted`.
class NotingPause : public LanePause {
 public:
  __device__ NotingPause(const u64* abort, u64 abort_mask, const u64* timeout_ns, bool is_noted)
      : LanePause(abort, abort_mask, timeout_ns), is_noted_(is_noted) {}

  __device__ void arrive() {
    if (is_noted_ && has_waited()) waited_ns_ = ns_of_wait();
  }
  __device__ u64 waited_ns() const { return waited_ns_; }

 private:
  bool is_noted_;
  u64 waited_ns_ = 0;
};

// Waits for the phase of a local barrier. False: the GPU has gone wrong, the block must say nothing more to anyone (R9).
template <u32 kFillerWaits = 2>
__device__ inline bool wait_barrier(u64* barrier, u32 parity, const u64* timeout_ns = nullptr) {
  CopyPause<kFillerWaits> pause(timeout_ns);
  return wait_until([&] { return ptx::mbarrier_try_wait(barrier, parity); }, pause) == WaitResult::kReady;
}

// By a whole warp: until `look` is true in some lane. False: it never is. `sleep_ns`: between two looks.
template <class Look>
__device__ inline bool wait_any_lane(Look look, u32 sleep_ns = 0) {
  struct WarpPause {  // all lanes give up together
    u32 sleep_ns;
    CopyPause<> lane{};
    __device__ PauseResult turn() {
      if (sleep_ns != 0) ptx::nanosleep(sleep_ns);  // check: allow sleeping: of a warp, so that others may issue
      const bool is_over = lane.turn() == PauseResult::kDeadline;
      return __any_sync(0xffffffffu, is_over) != 0 ? PauseResult::kDeadline : PauseResult::kLookAgain;
    }
  };
  WarpPause pause{sleep_ns};
  return wait_until([&] { return __any_sync(0xffffffffu, look()) != 0; }, pause) == WaitResult::kReady;
}

// By a whole warp: until `look` is true in all lanes. One lane has `pause`, the others hear of it.
template <class Look, class Pause>
__device__ inline WaitResult wait_all_lanes(Look look, Pause& pause) {
  struct WarpPause {
    Pause& first_lane;
    __device__ PauseResult turn() {
      u32 verdict = 0;
      if (threadIdx.x % ptx::kWarpLanes == 0) verdict = static_cast<u32>(first_lane.turn());
      return static_cast<PauseResult>(__shfl_sync(0xffffffffu, verdict, 0));
    }
  };
  WarpPause warp{pause};
  return wait_until([&] { return __all_sync(0xffffffffu, look() ? 1 : 0) != 0; }, warp);
}

// By a whole warp, each lane with its word, which another warp of the block writes: until one of the words differs from what
// its lane has seen. Returns this lane's; if none ever differs, all have what they had.
__device__ inline u32 wait_any_change(const u32* word, u32 seen) {
  u32 now = seen;
  wait_any_lane([&] {
    now = ptx::ld_acquire_cta(word);
    return now != seen;
  });
  return now;
}

}  // namespace weft::sync
