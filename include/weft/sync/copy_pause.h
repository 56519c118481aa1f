// The Pause of waits behind which are only this block's own copies (docs/protocols/rules.md, R7).
#pragma once

#include "weft/ptx/clock.h"
#include "weft/ptx/memory.h"
#include "weft/sync/wait.h"

namespace weft::sync {

// Own copies end by themselves, so an abort does not cut them short: what is in flight is drained. One that takes seconds means a
// broken GPU; how many exactly does not matter, so the SM's cycles count them. `timeout_ns`, unless null: of the warp that begins
// these copies, which may wait for a peer before each, for that time. It ends such a wait by itself; up to kFillerWaits of them
// may pass while somebody waits here, who is not to give up before it. The usual limit is a constant: with one kept in a register,
// the compiler makes another loop of the wait and combine of ordinary tensors takes a tenth longer (docs/decisions/0022).
template <u32 kFillerWaits = 2>
class CopyPause {
 public:
  WEFT_HD explicit CopyPause(const u64* timeout_ns = nullptr) : timeout_ns_(timeout_ns) {}

  WEFT_HD PauseResult turn() {
    if (num_turns_++ % kLooks != 0) return PauseResult::kLookAgain;
    const u64 now = ptx::cycles();
    if (start_cycle_ == 0) start_cycle_ = now;
    const u64 waited = now - start_cycle_;
    if (timeout_ns_ == nullptr) return waited >= kTimeoutCycles ? PauseResult::kDeadline : PauseResult::kLookAgain;
    if (waited < kTimeoutCycles) return PauseResult::kLookAgain;
    const u64 more = kFillerWaits * ptx::ld_relaxed_sys(timeout_ns_) * ptx::kCyclesPerNs;
    return waited - kTimeoutCycles >= more ? PauseResult::kDeadline : PauseResult::kLookAgain;
  }

 private:
  static constexpr u64 kTimeoutCycles = 20000000000ull * ptx::kCyclesPerNs;
  static constexpr u32 kLooks = 256;
  const u64* timeout_ns_;
  u64 start_cycle_ = 0;
  u32 num_turns_ = 0;
};

}  // namespace weft::sync
