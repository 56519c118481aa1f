// The only spin loop of the library. How to wait between two looks, when to give up and on which clock is the business of
// a Pause: on the CPU src/engine/cpu/pause.h spins and then sleeps, on the GPU one lane polls and the block hears of it.
#pragma once

#include "weft/config/base.h"

namespace weft::sync {

enum class WaitResult : u32 { kReady = 0, kAborted = 1, kDeadline = 2 };
enum class PauseResult : u32 { kLookAgain = 0, kAbort = 1, kDeadline = 2 };

// Pause has `PauseResult turn()`, called after each unsuccessful look. It must answer kAbort or kDeadline in the end: every
// wait is bounded (R7). The condition is looked at once more before leaving, so that an operation whose signals have all
// arrived ends well even if a peer died or closed right after it had sent them.
template <class Ready, class Pause>
WEFT_HD WaitResult wait_until(const Ready& ready, Pause& pause) {
  while (!ready()) {
    const PauseResult verdict = pause.turn();
    if (verdict == PauseResult::kLookAgain) continue;
    if (ready()) break;
    return verdict == PauseResult::kAbort ? WaitResult::kAborted : WaitResult::kDeadline;
  }
  return WaitResult::kReady;
}

}  // namespace weft::sync
