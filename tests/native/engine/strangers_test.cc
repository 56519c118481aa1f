// Guards against newcomers that wait for each other: one that is stopped may answer late, or not at all. One communicator on a control
// plane that is played by the test.
#include <atomic>
#include <utility>

#include "engine/played_group.h"
#include "weft/config/fail_point.h"

using namespace weft;        // NOLINT(google-build-using-namespace)
using namespace weft::test;  // NOLINT(google-build-using-namespace)

#if defined(WEFT_FAIL_POINTS)
void weft::fail_point(const char* /*name*/) {}
#endif

// Rank 3 came at the same time, was silent when this rank asked, and has read the question since: a change of both waits for an answer
// that it gives now.
TEST(who_waits_asks_another_newcomer_that_was_silent) {
  NewcomerCase joined(2, {{0, 11}, {1, 12}, {3, 14}});
  Stage& stage = joined.stage;
  const Listener other;
  stage.page->slots().claim(3, other.endpoint(), 0);
  {
    const std::lock_guard lock(stage.mutex);
    stage.peers[3] = incarnation_of(other.endpoint());
  }
  std::atomic<bool> is_awake{false};
  stage.on_send = [&](const Sent& message) {
    if (message.slot == 3 && !is_awake) return;
    if (message.errand == Errand::kWindow || message.errand == Errand::kReady) joined.answer(message, {});
  };
  SlotCell shown{{}, 1, 0, 1};
  shown.membership.prepared.add(2);
  for (const int member : {0, 1}) stage.page->slots().show(member, shown);
  joined.comm->ready(deadline_after_s(kLongS), {});
  CHECK(!stage.prepared(2).contains(3));
  is_awake = true;
  stage.page->slots().show(3, shown);
  CHECK(comes_true([&] {
    CHECK(!joined.comm->boundary(deadline_after_s(0.01), {}));
    return stage.prepared(2).contains(3);
  }));
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
