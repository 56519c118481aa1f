// Guards against what a rank of an open group does with letters, memory and wishes of others when they come in the wrong order or from
// nobody any more. One communicator on a control plane that is played by the test.
#include <atomic>
#include <functional>
#include <memory>
#include <set>
#include <string_view>
#include <utility>

#include "engine/played_group.h"
#include "weft/config/fail_point.h"

using namespace weft;        // NOLINT(google-build-using-namespace)
using namespace weft::test;  // NOLINT(google-build-using-namespace)

TEST(letters_of_another_life_are_not_read) {
  MemberCase member;
  Stage& stage = member.stage;
  {
    const std::lock_guard lock(stage.mutex);
    stage.peers[2] = 22;
  }
  stage.hear(2, 21, Errand::kWindow, 1, bytes_of(std::vector<u64>{1}));
  stage.ask(1, 12, Errand::kContract, {});  // letters are read in order
  CHECK(!member.window.has_taken_in(2));
  CHECK(!stage.answer(1));
  stage.ask(2, 22, Errand::kWindow, bytes_of(std::vector<u64>{1}));
  CHECK(member.window.has_taken_in(2));
}

// Whatever order its end and its offer come in.
TEST(what_a_dead_newcomer_offered_is_not_kept) {
  MemberCase member;
  Stage& stage = member.stage;
  const Listener newcomer;
  const u64 incarnation = member.come(2, newcomer);
  stage.ask(2, incarnation, Errand::kWindow, bytes_of(std::vector<u64>{1}));
  CHECK(member.window.has_taken_in(2));
  stage.set_dead(2);
  stage.hear(1, 12, Errand::kBell, 0, {});
  CHECK(comes_true([&] { return !member.window.has_taken_in(2); }));
  stage.hear(2, incarnation, Errand::kWindow, 1, bytes_of(std::vector<u64>{1}));
  stage.ask(1, 12, Errand::kContract, {});
  CHECK(!member.window.has_taken_in(2));
}

TEST(nobody_is_prepared_for_without_a_mapping) {
  MemberCase member;
  Stage& stage = member.stage;
  const Listener newcomer;
  const u64 incarnation = member.come(2, newcomer);
  CHECK(stage.ask(2, incarnation, Errand::kReady, bytes_of(std::vector<u64>{1})) == bytes_of(std::vector<u64>{0, 1}));
  CHECK(!stage.prepared(0).contains(2));
  stage.ask(2, incarnation, Errand::kWindow, bytes_of(std::vector<u64>{1}));
  CHECK(stage.ask(2, incarnation, Errand::kReady, bytes_of(std::vector<u64>{1})) == bytes_of(std::vector<u64>{0}));
  CHECK(stage.prepared(0).contains(2));
}

// It never came here: it has given up, though its process lives.
TEST(a_claim_that_is_over_is_cleared) {
  MemberCase member;
  SlotTable slots = member.stage.page->slots();
  {
    const Listener newcomer;
    slots.claim(3, newcomer.endpoint(), 1);
  }
  member.stage.hear(1, 12, Errand::kBell, 0, {});
  CHECK(comes_true([&] { return slots.claimed(3) == 0; }));
}

// Who enters an epoch meanwhile keeps only the newcomers that it knows.
TEST(a_newcomer_is_known_before_it_is_a_peer) {
  MemberCase member;
  std::vector<int> known;
  member.stage.on_add = [&](int) { known = member.comm->joining_ranks(); };
  const Listener newcomer;
  member.come(2, newcomer);
  CHECK(known == std::vector<int>{2});
}

// Operations use its memory from the boundary on, without a lock: what it offers late is not mapped in place of that.
TEST(who_belongs_to_the_group_offers_nothing_more) {
  MemberCase member;
  Stage& stage = member.stage;
  const Listener newcomer;
  const u64 incarnation = member.come(2, newcomer);
  const std::vector<std::byte> window_1 = bytes_of(std::vector<u64>{1});
  CHECK(stage.ask(2, incarnation, Errand::kWindow, window_1) == bytes_of(std::vector<u64>{0}));
  stage.ask(2, incarnation, Errand::kReady, window_1);
  stage.commit(taking_in(2, RankSet::of({0, 1, 2}), 2, incarnation));
  stage.ask(1, 12, Errand::kContract, {});  // a turn looks behind its letters
  stage.ask(1, 12, Errand::kContract, {});
  CHECK(stage.ask(2, incarnation, Errand::kWindow, window_1) != bytes_of(std::vector<u64>{0}));
  CHECK_EQ(member.window.num_taken_in(), 1);
}

