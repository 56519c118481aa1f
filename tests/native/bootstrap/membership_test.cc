// check: allow-in-file file-size: one machine, its register and its cases
// Guards against two decisions for one epoch, decisions that change, records that are believed though they are damaged or
// another group's, against a rank that was left behind and does not notice, and against wishes that are taken for orders.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "base/status.h"
#include "bootstrap/membership.h"
#include "bootstrap/membership_record.h"
#include "bootstrap/rank_set.h"
#include "bootstrap/register.h"
#include "check.h"
#include "memory/shared_memory.h"

using namespace weft;        // NOLINT(google-build-using-namespace)
using namespace weft::test;  // NOLINT(google-build-using-namespace)

namespace {

constexpr std::array<uint8_t, 16> kGroup{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

template <class Statement>
void check_code(ErrorCode code, const Statement& statement, int line) {
  try {
    statement();
    report_failure(__FILE__, line, "nothing thrown");
  } catch (const Error& error) {
    if (error.code != code) report_failure(__FILE__, line, error.text);
  }
}
#define CHECK_CODE(code, statement) check_code(ErrorCode::code, [&] { statement; }, __LINE__)

RegisterWord word(uint32_t epoch, RegisterState state, uint16_t version, uint16_t writer) {
  return {epoch, state, version, writer, state == RegisterState::kProposed};
}

RegisterWord committed(RegisterWord proposal) {
  proposal.state = RegisterState::kCommitted;
  return proposal;
}

// Everybody who takes part in epochs 1 to `num_epochs`, each with a record of its own; how many of its records won.
int decide(Register& decider, uint16_t me, uint32_t num_epochs, std::vector<RegisterWord>& decided) {
  int num_won = 0;
  for (uint32_t epoch = 1; epoch <= num_epochs; ++epoch) {
    RegisterWord now = decider.read(epoch);
    while (now.state != RegisterState::kCommitted) {
      const auto version = static_cast<uint16_t>(now.version + 1);
      const RegisterWord mine = word(epoch, RegisterState::kCommitted, version, me);
      now = decider.compare_set(now, mine);
      num_won += now == mine ? 1 : 0;
    }
    decided.push_back(now);
  }
  return num_won;
}

MembershipRecord good_record() {
  MembershipRecord record;
  record.group = kGroup;
  record.epoch = 7;
  record.era = 7;
  record.active = RankSet::of({0, 2, 1023});
  record.standby = RankSet::of({64});
  record.num_new = 2;
  record.new_members[0] = {11, 2, 0};
  record.new_members[1] = {12, 64, 0};
  seal_record(record);
  return record;
}

// A record that says something else, sealed again, must be refused.
template <class Change>
void check_refused(const Change& change, int line) {
  MembershipRecord record = good_record();
  change(record);
  seal_record(record);
  if (record_problem(record, kGroup, 7).empty()) report_failure(__FILE__, line, "believed");
}
#define CHECK_REFUSED(...) check_refused([](MembershipRecord& record) { __VA_ARGS__; }, __LINE__)

}  // namespace

TEST(rank_sets_are_sets) {
  std::mt19937 random(1);
  RankSet set;
  std::set<int> expected;
  for (int turn = 0; turn < 4000; ++turn) {
    const int rank = static_cast<int>(random() % kMaxControlRanks);
    if (random() % 3 != 0) {
      set.add(rank);
      expected.insert(rank);
    } else {
      set.remove(rank);
      expected.erase(rank);
    }
    CHECK_EQ(set.contains(rank), expected.contains(rank));
  }
  CHECK(set.ranks() == std::vector<int>(expected.begin(), expected.end()));
  CHECK_EQ(set.count(), static_cast<int>(expected.size()));
  CHECK(RankSet::of(set.ranks()) == set);
  const RankSet evens = [] {
    RankSet even;
    for (int rank = 0; rank < kMaxControlRanks; rank += 2) even.add(rank);
    return even;
  }();
  CHECK_EQ((set & evens).count() + (set - evens).count(), set.count());
  CHECK_EQ((set | evens).count(), evens.count() + (set - evens).count());
  CHECK((set - set).empty());
}

TEST(rank_sets_have_an_end) {
  RankSet set;
  for (const int rank : {-1, -64, 1024, 1 << 30}) {
    set.add(rank);
    CHECK(!set.contains(rank));
    set.remove(rank);
  }
  CHECK(set.empty());
  CHECK_EQ(set.next(0), -1);
  set = RankSet::first(1024);
  CHECK_EQ(set.count(), 1024);
  CHECK_EQ(set.next(1023), 1023);
  CHECK_EQ(set.next(1024), -1);
  CHECK_EQ(set.next(-5), 0);
  set = RankSet::of({63, 64, 127, 1023});
  CHECK_EQ(set.next(63), 63);
  CHECK_EQ(set.next(65), 127);
  CHECK_EQ(set.next(128), 1023);
}

TEST(words_keep_all_their_fields) {
  std::mt19937_64 random(2);
  for (int turn = 0; turn < 10000; ++turn) {
    const uint64_t bits = random();
    if ((bits >> 30 & 3) == 3) continue;  // no such state
    CHECK_EQ(RegisterWord::unpack(bits).pack(), bits);
  }
  const RegisterWord last = word(~uint32_t{0}, RegisterState::kCommitted, kMaxRegisterVersion, 1023);
  CHECK(RegisterWord::unpack(last.pack()) == last);
}

TEST(a_word_goes_only_where_it_may) {
  using enum RegisterState;
  CHECK(may_become(word(5, kOpen, 0, 0), word(5, kProposed, 1, 3)));
  CHECK(may_become(word(5, kOpen, 0, 0), word(5, kCommitted, 1, 3)));  // a recovery
  CHECK(may_become(word(5, kProposed, 1, 3), committed(word(5, kProposed, 1, 3))));
  CHECK(!may_become(word(5, kProposed, 1, 3), word(5, kCommitted, 1, 3)));            // its record of a recovery
  CHECK(!may_become(word(5, kProposed, 1, 3), committed(word(5, kProposed, 2, 3))));  // nobody can have acknowledged it
  CHECK(!may_become(word(5, kOpen, 0, 0), committed(word(5, kProposed, 1, 3))));
  CHECK(may_become(word(5, kProposed, 1, 3), word(5, kOpen, 2, 4)));        // withdrawn by another rank
  CHECK(may_become(word(5, kProposed, 1, 3), word(5, kCommitted, 2, 4)));   // overtaken by a recovery
  CHECK(!may_become(word(5, kProposed, 1, 3), word(5, kCommitted, 1, 4)));  // a record that nobody has acknowledged
  CHECK(!may_become(word(5, kProposed, 1, 3), word(5, kOpen, 1, 3)));
  CHECK(!may_become(word(5, kProposed, 2, 3), word(5, kOpen, 1, 3)));
  CHECK(!may_become(word(5, kOpen, 1, 0), word(5, kOpen, 2, 0)));
  CHECK(!may_become(word(5, kOpen, 1, 0), word(6, kProposed, 2, 0)));
  CHECK(!may_become(word(0, kOpen, 0, 0), word(0, kProposed, 1, 0)));
  for (const RegisterState state : {kOpen, kProposed, kCommitted}) {
    CHECK(!may_become(word(5, kCommitted, 1, 3), word(5, state, 2, 3)));
  }
}

TEST(a_register_changes_by_compare_and_set_only) {
  using enum RegisterState;
  const SharedMemory page = SharedMemory::create(PageRegister::kBytes);
  PageRegister mine({page.data(), PageRegister::kBytes});
  PageRegister other({page.data(), PageRegister::kBytes});
  const RegisterWord open = word(5, kOpen, 0, 0);
  const RegisterWord proposed = word(5, kProposed, 1, 3);
  const RegisterWord decided = committed(proposed);
  CHECK(mine.read(5) == open);
  CHECK(mine.compare_set(open, proposed) == proposed);
  CHECK(other.read(5) == proposed);
  CHECK(other.compare_set(open, word(5, kProposed, 1, 4)) == proposed);  // too late
  CHECK(other.compare_set(proposed, decided) == decided);
  CHECK(mine.compare_set(proposed, word(5, kOpen, 2, 3)) == decided);  // withdrawn too late
  CHECK_CODE(kInvalidArgument, mine.compare_set(decided, word(5, kOpen, 2, 3)));
  CHECK(mine.read(5) == decided);
  CHECK(mine.read(6) == word(6, kOpen, 0, 0));
  CHECK_CODE(kInvalidArgument, PageRegister({page.data(), PageRegister::kBytes - 1}));
  CHECK_CODE(kInvalidArgument, PageRegister({page.data() + 8, PageRegister::kBytes}));
}

TEST(a_rank_that_was_left_behind_is_told) {
  const SharedMemory page = SharedMemory::create(PageRegister::kBytes);
  PageRegister decider({page.data(), PageRegister::kBytes});
  std::vector<RegisterWord> decided;
  CHECK_EQ(decide(decider, 3, 200, decided), 200);
  for (uint32_t epoch = 137; epoch <= 200; ++epoch) CHECK(decider.read(epoch) == decided[epoch - 1]);
  CHECK_CODE(kInvalidState, decider.read(136));
  CHECK_CODE(kInvalidState,
             decider.compare_set(word(136, RegisterState::kOpen, 0, 0), word(136, RegisterState::kCommitted, 1, 4)));
  CHECK(decider.read(264) == word(264, RegisterState::kOpen, 0, 0));
  // The last epoch that there is.
  const RegisterWord last = word(~uint32_t{0}, RegisterState::kCommitted, 1, 4);
  CHECK(decider.compare_set(word(~uint32_t{0}, RegisterState::kOpen, 0, 0), last) == last);
  CHECK(decider.read(~uint32_t{0}) == last);
}

TEST(threads_decide_each_epoch_once) {
  constexpr int kThreads = 4;
  constexpr uint32_t kEpochs = 60;  // fewer than are kept, so that nobody is left behind
  for (int round = 0; round < 50; ++round) {
    const SharedMemory page = SharedMemory::create(PageRegister::kBytes);
    std::vector<std::vector<RegisterWord>> decided(kThreads);
    std::vector<int> num_won(kThreads);
    std::vector<std::thread> threads;
    std::atomic<int> num_ready{0};
    for (int idx = 0; idx < kThreads; ++idx) {
      threads.emplace_back([&, idx] {
        PageRegister decider({page.data(), PageRegister::kBytes});
        ++num_ready;
        while (num_ready < kThreads) std::this_thread::yield();
        num_won[static_cast<size_t>(idx)] =
            decide(decider, static_cast<uint16_t>(idx), kEpochs, decided[static_cast<size_t>(idx)]);
      });
    }
    for (std::thread& thread : threads) thread.join();
    int all_won = 0;
    for (const int won : num_won) all_won += won;
    CHECK_EQ(all_won, static_cast<int>(kEpochs));
    for (const auto& each : decided) CHECK(each == decided[0]);
  }
}

TEST(processes_decide_each_epoch_once_though_some_are_killed) {
  constexpr int kProcesses = 4;
  constexpr uint32_t kEpochs = 60;
  const SharedMemory page = SharedMemory::create(PageRegister::kBytes);
  std::vector<pid_t> pids;
  for (int idx = 0; idx < kProcesses; ++idx) {
    const pid_t pid = fork();
    if (pid == 0) {
      PageRegister decider({page.data(), PageRegister::kBytes});
      std::vector<RegisterWord> decided;
      decide(decider, static_cast<uint16_t>(idx), idx % 2 == 0 ? 30 : kEpochs, decided);
      if (idx % 2 == 0) raise(SIGKILL);
      _exit(0);
    }
    pids.push_back(pid);
  }
  for (const pid_t pid : pids) waitpid(pid, nullptr, 0);
  PageRegister decider({page.data(), PageRegister::kBytes});
  std::vector<RegisterWord> decided;
  CHECK_EQ(decide(decider, 9, kEpochs, decided), 0);  // the dead have hindered nobody, all is decided
}

TEST(records_are_checked) {
  const MembershipRecord good = good_record();
  CHECK_EQ(record_problem(good, kGroup, 7), std::string());
  for (size_t at = 0; at < kRecordBytes; ++at) {
    MembershipRecord bad = good;
    reinterpret_cast<uint8_t*>(&bad)[at] ^= static_cast<uint8_t>(1u << (at % 8));
    CHECK(!record_problem(bad, kGroup, 7).empty());
  }
  CHECK(!record_problem(good, kGroup, 8).empty());
  CHECK(!record_problem(good, {}, 7).empty());
  CHECK(!record_problem(MembershipRecord(), kGroup, 7).empty());
}

TEST(records_that_make_no_sense_are_refused) {
  MembershipRecord planned = good_record();
  planned.kind = ChangeKind::kPlanned;
  planned.era = 3;
  seal_record(planned);
  CHECK_EQ(record_problem(planned, kGroup, 7), std::string());
  CHECK_REFUSED(record.kind = ChangeKind::kPlanned);  // which keeps its pages, and so its era
  CHECK_REFUSED(record.era = 6);                      // a recovery has fresh ones
  CHECK_REFUSED(record.era = 8);
  CHECK_REFUSED(record.kind = static_cast<ChangeKind>(3));
  CHECK_REFUSED(record.magic ^= 1);
  CHECK_REFUSED(record.version = 2);
  CHECK_REFUSED(record.active = RankSet());
  CHECK_REFUSED(record.standby.add(0));
  CHECK_REFUSED(record.num_new = 237);
  CHECK_REFUSED(record.new_members[0].nonce = 0);
  CHECK_REFUSED(record.new_members[0].slot = 1);     // in no set
  CHECK_REFUSED(record.new_members[1].slot = 2);     // twice
  CHECK_REFUSED(record.new_members[1].slot = 1024);  // no rank
}

namespace {

using Event = MembershipEvent;
using Failure = MembershipFailure;

// One rank of four and a register; what the machine wants is done at once until it wants something else than the register.
struct Caller {
  explicit Caller(int rank, PageRegister& shared, std::map<uint32_t, MembershipRecord>& decided,
                  uint32_t first_epoch = 1)
      : membership(rank, {11, 12, 13, 14}, kGroup, first_epoch), words(shared), records(decided) {}
  Caller(Membership machine, PageRegister& shared, std::map<uint32_t, MembershipRecord>& decided)
      : membership(std::move(machine)), words(shared), records(decided) {}

