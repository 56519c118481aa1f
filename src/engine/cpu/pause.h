// How a rank of the CPU engine waits: it yields briefly, then sleeps on the doorbell word of its own window, so that four
// ranks can share two cores (docs/decisions/0008). Sleeping and waking live here; the loop itself is sync/wait.h.
#pragma once

#include "engine/poll.h"
#include "weft/layout/window.h"
#include "weft/sync/wait.h"

namespace weft::cpu {

// Rings the doorbell of the window that `words` belong to. Call it after the signal was stored.
void ring_doorbell(ControlWords* words);

// A Pause for sync::wait_until. One for each wait.
class SleepingPause {
 public:
  SleepingPause(ControlWords* words, u64 deadline_ns, const Poll& poll);
  ~SleepingPause();
  SleepingPause(const SleepingPause&) = delete;
  SleepingPause& operator=(const SleepingPause&) = delete;

  sync::PauseResult turn();

  u64 waited_ns() const;  // since the first unsuccessful look; 0 if there was none

 private:
  void sleep();
  void leave_doorbell();

  ControlWords* words_;
  u64 deadline_ns_;
  const Poll& poll_;
  u64 start_ns_ = 0;
  u64 next_poll_ns_ = 0;
  u32 bell_ = 0;
  bool at_doorbell_ = false;
};

}  // namespace weft::cpu