// Suspended, it has what it had then; a rank that comes back with it would believe that.
TEST(a_suspended_rank_has_nothing_to_hand_over) {
  MemberCase member;
  Stage& stage = member.stage;
  member.comm->set_contract("a map");
  CHECK(stage.ask(1, 12, Errand::kContract, {}).size() > sizeof(u64));
  MembershipRecord record;
  record.kind = ChangeKind::kPlanned;
  record.epoch = 2;
  record.era = 1;
  record.boundary = 1;
  record.active = RankSet::of({1});
  record.standby = RankSet::of({0});
  stage.commit(record);
  stage.hear(1, 12, Errand::kBell, 0, {});
  CHECK(comes_true([&] { return member.comm->boundary(deadline_after_s(kLongS), {}).has_value(); }));
  CHECK(stage.ask(1, 12, Errand::kContract, {}) == bytes_of(std::vector<u64>{0}));
}

// What it has mapped before the window grows is not all of it, and it must not be taken in with that.
TEST(nobody_is_prepared_for_while_a_window_changes) {
  MemberCase member;
  Stage& stage = member.stage;
  const Listener newcomer;
  const u64 incarnation = member.come(2, newcomer);
  const auto ready = [&] { return stage.ask(2, incarnation, Errand::kReady, bytes_of(std::vector<u64>{1})); };
  stage.ask(2, incarnation, Errand::kWindow, bytes_of(std::vector<u64>{1}));
  ready();
  CHECK(stage.prepared(0).contains(2));
  member.comm->hold_newcomers(true);
  CHECK(!stage.prepared(0).contains(2));
  CHECK(ready() == bytes_of(std::vector<u64>{0, 1}));
  CHECK(!stage.prepared(0).contains(2));
  member.comm->note_changed_window();
  member.comm->hold_newcomers(false);
  CHECK(ready() == bytes_of(std::vector<u64>{0, 1}));
  stage.ask(2, incarnation, Errand::kWindow, bytes_of(std::vector<u64>{1}));
  ready();
  CHECK(stage.prepared(0).contains(2));
  member.comm->propose({{}, {1}, {}, 7}, deadline_after_s(kLongS));  // this rank has given its word
  CHECK_ERROR(kInvalidState, {}, member.comm->hold_newcomers(true));
  member.comm->hold_newcomers(false);
}

// Rank 1 has shown that it is prepared for the spare, and told nobody so far: who recovers looks before it decides.
TEST(a_recovery_takes_in_whom_the_others_are_prepared_for_by_now) {
  MemberCase member;
  Stage& stage = member.stage;
  const Listener newcomer;
  const u64 incarnation = member.come(2, newcomer);
  stage.ask(2, incarnation, Errand::kWindow, bytes_of(std::vector<u64>{1}));
  stage.ask(2, incarnation, Errand::kReady, bytes_of(std::vector<u64>{1}));
  CHECK(member.comm->prepared_ranks() == std::vector<int>{2});
  SlotCell cell;
  cell.membership.prepared = RankSet::of({2});
  stage.page->slots().show(1, cell);
  try {
    member.comm->recover({}, 1, std::vector<int>{2}, deadline_after_s(kLongS), {});
  } catch (const Error&) {  // nobody comes to the meeting
  }
  const Decision decided = PageLedger(stage.page).find(2);
  CHECK(decided.record && decided.record->active == RankSet::of({0, 1, 2}));
}

// Whoever drives the machine finds it, and the next call says so.
TEST(an_eviction_that_a_wish_finds_is_told) {
  MemberCase member;
  MembershipRecord record;
  record.epoch = record.era = 2;
  record.active = RankSet::of({1});
  member.stage.commit(record);
  try {
    member.comm->propose({{}, {1}, {}, 7}, deadline_after_s(kLongS));
  } catch (const Error& error) {  // the thread of the rank was faster
    CHECK(error.code == ErrorCode::kEvicted);
  }
  CHECK_ERROR(kEvicted, {0}, member.comm->boundary(deadline_after_s(kLongS), {}));
}

