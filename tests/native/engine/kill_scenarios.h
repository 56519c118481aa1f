// check: allow-in-file file-size: one scenario, from its processes to who wakes them
// Scenarios of a group that ranks join, leave and recover, with deaths and stops at named points: what it may not do to the others
// is to let them hang, to give them a wrong word, or to leave a slot lost or something behind. Who has died is replaced by a new
// process in the same slot: each scenario ends with all slots that it began with, and those of its newcomer, at work.
#pragma once

#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "bootstrap/ranks.h"
#include "engine/engine_rank.h"
#include "engine/leftovers.h"
#include "weft/config/fail_point.h"

namespace weft::test {

constexpr int kCapacity = 4;
constexpr int kNewcomer = 3;       // process and slot of who joins
constexpr int kMostProcesses = 8;  // founders or newcomer in their slots, then those that replace victims
constexpr unsigned kLongestS = 60;
constexpr double kLateS = 3;  // of an operation, where somebody is stopped
constexpr u64 kRoom = 1u << 20;
constexpr u64 kOpsOn = 20;  // of the others, while somebody is stopped
constexpr u64 kOpsAfter = 5;
constexpr u64 kEndTag = u64{1} << 57;  // of the exchanges in which all agree to end

struct Fuse {
  const char* point = nullptr;
  std::atomic<int> num_passes{0};  // before the one that counts
  int signal = SIGKILL;
  bool may_miss = false;
  std::atomic<int>* first = nullptr;  // of several processes with such a fuse: who has come to it first; -1: nobody
  int process = kUnarmed;
  std::atomic<bool>* is_hot = nullptr;
  std::atomic<bool>* is_due = nullptr;  // passes before do not count

  static constexpr int kUnarmed = -1;
};
inline Fuse fuse;

constexpr int kAnybody = -1;  // of the founders: whoever comes to the point first
constexpr int kNobody = -2;   // has come to it
struct Victim {
  int process;
  const char* point;
  int num_passes = 0;
  int signal = SIGKILL;
  bool may_miss = false;   // the point, and so live on; of the last victim, behind the others' deaths
  bool sleeps_on = false;  // stopped, until all other victims have come to their points and are replaced
};

enum class Kind {
  kJoin,     // of three founders and a newcomer
  kLeave,    // slot 2 leaves three founders
  kRecover,  // four founders
};

// What those of the founders that live see of it.
enum class Sees { kNothing, kBreak, kEither };

// Told of the points that processes pass once they are armed and hot.
inline void (*on_pass)(const char* name, int process) = nullptr;

// What the processes of a scenario show each other.
struct Board {
  std::atomic<int> num_begun{0}, num_armed{0};
  char address[4096] = {};
  std::atomic<bool> may_join[kMostProcesses] = {};
  std::atomic<bool> may_end{false};
  std::atomic<bool> is_hot{false};            // passes count for who may miss its point
  std::atomic<bool> are_asleep{false};        // those that sleep on: a recovery could take in who is late
  std::atomic<int> first{kAnybody};           // who has come to a point of kAnybody, or of who may miss it
  std::atomic<u64> ops[kMostProcesses] = {};  // as a member
  std::atomic<u32> epoch[kMostProcesses] = {};
  std::atomic<u64> whole_ops[kMostProcesses] = {};  // in this epoch, with all who are to be there at the end
  std::atomic<bool> has_ended[kMostProcesses] = {};
  std::atomic<bool> is_ready[kMostProcesses] = {};  // of who is no founder
};

struct Scenario {
  Kind kind;
  std::vector<Victim> victims;
  Sees sees = Sees::kEither;
  Board* board = nullptr;

