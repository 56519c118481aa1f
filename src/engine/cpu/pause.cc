#include "engine/cpu/pause.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "base/clock.h"
#include "base/env.h"
#include "weft/ptx/memory.h"

namespace weft::cpu {
namespace {

constexpr u64 kLongestSleepNs = 50'000'000;  // also how late Ctrl-C can be noticed

void futex_wait(u32* word, u32 expected, u64 timeout_ns) {
  const timespec timeout{static_cast<time_t>(timeout_ns / 1'000'000'000),
                         static_cast<long>(timeout_ns % 1'000'000'000)};
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

}  // namespace

void ring_doorbell(ControlWords* words) {
  // Sequentially consistent on both sides: either the sleeper sees the new bell, or the ringer sees the sleeper.
  __atomic_fetch_add(&words->doorbell, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&words->num_sleepers, __ATOMIC_SEQ_CST) != 0) {
    syscall(SYS_futex, &words->doorbell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

SleepingPause::SleepingPause(ControlWords* words, u64 deadline_ns, const Poll& poll)
    : words_(words), deadline_ns_(deadline_ns), poll_(poll) {}

SleepingPause::~SleepingPause() { leave_doorbell(); }

u64 SleepingPause::waited_ns() const { return start_ns_ == 0 ? 0 : now_ns() - start_ns_; }

void SleepingPause::leave_doorbell() {
  if (at_doorbell_) __atomic_fetch_sub(&words_->num_sleepers, 1, __ATOMIC_SEQ_CST);
  at_doorbell_ = false;
}

sync::PauseResult SleepingPause::turn() {
  const u64 now = now_ns();
  if (start_ns_ == 0) {
    start_ns_ = now;
    next_poll_ns_ = now + kLongestSleepNs;
  }
  if (ptx::ld_acquire_sys(&words_->abort) != 0) return sync::PauseResult::kAbort;
  if (now >= deadline_ns_) return sync::PauseResult::kDeadline;
  if (now - start_ns_ < env().spin_us * 1000) {
    sched_yield();
  } else if (!at_doorbell_) {
    // Register first, then let the caller look once more: what is signalled after this look changes the bell.
    __atomic_fetch_add(&words_->num_sleepers, 1, __ATOMIC_SEQ_CST);
    at_doorbell_ = true;
    bell_ = __atomic_load_n(&words_->doorbell, __ATOMIC_SEQ_CST);
  } else {
    sleep();
  }
  return sync::PauseResult::kLookAgain;
}

void SleepingPause::sleep() {
  const u64 now = now_ns();
  if (now < deadline_ns_) futex_wait(&words_->doorbell, bell_, std::min(kLongestSleepNs, deadline_ns_ - now));
  bell_ = __atomic_load_n(&words_->doorbell, __ATOMIC_SEQ_CST);
  if (poll_ && now_ns() >= next_poll_ns_) {
    next_poll_ns_ = now_ns() + kLongestSleepNs;
    poll_();
  }
}

}  // namespace weft::cpu
