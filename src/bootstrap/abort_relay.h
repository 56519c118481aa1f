// Hands abort reasons to the handler: one at a time, in order, with no lock held, so a handler may publish or replace
// itself.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "bootstrap/control_plane.h"

namespace weft {

class AbortRelay {
 public:
  // Delivers on the calling thread, or leaves it to the thread that is delivering just now. Kept while there is no
  // handler.
  void post(const AbortReason& reason);

  // Waits until a running handler has returned (unless called from inside of it), then delivers what is kept.
  void set_handler(ControlPlane::AbortHandler handler);

  // As set_handler with an empty one; from now on nothing is kept.
  void close() noexcept;

 private:
  void deliver(std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable idle_;
  ControlPlane::AbortHandler handler_;
  std::deque<AbortReason> kept_;
  std::thread::id delivering_;  // default: nobody
  bool closed_ = false;
};

}  // namespace weft