// Rank 1 never acknowledges: at the deadline nothing has happened, and nothing may happen later.
TEST(a_proposal_is_withdrawn_at_the_deadline) {
  MemberCase member;
  member.comm->propose({{}, {1}, {}, 7}, deadline_after_s(0.05));
  const WantedChange told = member.comm->await_change(deadline_after_s(kLongS), {});
  CHECK(told.state == WantedChange::State::kWithdrawn);
  CHECK(member.stage.page->words().read(2).state == RegisterState::kOpen);
  CHECK(member.stage.page->words().read(2).version > 0);
  member.comm->propose({{}, {1}, {}, 8}, deadline_after_s(kLongS));  // the next one may come
  CHECK(member.stage.page->words().read(2).state == RegisterState::kProposed);
}

#if defined(WEFT_FAIL_POINTS)
namespace {
std::function<void()> at_the_wish;         // in the thread that is about to want the change again
std::function<void()> behind_the_renewal;  // in the thread that recovers, before it enters the epoch
using Hook = std::function<void()>;
}  // namespace
void weft::fail_point(const char* name) {
  if (at_the_wish && std::string_view(name) == "wish.again") at_the_wish();
  if (behind_the_renewal && std::string_view(name) == "recover.renewed") behind_the_renewal();
}

// As one that was stopped there: the others have gone on without it, and its own thread hears of that first.
TEST(an_eviction_that_is_heard_inside_recover_is_told) {
  MemberCase member;
  Stage& stage = member.stage;
  stage.set_dead(1);
  behind_the_renewal = [&] {
    MembershipRecord record;
    record.epoch = record.era = 3;
    record.active = RankSet::of({1});
    stage.commit(record);
    AbortReason decided;
    decided.code = AbortCode::kDecided;
    stage.on_abort(decided);
  };
  const std::unique_ptr<Hook, void (*)(Hook*)> end(&behind_the_renewal, [](Hook* hook) { *hook = {}; });
  member.comm->recover({}, 1, deadline_after_s(kLongS), {});
  CHECK_EQ(member.comm->epoch(), u32{2});
  CHECK_ERROR(kEvicted, {0}, member.comm->raise_if_broken());
}

// Who takes it back meanwhile must not be told so before: the proposal that is on its way is withdrawn, too.
TEST(what_is_taken_back_is_not_proposed_again) {
  std::atomic<bool> is_wanted{false}, is_withdrawn{false};
  at_the_wish = [&] {
    is_wanted = true;
    const uint64_t until_ns = deadline_after_s(1);  // it waits for this thread, so nothing comes of it
    while (!is_withdrawn && now_ns() < until_ns) usleep(500);
  };
  const std::unique_ptr<Hook, void (*)(Hook*)> end(&at_the_wish, [](Hook* hook) { *hook = {}; });
  MemberCase member;
  Stage& stage = member.stage;
  member.comm->propose({{}, {1}, {}, 7}, deadline_after_s(kLongS));
  const RegisterWord proposed = stage.page->words().read(2);
  CHECK(proposed.state == RegisterState::kProposed);
  stage.page->words().compare_set(proposed, {.epoch = 2, .version = 2, .writer = 1});  // rank 1 withdraws it
  stage.hear(1, 12, Errand::kBell, 0, {});
  CHECK(comes_true([&] { return is_wanted.load(); }));
  CHECK(member.comm->withdraw_change().state == WantedChange::State::kWithdrawn);
  is_withdrawn = true;
  stage.ask(1, 12, Errand::kContract, {});  // two turns later
  stage.ask(1, 12, Errand::kContract, {});
  CHECK(stage.page->words().read(2).state == RegisterState::kOpen);
}
#endif

