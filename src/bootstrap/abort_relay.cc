#include "bootstrap/abort_relay.h"

#include <utility>

#include "base/log.h"

namespace weft {

void AbortRelay::post(const AbortReason& reason) {
  std::unique_lock lock(mutex_);
  if (closed_) return;
  kept_.push_back(reason);
  if (delivering_ == std::thread::id()) deliver(lock);
}

void AbortRelay::set_handler(ControlPlane::AbortHandler handler) {
  std::unique_lock lock(mutex_);
  if (delivering_ == std::this_thread::get_id()) {
    handler_ = std::move(handler);  // the loop in deliver() goes on with it
    return;
  }
  idle_.wait(lock, [this] { return delivering_ == std::thread::id(); });
  handler_ = std::move(handler);
  deliver(lock);
}

void AbortRelay::close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    kept_.clear();
  }
  set_handler({});
}

void AbortRelay::deliver(std::unique_lock<std::mutex>& lock) {
  delivering_ = std::this_thread::get_id();
  while (handler_ && !kept_.empty()) {
    const AbortReason reason = kept_.front();
    kept_.pop_front();
    const ControlPlane::AbortHandler handler = handler_;  // a copy: it may replace itself while it runs
    lock.unlock();
    try {
      handler(reason);
    } catch (...) {
      log_line(kLogError, "an abort handler threw");
    }
    lock.lock();
  }
  delivering_ = std::thread::id();
  idle_.notify_all();
}

}  // namespace weft
