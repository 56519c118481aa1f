// Guards against waits without end and against an abort that throws away a signal which has arrived (R7).
#include "weft/sync/wait.h"

#include "check.h"

using namespace weft::sync;

namespace {

struct Scripted {
  int looks_until_stop;
  PauseResult verdict;
  int num_turns = 0;
  PauseResult turn() { return ++num_turns >= looks_until_stop ? verdict : PauseResult::kLookAgain; }
};

TEST(ready_at_once_never_pauses) {
  Scripted pause{1, PauseResult::kAbort};
  CHECK_EQ(wait_until([] { return true; }, pause), WaitResult::kReady);
  CHECK_EQ(pause.num_turns, 0);
}

TEST(one_look_before_each_pause) {
  Scripted pause{1000, PauseResult::kAbort};
  int num_looks = 0;
  CHECK_EQ(wait_until([&] { return ++num_looks == 500; }, pause), WaitResult::kReady);
  CHECK_EQ(pause.num_turns, 499);
}

TEST(leaves_with_what_the_pause_said) {
  Scripted abort{7, PauseResult::kAbort};
  CHECK_EQ(wait_until([] { return false; }, abort), WaitResult::kAborted);
  CHECK_EQ(abort.num_turns, 7);
  Scripted deadline{9, PauseResult::kDeadline};
  CHECK_EQ(wait_until([] { return false; }, deadline), WaitResult::kDeadline);
  CHECK_EQ(deadline.num_turns, 9);
}

TEST(looks_once_more_before_leaving) {
  for (const PauseResult verdict : {PauseResult::kAbort, PauseResult::kDeadline}) {
    Scripted pause{3, verdict};
    // The signal arrives while the pause finds the abort word set.
    CHECK_EQ(wait_until([&] { return pause.num_turns == 3; }, pause), WaitResult::kReady);
    Scripted late{3, verdict};
    int num_looks = 0;
    CHECK(wait_until([&] { return ++num_looks > 4; }, late) != WaitResult::kReady);
    CHECK_EQ(num_looks, 4);
  }
}

}  // namespace

int main(int argc, char** argv) { return weft::test::run_tests(argc, argv); }
