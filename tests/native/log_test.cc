// Guards against a sink that is used after it was replaced: Python takes it away before its interpreter ends.
#include "base/log.h"

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include "check.h"

using weft::log_line;
using weft::set_log_sink;

TEST(a_replaced_sink_is_not_in_use) {
  std::promise<void> begun;
  std::atomic<bool> has_ended{false};
  set_log_sink([&](int level, const std::string& text) {
    CHECK(level == weft::kLogError);
    CHECK(text == "a line");
    begun.set_value();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    has_ended = true;
  });
  std::thread other([] { log_line(weft::kLogError, "a line"); });
  begun.get_future().wait();
  set_log_sink({});
  CHECK(has_ended);
  other.join();
}

TEST(a_sink_may_replace_itself) {
  int num_lines = 0;
  set_log_sink([&](int, const std::string&) {
    ++num_lines;
    set_log_sink({});
  });
  log_line(weft::kLogError, "a line");
  CHECK(num_lines == 1);
}

int main(int argc, char** argv) { return weft::test::run_tests(argc, argv); }
