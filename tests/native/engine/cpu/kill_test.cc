// Guards against what a death may do to those who live on: a hang, a wrong word, a wrong name, something left behind, or a
// communicator that can't go on. Ranks are processes of the engine built with fail points; 243 of them are killed, six stopped.
#include <cstdlib>
#include <cstring>
#include <random>

#include "bootstrap/ranks.h"
#include "engine/engine_rank.h"
#include "engine/leftovers.h"

using namespace weft;
using namespace weft::test;

namespace {

// Where this process is to end or stop itself, if it is to. Set once the rank runs.
struct Fuse {
  const char* point = nullptr;
  int num_passes = 0;  // passes of the point before the one that kills
  int signal = SIGKILL;
};
Fuse fuse;

constexpr const char* kPoints[] = {
    "dispatch.before_count", "dispatch.after_count",  "dispatch.after_notify", "dispatch.mid_row",
    "dispatch.before_send",  "dispatch.after_send",   "dispatch.after_finish", "dispatch.staged_push",
    "dispatch.staged_drain", "combine.before_count",  "combine.after_count",   "combine.mid_push",
    "combine.mid_sum",       "combine.before_reduce", "combine.after_finish",
};
constexpr int kNumRanks = 5;
constexpr int kNodeRanks = 2;  // where there are nodes: of 2, 2 and 1 rank
constexpr int kKillsASet = 3;  // one after the other, with a rebuild after each
constexpr unsigned kLongestS = 60;

// Who dies when; known to all ranks of a set.
struct Kill {
  int victim = 0;
  const char* point = nullptr;  // null: the parent kills at a random time
  int num_passes = 0;
};

// Between nodes not every rank comes to every point.
enum class Needs { kNothing, kOtherNode, kMate, kSource };
struct NodePoint {
  const char* name;
  Needs needs = Needs::kNothing;
};
constexpr NodePoint kNodePoints[] = {
    {"dispatch.before_count"},
    {"dispatch.after_count"},
    {"dispatch.after_put", Needs::kOtherNode},  // who lives alone in the last node puts no row
    {"dispatch.mid_forward", Needs::kSource},
    {"dispatch.before_send"},
    {"dispatch.after_finish"},
    {"combine.after_count"},
    {"combine.mid_push", Needs::kMate},
    {"combine.after_put", Needs::kSource},
    {"combine.mid_sum"},
    {"combine.before_reduce"},
    {"combine.after_finish"},
};

bool comes_to(int rank, Needs needs, const std::vector<int>& alive) {
  RailMap map{kNumRanks, kNodeRanks, 0};
  for (int each : alive) map.active |= u64{1} << each;
  return needs == Needs::kNothing || std::any_of(alive.begin(), alive.end(), [&](int other) {
           if (map.are_mates(rank, other)) return needs == Needs::kMate && other != rank;
           return needs == Needs::kOtherNode ||
                  (needs == Needs::kSource && map.forwarder(other, map.node(rank)) == rank);
         });
}

JobShape job_shape(u64 seed, int node_ranks = 0) {
  JobShape shape;
  shape.node_ranks = node_ranks;
  shape.num_ranks = kNumRanks;
  shape.num_local = 2;
  shape.top_k = 3;
  shape.max_tokens = 24;
  shape.max_row_bytes = 512;
  shape.seed = seed;
  return shape;
}

// Calls go on until the victim's death ends one of them. What comes out of them until then is right.
void run_until_lost(EngineRank& rank, int victim, u64 first_call) {
  try {
    for (u64 id = first_call;; ++id) rank.run(id);
  } catch (const Error& error) {
    CHECK_EQ(error.code, ErrorCode::kPeerLost);
    CHECK_EQ(ranks_text(error.peers), ranks_text({victim}));
    CHECK(error.text.find("rank " + std::to_string(victim)) != std::string::npos);
  }
  // Broken means broken: the same error again, at once, until it is rebuilt.
  CHECK_ERROR(kPeerLost, {victim}, rank.barrier());
}

void live(Rank& self, const std::vector<Kill>& kills, const JobShape& shape, u64 heap_bytes) {
  alarm(kLongestS);
  const RankLeftovers leftovers;
  std::vector<int> gone;
  self.connect();
  {
    EngineRank rank(std::move(self.plane), shape, heap_bytes);
    for (u64 round = 0; round < kills.size(); ++round) {
      const Kill& kill = kills[round];
      rank.run_many(round * 1000000, 2);
      self.parent.tell(round);
      if (kill.victim == self.rank) {
        // A death right after a call may end that call elsewhere, so all have left the last one first.
        self.parent.hear();
        fuse = {kill.point, kill.num_passes};
      }
      run_until_lost(rank, kill.victim, round * 1000000 + 2);
      gone.push_back(kill.victim);
      rank.rebuild(all_but(kNumRanks, gone));
      CHECK_EQ(rank.comm().epoch(), static_cast<u32>(round) + 2);
    }
    rank.run_many(9000000, 4);
    rank.barrier();
    CHECK_EQ(rank.window().heap_used(), 0u);
    rank.close();
  }
  leftovers.check();
}

void run_set(const std::vector<Kill>& kills, u64 seed, u64 heap_bytes, int node_ranks) {
  const JobShape shape = job_shape(seed, node_ranks);
  std::mt19937 random(static_cast<unsigned>(seed));
  const int before = num_failures();
  {
    ForkedRanks ranks(kNumRanks, [&](Rank& self) { live(self, kills, shape, heap_bytes); });
    std::vector<int> gone;
    for (size_t round = 0; round < kills.size(); ++round) {
      for (int rank : all_but(kNumRanks, gone)) CHECK_EQ(ranks.pipe(rank).hear(), uint64_t{round});
      ranks.pipe(kills[round].victim).tell(round);
      if (kills[round].point == nullptr) {
        usleep(static_cast<useconds_t>(random() % 15000));
        ranks.signal(kills[round].victim, SIGKILL);
      }
      ranks.join(kills[round].victim, SIGKILL);
      gone.push_back(kills[round].victim);
      if (num_failures() != before) break;
    }
    if (num_failures() == before) ranks.join_all(gone);
  }
  if (num_failures() == before) return;
  std::string text = "set with seed " + std::to_string(seed) + ":";
  for (const Kill& kill : kills)
    text += " rank " + std::to_string(kill.victim) + " at " + (kill.point != nullptr ? kill.point : "random");
  std::fprintf(stderr, "%s\n", text.c_str());
}

// `num_kills` deaths in sets; `choose(n, alive)` says who dies n-th, and where.
template <class Choose>
void run_sets(int num_kills, u64 seed, u64 heap_bytes, int node_ranks, const Choose& choose) {
  std::mt19937 random(static_cast<unsigned>(seed));
  const TestLeftovers leftovers;
  for (int first = 0; first < num_kills && num_failures() == 0; first += kKillsASet) {
    std::vector<int> alive = all_but(kNumRanks);
    std::shuffle(alive.begin(), alive.end(), random);
    std::vector<Kill> kills;
    for (int idx = 0; idx < kKillsASet; ++idx) {
      Kill kill = choose(first + idx, alive);
      const bool is_in_loop = kill.point != nullptr && std::strstr(kill.point, "mid") != nullptr;
      kill.num_passes = static_cast<int>(random() % (is_in_loop ? 100 : 5));
      kills.push_back(kill);
      alive.erase(std::find(alive.begin(), alive.end(), kill.victim));
    }
    run_set(kills, seed * 1000 + static_cast<u64>(first), heap_bytes, node_ranks);
  }
  leftovers.check();
}

template <class PointOf>
void run_kills(int num_kills, u64 seed, u64 heap_bytes, const PointOf& point_of) {
  run_sets(num_kills, seed, heap_bytes, 0,
           [&](int idx, const std::vector<int>& alive) { return Kill{alive.front(), point_of(idx)}; });
}

// The first of `alive` that comes to the point dies there; does none, one dies at a random time.
void run_kills_between_nodes(int num_kills, u64 seed, u64 heap_bytes) {
  run_sets(num_kills, seed, heap_bytes, kNodeRanks, [](int idx, const std::vector<int>& alive) {
    const NodePoint& point = kNodePoints[static_cast<size_t>(idx) % std::size(kNodePoints)];
    for (int rank : alive) {
      if (comes_to(rank, point.needs, alive)) return Kill{rank, point.name};
    }
    return Kill{alive.front(), nullptr};
  });
}

// As live(), but ranks stop and stay. Who awaits what a stopped rank owes names it, and so do those who await such a rank.
void live_beside_stopped(Rank& self, const std::vector<Kill>& stops, const JobShape& shape, u64 heap_bytes) {
  self.connect();
  EngineRank rank(std::move(self.plane), shape, heap_bytes);
  std::vector<int> gone;
  for (u64 round = 0; round < stops.size(); ++round) {
    const Kill& stop = stops[round];
    rank.set_timeout_s(30);
    rank.run_many(round * 1000000, 2);
    self.parent.tell(round);
    self.parent.hear();
    if (stop.victim == self.rank) fuse = {stop.point, stop.num_passes, SIGSTOP};
    rank.set_timeout_s(4);
    CHECK_ERROR(kPeerTimeout, {stop.victim}, rank.run_many(round * 1000000 + 2, 100000));
    gone.push_back(stop.victim);
    rank.rebuild(all_but(kNumRanks, gone));
  }
  rank.set_timeout_s(30);
  rank.run_many(9000000, 2);
  rank.close();
}

void run_stops(const std::vector<Kill>& stops, u64 seed, u64 heap_bytes) {
  const JobShape shape = job_shape(seed, kNodeRanks);
  const int before = num_failures();
  {
    ForkedRanks ranks(kNumRanks, [&](Rank& self) { live_beside_stopped(self, stops, shape, heap_bytes); });
    std::vector<int> gone;
    for (size_t round = 0; round < stops.size() && num_failures() == before; ++round) {
      for (int rank : all_but(kNumRanks, gone)) CHECK_EQ(ranks.pipe(rank).hear(), uint64_t{round});
      for (int rank : all_but(kNumRanks, gone)) ranks.pipe(rank).tell(round);
      ranks.await_stop(stops[round].victim);
      gone.push_back(stops[round].victim);
    }
    if (num_failures() == before) ranks.join_all(gone);
    for (int rank : gone) {
      ranks.signal(rank, SIGKILL);
      ranks.join(rank, SIGKILL);
    }
  }
  if (num_failures() == before) return;
  std::string text = "stops with seed " + std::to_string(seed) + ":";
  for (const Kill& stop : stops) text += " rank " + std::to_string(stop.victim) + " at " + stop.point;
  std::fprintf(stderr, "%s\n", text.c_str());
}

constexpr u64 kRoom = 8u << 20;

const char* named_point(int idx) { return kPoints[static_cast<size_t>(idx) % std::size(kPoints)]; }
const char* no_point(int) { return nullptr; }

// Without heap all rows go through the rings, so that every point is passed.
TEST(kills_at_named_points_without_heap) { run_kills(45, 1, 0, named_point); }
TEST(kills_at_named_points) {
  run_kills(45, 2, kRoom, [](int idx) {
    const char* point = named_point(idx);
    return std::strstr(point, "staged") != nullptr ? "dispatch.mid_row" : point;
  });
}
// Nodes of 2, 2 and 1, fewer after each rebuild: somebody stands in for who is gone, and a node may be gone.
TEST(kills_between_nodes) { run_kills_between_nodes(24, 5, kRoom); }
TEST(kills_between_nodes_without_heap) { run_kills_between_nodes(24, 6, 0); }
TEST(kills_between_nodes_at_random_times) {
  run_sets(15, 7, kRoom, kNodeRanks, [](int, const std::vector<int>& alive) { return Kill{alive.front(), nullptr}; });
}
TEST(stops_between_nodes) {
  run_stops({{3, "dispatch.after_put", 2}, {0, "dispatch.mid_forward", 20}, {1, "combine.mid_sum", 20}}, 8, kRoom);
  run_stops({{2, "combine.after_put", 2}, {0, "combine.mid_push", 20}, {4, "dispatch.before_count", 2}}, 9, 0);
}
TEST(kills_at_random_times) { run_kills(60, 3, kRoom, no_point); }
TEST(kills_at_random_times_without_heap) { run_kills(30, 4, 0, no_point); }

// Several deaths at once, also during the rebuild that the first of them asked for.
void survive_all(Rank& self, const std::vector<int>& victims, const JobShape& shape) {
  alarm(kLongestS);
  const RankLeftovers leftovers;
  self.connect();
  {
    EngineRank rank(std::move(self.plane), shape, kRoom);
    rank.run_many(0, 1);
    self.parent.tell(0);
    std::vector<int> gone;
    u64 first_call = 1;
    const auto note = [&](const Error& error) {
      CHECK_EQ(error.code, ErrorCode::kPeerLost);
      if (error.code != ErrorCode::kPeerLost) throw error;
      for (int peer : error.peers) {
        CHECK(std::find(victims.begin(), victims.end(), peer) != victims.end());
        gone.push_back(peer);
      }
    };
    while (gone.size() < victims.size()) {
      try {
        for (u64 id = first_call;; ++id) rank.run(id);
      } catch (const Error& error) {
        note(error);
      }
      for (bool done = false; !done;) {
        try {
          rank.rebuild(all_but(kNumRanks, gone));
          done = true;
        } catch (const Error& error) {
          note(error);
        }
      }
      first_call += 1000000;
    }
    rank.run_many(9000000, 2);
    rank.barrier();
    rank.close();
  }
  leftovers.check();
}

void kill_two(const std::vector<int>& victims, u64 trial, int node_ranks) {
  const JobShape shape = job_shape(700 + trial, node_ranks);
  ForkedRanks ranks(kNumRanks, [&](Rank& self) { survive_all(self, victims, shape); });
  for (int rank : all_but(kNumRanks)) ranks.pipe(rank).hear();
  usleep(static_cast<useconds_t>(trial * 300));
  ranks.signal(victims[0], SIGKILL);
  usleep(static_cast<useconds_t>(trial % 5 * 400));
  ranks.signal(victims[1], SIGKILL);
  for (int victim : victims) ranks.join(victim, SIGKILL);
  ranks.join_all(victims);
}

TEST(two_ranks_die_together) {
  for (u64 trial = 0; trial < 15 && num_failures() == 0; ++trial) kill_two({static_cast<int>(trial % 4), 4}, trial, 0);
}
// Whole nodes, both ends of a rail, and of each node one.
TEST(two_ranks_die_together_between_nodes) {
  const std::vector<int> pairs[] = {{0, 1}, {2, 3}, {0, 2}, {1, 4}, {3, 0}};
  for (u64 trial = 0; trial < 15 && num_failures() == 0; ++trial) kill_two(pairs[trial % 5], trial, kNodeRanks);
}

TEST(close_works_with_every_peer_dead) {
  for (int variant = 0; variant < 3; ++variant) {
    const JobShape shape = job_shape(800);
    ForkedRanks ranks(kNumRanks, [&](Rank& self) {
      alarm(kLongestS);
      const RankLeftovers leftovers;
      self.connect();
      {
        EngineRank rank(std::move(self.plane), shape, kRoom);
        rank.run_many(0, 2);
        self.parent.tell(0);
        self.parent.hear();  // all others are dead now
        if (variant == 0) rank.close();
        if (variant == 1)
          CHECK_THROWS(rank.barrier(), Error, [](const Error& e) { CHECK_EQ(e.code, ErrorCode::kPeerLost); });
        const uint64_t start_ns = now_ns();
        // The destructor does the rest.
        if (variant == 2) rank.comm().close();
        CHECK(now_ns() - start_ns < 20'000'000'000);  // milliseconds on an idle machine
      }
      leftovers.check();
    });
    for (int rank : all_but(kNumRanks)) ranks.pipe(rank).hear();
    for (int rank = 1; rank < kNumRanks; ++rank) ranks.signal(rank, SIGKILL);
    for (int rank = 1; rank < kNumRanks; ++rank) ranks.join(rank, SIGKILL);
    ranks.pipe(0).tell(0);
    ranks.join(0);
  }
}

// Two communicators of the same processes: each breaks and is rebuilt on its own.
TEST(two_communicators_at_once) {
  const JobShape shape = job_shape(900);
  const std::vector<int> left = {0, 2, 3, 4};
  ForkedRanks ranks(kNumRanks, [&](Rank& self) {
    alarm(kLongestS);
    const RankLeftovers leftovers;
    Listener listener;
    const Endpoint mine = listener.endpoint();
    self.connect();
    std::vector<std::byte> bytes(sizeof(mine));
    std::memcpy(bytes.data(), &mine, sizeof(mine));
    const auto parcels = self.plane->exchange(all_but(kNumRanks), 77, bytes, {}, deadline_after_s(kLongS), {});
    std::vector<Endpoint> endpoints;
    for (const Parcel& parcel : parcels) endpoints.push_back(parse_endpoint(parcel.bytes, "endpoint"));
    auto second_plane = connect_processes(self.rank, endpoints, std::move(listener), deadline_after_s(kLongS), {});
    {
      EngineRank first(std::move(self.plane), shape, kRoom);
      EngineRank second(std::move(second_plane), shape, 0);
      for (u64 id = 0; id < 5; ++id) {
        first.run(id);
        second.run(id + 50);
      }
      self.parent.tell(0);
      run_until_lost(first, 1, 1000);
      CHECK_ERROR(kPeerLost, {1}, for (u64 id = 0;; ++id) second.run(2000 + id));
      second.rebuild(left);
      second.run_many(3000, 2);
      CHECK_ERROR(kPeerLost, {1}, first.barrier());  // the one has nothing to do with the other
      first.close();
      second.run_many(4000, 2);
      second.barrier();
      second.close();
    }
    leftovers.check();
  });
  for (int rank : all_but(kNumRanks)) ranks.pipe(rank).hear();
  usleep(5000);
  ranks.signal(1, SIGKILL);
  ranks.join(1, SIGKILL);
  ranks.join_all({1});
}

}  // namespace

namespace weft {
void fail_point(const char* name) {
  if (fuse.point == nullptr || std::strcmp(name, fuse.point) != 0 || fuse.num_passes-- > 0) return;
  kill(getpid(), fuse.signal);
  pause();
}
}  // namespace weft

int main(int argc, char** argv) { return run_tests(argc, argv); }
