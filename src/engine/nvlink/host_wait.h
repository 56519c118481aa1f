// How the host waits for a GPU: it looks again at once for a moment, then sleeps in between; Ctrl-C is looked for.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/clock.h"
#include "engine/poll.h"
#include "weft/sync/wait.h"

namespace weft::nvlink {

// A Pause for sync::wait_until.
class HostPause {
 public:
  HostPause(u64 deadline_ns, const Poll& poll) : deadline_ns_(deadline_ns), poll_(poll) {}

  sync::PauseResult turn() {
    const u64 now = now_ns();
    if (start_ns_ == 0) start_ns_ = last_poll_ns_ = now;
    if (now >= last_poll_ns_ + kPollNs) {
      last_poll_ns_ = now;
      if (poll_) poll_();
    }
    if (now >= deadline_ns_) return sync::PauseResult::kDeadline;
    if (now - start_ns_ > kBriskNs) std::this_thread::sleep_for(kSleep);
    return sync::PauseResult::kLookAgain;
  }

 private:
  static constexpr u64 kBriskNs = 2'000'000;
  static constexpr u64 kPollNs = 20'000'000;
  static constexpr std::chrono::microseconds kSleep{50};
  const u64 deadline_ns_;
  const Poll& poll_;
  u64 start_ns_ = 0;
  u64 last_poll_ns_ = 0;
};

// False: not ready at `deadline_ns`.
template <class Ready>
bool wait_on_host(const Ready& ready, u64 deadline_ns, const Poll& poll) {
  HostPause pause(deadline_ns, poll);
  return sync::wait_until(ready, pause) == sync::WaitResult::kReady;
}

}  // namespace weft::nvlink