  int num_founders() const { return kind == Kind::kRecover ? kCapacity : 3; }
  int num_first() const { return kind == Kind::kLeave ? 3 : kCapacity; }  // the newcomer included
  int num_processes() const { return num_first() + static_cast<int>(victims.size()); }
  int process_of(const Victim& victim) const {
    if (victim.may_miss && board->first != victim.process) return kNobody;
    return victim.process == kAnybody ? board->first.load() : victim.process;
  }
  int slot_of(int process) const {
    return process < num_first() ? process : process_of(victims[static_cast<size_t>(process - num_first())]);
  }
  bool is_victim(int process) const {
    return std::any_of(victims.begin(), victims.end(), [&](const Victim& each) { return process_of(each) == process; });
  }
  bool has_stops() const {
    return std::any_of(victims.begin(), victims.end(), [](const Victim& each) { return each.signal == SIGSTOP; });
  }
  bool waits_for_sleep(const Victim& victim) const {
    return victim.process == kAnybody &&
           std::any_of(victims.begin(), victims.end(), [](const Victim& each) { return each.sleeps_on; });
  }
  bool may_be_evicted(int process) const {
    if (kind == Kind::kLeave && process == 2) return true;  // it recovers before its boundary
    return std::any_of(victims.begin(), victims.end(),
                       [&](const Victim& each) { return process_of(each) == process && each.signal == SIGSTOP; });
  }
  RankSet at_the_end() const {
    RankSet all;
    for (int slot = 0; slot < num_first(); ++slot) all.add(slot);
    if (kind == Kind::kLeave && !is_victim(2)) all.remove(2);
    return all;
  }
  double late_s() const { return has_stops() ? kLateS : kLongS; }
  std::string text() const {
    std::string text = "scenario " + std::to_string(static_cast<int>(kind)) + ":";
    for (const Victim& each : victims) {
      text += " process " + std::to_string(each.process) + (each.signal == SIGSTOP ? " stopped at " : " killed at ") +
              each.point + " (" + std::to_string(each.num_passes) + " passes before)";
    }
    return text;
  }
};

// One that forked processes share.
template <class T>
class InShared {
 public:
  InShared()
      : memory_(mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)),
        shared_(new(memory_) T) {}
  ~InShared() { munmap(memory_, sizeof(T)); }
  InShared(const InShared&) = delete;
  InShared& operator=(const InShared&) = delete;
  T& operator*() const { return *shared_; }

 private:
  void* memory_;
  T* shared_;
};

template <class Condition>
bool comes_true(const Condition& condition) {
  const u64 until_ns = deadline_after_s(2 * kLongS);
  while (!condition()) {
    if (now_ns() >= until_ns) return false;
    usleep(500);
  }
  return true;
}

inline JobShape job_shape() {
  JobShape shape;
  shape.num_ranks = kCapacity;
  shape.num_local = 2;
  shape.top_k = 3;
  shape.max_tokens = 12;
  shape.max_row_bytes = 256;
  shape.seed = 35;
  return shape;
}

// ---- a process of a scenario

class Member {
 public:
  Member(Rank& self, const Scenario& scenario) : self_(self), scenario_(scenario), board_(*scenario.board) {}

  void live() {
    alarm(kLongestS);
    std::srand(static_cast<unsigned>(getpid()));
    const RankLeftovers leftovers;
    const bool is_founder = self_.rank < scenario_.num_founders();
    if (!is_founder && !comes_true([&] { return board_.may_join[self_.rank].load(); })) return;
    if (!is_founder) arm();
    try {
      rank_ = std::make_unique<EngineRank>(is_founder ? found() : join(), job_shape(), kRoom);
      rank_->set_timeout_s(scenario_.late_s());
      if (is_founder) begin();
      if (is_founder) arm();
      if (is_founder) ++board_.num_armed;
      CHECK(comes_true([&] { return board_.num_armed == scenario_.num_founders(); }));
      if (!is_founder) wait_to_be_taken_in();
      if (work()) {
        check_held();
        comm().exchange(kEndTag, {}, {}, deadline_after_s(kLongS), {});  // all have looked
      }
    } catch (const Error& error) {
      if (error.code != ErrorCode::kEvicted || !scenario_.may_be_evicted(self_.rank)) {
        report_failure("process", self_.rank, std::string(error_code_name(error.code)) + ": " + error.text);
      }
    }
    if (rank_) rank_->close();
    rank_.reset();
    leftovers.check();
    board_.has_ended[self_.rank] = true;
  }

