// Guards against groups over several machines that split, hang without their store, take a stopped rank back, or share memory that
// they can't. One machine plays several, over its loopback interface; the store is files.
#include <memory>

#include "bootstrap/ranks.h"
#include "engine/engine_rank.h"

using namespace weft;        // NOLINT(google-build-using-namespace)
using namespace weft::test;  // NOLINT(google-build-using-namespace)

namespace {

constexpr u64 kTag = u64{1} << 60;

ServedDecider::CompareSet in(const FileStore& store) {
  return [&store](const std::string& key, const std::string& expected, const std::string& desired) {
    return store.compare_set(key, expected, desired);
  };
}

// A rank of several machines, and who answers what it asks the store.
struct Member {
  Member(Rank& self, ServedDecider::CompareSet compare_set) : served(std::move(compare_set)) {
    self.connect(kLongS, {served.decider, {}});
    comm = Communicator::create(std::move(self.plane));
  }
  ~Member() {
    if (comm) comm->close();
  }
  void exchange(u64 number) const { comm->exchange(kTag | number, {}, {}, deadline_after_s(kLongS), {}); }
  void recover(const std::vector<int>& evict = {}, double timeout_s = kLongS) const {
    comm->recover(evict, 1, deadline_after_s(timeout_s), {});
  }

  ServedDecider served;
  std::shared_ptr<Communicator> comm;
};

bool comes_true(const std::function<bool()>& what) {
  const uint64_t deadline_ns = deadline_after_s(kLongS);
  while (!what() && now_ns() < deadline_ns) usleep(500);
  return what();
}

}  // namespace

TEST(those_left_agree_whoever_dies) {
  for (int victim = 0; victim < 5; ++victim) {
    const FileStore store;
    const int second = (victim + 2) % 5;  // dies while the others recover
    ForkedRanks ranks(5,
                      [&](Rank& self) {
                        const Member member(self, in(store));
                        member.exchange(1);
                        self.parent.tell(1);
                        if (self.rank == victim || self.rank == second) pause();
                        CHECK_ERROR(kPeerLost, {victim}, member.exchange(2));
                        self.parent.tell(2);
                        std::vector<int> gone{std::min(victim, second), std::max(victim, second)};
                        while (member.comm->active_ranks() != all_but(5, gone)) member.recover();
                        member.exchange(3);
                        self.parent.tell(member.comm->epoch());
                        CHECK_EQ(self.parent.hear(), 3u);
                      },
                      {"a", "a", "b", "b", "c"});
    for (int rank = 0; rank < 5; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
    ranks.signal(victim, SIGKILL);
    ranks.join(victim, SIGKILL);
    const std::vector<int> left = all_but(5, {victim, second});
    for (const int rank : left) CHECK_EQ(ranks.pipe(rank).hear(), 2u);
    ranks.signal(second, SIGKILL);
    ranks.join(second, SIGKILL);
    std::vector<u64> epochs;
    for (const int rank : left) epochs.push_back(ranks.pipe(rank).hear());
    for (const u64 epoch : epochs) CHECK(epoch == epochs.front() && epoch <= 3);
    for (const int rank : left) ranks.pipe(rank).tell(3);
    ranks.join_all({victim, second});
  }
}

TEST(lists_that_differ_never_split_a_group) {
  const FileStore store;
  ForkedRanks ranks(4,
                    [&](Rank& self) {
                      const Member member(self, in(store));
                      member.exchange(1);
                      const std::vector<int> wish = self.rank < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3};
                      bool has_won = true;
                      try {
                        member.comm->rebuild(wish, deadline_after_s(kLongS), {});
                        member.exchange(2);
                      } catch (const Error& error) {
                        CHECK_EQ(error.code, ErrorCode::kEvicted);
                        has_won = false;
                        CHECK_ERROR(kEvicted, {self.rank}, member.exchange(2));
                        CHECK_ERROR(kEvicted, {self.rank}, member.recover());
                      }
                      self.parent.tell(has_won ? 1 : 0);
                      CHECK_EQ(self.parent.hear(), 9u);
                    },
                    {"a", "b", "a", "b"});
  std::vector<u64> won;
  for (int rank = 0; rank < 4; ++rank) won.push_back(ranks.pipe(rank).hear());
  CHECK(won[0] == won[1] && won[2] == won[3] && won[0] + won[2] == 1);
  for (int rank = 0; rank < 4; ++rank) ranks.pipe(rank).tell(9);
  ranks.join_all();
}