// Ranks that came to one boundary after different numbers of calls: the operation behind it breaks on all.
TEST(a_newcomer_that_can_t_begin_tells_all) {
  NewcomerCase joined;
  joined.window.differs = true;
  joined.stage.show_installed({0, 1}, 2);
  joined.stage.commit(taking_in(2, RankSet::of({0, 1, 2}), 2, 13));
  CHECK_ERROR(kInvalidState, {}, joined.comm->boundary(deadline_after_s(kLongS), {}));
  CHECK(joined.stage.was_aborted());
  CHECK(joined.comm->is_aborted());
  CHECK_EQ(joined.comm->epoch(), u32{2});
  CHECK(!joined.comm->is_solo());
}

// Signals in the memory of a window carry 16 bits of the epoch.
TEST(memory_serves_so_many_changes) {
  NewcomerCase joined(2, {{0, 11}, {1, 12}}, kMostEpochsOfEra - 1);
  joined.stage.show_installed({0, 1}, kMostEpochsOfEra);
  joined.stage.commit(taking_in(kMostEpochsOfEra, RankSet::of({0, 1, 2}), 2, 13));
  CHECK(joined.comm->boundary(deadline_after_s(kLongS), {}).has_value());
  CHECK_ERROR(kInvalidState, {}, joined.comm->propose({{}, {1}, {}, 7}, deadline_after_s(kLongS)));
}

// Of a change that this rank had no part in: rank 2 was a newcomer beside it once.
TEST(a_member_is_no_newcomer_any_more) {
  NewcomerCase joined(3, {{0, 11}, {1, 12}, {2, 21}});
  CHECK(joined.comm->joining_ranks() == std::vector<int>{2});
  joined.stage.show_installed({0, 1, 2}, 3);
  joined.stage.commit(taking_in(2, RankSet::of({0, 1, 2}), 2, 21));
  joined.stage.commit(taking_in(3, RankSet::of({0, 1, 2, 3}), 3, 13));
  const auto done = joined.comm->boundary(deadline_after_s(kLongS), {});
  CHECK(done && done->epoch == 3);
  CHECK(joined.comm->joining_ranks().empty());
}

// A member has made its memory anew between the offer and the question: it is offered again.
TEST(ready_offers_again_what_a_member_has_lost) {
  NewcomerCase joined;
  int num_offers = 0, num_questions = 0;
  joined.stage.on_send = [&](const Sent& message) {
    if (message.errand == Errand::kWindow) {
      ++num_offers;
      joined.answer(message, {});
    } else if (message.errand == Errand::kReady) {
      joined.answer(message, ++num_questions == 1 ? std::vector<u64>{1} : std::vector<u64>{});
    }
  };
  joined.comm->ready(deadline_after_s(kLongS), {});
  CHECK_EQ(num_offers, 2);
  CHECK_EQ(num_questions, 4);
  CHECK(joined.window.has_taken_in(0) && joined.window.has_taken_in(1));
  joined.stage.on_send = [&](const Sent& message) {
    if (message.errand == Errand::kReady) joined.answer(message, {9});
  };
  CHECK_ERROR(kInvalidState, {}, joined.comm->ready(deadline_after_s(kLongS), {}));  // a window that it has not
}

// A window that a member has closed is of no use to anybody, and no reason to fail.
TEST(ready_leaves_out_what_a_member_has_closed) {
  NewcomerCase joined;
  int num_questions = 0;
  joined.stage.on_send = [&](const Sent& message) {
    if (message.errand == Errand::kWindow) {
      const u64 code = message.slot == 0 ? static_cast<u64>(ErrorCode::kInvalidState) : 0;
      joined.answer(message, {'?'}, code);
    } else if (message.errand == Errand::kReady) {
      joined.answer(message, ++num_questions == 2 ? std::vector<u64>{1} : std::vector<u64>{});
    }
  };
  joined.comm->ready(deadline_after_s(kLongS), {});
  CHECK(!joined.window.has_taken_in(0) && joined.window.has_taken_in(1));
  CHECK_ERROR(kInvalidState, {0}, joined.comm->share_window(joined.window, deadline_after_s(kLongS), {}));  // a new one
}