 private:
  Communicator& comm() { return rank_->comm(); }
  u64 until_ns() const { return deadline_after_s(scenario_.late_s()); }

  void arm() {
    fuse.process = self_.rank;
    fuse.is_hot = &board_.is_hot;
    const bool is_founder = self_.rank < scenario_.num_founders();
    for (const Victim& victim : scenario_.victims) {
      const bool may_be_first = (victim.process == kAnybody && is_founder && fuse.point == nullptr) || victim.may_miss;
      if (victim.process != self_.rank && (victim.process != kAnybody || !may_be_first)) continue;
      fuse.first = may_be_first ? &board_.first : nullptr;
      fuse.is_due = scenario_.waits_for_sleep(victim) ? &board_.are_asleep : nullptr;
      fuse.num_passes = victim.num_passes;
      fuse.signal = victim.signal;
      fuse.may_miss = victim.may_miss;
      fuse.point = victim.point;
    }
  }

  std::shared_ptr<Communicator> found() {
    std::vector<Endpoint> endpoints = self_.endpoints;
    endpoints.resize(static_cast<size_t>(scenario_.num_founders()));
    return Communicator::create(connect_processes(self_.rank, endpoints, std::move(self_.listener),
                                                  deadline_after_s(kLongS), {}, {}, {kCapacity}));
  }

  std::shared_ptr<Communicator> join() {
    const int slot = scenario_.slot_of(self_.rank);
    const u64 give_up_ns = deadline_after_s(kLongS);
    for (;;) {
      try {
        Listener listener;  // one whose join has failed is closed
        return Communicator::join(join_processes(board_.address, slot, std::move(listener), give_up_ns, {}));
      } catch (const Error& error) {  // the end of its last owner is not noticed yet
        if (error.code != ErrorCode::kInvalidArgument || now_ns() > give_up_ns) throw;
      }
      usleep(2000);
    }
  }

  void begin() {
    rank_->run(0);
    for (int waited_ms = 0; waited_ms < 20; ++waited_ms) {  // descriptors of exchanges are on their way
      const Held now = held();
      if (waited_ms == 0 || now.num_fds < num_held_.num_fds) num_held_ = now;
      usleep(1000);
    }
    first_of_2_ = comm().incarnation(2);
    const std::string address = comm().address();
    if (self_.rank == 0) std::memcpy(board_.address, address.data(), address.size());
    ++board_.num_begun;
    CHECK(comes_true([&] { return board_.num_begun == scenario_.num_founders(); }));
  }

  void wait_to_be_taken_in() {
    rank_->run(1);  // alone
    comm().ready(deadline_after_s(kLongS), {});
    board_.is_ready[self_.rank] = true;
    while (!comm().boundary(deadline_after_s(kLongS), {})) {
    }
    is_due_ = true;
  }

  // Steps, with recoveries, until all agree to end. False: this rank was let go.
  bool work() {
    for (;;) {
      try {
        if (!is_due_) {
          propose();
          const auto change = comm().boundary(until_ns(), {});
          if (change && RankSet::of(change->removed).contains(comm().rank())) return false;
        }
        is_due_ = false;
        if (comm().epoch() != epoch_) count_ = 0;
        epoch_ = comm().epoch();
        rank_->run(u64{epoch_} * 1'000'000 + ++count_);
        board_.epoch[self_.rank] = epoch_;
        ++board_.ops[self_.rank];
        const bool is_whole = RankSet::of(comm().active_ranks()) == scenario_.at_the_end();
        board_.whole_ops[self_.rank] = is_whole ? count_ : 0;
        if (count_ % 4 == 0 && all_may_end()) return true;
      } catch (const Error& error) {
        note(error);
        recover(error);
        is_due_ = true;  // the step is repeated, as a spare has it, too
      }
    }
  }

