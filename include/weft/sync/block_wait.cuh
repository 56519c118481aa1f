// Waits of a thread block: one lane polls and the block hears of it; local barriers of bulk loads, bounded too (R7).
#pragma once

#include "weft/layout/window.h"
#include "weft/ptx/bulk.cuh"
#include "weft/ptx/clock.h"
#include "weft/ptx/memory.h"
#include "weft/ptx/thread.cuh"
#include "weft/sync/wait.h"

namespace weft::sync {

// A Pause for one lane. Reading the clock costs more than a look, and the abort word lies in host memory: the clock is
// read at the first unsuccessful look and then every kLooks, the abort word only after 10 us.
class LanePause {
 public:
  // `deadline_ns`: of globaltimer. `abort` may be null: then only the deadline ends the wait.
  __device__ LanePause(const u64* abort, u64 deadline_ns) : abort_(abort), deadline_ns_(deadline_ns) {}

  __device__ PauseResult turn() {
    if (num_turns_++ % kLooks != 0) return PauseResult::kLookAgain;
    const u64 now = ptx::globaltimer_ns();
    if (start_ns_ == 0) start_ns_ = now;
    if (now - start_ns_ < kQuietNs) return PauseResult::kLookAgain;
    if (abort_ != nullptr && ptx::ld_relaxed_sys(abort_) != 0) return PauseResult::kAbort;
    return now >= deadline_ns_ ? PauseResult::kDeadline : PauseResult::kLookAgain;
  }

 private:
  static constexpr u64 kQuietNs = 10000;
  static constexpr u32 kLooks = 16;
  const u64* abort_;
  u64 deadline_ns_;
  u64 start_ns_ = 0;
  u32 num_turns_ = 0;
};

// Waits for the phase of a local barrier. The copies behind it are this block's own, so they end; the bound is for a
// GPU that has gone wrong.
template <class Pause>
__device__ inline WaitResult wait_barrier(u64* barrier, u32 parity, Pause& pause) {
  return wait_until([&] { return ptx::mbarrier_try_wait(barrier, parity); }, pause);
}

}  // namespace weft::sync
