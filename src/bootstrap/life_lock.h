// How a death is noticed within a fraction of a millisecond: every rank holds a robust process-shared mutex in a page
// that its peers map. The kernel hands the mutex on when its owner dies, before it tears the process down, however big
// that is and whoever else still holds its sockets.
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "memory/shared_memory.h"

namespace weft {

struct LifePage {
  uint64_t magic;
  std::atomic<uint32_t> goodbye;     // written by the owner. 1: what follows is an orderly end, not a death
  std::atomic<uint32_t> owner_died;  // written by the first watcher that the kernel told, for the other ones
  pthread_mutex_t mutex;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// This rank's own: locked by a thread that does nothing else, from construction until release().
class LifeLock {
 public:
  LifeLock();
  ~LifeLock() { release(); }
  LifeLock(const LifeLock&) = delete;
  LifeLock& operator=(const LifeLock&) = delete;

  int fd() const noexcept { return memory_.fd(); }
  void say_goodbye() noexcept { page_->goodbye.store(1, std::memory_order_release); }
  void release() noexcept;  // says goodbye, returns at once; may be repeated

 private:
  void hold();

  SharedMemory memory_;
  LifePage* page_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
  bool let_go_ = false;
  std::thread holder_;
};

// A peer's.
class PeerLife {
 public:
  explicit PeerLife(OwnedFd fd);  // Error kInvalidArgument if that is no page of ours

  enum class State { kHeld, kReleased, kOwnerDied, kUnknown };

  // Blocks while the mutex is held, `timeout_ns` at most.
  State wait(uint64_t timeout_ns) noexcept;
  // It has ended, in order or not. The kernel hands the mutex on before it closes anything of the process; another watcher may have it
  // for a moment then, so this waits a little before it says no.
  bool has_ended() noexcept;
  bool said_goodbye() const noexcept { return page_->goodbye.load(std::memory_order_acquire) != 0; }

 private:
  SharedMemory memory_;
  LifePage* page_;
};

}  // namespace weft