  // The lowest rank wants what is missing, until it is there.
  void propose() {
    if (is_wanting_) {
      const auto state = comm().wanted_change().state;
      is_wanting_ = state == WantedChange::State::kPreparing || state == WantedChange::State::kProposed;
    }
    const RankSet active = RankSet::of(comm().active_ranks());
    if (is_wanting_ || comm().rank() != active.next(0)) return;
    const bool is_leaving =
        scenario_.kind == Kind::kLeave && active.contains(2) && comm().incarnation(2) == first_of_2_;
    Communicator::Wanted wanted;
    if (is_leaving) wanted.remove = {2};
    if (!is_leaving) wanted.admit = (scenario_.at_the_end() - active).ranks();
    if (!is_leaving && wanted.admit.empty()) return;
    wanted.id = 1 + epoch_;
    comm().propose(wanted, deadline_after_s(2 * kLongS));
    is_wanting_ = true;
  }

  bool all_may_end() {
    const bool is_whole = RankSet::of(comm().active_ranks()) == scenario_.at_the_end();
    const std::vector<std::byte> mine{std::byte{is_whole && board_.may_end}};
    const auto parcels = comm().exchange(kEndTag | count_, mine, {}, until_ns(), {});
    const auto& active = comm().active_ranks();
    return std::all_of(active.begin(), active.end(), [&](int each) {
      return parcels[static_cast<size_t>(each)].bytes == std::vector<std::byte>{std::byte{1}};
    });
  }

  void note(const Error& error) {
    if (error.code != ErrorCode::kPeerLost && error.code != ErrorCode::kPeerTimeout) throw error;
    ++num_breaks_;
    if (error.code != ErrorCode::kPeerLost) return;
    for (const int peer : error.peers) {
      const bool is_expected = std::any_of(scenario_.victims.begin(), scenario_.victims.end(),
                                           [&](const Victim& each) { return scenario_.process_of(each) == peer; });
      if (!is_expected) report_failure("process", self_.rank, error.text);
    }
  }

  void recover(const Error& first) {
    std::vector<int> evict = stopped_of(first);
    for (;;) {
      try {
        return comm().recover(evict, 1, std::nullopt, until_ns(), {});
      } catch (const Error& error) {
        note(error);
        for (const int rank : stopped_of(error)) evict.push_back(rank);
      }
    }
  }

  std::vector<int> stopped_of(const Error& error) const {
    RankSet stopped;
    for (const Victim& victim : scenario_.victims) {
      if (victim.signal == SIGSTOP) stopped.add(victim.process);
    }
    if (error.code != ErrorCode::kPeerTimeout) return {};
    return (stopped & RankSet::of(error.peers)).ranks();
  }

  // What a rank holds of three or four others is the same at the end, whoever they are.
  struct Held {
    size_t num_fds;
    int num_mappings;
    size_t num_threads;
  };
  static Held held() {
    return {names_in("/proc/self/fd").size(), num_shared_mappings(), names_in("/proc/self/task").size()};
  }
  void check_held() {
    if (self_.rank >= scenario_.num_founders()) return;
    if (scenario_.sees == Sees::kNothing) CHECK_EQ(num_breaks_, 0);
    if (scenario_.sees == Sees::kBreak) CHECK(num_breaks_ > 0);
    const int num_more = static_cast<int>(comm().active_ranks().size()) - scenario_.num_founders();
    const auto wanted_fds = static_cast<size_t>(static_cast<int>(num_held_.num_fds) + 2 * num_more);
    const auto wanted_threads = static_cast<size_t>(static_cast<int>(num_held_.num_threads) + num_more);
    const int wanted_mappings = num_held_.num_mappings + 3 * num_more;
    Held now = held();
    for (int waited_ms = 0; waited_ms < 20'000; ++waited_ms) {  // watchers look up now and then
      now = held();
      if (now.num_fds == wanted_fds && now.num_mappings == wanted_mappings && now.num_threads == wanted_threads) break;
      usleep(1000);
    }
    CHECK_EQ(now.num_fds, wanted_fds);
    for (const std::string& name : names_in("/proc/self/fd")) {
      char target[256] = {};
      const std::string path = "/proc/self/fd/" + name;
      if (now.num_fds != wanted_fds && readlink(path.c_str(), target, sizeof(target) - 1) > 0) {
        std::fprintf(stderr, "process %d: descriptor %s is %s\n", self_.rank, name.c_str(), target);
      }
    }
    CHECK_EQ(now.num_mappings, wanted_mappings);
    CHECK_EQ(now.num_threads, wanted_threads);
  }

