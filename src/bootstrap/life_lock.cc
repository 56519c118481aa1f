#include "bootstrap/life_lock.h"

#include <cerrno>
#include <new>
#include <utility>

#include "base/clock.h"
#include "base/status.h"
#include "base/thread.h"

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace weft {
namespace {

constexpr uint64_t kLifeMagic = 0x4546494c54464557;  // "WEFTLIFE"

LifePage* new_page(SharedMemory& memory) {
  auto* page = new (memory.data()) LifePage{};
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int error_number = pthread_mutex_init(&page->mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  if (error_number != 0) throw_system_error("making a robust mutex", error_number);
  page->magic = kLifeMagic;
  return page;
}

// GCC's ThreadSanitizer does not know pthread_mutex_clocklock.
void note_locked([[maybe_unused]] pthread_mutex_t& mutex) {
#ifdef __SANITIZE_THREAD__
  __tsan_mutex_pre_lock(&mutex, __tsan_mutex_try_lock);
  __tsan_mutex_post_lock(&mutex, __tsan_mutex_try_lock, 0);
#endif
}

}  // namespace

LifeLock::LifeLock() : memory_(SharedMemory::create(sizeof(LifePage))), page_(new_page(memory_)) {
  holder_ = start_thread("weft-life", [this] { hold(); });
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return held_; });
}

void LifeLock::hold() {
  pthread_mutex_lock(&page_->mutex);  // nobody else knows it yet
  {
    std::unique_lock lock(mutex_);
    held_ = true;
    changed_.notify_one();
    changed_.wait(lock, [this] { return let_go_; });
  }
  pthread_mutex_unlock(&page_->mutex);
}

void LifeLock::release() noexcept {
  if (!holder_.joinable()) return;
  say_goodbye();
  memory_.drop_fd();
  {
    const std::lock_guard lock(mutex_);
    let_go_ = true;
    changed_.notify_one();
  }
  holder_.join();
}

PeerLife::PeerLife(OwnedFd fd)
    : memory_(SharedMemory::attach(std::move(fd), sizeof(LifePage))),
      page_(std::launder(reinterpret_cast<LifePage*>(memory_.data()))) {
  memory_.drop_fd();
  if (page_->magic != kLifeMagic) throw_invalid_argument("a peer's page for its life lock has a wrong magic number");
}

PeerLife::State PeerLife::wait(uint64_t timeout_ns) noexcept {
  const uint64_t until_ns = now_ns() + timeout_ns;
  timespec until{};
  until.tv_sec = static_cast<time_t>(until_ns / 1'000'000'000u);
  until.tv_nsec = static_cast<long>(until_ns % 1'000'000'000u);
  const int result = pthread_mutex_clocklock(&page_->mutex, CLOCK_MONOTONIC, &until);
  if (result == ETIMEDOUT) return State::kHeld;
  if (result != 0 && result != EOWNERDEAD) return State::kUnknown;
  note_locked(page_->mutex);
  if (result == EOWNERDEAD) {
    // The kernel wakes one watcher, which must wake the next by unlocking. Left inconsistent, the mutex would turn
    // unrecoverable, and the C library (glibc 2.36) wakes nobody when it hands on such a one.
    page_->owner_died.store(1, std::memory_order_release);
    pthread_mutex_consistent(&page_->mutex);
  }
  const bool owner_died = page_->owner_died.load(std::memory_order_acquire) != 0;
  pthread_mutex_unlock(&page_->mutex);
  return owner_died ? State::kOwnerDied : State::kReleased;
}

bool PeerLife::has_ended() noexcept {
  constexpr uint64_t kPatienceNs = 20'000'000;
  if (said_goodbye()) return true;
  const State state = wait(kPatienceNs);
  return state == State::kReleased || state == State::kOwnerDied ||
         page_->owner_died.load(std::memory_order_acquire) != 0;
}

}  // namespace weft
