#include "bootstrap/decider.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/clock.h"
#include "base/status.h"
#include "base/text.h"

namespace weft {
namespace {

constexpr uint64_t kSliceNs = 50'000'000;
constexpr uint64_t kRetryNs = 200'000'000;

[[noreturn]] void throw_control_lost(const std::string& why) {
  throw Error(ErrorCode::kControlLost,
              "the store in which the ranks decide who belongs to the group " + why +
                  "; nothing was decided here, and no membership changes until it answers: call again, or close()");
}

}  // namespace

uint64_t Decider::push(Request request) {
  request.number = ++last_number_;
  requests_.push_back(std::move(request));
  changed_.notify_all();
  return last_number_;
}

std::string Decider::compare_set(const std::string& key, const std::string& expected, const std::string& desired,
                                 const Wait& wait) {
  std::unique_lock lock(mutex_);
  const auto begin = [&] {
    value_.reset();
    failure_.reset();
    waited_ = push({0, key, expected, desired});
  };
  const auto leave = [&] {
    std::erase_if(requests_, [&](const Request& each) { return each.number == waited_; });
    waited_ = 0;
  };
  uint64_t failing_since_ns = 0;
  uint64_t retry_ns = 0;
  begin();
  // check: allow spin-loop: sleeps on a condition variable and ends at the deadline
  for (;;) {
    const uint64_t time_ns = now_ns();
    if (value_) {
      waited_ = 0;
      return *std::exchange(value_, std::nullopt);
    }
    if (closed_) throw_invalid_state("the communicator was closed while it asked the store");
    if (failure_ && retry_ns == 0) {
      if (failing_since_ns == 0) failing_since_ns = time_ns;
      retry_ns = time_ns + kRetryNs;
    }
    const bool is_hopeless = failure_ && time_ns - failing_since_ns > kPatienceNs;
    if (is_hopeless || time_ns >= wait.deadline_ns) {
      const std::string why = failure_ ? "fails: " + *failure_ : "did not answer by the deadline";
      leave();
      throw_control_lost(why);
    }
    if (failure_ && time_ns >= retry_ns) {
      retry_ns = 0;
      begin();
    }
    changed_.wait_for(lock, std::chrono::nanoseconds(std::min(kSliceNs, wait.deadline_ns - time_ns)));
    if (!wait.poll || value_) continue;
    lock.unlock();
    try {
      wait.poll();
    } catch (...) {
      lock.lock();
      leave();
      throw;
    }
    lock.lock();
  }
}

void Decider::post(std::string key, std::string expected, std::string desired) {
  const std::lock_guard lock(mutex_);
  if (requests_.size() < kMostPosted) push({0, std::move(key), std::move(expected), std::move(desired)});
}

std::optional<Decider::Request> Decider::next() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return closed_ || !requests_.empty(); });
  if (closed_) return std::nullopt;
  Request request = std::move(requests_.front());
  requests_.pop_front();
  return request;
}

void Decider::answer(uint64_t number, const std::string& value) {
  const std::lock_guard lock(mutex_);
  if (number != waited_) return;
  value_ = value;
  changed_.notify_all();
}

void Decider::fail(uint64_t number, const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (number != waited_) return;
  failure_ = one_line(why, 300);
  changed_.notify_all();
}

void Decider::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  requests_.clear();
  changed_.notify_all();
}

}  // namespace weft
