// Guards against deaths that are missed, blamed on the wrong rank, told twice or invented, and against survivors that
// can't go on or can't close. Ranks are real processes that are killed.
#include <sys/mman.h>

#include <algorithm>
#include <fstream>
#include <random>

#include "bootstrap/ranks.h"

using namespace weft;        // NOLINT(google-build-using-namespace)
using namespace weft::test;  // NOLINT(google-build-using-namespace)

namespace {

// When a rank heard of a death, by channel; 0: not through this one.
struct Times {
  uint64_t handler_ns = 0;
  uint64_t channel_ns[3] = {0, 0, 0};
};

// Waits until the handler named `victim`, checks that it was named once as lost, and says when.
Times wait_for_death(const Rank& self, const Ear& ear, const std::atomic<uint64_t>& handler_ns, int victim) {
  CHECK(ear.wait_for(1));
  CHECK_EQ(ear.count(victim, AbortCode::kPeerLost), 1);
  CHECK(self.plane->dead_ranks() == std::vector<int>{victim});
  Times times;
  times.handler_ns = handler_ns;
  const uint64_t deadline_ns = deadline_after_s(3);  // for the slower channels
  while (self.plane->detections().size() < 3 && now_ns() < deadline_ns) usleep(2000);
  for (const Detection& seen : self.plane->detections()) {
    CHECK_EQ(seen.rank, victim);
    if (seen.channel <= DetectionChannel::kPidfd) times.channel_ns[static_cast<size_t>(seen.channel)] = seen.time_ns;
  }
  CHECK_EQ(ear.heard().size(), 1u);  // the other channels added nothing
  return times;
}

void print_times(const char* name, std::vector<double> times_ms) {
  std::erase_if(times_ms, [](double time_ms) { return time_ms < 0; });
  if (times_ms.empty()) return;
  std::sort(times_ms.begin(), times_ms.end());
  std::printf("         %-12s median %8.3f ms, worst %8.3f ms (%zu samples)\n", name, times_ms[times_ms.size() / 2],
              times_ms.back(), times_ms.size());
}

struct Trial {
  bool exchanging;            // the victim is killed amid exchanges, else while it sleeps
  bool victim_has_child;      // which holds its sockets on
  size_t resident_bytes = 0;  // memory of the victim
};

// Kills rank 2 of 4; every survivor must hear of it once, go on without it and close.
std::vector<std::vector<double>> kill_trial(const Trial& trial, useconds_t delay_us) {
  constexpr int kVictim = 2;
  ForkedRanks ranks(4, [&](Rank& self) {
    Ear ear;
    std::atomic<uint64_t> handler_ns{0};
    const auto listen = ear.handler();
    std::vector<char> resident(self.rank == kVictim ? trial.resident_bytes : 0, 1);
    self.connect();
    self.plane->set_abort_handler([&](const AbortReason& reason) {
      handler_ns = now_ns();
      listen(reason);
    });
    self.exchange({0, 1, 2, 3}, 1);
    if (self.rank == kVictim && trial.victim_has_child && fork() == 0) {
      sleep(4);
      _exit(0);
    }
    self.parent.tell(1);
    try {
      for (uint64_t tag = 2; trial.exchanging || self.rank == kVictim; ++tag) {
        if (trial.exchanging) self.exchange({0, 1, 2, 3}, tag, kLongS, tag % 8 == 0 ? 300'000 : 24);
        if (!trial.exchanging) pause();
      }
    } catch (const Error& error) {
      CHECK_ERROR(kPeerLost, {kVictim}, throw error);
    }
    const Times times = wait_for_death(self, ear, handler_ns, kVictim);
    CHECK_ERROR(kPeerLost, {kVictim}, self.exchange({0, 1, 2, 3}, 1'000'000));
    for (uint64_t tag = 1'000'001; tag < 1'000'010; ++tag) self.exchange({0, 1, 3}, tag);
    self.parent.tell(times.handler_ns);
    for (const uint64_t time_ns : times.channel_ns) self.parent.tell(time_ns);
    CHECK_EQ(self.parent.hear(), 5u);
    self.plane->close();
  });
  for (int rank = 0; rank < 4; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
  usleep(delay_us);
  const uint64_t killed_ns = now_ns();
  ranks.signal(kVictim, SIGKILL);
  std::vector<std::vector<double>> times_ms(4);
  for (const int survivor : {0, 1, 3}) {
    for (auto& samples : times_ms) {
      const uint64_t time_ns = ranks.pipe(survivor).hear();
      samples.push_back(time_ns == 0 ? -1 : static_cast<double>(time_ns - killed_ns) / 1e6);
    }
  }
  for (const int survivor : {0, 1, 3}) ranks.pipe(survivor).tell(5);
  ranks.join(kVictim, SIGKILL);
  ranks.join_all({kVictim});
  return times_ms;
}

void kill_trials(const Trial& trial, int num_trials) {
  std::mt19937 random(7);
  std::vector<std::vector<double>> all(4);
  for (int turn = 0; turn < num_trials; ++turn) {
    const auto times_ms = kill_trial(trial, static_cast<useconds_t>(random() % 3000));
    for (size_t idx = 0; idx < 4; ++idx) all[idx].insert(all[idx].end(), times_ms[idx].begin(), times_ms[idx].end());
  }
  const char* names[] = {"handler", "owner death", "socket end", "pidfd"};
  for (size_t idx = 0; idx < 4; ++idx) print_times(names[idx], all[idx]);
}

}  // namespace

TEST(killed_while_idle) { kill_trials({.exchanging = false, .victim_has_child = false}, 10); }

TEST(killed_amid_exchanges) { kill_trials({.exchanging = true, .victim_has_child = false}, 25); }

TEST(killed_while_a_child_holds_its_sockets) { kill_trials({.exchanging = false, .victim_has_child = true}, 1); }

TEST(killed_when_large) {
  kill_trials({.exchanging = false, .victim_has_child = false, .resident_bytes = size_t{300} << 20}, 2);
}

// What belongs to a peer goes with it, not with close(): else slots that are taken again leak.
TEST(descriptors_and_pages_of_a_peer_go_with_it) {
  const auto num_life_pages = [] {
    std::ifstream maps("/proc/self/maps");
    int count = 0;
    for (std::string line; std::getline(maps, line);) count += line.find("memfd:weft") != std::string::npos ? 1 : 0;
    return count;
  };
  const auto shrinks_by = [](const std::function<int()>& count, int before, int by) {
    const uint64_t deadline_ns = deadline_after_s(kLongS);
    while (count() != before - by && now_ns() < deadline_ns) usleep(2000);
    return before - count();
  };
  ForkedRanks ranks(4, [&](Rank& self) {
    self.connect();
    self.exchange({0, 1, 2, 3}, 1);
    const int num_fds = num_open_fds(), num_pages = num_life_pages();
    self.parent.tell(1);
    if (self.rank == 1) pause();
    if (self.rank == 2) {
      CHECK_EQ(self.parent.hear(), 1u);  // rank 0 has counted
      self.plane->close();               // and its process lives on
      self.parent.hear();
      return;
    }
    if (self.rank == 3) CHECK_EQ(self.parent.hear(), 2u);
    if (self.rank == 0) {
      CHECK_EQ(shrinks_by(num_open_fds, num_fds, 4), 4);  // socket and pidfd of two
      CHECK_EQ(shrinks_by(num_life_pages, num_pages, 2), 2);
      self.exchange({0, 3}, 2);
      self.parent.tell(3);
      self.plane->close();
      return;
    }
    self.exchange({0, 3}, 2);
  });
  for (int rank = 0; rank < 4; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
  ranks.pipe(2).tell(1);
  ranks.signal(1, SIGKILL);
  ranks.join(1, SIGKILL);
  ranks.pipe(3).tell(2);
  CHECK_EQ(ranks.pipe(0).hear(), 3u);
  ranks.pipe(2).tell(4);
  ranks.join_all({1});
}

TEST(several_killed_at_once) {
  ForkedRanks ranks(5, [](Rank& self) {
    Ear ear;
    self.connect();
    self.plane->set_abort_handler(ear.handler());
    self.exchange({0, 1, 2, 3, 4}, 1);
    self.parent.tell(1);
    if (self.rank != 0 && self.rank != 3) pause();
    CHECK(ear.wait_for(3));
    for (const int victim : {1, 2, 4}) CHECK_EQ(ear.count(victim, AbortCode::kPeerLost), 1);
    CHECK_ERROR(kPeerLost, ({1, 2, 4}), self.exchange({0, 1, 2, 3, 4}, 2));
    CHECK_ERROR(kPeerLost, {4}, self.exchange({0, 3, 4}, 3));
    self.exchange({0, 3}, 4, kLongS, 1 << 20);
    self.plane->set_abort_handler({});
  });
  for (int rank = 0; rank < 5; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
  for (const int victim : {1, 2, 4}) ranks.signal(victim, SIGKILL);
  for (const int victim : {1, 2, 4}) ranks.join(victim, SIGKILL);
  ranks.join_all({1, 2, 4});
}

// Rank 1 may have given up when it saw the death, and will never send: waiting for it would end with the wrong name.
TEST(a_death_ends_an_exchange_for_which_the_dead_had_sent) {
  ForkedRanks ranks(3, [](Rank& self) {
    self.connect();
    self.exchange({0, 1, 2}, 1);
    self.parent.tell(1);
    if (self.rank != 1) {
      const auto leave = [&] { self.exchange({0, 1, 2}, 2); };
      if (self.rank == 0) CHECK_ERROR(kPeerLost, {2}, leave());
      if (self.rank == 2) leave();
    }
    self.exchange({0, 1}, 3);
  });
  for (int rank = 0; rank < 3; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
  usleep(300'000);
  ranks.signal(2, SIGKILL);
  ranks.join(2, SIGKILL);
  ranks.join_all({2});
}

TEST(leaving_without_goodbye_is_a_death) {
  ForkedRanks ranks(3, [](Rank& self) {
    Ear ear;
    self.connect();
    self.plane->set_abort_handler(ear.handler());
    self.exchange({0, 1, 2}, 1);
    self.parent.tell(1);
    if (self.rank == 1) {
      CHECK_EQ(self.parent.hear(), 2u);  // a death while others are inside the exchange would end that
      _exit(0);
    }
    CHECK(ear.wait_for(1));
    CHECK_EQ(ear.count(1, AbortCode::kPeerLost), 1);
    self.exchange({0, 2}, 2);
    self.plane->set_abort_handler({});
  });
  for (int rank = 0; rank < 3; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
  ranks.pipe(1).tell(2);
  ranks.join_all();
}

TEST(stopped_is_not_dead) {
  ForkedRanks ranks(3, [](Rank& self) {
    Ear ear;
    self.connect();
    self.plane->set_abort_handler(ear.handler());
    self.exchange({0, 1, 2}, 1);
    self.parent.tell(1);
    if (self.rank != 1) {
      CHECK_EQ(self.parent.hear(), 2u);
      const uint64_t start_ns = now_ns();
      // More than its socket takes: what waits for room must not block us either.
      CHECK_ERROR(kPeerTimeout, {1}, self.exchange({0, 1, 2}, 2, 4, 1 << 20));
      CHECK(now_ns() - start_ns >= 4'000'000'000u);
      AbortReason reason;
      reason.code = AbortCode::kPeerTimeout;
      reason.rank = 1;
      const uint64_t publish_ns = now_ns();
      self.plane->publish_abort(reason);
      CHECK(now_ns() - publish_ns < 5'000'000'000u);
      CHECK(self.plane->detections().empty());
      self.parent.tell(3);
    }
    self.exchange({0, 1, 2}, 3);  // rank 1 was woken
    CHECK_EQ(ear.count(1, AbortCode::kPeerLost), 0);
    if (self.rank == 1) CHECK(ear.wait_for(2));  // it was told that it was late
    self.plane->set_abort_handler({});
  });
  for (int rank = 0; rank < 3; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
  ranks.signal(1, SIGSTOP);
  for (const int other : {0, 2}) ranks.pipe(other).tell(2);
  for (const int other : {0, 2}) CHECK_EQ(ranks.pipe(other).hear(), 3u);
  ranks.signal(1, SIGCONT);
  ranks.join_all();
}

TEST(close_waits_for_nobody) {
  ForkedRanks ranks(4, [](Rank& self) {
    self.connect();
    self.exchange({0, 1, 2, 3}, 1);
    self.parent.tell(1);
    if (self.rank != 0) pause();
    CHECK_EQ(self.parent.hear(), 2u);                      // 1 is dead, 2 stopped, 3 asleep
    while (self.plane->dead_ranks().empty()) usleep(500);  // else the deadline may come first
    const uint64_t start_ns = now_ns();
    CHECK_ERROR(kPeerLost, {1}, self.exchange({0, 1, 2, 3}, 2, 0.1, 2 << 20));
    self.plane->close();
    self.plane.reset();
    CHECK(now_ns() - start_ns < 5'000'000'000u);  // milliseconds on an idle machine
  });
  for (int rank = 0; rank < 4; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
  ranks.signal(1, SIGKILL);
  ranks.join(1, SIGKILL);
  ranks.signal(2, SIGSTOP);
  usleep(50'000);
  ranks.pipe(0).tell(2);
  ranks.join(0);
}

TEST(killed_before_it_connects) {
  ForkedRanks ranks(4, [](Rank& self) {
    self.parent.tell(1);
    if (self.rank == 1) pause();
    CHECK_EQ(self.parent.hear(), 2u);
    CHECK_ERROR(kPeerLost, {1}, self.connect());
    // Who is through first must not end before the others look: they would name it instead.
    self.parent.tell(3);
    CHECK_EQ(self.parent.hear(), 4u);
  });
  for (int rank = 0; rank < 4; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
  ranks.signal(1, SIGKILL);
  ranks.join(1, SIGKILL);
  for (const int other : {0, 2, 3}) ranks.pipe(other).tell(2);
  for (const int other : {0, 2, 3}) CHECK_EQ(ranks.pipe(other).hear(), 3u);
  for (const int other : {0, 2, 3}) ranks.pipe(other).tell(4);
  ranks.join_all({1});
}

TEST(killed_while_the_others_wait_for_it_to_connect) {
  ForkedRanks ranks(4, [](Rank& self) {
    self.parent.tell(1);
    if (self.rank == 3) pause();
    CHECK_ERROR(kPeerLost, {3}, self.connect());
    self.parent.tell(2);  // as in killed_before_it_connects
    CHECK_EQ(self.parent.hear(), 3u);
  });
  for (int rank = 0; rank < 4; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
  usleep(200'000);
  ranks.signal(3, SIGKILL);
  ranks.join(3, SIGKILL);
  for (const int other : {0, 1, 2}) CHECK_EQ(ranks.pipe(other).hear(), 2u);
  for (const int other : {0, 1, 2}) ranks.pipe(other).tell(3);
  ranks.join_all({3});
}

TEST(a_rank_that_never_connects_is_late) {
  ForkedRanks ranks(3, [](Rank& self) {
    if (self.rank == 2) {
      CHECK_EQ(self.parent.hear(), 2u);
      return;
    }
    const uint64_t start_ns = now_ns();
    try {
      self.connect(4);  // the other one has come by then
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.code == ErrorCode::kPeerTimeout && error.peers == std::vector<int>{2});
      // The first to give up tells the other, which began later and so hears of it before its own deadline.
      const bool was_told = error.text.find("gave up") != std::string::npos;
      CHECK(was_told || now_ns() - start_ns >= 4'000'000'000u);
    }
    self.parent.tell(1);
  });
  for (const int other : {0, 1}) CHECK_EQ(ranks.pipe(other).hear(), 1u);
  ranks.pipe(2).tell(2);
  ranks.join_all();
}

// Whatever the moment: survivors either connect and then hear of the death, or fail to connect naming the victim or a
// rank that gave up because of it.
TEST(killed_at_random_while_connecting) {
  std::mt19937 random(3);
  for (int turn = 0; turn < 20; ++turn) {
    ForkedRanks ranks(3, [](Rank& self) {
      Ear ear;
      self.parent.tell(1);
      if (self.rank == 1) {
        self.connect();
        pause();
      }
      try {
        self.connect();
      } catch (const Error& error) {
        CHECK(error.code == ErrorCode::kPeerLost && !error.peers.empty());
        return;
      }
      self.plane->set_abort_handler(ear.handler());
      CHECK(ear.wait_for(1));
      CHECK(!self.plane->dead_ranks().empty());
      self.plane->set_abort_handler({});
    });
    for (int rank = 0; rank < 3; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
    usleep(static_cast<useconds_t>(random() % 4000));
    ranks.signal(1, SIGKILL);
    ranks.join(1, SIGKILL);
    ranks.join_all({1});
  }
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