  Rank& self_;
  const Scenario& scenario_;
  Board& board_;
  std::unique_ptr<EngineRank> rank_;
  u32 epoch_ = 0;
  u64 count_ = 0;
  bool is_due_ = false;  // a step, without a boundary before it
  bool is_wanting_ = false;
  int num_breaks_ = 0;
  u64 first_of_2_ = 0;  // incarnation
  Held num_held_{};
};

// ---- a scenario

inline bool are_on(const Board& board, const Scenario& scenario, const Board& before, u64 num_ops) {
  for (int process = 0; process < scenario.num_founders(); ++process) {
    if (scenario.is_victim(process) || board.has_ended[process]) continue;
    const bool is_on = board.ops[process] >= before.ops[process] + num_ops;
    if (!is_on && board.epoch[process] <= before.epoch[process]) return false;
  }
  return true;
}

inline void copy(const Board& board, Board& copied) {
  for (int process = 0; process < kMostProcesses; ++process) {
    copied.ops[process] = board.ops[process].load();
    copied.epoch[process] = board.epoch[process].load();
  }
}

// Whether it comes true before a process has failed: what the others see then is not what the test is about.
template <class Condition>
bool comes_true_among(const ForkedRanks& ranks, const Condition& condition) {
  int failed = -1;
  const bool is_over = comes_true([&] {
    for (int process = 0; process < ranks.num_ranks(); ++process) {
      if (ranks.has_failed(process)) failed = process;
    }
    return failed >= 0 || condition();
  });
  if (failed >= 0) std::fprintf(stderr, "process %d has failed\n", failed);
  return is_over && failed < 0;
}

// Goes on when the others have done so without it; whether it was left out.
inline bool wake_up(const ForkedRanks& ranks, const Scenario& scenario, const Victim& victim, const Board& board) {
  Board before;
  copy(board, before);
  CHECK(comes_true_among(ranks, [&] { return are_on(board, scenario, before, kOpsOn); }));
  const auto replacements_are_ready = [&] {
    for (int process = scenario.num_first(); process < scenario.num_processes(); ++process) {
      if (board.may_join[process] && !board.is_ready[process] && board.ops[process] == 0) return false;
    }
    return true;
  };
  if (victim.sleeps_on) CHECK(comes_true_among(ranks, replacements_are_ready));
  copy(board, before);
  int other = 0;  // one that goes on
  while (other + 1 < scenario.num_founders() && (other == victim.process || scenario.is_victim(other))) ++other;
  ranks.signal(victim.process, SIGCONT);
  const auto works = [&] {
    return board.ops[victim.process] >= before.ops[victim.process] + kOpsAfter &&
           board.epoch[victim.process] == board.epoch[other];
  };
  CHECK(comes_true_among(ranks, [&] { return board.has_ended[victim.process] || works(); }));
  return board.has_ended[victim.process];
}

// Whether one that may miss its point has come to it. If all is done without it, and for a while, it does not any more.
inline bool comes_to_its_point(const ForkedRanks& ranks, const Scenario& scenario, Board& board) {
  constexpr u64 kOpsWhole = 40;
  const auto is_over = [&] {
    for (int process = 0; process < scenario.num_founders(); ++process) {
      const bool is_away =
          board.has_ended[process] || (!scenario.victims[0].may_miss && scenario.victims[0].process == process);
      if (!is_away && board.whole_ops[process] < kOpsWhole) return false;
    }
    return true;
  };
  CHECK(comes_true_among(ranks, [&] { return board.first != kAnybody || is_over(); }));
  int anybody = kAnybody;
  return !board.first.compare_exchange_strong(anybody, kNobody);
}

