// Guards against a sink that is used after it was replaced: Python takes it away before its interpreter ends.
#include "base/log.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <future>
#include <thread>

#include "check.h"

using weft::log_line;
using weft::set_log_sink;

TEST(a_replaced_sink_is_not_in_use) {
  std::promise<void> begun;
  std::atomic<int> num_begun{0};
  std::atomic<int> num_ended{0};
  set_log_sink([&](int level, const std::string& text) {
    CHECK_EQ(level, static_cast<int>(weft::kLogError));
    CHECK_EQ(text, std::string("a line"));
    if (++num_begun == 1) begun.set_value();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ++num_ended;
  });
  std::thread other([] { log_line(weft::kLogError, "a line"); });
  begun.get_future().wait();
  set_log_sink({});
  CHECK_EQ(num_ended.load(), 1);
  log_line(weft::kLogError, "a line for stderr");
  CHECK_EQ(num_begun.load(), 1);
  other.join();
}

TEST(a_sink_may_replace_itself) {
  int num_lines = 0;
  set_log_sink([&](int, const std::string&) {
    ++num_lines;
    set_log_sink({});
  });
  log_line(weft::kLogError, "a line");
  log_line(weft::kLogError, "a line for stderr");
  CHECK_EQ(num_lines, 1);
}

int main(int argc, char** argv) {
  unsetenv("WEFT_LOG_LEVEL");  // nothing is read before
  return weft::test::run_tests(argc, argv);
}