  // The last action, kMeet, kEnter or kRaise; those told are kept.
  MembershipAction run(const Event& event) {
    MembershipAction last;
    std::vector<MembershipAction> wanted;
    const auto step = [&](const Event& next) {
      for (const MembershipAction& action : membership.step(next)) wanted.push_back(action);
    };
    step(event);
    while (!wanted.empty()) {
      last = wanted.front();
      wanted.erase(wanted.begin());
      if (last.kind == MembershipAction::Kind::kTell) told = told | last.ranks;
      const bool decides = last.kind == MembershipAction::Kind::kDecide || last.kind == MembershipAction::Kind::kMove;
      kinds.push_back(last.kind);
      if (!decides && last.kind != MembershipAction::Kind::kRead) continue;
      Event answer{.kind = Event::Kind::kWord};
      try {
        answer.word = decides ? words.compare_set(last.expected, last.desired) : words.read(last.epoch);
        const bool has_draft = last.kind == MembershipAction::Kind::kDecide;
        if (has_draft && answer.word == last.desired) records[last.epoch] = membership.draft();
        if (answer.word.state != RegisterState::kOpen && !has_damage) answer.record = &records[answer.word.epoch];
      } catch (const Error&) {
        answer.kind = Event::Kind::kForgotten;
        answer.epoch = last.epoch;
      }
      step(answer);
    }
    return last;
  }
  MembershipAction recover(const RecoverWish& wish = {}) { return run({.kind = Event::Kind::kRecover, .wish = wish}); }