// Members work on: who was taken in does not wait for the answers of a stopped one any more.
TEST(ready_ends_when_the_rank_is_taken_in) {
  NewcomerCase joined;
  bool is_committed = false;
  joined.stage.on_send = [&](const Sent& message) {
    if (message.errand != Errand::kReady || std::exchange(is_committed, true)) return;
    joined.stage.show_installed({0, 1}, 2);
    joined.stage.commit(taking_in(2, RankSet::of({0, 1, 2}), 2, 13));
    joined.stage.hear(0, 11, Errand::kBell, 0, {});
  };
  joined.comm->ready(deadline_after_s(kLongS), {});
  CHECK(joined.comm->boundary(deadline_after_s(kLongS), {}).has_value());
}

// The deadline of a spare's boundary() ends the call, whatever it does meanwhile; the next one goes on.
TEST(a_deadline_while_a_spare_prepares) {
  NewcomerCase joined;
  bool is_answered = false;
  std::set<int> asked;
  joined.stage.on_send = [&](const Sent& message) {
    if ((message.errand != Errand::kWindow && message.errand != Errand::kReady) || !is_answered) return;
    joined.answer(message, {});
    if (message.errand == Errand::kReady) asked.insert(message.slot);
  };
  CHECK(!joined.comm->boundary(deadline_after_s(0.01), {}, true));
  is_answered = true;
  CHECK(comes_true([&] {
    CHECK(!joined.comm->boundary(deadline_after_s(0.01), {}, true));
    return asked.size() == 2;
  }));
}

// Rank 1 came at the same time and is a member by now, which this rank has not been told of; it calls this rank by its door.
TEST(ready_waits_for_a_member_that_is_not_connected) {
  NewcomerCase joined(2, {{0, 11}});
  Stage& stage = joined.stage;
  const Listener other;
  const u64 incarnation = incarnation_of(other.endpoint());
  std::set<int> asked;
  stage.on_send = [&](const Sent& message) {
    if (message.errand == Errand::kReady) asked.insert(message.slot);
    const u64 sender = message.slot == 1 ? incarnation : 11;
    if (message.errand != Errand::kReady && message.errand != Errand::kWindow) return;
    stage.hear(message.slot, sender, Errand::kAnswer, message.number, bytes_of(std::vector<u64>{0}));
  };
  stage.page->slots().claim(1, other.endpoint(), 0);
  stage.commit(taking_in(2, RankSet::of({0, 1}), 1, incarnation));
  CHECK_ERROR(kPeerTimeout, {1}, joined.comm->ready(deadline_after_s(0.05), {}));
  CHECK(asked.empty());
  {
    const std::lock_guard lock(stage.mutex);
    stage.peers[1] = incarnation;
  }
  joined.comm->ready(deadline_after_s(kLongS), {});
  CHECK(asked == std::set<int>({0, 1}));
}

// Rank 3 is taken in while rank 0 is asked: it has answered as a newcomer, if at all.
TEST(ready_asks_again_when_there_is_another_member) {
  NewcomerCase joined(2, {{0, 11}, {1, 12}, {3, 14}});
  Stage& stage = joined.stage;
  int num_asked = 0;
  stage.on_send = [&](const Sent& message) {
    if (message.errand == Errand::kWindow) joined.answer(message, {});
    if (message.errand != Errand::kReady) return;
    if (message.slot == 3) ++num_asked;
    if (message.slot == 3 && num_asked == 1) stage.commit(taking_in(2, RankSet::of({0, 1, 3}), 3, 14));
    joined.answer(message, message.slot == 3 && num_asked < 3 ? std::vector<u64>{1} : std::vector<u64>{});
  };
  joined.comm->ready(deadline_after_s(kLongS), {});
  CHECK_EQ(num_asked, 3);
}

// It has ended, or closed, before this rank was connected to it.
TEST(ready_does_not_wait_for_a_member_that_has_ended) {
  NewcomerCase joined(2, {{0, 11}});
  Stage& stage = joined.stage;
  stage.on_send = [&](const Sent& message) {
    if (message.errand == Errand::kReady) joined.answer(message, {});
  };
  u64 incarnation = 0;
  {
    const Listener other;
    incarnation = incarnation_of(other.endpoint());
    stage.page->slots().claim(1, other.endpoint(), 0);
  }
  stage.commit(taking_in(2, RankSet::of({0, 1}), 1, incarnation));
  joined.comm->ready(deadline_after_s(kLongS), {});
}

