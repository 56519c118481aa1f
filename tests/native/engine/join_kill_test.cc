// Guards against what a death or a stop at any named point of joining, changing and recovering may do to the others: the table of
// docs/protocols/joining.md, line by line. every_point_test.cc has the rest of them.
#include "engine/kill_scenarios.h"

using namespace weft;
using namespace weft::test;

namespace {

// ---- docs/protocols/joining.md, who dies when

TEST(a_newcomer_dies_before_the_decision) {
  for (const char* point : {"join.called", "join.asked", "join.welcomed", "join.greeted", "join.answered",
                            "join.connected", "join.made", "window.offered", "window.shared", "ready.answered"}) {
    run_scenario({Kind::kJoin, {{kNewcomer, point}}, Sees::kNothing});
  }
  run_scenario({Kind::kJoin, {{kNewcomer, "join.greeted", 2}}, Sees::kNothing});
  run_scenario({Kind::kJoin, {{kNewcomer, "window.shared", 2}}, Sees::kNothing});
}

TEST(a_sponsor_dies) {
  for (const char* point : {"sponsor.heard", "sponsor.claimed", "sponsor.welcomed"}) {
    run_scenario({Kind::kJoin, {{kAnybody, point}}, Sees::kBreak});
  }
}
TEST(a_member_dies_while_another_rank_prepares) {
  for (const char* point : {"greet.heard", "greet.answered", "greet.admitted", "window.taken", "ready.served"}) {
    run_scenario({Kind::kJoin, {{1, point}}, Sees::kBreak});
    run_scenario({Kind::kJoin, {{0, point}}, Sees::kBreak});
  }
}

TEST(a_proposer_dies) {
  for (const char* point : {"propose.recorded", "propose.done"})
    run_scenario({Kind::kJoin, {{0, point}}, Sees::kBreak});
}

TEST(somebody_dies_between_proposal_and_decision) {
  for (const int process : {0, 2, kNewcomer}) {
    run_scenario({Kind::kJoin, {{process, "acknowledge.shown"}}, process == kNewcomer ? Sees::kEither : Sees::kBreak});
  }
}

TEST(who_decides_dies) {
  for (const char* point : {"commit.begun", "commit.done"}) run_scenario({Kind::kJoin, {{kAnybody, point}}});
}

// The proposal stands, and who is named does not give its word: whoever has waited long enough at the boundary takes it back.
TEST(who_withdraws_dies) {
  for (const char* point : {"withdraw.begun", "withdraw.done"}) {
    const Victim asleep{kNewcomer, "acknowledge.begun", 0, SIGSTOP, false, true};
    run_scenario({Kind::kJoin, {asleep, {kAnybody, point}}, Sees::kBreak});
  }
}

TEST(somebody_dies_after_the_decision) {
  for (const char* point : {"install.before", "install.entered", "install.mapped", "install.shown"}) {
    for (const int process : {0, 2, kNewcomer}) run_scenario({Kind::kJoin, {{process, point}}, Sees::kBreak});
  }
}

TEST(a_leaver_dies) {
  for (const char* point :
       {"acknowledge.shown", "install.before", "install.entered", "install.mapped", "install.shown"}) {
    run_scenario({Kind::kLeave, {{2, point}}});
  }
}

TEST(a_member_dies_while_another_one_leaves) {
  for (const char* point : {"acknowledge.shown", "install.before", "install.entered", "install.shown"}) {
    run_scenario({Kind::kLeave, {{1, point}}, Sees::kBreak});
  }
}

TEST(a_death_inside_recover) {
  for (const char* point : {"recover.begun", "recover.met", "recover.backed", "recover.renewed", "recover.entered"}) {
    run_scenario({Kind::kRecover, {{3, "dispatch.after_send", 5}, {1, point}}, Sees::kBreak});
  }
  for (const char* point : {"decide.recorded", "decide.done"}) {
    run_scenario({Kind::kRecover, {{3, "dispatch.after_send", 5}, {kAnybody, point}}, Sees::kBreak});
  }
}

TEST(all_but_one_die) {
  run_scenario({Kind::kRecover,
                {{0, "dispatch.after_send", 3}, {1, "dispatch.after_send", 4}, {2, "recover.begun"}},
                Sees::kBreak});
}

// ---- stopped, and awake again when the others have gone on

TEST(a_newcomer_is_stopped_before_the_decision) {
  for (const char* point :
       {"join.asked", "join.welcomed", "join.greeted", "join.made", "window.offered", "ready.answered"}) {
    run_scenario({Kind::kJoin, {{kNewcomer, point, 0, SIGSTOP}}, Sees::kNothing});
  }
}

std::atomic<int>* num_answers = nullptr;  // that the other newcomer has had to ready(); in shared memory

// Welcomed before its sponsor died, and awake again when another newcomer is in that slot, and ready. It makes its window when the
// other one does not ask for it any more, and as one that has not read of the death.
TEST(a_newcomer_finds_another_one_in_the_slot_of_a_member) {
  constexpr int kOther = kCapacity + 1;
  const InShared<std::atomic<int>> shared;
  num_answers = &*shared;
  on_pass = [](const char* name, int process) {
    constexpr int kOfMembers = 2;
    if (process == kOther && std::strcmp(name, "ready.answered") == 0) ++*num_answers;
    if (process != kNewcomer || std::strcmp(name, "join.made") != 0) return;
    CHECK(comes_true([] { return *num_answers >= 2 * kOfMembers; }));
  };
  const Victim asleep{kNewcomer, "join.welcomed", 0, SIGSTOP, false, true};
  run_scenario({Kind::kJoin, {asleep, {0, "sponsor.welcomed"}}, Sees::kBreak});
  on_pass = nullptr;
}

TEST(a_member_is_stopped_while_another_rank_prepares) {
  for (const char* point : {"greet.admitted", "window.taken", "ready.served"}) {
    run_scenario({Kind::kJoin, {{1, point, 0, SIGSTOP}}, Sees::kBreak});
  }
}

TEST(somebody_is_stopped_after_its_word) {
  run_scenario({Kind::kJoin, {{kNewcomer, "acknowledge.shown", 0, SIGSTOP}}});
  run_scenario({Kind::kJoin, {{kNewcomer, "install.before", 0, SIGSTOP}}, Sees::kBreak});
  run_scenario({Kind::kJoin, {{1, "acknowledge.shown", 0, SIGSTOP}}, Sees::kBreak});
  run_scenario({Kind::kJoin, {{1, "install.before", 0, SIGSTOP}}, Sees::kBreak});
  run_scenario({Kind::kJoin, {{1, "install.entered", 0, SIGSTOP}}, Sees::kBreak});
}

TEST(a_leaver_is_stopped) {
  run_scenario({Kind::kLeave, {{2, "install.before", 0, SIGSTOP}}});
  run_scenario({Kind::kLeave, {{2, "install.mapped", 0, SIGSTOP}}});
}

TEST(a_rank_is_stopped_inside_recover) {
  for (const char* point : {"recover.begun", "recover.met", "recover.backed"}) {
    run_scenario({Kind::kRecover, {{3, "dispatch.after_send", 5}, {1, point, 0, SIGSTOP}}, Sees::kBreak});
  }
}

}  // namespace

void weft::fail_point(const char* name) { pass(name); }

int main(int argc, char** argv) { return run_tests(argc, argv); }
