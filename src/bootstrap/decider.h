// Compare-and-set in a store that lies elsewhere and may not answer: whoever has the store serves, the ledger asks and
// does not wait for longer than it wants to. docs/protocols/membership.md.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

namespace weft {

struct Wait {
  uint64_t deadline_ns;
  const std::function<void()>& poll;  // may be empty; at least every 100 ms, may throw to leave
};

class Decider {
 public:
  // `key` holds "" until it is written. Makes it `desired` if it holds `expected`; returns what it holds afterwards. With
  // both empty it only reads. One thread at a time. Errors: kControlLost if there is no answer by the deadline, or if the
  // store has failed for kPatienceNs on end; kInvalidState after close().
  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired,
                          const Wait& wait);
  void post(std::string key, std::string expected, std::string desired);  // nobody waits for it

  // --- for the one thread that serves --------------------------------------------------------------------------------
  struct Request {
    uint64_t number = 0;
    std::string key, expected, desired;
  };
  std::optional<Request> next();  // waits; nothing: close() was called
  void answer(uint64_t number, const std::string& value);
  void fail(uint64_t number, const std::string& why);  // the store could not be asked: it is tried again
  void close();                                        // whoever waits gets kInvalidState; safe to repeat

 private:
  static constexpr uint64_t kPatienceNs = 5'000'000'000;
  static constexpr size_t kMostPosted = 64;

  uint64_t push(Request request);  // mutex_ is held

  std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::deque<Request> requests_;
  uint64_t last_number_ = 0;
  uint64_t waited_ = 0;  // number of the request whose answer somebody waits for; other answers are dropped
  std::optional<std::string> value_;
  std::optional<std::string> failure_;
  bool closed_ = false;
};

}  // namespace weft