  // Whether the last event led to such an action.
  bool did(MembershipAction::Kind kind) const { return std::find(kinds.begin(), kinds.end(), kind) != kinds.end(); }
  bool boundary(MembershipAction::Kind kind) {
    kinds.clear();
    run({.kind = Event::Kind::kBoundary});
    return did(kind);
  }

  Membership membership;
  PageRegister& words;
  std::map<uint32_t, MembershipRecord>& records;
  std::vector<MembershipAction::Kind> kinds;
  RankSet told;
  bool has_damage = false;
};

struct Group {
  explicit Group(uint32_t first_epoch = 1) {
    for (int rank = 0; rank < 4; ++rank) callers.emplace_back(rank, words, records, first_epoch);
  }
  SharedMemory page = SharedMemory::create(PageRegister::kBytes);
  PageRegister words{{page.data(), PageRegister::kBytes}};
  std::map<uint32_t, MembershipRecord> records;
  std::vector<Caller> callers;
};

#define CHECK_RAISES(expected, named, action)             \
  do {                                                    \
    const MembershipAction raised = (action);             \
    CHECK(raised.kind == MembershipAction::Kind::kRaise); \
    CHECK(raised.failure == Failure::expected);           \
    CHECK(raised.ranks == RankSet::of(named));            \
  } while (false)
using Ranks = std::vector<int>;

}  // namespace

TEST(the_first_decision_wins_whatever_others_wish) {
  Group group;
  const MembershipAction first = group.callers[0].recover({.evict = RankSet::of({3})});
  CHECK(first.kind == MembershipAction::Kind::kMeet);
  CHECK(first.ranks == RankSet::first(3));
  CHECK(group.callers[0].told == RankSet::of({3}));
  const MembershipAction second = group.callers[1].recover({.evict = RankSet::of({0})});
  CHECK(second.kind == MembershipAction::Kind::kMeet);
  CHECK(second.ranks == RankSet::first(3));
  CHECK_RAISES(kEvicted, Ranks({0, 1, 2}), group.callers[3].recover());
  CHECK_RAISES(kEvicted, Ranks({0, 1, 2}), group.callers[3].recover());
  CHECK(group.callers[3].membership.is_evicted());
}

TEST(an_exact_set_is_decided_or_refused) {
  Group group;
  CHECK(group.callers[0].recover({.exactly = RankSet::of({0, 1})}).kind == MembershipAction::Kind::kMeet);
  CHECK_RAISES(kOtherSet, Ranks({0, 1}), group.callers[1].recover({.exactly = RankSet::of({1, 2})}));
  CHECK(group.callers[1].recover({.exactly = RankSet::of({0, 1})}).kind == MembershipAction::Kind::kMeet);
  CHECK_RAISES(kEvicted, Ranks({0, 1}), group.callers[2].recover({.exactly = RankSet::of({2, 3})}));
}

TEST(a_death_in_a_meeting_costs_an_epoch) {
  Group group;
  Caller& caller = group.callers[0];
  CHECK_EQ(caller.recover().epoch, 2u);
  CHECK(caller.run({.kind = Event::Kind::kHere, .epoch = 2, .ranks = RankSet::of({1})}).kind !=
        MembershipAction::Kind::kRenew);
  const MembershipAction again = caller.run({.kind = Event::Kind::kGone, .ranks = RankSet::of({2})});
  CHECK(again.kind == MembershipAction::Kind::kMeet);
  CHECK_EQ(again.epoch, 3u);
  CHECK(again.ranks == RankSet::of({0, 1, 3}));
  CHECK_RAISES(kPeersLate, Ranks({1, 3}), caller.run({.kind = Event::Kind::kDeadline}));
  CHECK_RAISES(kPeersLost, Ranks({2}), caller.recover({.exactly = RankSet::of({0, 2})}));
  CHECK_EQ(caller.recover({.evict = RankSet::of({1, 3})}).epoch, 4u);
  CHECK(caller.run({.kind = Event::Kind::kHere, .epoch = 4, .ranks = RankSet::of({0})}).kind ==
        MembershipAction::Kind::kRenew);
  CHECK(caller.run({.kind = Event::Kind::kRenewed, .epoch = 4}).kind == MembershipAction::Kind::kEnter);
  CHECK(caller.membership.active() == RankSet::of({0}));
  CHECK(caller.membership.evicted() == RankSet::of({1, 2, 3}));
  caller.run({.kind = Event::Kind::kProven, .ranks = RankSet::of({2})});
  CHECK(caller.membership.safe_to_delete() == RankSet::of({2}));
  CHECK(caller.membership.evicted() == RankSet::of({1, 3}));
}

TEST(too_few_ranks_decide_nothing) {
  Group group;
  Caller& caller = group.callers[2];
  caller.run({.kind = Event::Kind::kGone, .ranks = RankSet::of({0, 1})});
  CHECK_RAISES(kTooFew, Ranks({2, 3}), caller.recover({.min_ranks = 3}));
  CHECK(group.words.read(2).state == RegisterState::kOpen);
  CHECK(caller.recover({.min_ranks = 2}).kind == MembershipAction::Kind::kMeet);
}

TEST(a_recovery_overtakes_a_proposal) {
  Group group;
  const RegisterWord proposed = word(2, RegisterState::kProposed, 7, 3);
  CHECK(group.words.compare_set(word(2, RegisterState::kOpen, 0, 0), proposed) == proposed);
  CHECK(group.callers[0].recover().kind == MembershipAction::Kind::kMeet);
  CHECK(group.words.read(2) == word(2, RegisterState::kCommitted, 8, 0));
}

TEST(the_last_epoch_is_entered_and_is_the_last) {
  Group group(~uint32_t{0} - 1);
  for (const int rank : {0, 1}) {
    Caller& caller = group.callers[static_cast<size_t>(rank)];
    CHECK_EQ(caller.recover({.evict = RankSet::of({2, 3})}).epoch, ~uint32_t{0});
    CHECK(caller.run({.kind = Event::Kind::kHere, .epoch = ~uint32_t{0}, .ranks = RankSet::first(2)}).kind ==
          MembershipAction::Kind::kRenew);
    CHECK(caller.run({.kind = Event::Kind::kRenewed, .epoch = ~uint32_t{0}}).kind == MembershipAction::Kind::kEnter);
    CHECK_RAISES(kLastEpoch, Ranks(), caller.recover());
    CHECK(caller.membership.step({.kind = Event::Kind::kLook}).empty());
  }
}

// What a call that ended without a word was about to enter is not entered by the next one.
TEST(a_meeting_is_joined_once) {
  Group group;
  Caller& caller = group.callers[0];
  CHECK_EQ(caller.recover().epoch, 2u);
  CHECK_EQ(caller.recover().epoch, 3u);
}

TEST(what_can_t_be_decided_or_believed_is_said) {
  Group last(~uint32_t{0});
  CHECK_RAISES(kLastEpoch, Ranks(), last.callers[0].recover());
  Group damaged;
  damaged.callers[0].recover();
  damaged.callers[1].has_damage = true;
  CHECK_RAISES(kDamaged, Ranks(), damaged.callers[1].recover());
  Group silent;
  silent.callers[0].membership.step({.kind = Event::Kind::kRecover});
  CHECK_RAISES(kControlLost, Ranks(), silent.callers[0].run({.kind = Event::Kind::kDeadline}));
}

// Retried recoveries decide an epoch each, and the register forgets those that the late rank never read.
TEST(a_late_rank_that_every_record_names_goes_on) {
  for (const bool calls : {true, false}) {
    Group group;
    for (uint32_t epoch = 2; epoch < 200; ++epoch) CHECK_EQ(group.callers[0].recover().epoch, epoch);
    Caller& late = group.callers[1];
    if (!calls) {
      late.run({.kind = Event::Kind::kLook});
      CHECK_EQ(late.membership.newest(), 199u);
    }
    const MembershipAction meeting = late.recover();
    CHECK(meeting.kind == MembershipAction::Kind::kMeet);
    CHECK_EQ(meeting.epoch, 199u);
    CHECK(meeting.ranks == RankSet::first(4));
    CHECK(!late.membership.is_evicted());
  }
}

TEST(a_late_rank_that_waits_in_a_meeting_goes_on) {
  Group group;
  CHECK_EQ(group.callers[1].recover().epoch, 2u);
  for (uint32_t epoch = 3; epoch < 200; ++epoch) group.callers[0].recover();
  const MembershipAction meeting = group.callers[1].run({.kind = Event::Kind::kForgotten, .epoch = 3});
  CHECK(meeting.kind == MembershipAction::Kind::kMeet);
  CHECK_EQ(meeting.epoch, group.callers[0].membership.newest());
}

TEST(a_late_rank_that_was_left_out_is_told_of_the_epoch) {
  Group group;
  group.callers[0].recover({.evict = RankSet::of({1})});
  for (int turn = 0; turn < 100; ++turn) group.callers[0].recover();
  const MembershipAction raised = group.callers[1].recover();
  CHECK(raised.failure == Failure::kEvicted && raised.ranks == RankSet::of({0, 2, 3}));
  CHECK(raised.epoch > 2 && !group.records[raised.epoch].active.contains(1));
}

TEST(a_late_rank_believes_no_record_that_is_damaged_or_open) {
  Group group;
  for (int turn = 0; turn < 100; ++turn) group.callers[0].recover();
  group.callers[1].has_damage = true;
  CHECK_RAISES(kDamaged, Ranks(), group.callers[1].recover());
  Group open;
  open.callers[1].membership.step({.kind = Event::Kind::kRecover});
  CHECK_RAISES(kDamaged, Ranks(), open.callers[1].run({.kind = Event::Kind::kForgotten, .epoch = 2}));
}

namespace {

// Two members in slots 0 and 1 of three, and a joiner for slot 2, all on one register; what one shows all others see at once.
struct Changing {
  Changing() {
    for (int rank = 0; rank < 2; ++rank) callers.emplace_back(Membership(rank, {11, 12, 0}, kGroup, 1), words, records);
    callers.emplace_back(Membership(2, 13, callers[0].membership.welcome(), kGroup), words, records);
  }
  void show_all() {
    for (Caller& from : callers) {
      const MembershipCell cell = from.membership.cell();
      for (Caller& to : callers) {
        const int rank = from.membership.origin().rank;
        if (&to != &from) to.run({.kind = Event::Kind::kCell, .rank = rank, .cell = &cell});
      }
    }
  }
  void look_all() {
    for (Caller& caller : callers) caller.run({.kind = Event::Kind::kLook});
  }
  void prepare(std::vector<int> ranks) {
    for (const int rank : ranks)
      callers[static_cast<size_t>(rank)].run({.kind = Event::Kind::kPrepared, .rank = 2, .incarnation = 13});
  }
  void propose(const ChangeWish& change) { callers[0].run({.kind = Event::Kind::kPropose, .change = change}); }