// Whether all victims came to their points.
inline bool run_scenario(Scenario scenario) {
  const int before = num_failures();
  bool have_come = true;
  const std::string text = scenario.text();
  const char* const name = std::exchange(running_case(), text.c_str());  // what hangs
  const TestLeftovers leftovers;
  {
    const InShared<Board> shared;
    Board& board = *shared;
    scenario.board = &board;
    board.is_hot = scenario.victims.empty() || scenario.victims[0].may_miss;
    ForkedRanks ranks(scenario.num_processes(), [&](Rank& self) { Member(self, scenario).live(); });
    CHECK(comes_true_among(ranks, [&] { return board.num_armed == scenario.num_founders(); }));
    if (scenario.kind == Kind::kJoin) board.may_join[kNewcomer] = true;
    std::vector<int> joined, order, last;
    for (size_t idx = 0; idx < scenario.victims.size(); ++idx) {
      (scenario.victims[idx].sleeps_on ? last : order).push_back(static_cast<int>(idx));
    }
    const auto await_stop = [&](int process) {
      CHECK(comes_true_among(ranks, [&] { return ranks.has_stopped(process); }));
      if (num_failures() == before) ranks.await_stop(process);
    };
    for (const int idx : last) await_stop(scenario.victims[static_cast<size_t>(idx)].process);
    board.are_asleep = true;
    order.insert(order.end(), last.begin(), last.end());
    for (const int idx : order) {
      const Victim& victim = scenario.victims[static_cast<size_t>(idx)];
      const int replacement = scenario.num_first() + idx;
      if (victim.may_miss && !comes_to_its_point(ranks, scenario, board)) {
        ranks.signal(replacement, SIGKILL);
        ranks.join(replacement, SIGKILL);
        joined.push_back(replacement);
        have_come = false;
        continue;
      }
      if (victim.process == kAnybody) CHECK(comes_true_among(ranks, [&] { return board.first != kAnybody; }));
      if (num_failures() != before) break;
      const int process = scenario.process_of(victim);
      bool is_out = true;
      if (victim.signal == SIGSTOP && !victim.sleeps_on) await_stop(victim.process);
      if (num_failures() != before) break;
      if (victim.signal == SIGSTOP) is_out = wake_up(ranks, scenario, victim, board);
      if (victim.signal != SIGSTOP) CHECK(comes_true_among(ranks, [&] { return ranks.has_ended(process); }));
      if (num_failures() != before) break;
      if (victim.signal != SIGSTOP) ranks.join(process, victim.signal);
      if (victim.signal != SIGSTOP) joined.push_back(process);
      if (is_out) board.may_join[replacement] = true;
      if (!is_out) ranks.signal(replacement, SIGKILL);
      if (!is_out) ranks.join(replacement, SIGKILL);
      if (!is_out) joined.push_back(replacement);
      if (num_failures() != before) break;
    }
    board.may_end = true;
    for (const int process : all_but(ranks.num_ranks(), joined)) {
      if (num_failures() == before) CHECK(comes_true_among(ranks, [&] { return ranks.has_ended(process); }));
    }
    if (num_failures() == before) ranks.join_all(joined);
  }  // who has not ended does so here
  leftovers.check();
  running_case() = name;
  if (num_failures() == before) return have_come;
  std::fprintf(stderr, "%s\n", text.c_str());
  return have_come;
}

// What a fail point does, in a process of a scenario.
inline void pass(const char* name) {
  if (fuse.process == Fuse::kUnarmed) return;
  if (on_pass != nullptr && *fuse.is_hot) on_pass(name, fuse.process);
  if (fuse.point == nullptr || std::strcmp(name, fuse.point) != 0) return;
  if (fuse.is_due != nullptr && !*fuse.is_due) return;
  if ((fuse.may_miss && !*fuse.is_hot) || fuse.num_passes-- != 0) return;
  int anybody = kAnybody;
  if (fuse.first != nullptr && !fuse.first->compare_exchange_strong(anybody, fuse.process)) return;
  if (!fuse.may_miss) *fuse.is_hot = true;
  // To this thread: any other might take a stop of the process, while this one went on for a while.
  pthread_kill(pthread_self(), fuse.signal);
}

}  // namespace weft::test
