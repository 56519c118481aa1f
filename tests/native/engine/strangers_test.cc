// Guards against newcomers that wait for each other: one that is stopped may answer late, or not at all. One communicator on a control
// plane that is played by the test.
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <utility>
#include <vector>

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
  stage.hear(3, incarnation_of(other.endpoint()), Errand::kBell, 0, {});
  CHECK(comes_true([&] {
    CHECK(!joined.comm->boundary(deadline_after_s(0.01), {}));
    return stage.prepared(2).contains(3);
  }));
}

// Rank 2 came at the same time and is stopped before it has met this rank: the call stays open until it is awake, and nothing else waits.
TEST(a_call_that_is_not_answered_holds_up_nothing) {
  NewcomerCase joined(3);
  Stage& stage = joined.stage;
  const Listener other;
  stage.page->slots().claim(2, other.endpoint(), 0);
  OwnedFd call;
  PacketReader reader;
  CHECK(comes_true([&] {  // a look whether somebody listens there hangs up without a word
    pollfd door{other.fd(), POLLIN, 0};
    if (::poll(&door, 1, 0) == 1) call = OwnedFd(::accept4(other.fd(), nullptr, nullptr, SOCK_CLOEXEC));
    return call.valid() && reader.receive(call.get()) == ReceiveResult::kPacket;
  }));
  joined.comm->set_contract("objects");
  for (int turn = 0; turn < 3; ++turn) CHECK(stage.ask(0, 11, Errand::kContract, {}).size() > sizeof(u64));
  pollfd hung_up{call.get(), POLLRDHUP, 0};
  CHECK_EQ(::poll(&hung_up, 1, 0), 0);
  std::vector<Endpoint> endpoints(kSlots);
  endpoints[2] = other.endpoint();
  endpoints[3] = stage.door.endpoint();
  const Hello hello = make_hello(2, 3, endpoints, stage.secret);
  std::vector<OwnedFd> fds;
  fds.push_back(OwnedFd::duplicate(stage.life.fd()));
  PacketHeader header = small_header(PacketType::kHello, sizeof(hello));
  header.num_fds = 1;
  CHECK(send_packet(call.get(), header, payload_of(hello), fds) == SendResult::kSent);
  CHECK(comes_true([&] { return joined.comm->joining_ranks() == std::vector<int>{2}; }));
}

// Another newcomer that has not answered in time is asked again when it has said something.
TEST(who_is_silent_is_not_waited_for_again) {
  NewcomerCase joined(2, {{0, 11}, {1, 12}, {3, 14}});
  Stage& stage = joined.stage;
  std::atomic<int> num_asked{0};
  stage.on_send = [&](const Sent& message) {
    if (message.errand != Errand::kWindow && message.errand != Errand::kReady) return;
    if (message.slot == 3) {
      ++num_asked;
    } else {
      joined.answer(message, {});
    }
  };
  joined.comm->ready(deadline_after_s(kLongS), {});
  CHECK_EQ(num_asked, 1);
  joined.comm->ready(deadline_after_s(kLongS), {});
  CHECK_EQ(num_asked, 1);
  stage.hear(3, 14, Errand::kBell, 0, {});
  joined.comm->ready(deadline_after_s(kLongS), {});
  CHECK(num_asked > 1);
}

// The same where the deadline of the call came before the time of the other one.
TEST(who_was_silent_until_the_deadline_is_asked_when_it_speaks) {
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
  joined.comm->ready(deadline_after_s(0.2), {});
  CHECK(!stage.prepared(2).contains(3));
  is_awake = true;
  stage.hear(3, incarnation_of(other.endpoint()), Errand::kAnswer, 1, {});  // late: nobody waits for it
  CHECK(comes_true([&] {
    CHECK(!joined.comm->boundary(deadline_after_s(0.01), {}));
    return stage.prepared(2).contains(3);
  }));
}

TEST(a_newcomer_that_has_closed_a_window_is_not_prepared_for) {
  MemberCase member;
  Stage& stage = member.stage;
  const Listener newcomer;
  const u64 incarnation = member.come(2, newcomer);
  const std::vector<std::byte> windows = bytes_of(std::vector<u64>{1});
  stage.ask(2, incarnation, Errand::kWindow, windows);
  stage.ask(2, incarnation, Errand::kReady, windows);
  CHECK(stage.prepared(0).contains(2));
  stage.hear(2, incarnation, Errand::kNotReady, 0, {});
  stage.ask(1, 12, Errand::kContract, {});  // letters are read in order
  CHECK(!stage.prepared(0).contains(2));
  stage.ask(2, incarnation, Errand::kReady, windows);
  CHECK(stage.prepared(0).contains(2));
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
