// Ranks that send each other chunks through rings of sync/rail.h over software NICs, every pair both ways; every word is compared.
#pragma once

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "nic/nic.h"
#include "weft/sync/rail.h"

namespace weft::test {

inline constexpr u64 kPoison = 0xa5a5a5a5a5a5a5a5u;

// Memory that threads and forked children share; zeroed.
class SharedPages {
 public:
  explicit SharedPages(u64 num_bytes) : num_bytes_(num_bytes) {
    data_ = static_cast<u8*>(mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    CHECK(data_ != MAP_FAILED);
  }
  ~SharedPages() { munmap(data_, num_bytes_); }
  SharedPages(const SharedPages&) = delete;
  SharedPages& operator=(const SharedPages&) = delete;
  u8* data() const { return data_; }

 private:
  u8* data_;
  u64 num_bytes_;
};

class SharedSegments {
 public:
  SharedSegments(int num_ranks, const nic::Model& model)
      : num_ranks_(num_ranks),
        bytes_(nic::Nic::segment_bytes(num_ranks, model)),
        pages_(bytes_ * static_cast<u64>(num_ranks)) {}
  std::vector<nic::Nic::Segment> segments(bool are_threads) const {
    std::vector<nic::Nic::Segment> all;
    for (int rank = 0; rank < num_ranks_; ++rank)
      all.push_back({pages_.data() + static_cast<u64>(rank) * bytes_, are_threads});
    return all;
  }

 private:
  int num_ranks_;
  u64 bytes_;
  SharedPages pages_;
};

// kPort: every rank loses a port in the middle. Else it is rank 0: it drops rank 1, goes dark, dies.
enum class Fault { kNone, kPort, kDroppedPeer, kDark, kDeath };

struct RingJob {
  int num_ranks = 2;
  u32 num_slots = 3;
  u64 num_chunks = 10;  // of each ring
  u64 most_bytes = 64;  // of a chunk, which has 8 at least
  Fault fault = Fault::kNone;
  nic::Model model;
};

class RingRank {
 public:
  RingRank(int rank, const RingJob& job, std::vector<nic::Nic::Segment> segments, u32* num_finished)
      : rank_(rank),
        job_(job),
        num_finished_(num_finished),
        memory_((kWords * 8 + 2 * job.num_slots * job.most_bytes) * static_cast<u64>(job.num_ranks) / 8, kPoison),
        nic_(rank, own_model(rank, job), std::move(segments), copier_),
        is_half_read_(static_cast<size_t>(job.num_ranks)),
        num_read_(static_cast<size_t>(job.num_ranks)) {
    nic_.add_region({reinterpret_cast<u8*>(memory_.data()), memory_.size() * 8, nic::Space::kHost});
    for (int peer = 0; peer < job.num_ranks; ++peer) std::memset(words(peer), 0, kWords * 8);
  }

  // Ends when this rank and all others have what they can have, or at a deadline.
  void run() {
    constexpr double kLongestS = 100;
    const u64 deadline_ns = deadline_after_s(kLongestS);
    bool has_said = false;
    for (u64 turn = 0; now_ns() < deadline_ns; ++turn) {
      for (int peer = 0; peer < job_.num_ranks; ++peer) {
        if (peer == rank_) continue;
        send(peer);
        take(peer);
      }
      nic_.progress(now_ns());
      inflict();
      if (!has_said && is_finished()) {
        __atomic_fetch_add(num_finished_, 1, __ATOMIC_ACQ_REL);
        has_said = true;
      }
      if (has_said && __atomic_load_n(num_finished_, __ATOMIC_ACQUIRE) == static_cast<u32>(job_.num_ranks)) break;
      if (turn % 4 == 0) std::this_thread::yield();
    }
    CHECK(now_ns() < deadline_ns);
    CHECK(nic_.error().empty());
    check_end();
  }

 private:
  static constexpr u64 kWords = 8;  // num_put, num_taken, credits, signals

