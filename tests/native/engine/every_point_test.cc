// Guards against a death at a point of joining, changing and recovering that the table of join_kill_test.cc does not have: each
// process dies at each named point that it passes there.
//
//   engine_every_point [--times N] [--seed S] [--stops] [--only POINT/PROCESS] [--part K/N] [--jitter US] [CASE...]
//
// N: deaths of each process at each point, each at a pass of its own; 0, the default: some that the seed draws. With --stops they
// are stopped there, and go on when the others have gone on without them. With --only: that process at that point alone.
// --jitter: at every fourth point or so each process sleeps up to US microseconds, so that they meet in other orders.
// --part: of all cases, of which every N-th is in one part, those of part K, from 0.
#include <unistd.h>

#include <map>
#include <random>
#include <string>
#include <utility>

#include "engine/kill_scenarios.h"

using namespace weft;
using namespace weft::test;

namespace {

constexpr int kDrawn = 6;  // of a kind of scenario
int num_times = 0;
unsigned seed = 1;
int signal_number = SIGKILL;
std::string only;  // one that dies
int longest_us = 0;

bool is_of_operations(const std::string& name) {  // kill_test.cc has these
  return name.starts_with("dispatch.") || name.starts_with("combine.");
}

// The points that processes pass. Names lie at one address in all processes of a test.
struct Passes {
  static constexpr int kMost = 64;
  struct Point {
    std::atomic<const char*> name{nullptr};
    std::atomic<int> counts[kMostProcesses] = {};
  };

  void note(const char* name, int process) {
    for (Point& point : points) {
      const char* found = nullptr;
      if (!point.name.compare_exchange_strong(found, name) && std::strcmp(found, name) != 0) continue;
      ++point.counts[process];
      return;
    }
    CHECK(false);
  }

  Point points[kMost];
};
Passes* passes = nullptr;  // in shared memory

// What each process of the scenario passes, if nobody else dies; of those that die nothing.
std::map<std::pair<const char*, int>, int> passes_of(const Scenario& scenario) {
  const InShared<Passes> noted;
  passes = &*noted;
  on_pass = [](const char* name, int process) { passes->note(name, process); };
  run_scenario(scenario);
  on_pass = nullptr;
  std::map<std::pair<const char*, int>, int> counts;
  for (const auto& point : (*noted).points) {
    if (point.name == nullptr || is_of_operations(point.name.load())) continue;
    for (int process = 0; process < kCapacity; ++process) {
      if (point.counts[process] > 0 && !scenario.is_victim(process)) {
        counts[{point.name.load(), process}] = point.counts[process];
      }
    }
  }
  return counts;
}

void die_everywhere(const Scenario& scenario) {
  constexpr int kMostPasses = 8;
  const auto counts = passes_of(scenario);
  CHECK(counts.size() > 8);
  std::mt19937 random(seed);
  std::vector<std::pair<const char*, int>> chosen;
  for (const auto& [each, count] : counts) {
    if (!only.empty() && only != each.first + ("/" + std::to_string(each.second))) continue;
    for (int time = 0; time < std::max(num_times, 1); ++time) chosen.push_back(each);
  }
  std::shuffle(chosen.begin(), chosen.end(), random);
  if (num_times == 0) chosen.resize(std::min(chosen.size(), size_t{kDrawn}));
  int num_missed = 0;
  for (const auto& [point, process] : chosen) {
    watch(running_case());  // each scenario may take that long
    Scenario with_death = scenario;
    const int num_passes =
        static_cast<int>(random() % static_cast<unsigned>(std::min(counts.at({point, process}), kMostPasses)));
    with_death.victims.push_back({process, point, num_passes, signal_number, true});
    const int before = num_failures();
    num_missed += run_scenario(with_death) ? 0 : 1;
    if (num_failures() != before) return;  // the scenario is printed
  }
  std::printf("%zu points of processes, %zu scenarios, %d of them past the point\n", counts.size(), chosen.size(),
              num_missed);
}

TEST(everybody_dies_at_every_point_of_a_join) { die_everywhere({Kind::kJoin, {}}); }

TEST(everybody_dies_at_every_point_of_a_leave) { die_everywhere({Kind::kLeave, {}}); }

TEST(everybody_dies_at_every_point_of_a_recovery) { die_everywhere({Kind::kRecover, {{3, "dispatch.after_send", 5}}}); }

TEST(everybody_dies_at_every_point_behind_the_death_of_a_newcomer) {
  die_everywhere({Kind::kJoin, {{kNewcomer, "acknowledge.shown"}}});
}

std::vector<std::string> part_of(const char* text) {
  size_t part = 0, num_parts = 1;
  CHECK_EQ(std::sscanf(text, "%zu/%zu", &part, &num_parts), 2);
  std::vector<std::string> names;
  for (size_t idx = part; idx < cases().size(); idx += std::max(num_parts, size_t{1})) {
    names.emplace_back(cases()[idx].name);
  }
  return names;
}

}  // namespace

void weft::fail_point(const char* name) {
  if (longest_us > 0 && fuse.process != Fuse::kUnarmed) {
    thread_local std::mt19937 random(seed + static_cast<unsigned>(gettid()));
    if (random() % 4 == 0) usleep(static_cast<useconds_t>(random() % static_cast<unsigned>(longest_us)));
  }
  pass(name);
}

int main(int argc, char** argv) {
  std::vector<char*> wanted{argv[0]};
  std::vector<std::string> names;
  for (int idx = 1; idx < argc; ++idx) {
    const bool has_value = idx + 1 < argc;
    if (has_value && std::strcmp(argv[idx], "--times") == 0) {
      num_times = std::atoi(argv[++idx]);
    } else if (has_value && std::strcmp(argv[idx], "--seed") == 0) {
      seed = static_cast<unsigned>(std::atoi(argv[++idx]));
    } else if (has_value && std::strcmp(argv[idx], "--only") == 0) {
      only = argv[++idx];
    } else if (has_value && std::strcmp(argv[idx], "--part") == 0) {
      names = part_of(argv[++idx]);
      for (std::string& name : names) wanted.push_back(name.data());
    } else if (has_value && std::strcmp(argv[idx], "--jitter") == 0) {
      longest_us = std::atoi(argv[++idx]);
    } else if (std::strcmp(argv[idx], "--stops") == 0) {
      signal_number = SIGSTOP;
    } else {
      wanted.push_back(argv[idx]);
    }
  }
  return run_tests(static_cast<int>(wanted.size()), wanted.data());
}
