// Guards against a late rank that is taken for a dead one, a deadline that ends a call too early or never, and a stopped
// process that wakes up and harms the others.
#include <random>

#include "bootstrap/ranks.h"
#include "engine/engine_rank.h"
#include "engine/leftovers.h"

using namespace weft;
using namespace weft::test;

namespace {

constexpr int kNumRanks = 4;
constexpr u64 kRoom = 8u << 20;
constexpr unsigned kLongestS = 60;

JobShape job_shape(u64 seed) {
  JobShape shape;
  shape.num_ranks = kNumRanks;
  shape.num_local = 2;
  shape.top_k = 3;
  shape.max_tokens = 24;
  shape.max_row_bytes = 512;
  shape.seed = seed;
  return shape;
}

// Only late: nobody notices anything but the time.
TEST(a_stop_within_the_deadline_changes_nothing) {
  const JobShape shape = job_shape(1);
  ForkedRanks ranks(kNumRanks, [&](Rank& self) {
    alarm(kLongestS);
    self.connect();
    EngineRank rank(std::move(self.plane), shape, self.rank == 2 ? 0 : kRoom);
    rank.barrier();
    self.parent.tell(0);
    for (u64 id = 0; id < 150; ++id) rank.run(id);
    rank.barrier();
    self.parent.tell(1);
    self.parent.hear();
    rank.close();
  });
  for (int rank : all_but(kNumRanks)) ranks.pipe(rank).hear();
  std::mt19937 random(1);
  for (int round = 0; round < 8; ++round) {
    const int victim = round % kNumRanks;
    ranks.signal(victim, SIGSTOP);
    usleep(static_cast<useconds_t>(20000 + random() % 60000));
    ranks.signal(victim, SIGCONT);
    usleep(static_cast<useconds_t>(random() % 5000));
  }
  for (int rank : all_but(kNumRanks)) CHECK_EQ(ranks.pipe(rank).hear(), uint64_t{1});
  for (int rank : all_but(kNumRanks)) ranks.pipe(rank).tell(0);
  ranks.join_all();
}

// The stop outlasts the deadline: everyone gets PeerTimeout, the stopped rank too when it wakes up; all go on together.
void outlast(Rank& self, const JobShape& shape, int late, double deadline_s) {
  alarm(kLongestS);
  const RankLeftovers leftovers;
  self.connect();
  {
    EngineRank rank(std::move(self.plane), shape, kRoom);
    rank.run_many(0, 2);
    rank.set_timeout_s(deadline_s);
    self.parent.tell(0);
    uint64_t start_ns = 0, taken_ns = 0;
    try {
      for (u64 id = 2;; ++id) {
        start_ns = now_ns();
        rank.run(id);
      }
    } catch (const Error& error) {
      taken_ns = now_ns() - start_ns;
      CHECK_EQ(error.code, ErrorCode::kPeerTimeout);
      CHECK(error.sequence > 0);
      CHECK(!error.op.empty());
      if (self.rank != late) {
        CHECK(std::find(error.peers.begin(), error.peers.end(), late) != error.peers.end());
      }
    }
    CHECK_ERROR(
        kPeerTimeout, {late}, try { rank.barrier(); } catch (Error& error) {
          error.peers = {late};  // which ranks are named was looked at above
          throw;
        });
    self.parent.tell(taken_ns);
    self.parent.hear();  // the late one is awake
    rank.set_timeout_s(30);
    rank.rebuild(all_but(kNumRanks));
    CHECK_EQ(rank.comm().epoch(), u32{2});
    rank.run_many(1000, 5);
    rank.barrier();
    self.parent.tell(2);
    self.parent.hear();
    rank.close();
  }
  leftovers.check();
}

TEST(a_stop_beyond_the_deadline_is_a_timeout_for_all) {
  for (u64 trial = 0; trial < 4; ++trial) {
    const JobShape shape = job_shape(10 + trial);
    const int late = static_cast<int>(trial % kNumRanks);
    constexpr double kDeadlineS = 4;  // which those that are not stopped must meet
    ForkedRanks ranks(kNumRanks, [&](Rank& self) { outlast(self, shape, late, kDeadlineS); });
    for (int rank : all_but(kNumRanks)) CHECK_EQ(ranks.pipe(rank).hear(), uint64_t{0});
    usleep(static_cast<useconds_t>(trial * 1700));
    ranks.signal(late, SIGSTOP);
    // Ranks begin a call at slightly different times, and the first whose deadline passes ends it for all.
    uint64_t longest_ns = 0;
    for (int rank : all_but(kNumRanks, {late})) longest_ns = std::max(longest_ns, ranks.pipe(rank).hear());
    CHECK(longest_ns >= static_cast<uint64_t>(kDeadlineS * 1e9));
    CHECK(longest_ns < 20'000'000'000);
    ranks.signal(late, SIGCONT);
    ranks.pipe(late).hear();
    for (int rank : all_but(kNumRanks)) ranks.pipe(rank).tell(0);
    for (int rank : all_but(kNumRanks)) CHECK_EQ(ranks.pipe(rank).hear(), uint64_t{2});
    for (int rank : all_but(kNumRanks)) ranks.pipe(rank).tell(0);
    ranks.join_all();
  }
}

// The others leave a stopped rank behind; when it wakes up it writes into memory that nobody else has mapped any more (R13).
TEST(a_rank_left_behind_harms_nobody_when_it_wakes_up) {
  for (u64 trial = 0; trial < 4; ++trial) {
    const JobShape shape = job_shape(30 + trial);
    const int late = static_cast<int>(trial % kNumRanks);
    ForkedRanks ranks(kNumRanks, [&](Rank& self) {
      alarm(kLongestS);
      self.connect();
      EngineRank rank(std::move(self.plane), shape, trial % 2 == 0 ? kRoom : 0);
      rank.run_many(0, 2);
      rank.set_timeout_s(0.3);
      self.parent.tell(0);
      CHECK_THROWS(rank.run_many(2, 1000000), Error, [&](const Error& error) {
        CHECK(error.code == ErrorCode::kPeerTimeout || (self.rank == late && error.code == ErrorCode::kEvicted));
      });
      if (self.rank == late) {
        // It may be late for another's reason, and be stopped here.
        while (rank.comm().reason().code != AbortCode::kEvicted) usleep(500);
        CHECK_ERROR(kEvicted, {late}, rank.run(5));
        return;
      }
      rank.set_timeout_s(30);
      rank.rebuild(all_but(kNumRanks, {late}));
      rank.run_many(1000, 3);
      self.parent.tell(1);
      rank.run_many(2000, 60);  // the late one wakes up meanwhile
      rank.barrier();
      self.parent.tell(2);
      self.parent.hear();
    });
    for (int rank : all_but(kNumRanks)) CHECK_EQ(ranks.pipe(rank).hear(), uint64_t{0});
    usleep(static_cast<useconds_t>(trial * 1300));
    ranks.signal(late, SIGSTOP);
    for (int rank : all_but(kNumRanks, {late})) CHECK_EQ(ranks.pipe(rank).hear(), uint64_t{1});
    ranks.signal(late, SIGCONT);
    ranks.join(late);
    for (int rank : all_but(kNumRanks, {late})) CHECK_EQ(ranks.pipe(rank).hear(), uint64_t{2});
    for (int rank : all_but(kNumRanks, {late})) ranks.pipe(rank).tell(0);
    ranks.join_all({late});
  }
}

// One rank calls nothing: the deadline is kept on both sides, and the late one is named alone.
TEST(a_rank_that_does_not_call_is_named_after_the_deadline) {
  const JobShape shape = job_shape(50);
  ForkedRanks ranks(kNumRanks, [&](Rank& self) {
    alarm(kLongestS);
    self.connect();
    EngineRank rank(std::move(self.plane), shape, kRoom);
    rank.run_many(0, 2);
    rank.set_timeout_s(4);  // which the other three must meet
    const uint64_t start_ns = now_ns();
    while (self.rank == 3 && !rank.comm().is_broken()) usleep(500);
    CHECK_ERROR(kPeerTimeout, {3}, rank.barrier());
    const uint64_t taken_ns = now_ns() - start_ns;
    rank.set_timeout_s(30);
    rank.rebuild(all_but(kNumRanks));
    rank.run_many(1000, 3);
    rank.barrier();
    self.parent.tell(taken_ns);
    self.parent.hear();
  });
  uint64_t longest_ns = 0;
  for (int rank : all_but(kNumRanks, {3})) longest_ns = std::max(longest_ns, ranks.pipe(rank).hear());
  CHECK(longest_ns >= 4'000'000'000 && longest_ns < 20'000'000'000);
  ranks.pipe(3).hear();
  for (int rank : all_but(kNumRanks)) ranks.pipe(rank).tell(0);
  ranks.join_all();
}

// Between nodes: a creditor sees only the next rank of a chain.
TEST(blame_follows_those_who_say_that_they_wait) {
  auto hub = std::make_shared<LocalHub>(kNumRanks);
  std::vector<std::shared_ptr<Communicator>> comms;
  for (int rank : all_but(kNumRanks)) comms.push_back(Communicator::create(connect_threads(hub, rank)));
  const auto says = [&](int rank, const std::vector<int>& awaited) {
    comms[static_cast<size_t>(rank)]->note_awaited(RankSet::of(awaited));
  };
  const auto blamed = [&](const std::vector<int>& late) {
    return ranks_text(comms[0]->to_blame(RankSet::of(late)).ranks());
  };
  CHECK_EQ(blamed({1}), ranks_text({1}));
  says(1, {0, 2});
  CHECK_EQ(blamed({1}), ranks_text({2}));
  CHECK_EQ(blamed({1, 3}), ranks_text({2, 3}));
  says(2, {3});
  CHECK_EQ(blamed({1}), ranks_text({3}));
  says(3, {1, 0});  // in a circle
  CHECK_EQ(blamed({1}), ranks_text({1}));
  says(3, {});
  says(1, {});
  CHECK_EQ(blamed({1}), ranks_text({1}));
  CHECK_EQ(blamed({2}), ranks_text({3}));
  for (const auto& comm : comms) comm->close();
}

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv); }