  SharedMemory page = SharedMemory::create(PageRegister::kBytes);
  PageRegister words{{page.data(), PageRegister::kBytes}};
  std::map<uint32_t, MembershipRecord> records;
  std::vector<Caller> callers;
};
using Kind = MembershipAction::Kind;
const ChangeWish kTakeIn{.add = RankSet::of({2}), .id = 5};

}  // namespace

TEST(a_joiner_is_taken_in_at_one_boundary) {
  Changing group;
  group.prepare({0, 1});
  group.show_all();
  group.propose(kTakeIn);
  CHECK(group.words.read(2).state == RegisterState::kProposed);
  CHECK_EQ(group.records[2].boundary, uint64_t{2});
  group.look_all();
  group.show_all();
  CHECK(group.words.read(2).state == RegisterState::kCommitted);
  group.look_all();
  CHECK(group.callers[2].membership.is_member());
  CHECK_EQ(group.callers[2].membership.passed(), uint64_t{2});
  for (int rank : {0, 1}) {
    Caller& member = group.callers[static_cast<size_t>(rank)];
    CHECK(member.boundary(Kind::kPass));
    CHECK_EQ(member.membership.epoch(), uint32_t{1});
    CHECK(member.boundary(Kind::kInstall));
    CHECK(member.membership.active() == RankSet::of({0, 1, 2}));
    CHECK_EQ(member.membership.era(), uint32_t{1});  // the pages stay
  }
}

TEST(nobody_is_proposed_before_all_are_prepared) {
  Changing group;
  group.prepare({0});
  group.show_all();
  group.propose(kTakeIn);
  CHECK(group.words.read(2).state == RegisterState::kOpen);
  group.prepare({1});
  group.show_all();
  CHECK(group.words.read(2).state == RegisterState::kProposed);
}

TEST(what_is_there_already_is_not_proposed_again) {
  Changing group;
  group.prepare({0, 1});
  group.show_all();
  group.propose({.add = RankSet::of({1, 2}), .id = 5});  // a recovery has taken rank 1 in meanwhile
  CHECK(group.words.read(2).state == RegisterState::kProposed);
  CHECK(group.records[2].active == RankSet::of({0, 1, 2}));
  CHECK_EQ(group.records[2].num_new, uint32_t{1});
}

TEST(a_map_of_experts_alone_is_a_change) {
  Changing group;
  group.propose({.id = 9, .map_hash = 77});
  CHECK_EQ(group.records[2].map_hash, uint64_t{77});
  CHECK(group.records[2].active == RankSet::of({0, 1}));
  group.look_all();
  group.show_all();
  CHECK(group.words.read(2).state == RegisterState::kCommitted);
  group.look_all();
  for (int rank : {0, 1}) {
    Caller& member = group.callers[static_cast<size_t>(rank)];
    CHECK(member.boundary(Kind::kPass));
    CHECK(member.boundary(Kind::kInstall));
    CHECK(member.membership.active() == RankSet::of({0, 1}));
  }
}

TEST(another_life_in_the_slot_is_not_acknowledged) {
  Changing group;
  group.prepare({0, 1});
  group.show_all();
  group.callers[1].run({.kind = Event::Kind::kPrepared, .rank = 2, .incarnation = 14});
  group.propose(kTakeIn);
  group.look_all();
  group.show_all();
  CHECK(group.words.read(2).state == RegisterState::kProposed);
  CHECK(group.callers[1].boundary(Kind::kPass));
  CHECK(group.callers[1].boundary(Kind::kPass));  // its boundary: what it has not acknowledged is withdrawn
  CHECK(group.words.read(2).state == RegisterState::kOpen);
}

TEST(who_has_given_its_word_waits_until_it_has_waited_long_enough) {
  Changing group;
  group.prepare({0, 1});
  group.show_all();
  group.propose({.add = RankSet::of({2}), .id = 5, .margin = 1});
  CHECK(!group.callers[0].boundary(Kind::kPass));
  CHECK(group.callers[0].membership.waits_at_boundary());
  group.callers[0].kinds.clear();
  group.callers[0].run({.kind = Event::Kind::kPatience});
  CHECK(group.callers[0].did(Kind::kPass));
  CHECK(group.callers[0].did(Kind::kWithdrawn));
  CHECK(group.words.read(2).state == RegisterState::kOpen);
}

TEST(a_proposal_is_taken_back) {
  Changing group;
  group.prepare({0, 1});
  group.show_all();
  group.propose(kTakeIn);
  CHECK(group.words.read(2).state == RegisterState::kProposed);
  group.callers[0].kinds.clear();
  group.callers[0].run({.kind = Event::Kind::kTakeBack});
  CHECK(group.callers[0].did(Kind::kWithdrawn));
  CHECK(group.words.read(2).state == RegisterState::kOpen);
  group.callers[0].kinds.clear();
  group.callers[0].run({.kind = Event::Kind::kTakeBack});  // nothing is wanted
  CHECK(!group.callers[0].did(Kind::kWithdrawn));
}

TEST(what_was_committed_is_not_taken_back) {
  Changing group;
  group.prepare({0, 1});
  group.show_all();
  group.propose(kTakeIn);
  for (const int rank : {1, 2}) group.callers[static_cast<size_t>(rank)].run({.kind = Event::Kind::kLook});
  group.callers[1].run({.kind = Event::Kind::kCell, .rank = 2, .cell = &group.callers[2].membership.cell()});
  group.callers[1].run({.kind = Event::Kind::kCell, .rank = 0, .cell = &group.callers[0].membership.cell()});
  CHECK(group.words.read(2).state == RegisterState::kCommitted);
  group.callers[0].kinds.clear();
  group.callers[0].run({.kind = Event::Kind::kTakeBack});
  CHECK(group.callers[0].did(Kind::kChanged));
  CHECK(!group.callers[0].did(Kind::kWithdrawn));
}

TEST(a_wish_that_waits_is_taken_back_at_once) {
  Changing group;
  group.propose(kTakeIn);  // nobody is prepared
  group.callers[0].kinds.clear();
  group.callers[0].run({.kind = Event::Kind::kTakeBack});
  CHECK(group.callers[0].did(Kind::kWithdrawn));
  group.prepare({0, 1});
  group.show_all();
  CHECK(group.words.read(2).state == RegisterState::kOpen);
}

TEST(who_could_be_taken_in) {
  Changing group;
  const Membership& self = group.callers[0].membership;
  group.prepare({0});
  group.show_all();
  CHECK(self.admissible(RankSet::of({1, 2})).empty());
  group.prepare({1});
  group.show_all();
  CHECK(self.admissible(RankSet::of({1, 2})) == RankSet::of({2}));
  CHECK(self.admissible(RankSet::of({1})).empty());
}

// Rank 0 is left of three, and prepared for the spares 3 and 4. Not connected to each other they would take each other for dead.
TEST(spares_come_in_together_if_they_are_prepared_for_each_other) {
  const auto decided = [](const RankSet& of_3, const RankSet& of_4) {
    SharedMemory page = SharedMemory::create(PageRegister::kBytes);
    PageRegister words{{page.data(), PageRegister::kBytes}};
    std::map<uint32_t, MembershipRecord> records;
    Caller caller(Membership(0, {11, 12, 13, 0, 0}, kGroup, 1), words, records);
    for (const int spare : {3, 4}) {
      const MembershipCell cell{.prepared = spare == 3 ? of_3 : of_4};
      const auto incarnation = static_cast<uint64_t>(11 + spare);
      caller.run({.kind = Event::Kind::kPrepared, .rank = spare, .incarnation = incarnation});
      caller.run({.kind = Event::Kind::kCell, .rank = spare, .cell = &cell});
    }
    caller.run({.kind = Event::Kind::kGone, .ranks = RankSet::of({1, 2})});
    caller.recover({.spares = RankSet::of({3, 4}), .takes_all_spares = true});
    return records[2].active;
  };
  CHECK(decided(RankSet::of({3, 4}), RankSet::of({3, 4})) == RankSet::of({0, 3, 4}));
  CHECK(decided(RankSet::of({3, 4}), RankSet::of({4})) == RankSet::of({0, 3}));
  CHECK(decided(RankSet::of({3}), RankSet::of({3, 4})) == RankSet::of({0, 3}));
  CHECK(decided(RankSet::of({3}), RankSet::of({4})) == RankSet::of({0, 3}));
}

TEST(a_death_withdraws_a_proposal) {
  Changing group;
  group.prepare({0, 1});
  group.show_all();
  group.propose(kTakeIn);
  group.callers[1].run({.kind = Event::Kind::kLook});
  group.callers[1].run({.kind = Event::Kind::kGone, .ranks = RankSet::of({2})});
  CHECK(group.words.read(2).state == RegisterState::kOpen);
}

TEST(a_proposal_whose_record_is_damaged_is_withdrawn) {
  Changing group;
  group.prepare({0, 1});
  group.show_all();
  group.propose(kTakeIn);
  group.callers[1].has_damage = true;
  group.callers[1].run({.kind = Event::Kind::kLook});
  CHECK(group.words.read(2).state == RegisterState::kOpen);
}

TEST(who_is_let_go_works_until_its_boundary) {
  Changing group;
  group.propose({.remove = RankSet::of({1}), .id = 6});
  group.look_all();
  group.show_all();
  group.look_all();
  Caller& leaver = group.callers[1];
  CHECK(leaver.membership.is_leaving());
  CHECK(leaver.boundary(Kind::kPass));
  CHECK(leaver.boundary(Kind::kInstall));
  CHECK(!leaver.membership.is_member());
  CHECK(group.callers[0].boundary(Kind::kPass));
  CHECK(group.callers[0].boundary(Kind::kInstall));
  CHECK(group.callers[0].membership.leaving() == RankSet::of({1}));
  group.callers[0].run({.kind = Event::Kind::kProven, .ranks = RankSet::of({1})});
  CHECK(group.callers[0].membership.safe_to_delete() == RankSet::of({1}));
}

TEST(changes_that_make_no_sense_are_withdrawn_at_once) {
  for (const ChangeWish& change : {ChangeWish{}, ChangeWish{.add = RankSet::of({1})},
                                   ChangeWish{.remove = RankSet::of({2})}, ChangeWish{.remove = RankSet::of({0, 1})}}) {
    Changing group;
    group.propose(change);
    CHECK(group.callers[0].did(Kind::kWithdrawn));
    CHECK(group.words.read(2).state == RegisterState::kOpen);
  }
}

// It knows less of the members than they do of each other.
TEST(a_joiner_withdraws_nothing) {
  Changing group;
  group.prepare({0, 1});
  group.show_all();
  group.callers[2].run({.kind = Event::Kind::kGone, .ranks = RankSet::of({1})});
  group.propose(kTakeIn);
  group.callers[2].run({.kind = Event::Kind::kLook});
  CHECK(group.words.read(2).state == RegisterState::kProposed);
  group.callers[1].run({.kind = Event::Kind::kGone, .ranks = RankSet::of({2})});
  group.callers[1].run({.kind = Event::Kind::kLook});
  CHECK(group.words.read(2).state == RegisterState::kOpen);
}

TEST(a_joiner_that_is_ready_no_more_gives_no_word) {
  const Event not_ready{.kind = Event::Kind::kPrepared, .rank = 2};
  for (const bool is_seen : {false, true}) {
    Changing group;
    group.prepare({0, 1});
    group.show_all();
    group.callers[2].run(not_ready);
    if (is_seen) group.show_all();
    group.propose(kTakeIn);
    group.look_all();
    group.show_all();
    CHECK((group.words.read(2).state == RegisterState::kProposed) == !is_seen);
    CHECK(group.callers[2].membership.cell().acked_epoch == 0);
    group.callers[2].run({.kind = Event::Kind::kPrepared, .rank = 2, .incarnation = 13});  // it is ready again
    group.show_all();
    group.look_all();
    group.show_all();
    CHECK(group.words.read(2).state == RegisterState::kCommitted);
  }
}

TEST(a_joiner_takes_its_word_back) {
  Changing group;
  group.prepare({0, 1});
  group.show_all();
  group.propose(kTakeIn);
  group.callers[2].run({.kind = Event::Kind::kLook});
  CHECK(group.callers[2].membership.cell().acked_epoch == 2);
  group.callers[2].run({.kind = Event::Kind::kPrepared, .rank = 2});
  CHECK(group.words.read(2).state == RegisterState::kOpen);
  group.look_all();
  group.show_all();
  CHECK(group.words.read(2).state == RegisterState::kOpen);
}

// It has seen the death of whoever had the slot before, and meets the one that the members have taken in late.
TEST(a_joiner_goes_along_with_a_slot_that_is_taken_again) {
  Changing group;
  group.callers[2].run({.kind = Event::Kind::kGone, .ranks = RankSet::of({1})});
  group.callers[0].run({.kind = Event::Kind::kGone, .ranks = RankSet::of({1})});
  group.callers[0].recover({});
  group.callers[0].run({.kind = Event::Kind::kHere, .epoch = 2, .ranks = RankSet::of({0})});
  group.callers[0].run({.kind = Event::Kind::kRenewed, .epoch = 2});
  CHECK_EQ(group.callers[0].membership.epoch(), uint32_t{2});
  std::vector<Caller> living;
  living.push_back(std::move(group.callers[0]));
  living.push_back(std::move(group.callers[2]));
  living.emplace_back(Membership(1, 14, living[0].membership.welcome(), kGroup), group.words, group.records);
  group.callers = std::move(living);
  const auto take_in = [&](int slot, uint64_t incarnation) {
    for (Caller& caller : group.callers) {
      if (!caller.membership.is_member()) continue;
      caller.run({.kind = Event::Kind::kPrepared, .rank = slot, .incarnation = incarnation});
    }
    group.show_all();
    group.propose({.add = RankSet::of({slot}), .id = incarnation});
    for (int turn = 0; turn < 3; ++turn) {
      group.look_all();
      group.show_all();
    }
    for (Caller& caller : group.callers) {
      for (int turn = 0; turn < 2 && caller.membership.epoch() < group.callers[0].membership.newest(); ++turn) {
        if (caller.membership.is_member()) caller.run({.kind = Event::Kind::kBoundary});
      }
    }
    group.show_all();
    return group.callers[0].membership.newest_set();
  };
  CHECK(take_in(1, 14) == RankSet::of({0, 1}));
  group.callers[1].run({.kind = Event::Kind::kMet, .rank = 1});
  CHECK(take_in(2, 13) == RankSet::of({0, 1, 2}));
}

TEST(a_register_that_proposals_have_used_up_serves_a_recovery) {
  Changing group;
  RegisterWord last = word(2, RegisterState::kProposed, kMaxProposedVersion, 0);
  group.records[2] = MembershipRecord();  // of nobody: withdrawn by whoever reads it
  group.words.compare_set({.epoch = 2}, last);
  group.callers[1].run({.kind = Event::Kind::kLook});
  last = group.words.read(2);
  CHECK(last.state == RegisterState::kOpen);
  group.propose({.remove = RankSet::of({1}), .id = 6});
  CHECK(group.words.read(2) == last);
  group.callers[0].recover({.evict = RankSet::of({1})});
  CHECK(group.words.read(2).state == RegisterState::kCommitted);
  CHECK(group.callers[0].membership.newest_set() == RankSet::of({0}));
}

// What a rank says counts in its era, but not what it says while it is suspended, or after it has left.
TEST(who_was_let_go_is_not_heard) {
  Changing group;
  Membership& machine = group.callers[0].membership;
  const auto change_to = [&](const ChangeWish& change) {
    group.propose(change);
    for (int turn = 0; turn < 3; ++turn) {
      group.look_all();
      group.show_all();
    }
    for (Caller& caller : group.callers) {
      for (int turn = 0; turn < 2 && caller.membership.is_member(); ++turn) {
        caller.run({.kind = Event::Kind::kBoundary});
      }
    }
  };
  const auto hears = [&](uint32_t epoch) { return machine.hear({kGroup, epoch, 1, 1, 12}) == Hearing::kCounts; };
  change_to({.remove = RankSet::of({1}), .suspend = RankSet::of({1}), .id = 6});
  CHECK_EQ(machine.epoch(), uint32_t{2});
  CHECK(hears(1));  // it has given up the last operation before the boundary
  CHECK(!hears(2));
  CHECK(!hears(3));
  for (const int rank : {0, 1}) {
    group.callers[static_cast<size_t>(rank)].run({.kind = Event::Kind::kPrepared, .rank = 1, .incarnation = 12});
  }
  group.show_all();
  change_to({.add = RankSet::of({1}), .id = 7});
  CHECK_EQ(machine.epoch(), uint32_t{3});
  CHECK(machine.active() == RankSet::of({0, 1}));
  CHECK(!hears(2));
  CHECK(hears(3));
}

// Its slot is another's then, as that of any rank that was left out.
TEST(who_is_suspended_and_ends_is_safe_to_delete) {
  Changing group;
  const Membership& machine = group.callers[0].membership;
  const auto lists = [&](const RankSet& evicted, const RankSet& leaving, const RankSet& safe) {
    CHECK(machine.evicted() == evicted);
    CHECK(machine.leaving() == leaving);
    CHECK(machine.safe_to_delete() == safe);
  };
  const RankSet none, one = RankSet::of({1});
  group.propose({.remove = one, .suspend = one, .id = 6});
  group.look_all();
  group.show_all();
  group.look_all();
  CHECK(group.callers[0].boundary(Kind::kPass));
  CHECK(group.callers[0].boundary(Kind::kInstall));
  group.callers[0].run({.kind = Event::Kind::kPrepared, .rank = 1, .incarnation = 12});
  lists(none, none, none);
  CHECK(machine.hear({kGroup, 2, 1, 1, 12}) == Hearing::kDropped);
  CHECK(machine.hear({kGroup, 3, 1, 1, 12}) == Hearing::kLater);  // it may have been taken in
  group.callers[0].run({.kind = Event::Kind::kGone, .ranks = one});
  lists(none, one, none);
  group.callers[0].run({.kind = Event::Kind::kProven, .ranks = one});
  lists(none, none, one);
  group.callers[0].run({.kind = Event::Kind::kPrepared, .rank = 1, .incarnation = 14});
  lists(none, none, none);
}

// Signals in the pages carry 16 bits of the epoch, and planned changes keep them.
TEST(pages_serve_so_many_epochs) {
  Changing group;
  const uint32_t last = kMostEpochsOfEra;  // of era 1
  Caller joined(Membership(2, 13, {{11, 0, 0}, last - 1, 1}, kGroup), group.words, group.records);
  MembershipRecord record;
  record.kind = ChangeKind::kPlanned;
  record.group = kGroup;
  record.epoch = last;
  record.era = 1;
  record.active = RankSet::of({0, 2});
  record.num_new = 1;
  record.new_members[0] = {.nonce = 13, .slot = 2};
  group.records[last] = record;
  const RegisterWord proposed = word(last, RegisterState::kProposed, 1, 0);
  group.words.compare_set({.epoch = last}, proposed);
  group.words.compare_set(proposed, committed(proposed));
  CHECK(!joined.membership.is_era_over());
  joined.run({.kind = Event::Kind::kLook});
  CHECK_EQ(joined.membership.epoch(), last);
  CHECK(joined.membership.is_era_over());
  joined.kinds.clear();
  joined.run({.kind = Event::Kind::kPropose, .change = {.remove = RankSet::of({0}), .id = 8}});
  CHECK(joined.did(Kind::kWithdrawn));
  record.epoch = last + 1;
  record.active = RankSet::of({2});
  record.num_new = 0;
  group.records[last + 1] = record;
  group.words.compare_set({.epoch = last + 1}, word(last + 1, RegisterState::kProposed, 1, 0));
  joined.run({.kind = Event::Kind::kLook});  // what another one proposes is withdrawn, too
  CHECK(group.words.read(last + 1).state == RegisterState::kOpen);
  joined.recover({.evict = RankSet::of({0})});
  joined.run({.kind = Event::Kind::kHere, .epoch = last + 1, .ranks = RankSet::of({2})});
  joined.run({.kind = Event::Kind::kRenewed, .epoch = last + 1});
  CHECK_EQ(joined.membership.era(), last + 1);
  CHECK(!joined.membership.is_era_over());
}

TEST(a_slot_that_is_taken_can_t_be_joined) {
  const Membership::Welcome welcome{{11, 0}, 3, 2};
  CHECK_CODE(kInvalidArgument, Membership(0, 7, welcome, kGroup));
  CHECK_CODE(kInvalidArgument, Membership(2, 7, welcome, kGroup));
  CHECK_CODE(kInvalidArgument, Membership(1, 0, welcome, kGroup));
  CHECK_EQ(Membership(1, 7, welcome, kGroup).era(), uint32_t{2});
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
