// Guards against two operations in flight on one window, and against a later error that hides the first (R5, R9).
#include "weft/sync/operation.h"

#include <atomic>
#include <thread>
#include <vector>

#include "check.h"

using namespace weft;
using namespace weft::sync;

namespace {

TEST(one_owner_at_a_time) {
  ControlWords words;
  CHECK_EQ(begin_operation(&words, 1), BeginResult::kOk);
  CHECK_EQ(begin_operation(&words, 2), BeginResult::kBusy);
  CHECK_EQ(begin_operation(&words, 1), BeginResult::kBusy);
  end_operation(&words, true);
  CHECK_EQ(words.sequence, 1u);
  CHECK_EQ(begin_operation(&words, 2), BeginResult::kOk);
  end_operation(&words, false);
  CHECK_EQ(words.sequence, 1u);
  CHECK_EQ(words.owner, 0u);
}

TEST(a_broken_window_stays_broken_and_is_not_owned) {
  ControlWords words;
  ErrorRecord first;
  first.code = 6;
  first.culprit = 2;
  ErrorRecord second;
  second.code = 5;
  second.culprit = 3;
  record_error(&words, first);
  record_error(&words, second);
  CHECK_EQ(words.error.code, 6u);
  CHECK_EQ(words.error.culprit, 2);
  for (int repeat = 0; repeat < 3; ++repeat) {
    CHECK_EQ(begin_operation(&words, 1), BeginResult::kBroken);
    CHECK_EQ(words.owner, 0u);
    CHECK_EQ(words.sequence, 0u);
  }
}

TEST(threads_never_share_a_turn) {
  ControlWords words;
  std::atomic<int> num_inside{0};
  std::atomic<int> num_done{0};
  u64 plain_counter = 0;  // under ThreadSanitizer this also checks that the release pairs with the acquire
  std::vector<std::thread> threads;
  for (u64 tag = 1; tag <= 4; ++tag) {
    threads.emplace_back([&, tag] {
      for (int done = 0; done < 500;) {
        if (begin_operation(&words, tag) != BeginResult::kOk) {
          std::this_thread::yield();
          continue;
        }
        if (num_inside.fetch_add(1) != 0) CHECK(false);
        ++plain_counter;
        num_inside.fetch_sub(1);
        end_operation(&words, true);
        ++done;
        ++num_done;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(words.sequence, 2000u);
  CHECK_EQ(plain_counter, 2000u);
}

}  // namespace

int main(int argc, char** argv) { return weft::test::run_tests(argc, argv); }