// A stopped newcomer beside it holds up nobody.
TEST(ready_waits_for_members_alone) {
  NewcomerCase joined(2, {{0, 11}, {1, 12}, {3, 31}});
  joined.stage.on_send = [&](const Sent& message) {
    if (message.slot != 3 && message.errand == Errand::kReady) joined.answer(message, {});
  };
  joined.comm->ready(deadline_after_s(kLongS), {});
}

// A member that was stopped: the others go on without it, and awake again it may close its windows before it answers.
TEST(who_was_left_out_holds_up_no_newcomer) {
  for (const bool answers : {false, true}) {
    for (const Errand errand : {Errand::kWindow, Errand::kReady, Errand::kContract}) {
      NewcomerCase joined;
      joined.stage.on_send = [&](const Sent& message) {
        if (message.slot == 1 || message.errand < errand) return joined.answer(message, {});
        if (message.errand != errand) return;
        MembershipRecord record;
        record.epoch = record.era = 2;
        record.active = RankSet::of({1});
        joined.stage.commit(record);
        if (answers) joined.answer(message, {'?'}, static_cast<u64>(ErrorCode::kInvalidState));
      };
      const u64 soon_ns = deadline_after_s(kLongS);
      if (errand == Errand::kContract) CHECK_EQ(joined.comm->ask_contract(soon_ns, {}), "");
      if (errand == Errand::kContract) CHECK_ERROR(kPeerLost, {}, joined.comm->ask_contract(soon_ns, {}, {0}));
      if (errand != Errand::kContract) joined.comm->share_window(joined.window, soon_ns, {});
      if (errand != Errand::kContract) joined.comm->ready(soon_ns, {});
      CHECK_EQ(joined.window.has_taken_in(1), errand != Errand::kContract);
    }
  }
}

// A record has left rank 1 out, and another newcomer has its slot by now.
MembershipRecord without_rank_1() {
  MembershipRecord record;
  record.epoch = record.era = 2;
  record.active = RankSet::of({0});
  return record;
}

TEST(another_newcomer_in_the_slot_of_a_member_is_asked_as_one) {
  NewcomerCase joined(2, {{0, 11}, {1, 31}});
  std::optional<Sent> asked;
  int num_polls = 0;
  joined.stage.on_send = [&](const Sent& message) {
    if (message.errand != Errand::kWindow) return;
    if (message.slot == 0) return joined.answer(message, {});
    joined.stage.commit(without_rank_1());
    asked = message;
  };
  const Poll answer_later = [&] {
    if (!asked || ++num_polls != 2) return;
    joined.stage.hear(1, 31, Errand::kAnswer, asked->number, bytes_of(std::vector<u64>{0}));
  };
  joined.comm->share_window(joined.window, deadline_after_s(kLongS), answer_later);
  CHECK(joined.window.has_taken_in(1));
  CHECK(joined.comm->joining_ranks() == std::vector<int>{1});
}

TEST(another_newcomer_in_the_slot_of_a_member_is_answered_as_one) {
  NewcomerCase joined(2, {{0, 11}, {1, 31}});
  joined.stage.commit(without_rank_1());
  CHECK(joined.stage.ask(1, 31, Errand::kWindow, bytes_of(std::vector<u64>{1})) == bytes_of(std::vector<u64>{0}));
  CHECK(joined.window.has_taken_in(1));
}

// Rank 1 was taken in meanwhile, and had ended before this rank came to it.
TEST(a_group_of_which_one_was_never_met_is_gone) {
  NewcomerCase joined(2, {{0, 11}});
  Stage& stage = joined.stage;
  u64 incarnation = 0;
  {
    const Listener other;
    incarnation = incarnation_of(other.endpoint());
    stage.page->slots().claim(1, other.endpoint(), 0);
  }
  stage.commit(taking_in(2, RankSet::of({0, 1}), 1, incarnation));
  stage.set_dead(0);
  CHECK_ERROR(kPeerLost, {}, joined.comm->boundary(deadline_after_s(kLongS), {}));
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