  static nic::Model own_model(int rank, const RingJob& job) {
    nic::Model model = job.model;
    model.seed += static_cast<u64>(rank) * 77;
    return model;
  }
  // A pair that the fault parts.
  bool is_parted(int one, int other) const {
    if (job_.fault == Fault::kNone || job_.fault == Fault::kPort) return false;
    if (job_.fault == Fault::kDroppedPeer) return one + other == 1;
    return one == 0 || other == 0;
  }
  bool is_culprit() const { return rank_ == 0 && job_.fault != Fault::kNone && job_.fault != Fault::kPort; }
  u64 half() const { return job_.num_chunks / 2; }
  // A culprit sends half of its chunks before its fault.
  u64 most_sent(int peer) const { return is_culprit() && is_parted(rank_, peer) ? half() : job_.num_chunks; }

  u64 lane(int peer) const { return static_cast<u64>(peer) * (kWords * 8 + 2 * job_.num_slots * job_.most_bytes); }
  u64* words(int peer) { return memory_.data() + lane(peer) / 8; }
  u64 signal_of(int peer, u64 n) const { return lane(peer) + (3 + n % job_.num_slots) * 8; }
  u64 send_slot(int peer, u64 n) const { return lane(peer) + kWords * 8 + n % job_.num_slots * job_.most_bytes; }
  u64 receive_slot(int peer, u64 n) const { return send_slot(peer, n) + job_.num_slots * job_.most_bytes; }
  sync::RailSource source(int peer) { return {words(peer), words(peer) + 2, job_.num_slots}; }
  sync::RailSink sink(int peer) { return {words(peer) + 1, words(peer) + 3, job_.num_slots}; }

  static u64 mix(u64 word) {
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9u;
    word = (word ^ word >> 27) * 0x94d049bb133111ebu;
    return word ^ word >> 31;
  }
  static u64 key(int from, int to, u64 n) {
    return mix((n << 8 | static_cast<u64>(from) << 4 | static_cast<u64>(to)) + 0x9e3779b97f4a7c15u);
  }
  u64 bytes_of(u64 key) const {  // each power of two is as likely as another; half of the chunks are less than one
    u64 num_sizes = 1;
    while (u64{8} << num_sizes <= job_.most_bytes) ++num_sizes;
    const u64 most = u64{8} << key % num_sizes;
    return (key >> 32 & 1) != 0 ? most : most - mix(key) % (most / 2) / 8 * 8;
  }

  void send(int peer) {
    const sync::RailSource ring = source(peer);
    if (ring.next() >= most_sent(peer) || is_over_ || !ring.has_place()) return;
    const u64 key_of = key(rank_, peer, ring.next());
    u64* slot = memory_.data() + send_slot(peer, ring.next()) / 8;
    for (u64 word = 0; word < bytes_of(key_of) / 8; ++word) slot[word] = mix(key_of + word);
    ring.post([&](u64 n) {
      nic_.post(
          {peer, {0, send_slot(peer, n)}, {0, receive_slot(rank_, n)}, bytes_of(key_of), {0, signal_of(rank_, n)}, 1},
          now_ns());
    });
  }

  // A chunk is read in two halves, between which everything else goes on.
  void take(int peer) {
    const sync::RailSink ring = sink(peer);
    const bool is_enough = is_culprit() && is_parted(rank_, peer) && !has_inflicted_ && ring.next() >= half();
    if (ring.next() == job_.num_chunks || is_enough || is_over_ || !ring.has_arrived()) return;
    const auto idx = static_cast<size_t>(peer);
    const auto read = [&](u64 n) {
      is_half_read_[idx] = !is_half_read_[idx];
      verify(peer, n, !is_half_read_[idx]);
      return !is_half_read_[idx];
    };
    const auto give_credit = [&] { nic_.post({peer, {}, {}, 0, {0, lane(rank_) + 2 * 8}, 1}, now_ns()); };
    ring.take(read, give_credit);
  }