TEST(a_stopped_rank_that_was_left_out_is_told_when_it_wakes_up) {
  const FileStore store;
  ForkedRanks ranks(
      3,
      [&](Rank& self) {
        const Member member(self, in(store));
        member.exchange(1);
        self.parent.tell(1);
        if (self.rank == 2) {
          CHECK(comes_true([&] { return member.comm->reason().code == AbortCode::kEvicted; }));  // without a call
          CHECK_ERROR(kEvicted, {2}, member.exchange(2));
          return;
        }
        CHECK_EQ(self.parent.hear(), 1u);
        CHECK_ERROR(kPeerTimeout, {2}, member.comm->exchange(kTag | 2, {}, {}, deadline_after_s(4), {}));
        member.recover({2});
        CHECK(member.comm->active_ranks() == (std::vector<int>{0, 1}));
        CHECK(member.comm->evicted_ranks() == std::vector<int>{2} && member.comm->safe_to_delete().empty());
        member.exchange(3);
        self.parent.tell(2);
        CHECK_EQ(self.parent.hear(), 3u);
      },
      {"a", "b", "c"});
  for (int rank = 0; rank < 3; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
  ranks.signal(2, SIGSTOP);
  for (const int rank : {0, 1}) ranks.pipe(rank).tell(1);
  for (const int rank : {0, 1}) CHECK_EQ(ranks.pipe(rank).hear(), 2u);
  ranks.signal(2, SIGCONT);
  ranks.join(2);
  for (const int rank : {0, 1}) ranks.pipe(rank).tell(3);
  ranks.join_all({2});
}

TEST(without_the_store_no_membership_changes_and_all_else_goes_on) {
  const FileStore store;
  for (const bool hangs : {true, false}) {
    ForkedRanks ranks(2,
                      [&](Rank& self) {
                        std::atomic<bool> is_away{false};
                        const Member member(
                            self, [&](const std::string& key, const std::string& expected, const std::string& desired) {
                              while (is_away && hangs) usleep(1000);
                              if (is_away) throw_internal("no route to the store");
                              return store.compare_set(key, expected, desired);
                            });
                        member.recover();
                        CHECK_EQ(member.comm->epoch(), 2u);
                        member.exchange(1);
                        is_away = true;
                        CHECK_ERROR(kControlLost, {}, member.recover({}, 0.3));
                        CHECK_ERROR(kControlLost, {}, member.comm->rebuild({0, 1}, deadline_after_s(0.3), {}));
                        member.exchange(2);  // not broken
                        is_away = false;
                        member.recover();
                        CHECK_EQ(member.comm->epoch(), 3u);
                        member.exchange(3);
                        is_away = true;
                        const uint64_t start_ns = now_ns();
                        member.comm->close();
                        CHECK(now_ns() - start_ns < 20'000'000'000);
                        is_away = false;
                      },
                      {"a", "b"});
    ranks.join_all();
  }
}

// The first thing a recovery does between machines is to ask the store.
TEST(an_abort_ends_a_recovery_that_waits_for_the_store) {
  const FileStore store;
  ForkedRanks ranks(2,
                    [&](Rank& self) {
                      std::atomic<bool> is_away{false}, is_asked{false};
                      const Member member(
                          self, [&](const std::string& key, const std::string& expected, const std::string& desired) {
                            is_asked = is_away.load();
                            while (is_away) usleep(1000);
                            return store.compare_set(key, expected, desired);
                          });
                      member.exchange(1);
                      is_away = true;
                      std::thread other([&] {
                        CHECK(comes_true([&] { return is_asked.load(); }));
                        self.parent.tell(1);
                        CHECK_EQ(self.parent.hear(), 2u);
                        if (self.rank == 0) member.comm->abort("enough");
                      });
                      CHECK_ERROR(kAborted, {0}, member.recover());
                      other.join();
                      is_away = false;
                      self.parent.tell(3);
                      CHECK_EQ(self.parent.hear(), 4u);
                      member.recover();
                      member.exchange(2);
                    },
                    {"a", "b"});
  for (const int rank : {0, 1}) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
  for (const int rank : {0, 1}) ranks.pipe(rank).tell(2);
  for (const int rank : {0, 1}) CHECK_EQ(ranks.pipe(rank).hear(), 3u);
  for (const int rank : {0, 1}) ranks.pipe(rank).tell(4);
  ranks.join_all();
}

TEST(a_meeting_ends_when_a_later_epoch_was_decided) {
  const FileStore store;
  ForkedRanks ranks(3,
                    [&](Rank& self) {
                      const Member member(self, in(store));
                      member.exchange(1);
                      if (self.rank == 2) {
                        CHECK_EQ(self.parent.hear(), 1u);  // rank 0 waits for it in the meeting of epoch 2
                        CHECK_ERROR(kEvicted, {2}, member.recover());
                      } else if (self.rank == 0) {
                        self.parent.tell(1);
                        member.recover();  // epoch 2 with all, then epoch 3 without rank 2, as rank 1 says
                      } else {
                        CHECK_EQ(self.parent.hear(), 1u);
                        CHECK_ERROR(kPeerTimeout, {2}, member.recover({}, 4));  // rank 0 is there by then
                        member.recover({2});
                      }
                      if (self.rank != 2) {
                        CHECK_EQ(member.comm->epoch(), 3u);
                        member.exchange(2);
                      }
                      self.parent.tell(7);
                      CHECK_EQ(self.parent.hear(), 7u);
                    },
                    {"a", "b", "c"});
  CHECK_EQ(ranks.pipe(0).hear(), 1u);
  usleep(200'000);
  ranks.pipe(1).tell(1);
  CHECK_EQ(ranks.pipe(0).hear(), 7u);
  CHECK_EQ(ranks.pipe(1).hear(), 7u);
  ranks.pipe(2).tell(1);
  CHECK_EQ(ranks.pipe(2).hear(), 7u);
  for (int rank = 0; rank < 3; ++rank) ranks.pipe(rank).tell(7);
  ranks.join_all();
}

TEST(an_abort_ends_a_recovery_on_every_machine) {
  const FileStore store;
  ForkedRanks ranks(3,
                    [&](Rank& self) {
                      const Member member(self, in(store));
                      member.exchange(1);
                      if (self.rank == 2) {
                        CHECK_EQ(self.parent.hear(), 1u);
                        member.comm->abort("enough");
                      } else {
                        self.parent.tell(1);
                        CHECK_ERROR(kAborted, {2}, member.exchange(2));
                      }
                      member.recover();
                      member.exchange(3);
                    },
                    {"a", "b", "b"});
  for (const int rank : {0, 1}) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
  ranks.pipe(2).tell(1);
  ranks.join_all();
}

TEST(windows_are_refused_until_all_ranks_are_on_one_machine) {
  const FileStore store;
  ForkedRanks ranks(3,
                    [&](Rank& self) {
                      Member member(self, in(store));
                      WindowShape shape;
                      shape.num_ranks = 3;
                      shape.num_experts = 6;
                      shape.top_k = 2;
                      shape.max_tokens = 16;
                      shape.max_row_bytes = 256;
                      const auto make = [&] {
                        return cpu::Window(member.comm, shape, 1 << 16, deadline_after_s(kLongS), Poll{});
                      };
                      try {
                        make();
                        CHECK(false);
                      } catch (const Error& error) {
                        CHECK_EQ(error.code, ErrorCode::kUnsupported);
                        const std::string far =
                            self.rank == 2 ? "ranks 0, 1 run on another machine" : "rank 2 runs on another machine";
                        CHECK(error.text.find(far) != std::string::npos);
                      }
                      member.exchange(1);  // not broken
                      self.parent.tell(1);
                      CHECK_EQ(self.parent.hear(), 2u);  // all have ended that exchange
                      if (self.rank == 2) return;
                      while (member.comm->active_ranks().size() == 3) {
                        member.recover({2});
                      }
                      cpu::Window window = make();
                      window.barrier(30'000'000'000, {});
                    },
                    {"a", "a", "b"});
  for (int rank = 0; rank < 3; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
  for (int rank = 0; rank < 3; ++rank) ranks.pipe(rank).tell(2);
  ranks.join_all();
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