  void verify(int peer, u64 n, bool is_last_look) {
    const auto idx = static_cast<size_t>(peer);
    CHECK_EQ(n, num_read_[idx]);
    u64* slot = memory_.data() + receive_slot(peer, n) / 8;
    const u64 key_of = key(peer, rank_, num_read_[idx]);
    const u64 num_words = bytes_of(key_of) / 8;
    u64 num_wrong = 0;
    for (u64 word = 0; word < num_words; ++word) num_wrong += slot[word] != mix(key_of + word) ? 1 : 0;
    for (u64 word = num_words; word < job_.most_bytes / 8; ++word) num_wrong += slot[word] != kPoison ? 1 : 0;
    CHECK_EQ(num_wrong, 0u);
    if (!is_last_look) return;
    std::fill_n(slot, num_words, kPoison);
    ++num_read_[idx];
  }

  void inflict() {
    if (is_over_ || has_inflicted_) return;
    if (job_.fault == Fault::kPort) {
      if (source(rank_ == 0 ? 1 : 0).next() < half()) return;
      nic_.lose_port(rank_ % job_.model.num_ports, now_ns());
      has_inflicted_ = true;
    }
    if (!is_culprit()) return;
    for (int peer = 0; peer < job_.num_ranks; ++peer) {
      if (peer == rank_ || !is_parted(rank_, peer)) continue;
      if (source(peer).next() < half() || sink(peer).next() < half()) return;
    }
    has_inflicted_ = true;
    if (job_.fault == Fault::kDroppedPeer) nic_.drop_peer(1);
    if (job_.fault == Fault::kDark) nic_.set_dark(true);
    is_over_ = job_.fault != Fault::kDroppedPeer;
    if (job_.fault != Fault::kDeath) return;
    __atomic_fetch_add(num_finished_, 1, __ATOMIC_ACQ_REL);
    _exit(exit_code());
  }

  bool is_finished() {
    if (is_over_) return true;
    if (is_culprit() && !has_inflicted_) return false;
    for (int peer = 0; peer < job_.num_ranks; ++peer) {
      if (peer == rank_ || is_parted(rank_, peer)) continue;
      const u64 num_credits = ptx::ld_acquire_sys(words(peer) + 2);
      if (num_credits < job_.num_chunks || sink(peer).next() < job_.num_chunks) return false;
    }
    return true;
  }

  // Who waits for a parted peer is told at the deadline for whom.
  void check_end() {
    for (int peer = 0; peer < job_.num_ranks; ++peer) {
      if (peer == rank_ || !is_parted(rank_, peer) || is_over_) continue;
      CHECK(sink(peer).next() >= 1);
      CHECK(sink(peer).next() <= half() + job_.num_slots);
      struct Pause {
        RingRank& rank;
        u64 deadline_ns;
        sync::PauseResult turn() {
          rank.nic_.progress(now_ns());
          return now_ns() < deadline_ns ? sync::PauseResult::kLookAgain : sync::PauseResult::kDeadline;
        }
      } pause{*this, deadline_after_s(0.1)};
      while (sink(peer).has_arrived()) take(peer);
      const sync::RailLate late = sink(peer).wait_chunk(peer, pause);
      CHECK_EQ(late.result, sync::WaitResult::kDeadline);
      CHECK_EQ(late.rank, peer);
      CHECK(late.n < job_.num_chunks);
    }
  }

  const int rank_;
  const RingJob job_;
  u32* const num_finished_;
  std::vector<u64> memory_;
  nic::Copier copier_;
  nic::Nic nic_;
  std::vector<bool> is_half_read_;
  std::vector<u64> num_read_;
  bool has_inflicted_ = false;
  bool is_over_ = false;
};

inline void run_threads(const RingJob& job) {
  const SharedSegments segments(job.num_ranks, job.model);
  u32 num_finished = 0;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < job.num_ranks; ++rank)
    threads.emplace_back([&, rank] { RingRank(rank, job, segments.segments(true), &num_finished).run(); });
  for (std::thread& thread : threads) thread.join();
}

inline void run_processes(const RingJob& job) {
  const SharedSegments segments(job.num_ranks, job.model);
  const SharedPages words(4096);
  std::vector<pid_t> children;
  for (int rank = 0; rank < job.num_ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      RingRank(rank, job, segments.segments(false), reinterpret_cast<u32*>(words.data())).run();
      _exit(exit_code());
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
  }
}

}  // namespace weft::test
