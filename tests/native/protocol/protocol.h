// A small protocol made of the library's own signals, for tests that run it under delays and with mistakes built in.
//
// Ranks are processes or threads over one shared mapping of R windows. Three kinds of operation follow each other:
//   exchange  one phase: a payload for each peer. Nothing but the two buffers keeps a fast rank off a slow one (R2).
//   ring      payload, then rows through a small staging ring by landed and consumed words, then `done` headers.
//   barrier   several barriers by progress words, then `done` headers.
// Every word received is compared with what its sender computed. Counts are random, a third of them zero.
#pragma once

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "weft/config/mutants.h"
#include "weft/layout/window.h"
#include "weft/ptx/clock.h"
#include "weft/sync/header.h"
#include "weft/sync/operation.h"

namespace weft::test {

struct Options {
  i32 num_ranks = 3;
  u64 num_operations = 1500;
  u64 first_sequence = 0;
  u64 deadline_ms = 20000;
  u64 seed = 1;
  bool threads = false;
};

inline u64 mix(u64 x) {  // the finalizer of splitmix64 (Steele, Lea, Flood 2014)
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// What all ranks know about each operation without talking.
struct Script {
  u64 seed;

  enum class Kind : u64 { kExchange, kRing, kBarrier };

  u64 draw(u64 sequence, u64 source, u64 target, u64 salt) const {
    return mix(mix(mix(seed + salt) + sequence) + source * 64 + target);
  }
  Kind kind(u64 sequence) const {
    const u64 value = draw(sequence, 0, 0, 1) % 8;
    return value < 5 ? Kind::kExchange : value < 7 ? Kind::kRing : Kind::kBarrier;
  }
  u64 count(u64 sequence, i32 source, i32 target, u64 limit) const {
    const u64 value = draw(sequence, static_cast<u64>(source), static_cast<u64>(target), 2);
    return value % 3 == 0 ? 0 : 1 + (value >> 8) % limit;
  }
  u64 word(u64 sequence, i32 source, i32 target, u64 idx) const {
    return draw(sequence, static_cast<u64>(source), static_cast<u64>(target), 1000 + idx);
  }
};

// The memory of all ranks. Made by the parent before it forks or starts threads.
class World {
 public:
  explicit World(const Options& options) : options_(options) {
    WindowShape shape;
    shape.num_ranks = options.num_ranks;
    shape.num_experts = options.num_ranks * 64;
    shape.top_k = 1;
    layout_ = WindowLayout::make(shape);
    bytes_ = layout_.total_bytes * static_cast<u64>(options.num_ranks) + sizeof(Shared);
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    memory_ = static_cast<u8*>(memory);
    for (i32 rank = 0; rank < options.num_ranks; ++rank) words(rank)->sequence = options.first_sequence;
  }
  ~World() { munmap(memory_, bytes_); }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  const Options& options() const { return options_; }
  const WindowLayout& layout() const { return layout_; }
  u8* window(i32 rank) const { return memory_ + layout_.total_bytes * static_cast<u64>(rank); }
  ControlWords* words(i32 rank) const { return reinterpret_cast<ControlWords*>(window(rank)); }
  u64* cell(i32 rank, u64 offset) const { return reinterpret_cast<u64*>(window(rank) + offset); }

  // The first failure is printed; all ranks leave their waits.
  void fail(const std::string& text) {
    if (shared()->num_failures.fetch_add(1) == 0) {
      std::printf("found: %s\n", text.c_str());
      std::fflush(stdout);
    }
    for (i32 rank = 0; rank < options_.num_ranks; ++rank) ptx::st_release_sys(&words(rank)->abort, 1);
  }
  int num_failures() { return shared()->num_failures; }

 private:
  struct Shared {
    std::atomic<int> num_failures;
  };
  Shared* shared() { return reinterpret_cast<Shared*>(memory_ + bytes_ - sizeof(Shared)); }

  Options options_;
  WindowLayout layout_;
  u64 bytes_ = 0;
  u8* memory_ = nullptr;
};

class Pause {
 public:
  explicit Pause(const ControlWords* words) : words_(words) {}
  sync::PauseResult turn() {
    if (++num_turns_ % 16 != 0) return sync::PauseResult::kLookAgain;
    if (ptx::ld_acquire_sys(&words_->abort) != 0) return sync::PauseResult::kAbort;
    if (ptx::globaltimer_ns() >= words_->deadline_ns) return sync::PauseResult::kDeadline;
    sched_yield();
    return sync::PauseResult::kLookAgain;
  }

 private:
  const ControlWords* words_;
  u32 num_turns_ = 0;
};

class Rank {
 public:
  Rank(World& world, i32 rank)
      : world_(world),
        layout_(world.layout()),
        rank_(rank),
        random_(world.options().seed * 100 + static_cast<u64>(rank)) {}

  // Returns false when an operation failed; the reason is in the world.
  bool run() {
    ControlWords* words = world_.words(rank_);
    for (u64 done = 0; done < world_.options().num_operations; ++done) {
      if (sync::begin_operation(words, 1) != sync::BeginResult::kOk) return fail("the window is busy", -1);
      words->deadline_ns = ptx::globaltimer_ns() + world_.options().deadline_ms * 1'000'000;
      sequence_ = words->sequence + 1;
      turn_ = {1, static_cast<u32>(sequence_)};
      const bool ok = run_operation();
      sync::end_operation(words, ok);
      if (!ok) return false;
    }
    return true;
  }

 private:
  static constexpr u64 kRingSlots = 3;
  static constexpr u64 kRowWords = 24;
  static constexpr u32 kNumBarriers = 6;

  bool run_operation() {
    const Script::Kind kind = script().kind(sequence_);
    if (!exchange(kind)) return false;
    if (kind == Script::Kind::kRing && !(move_rows() && finish(kind))) return false;
    if (kind == Script::Kind::kBarrier && !(barriers() && finish(kind))) return false;
    return true;
  }

  // Each rank that this rank sends to and receives from, beginning with its neighbour.
  template <class Visit>
  bool for_each_peer(const Visit& visit) {
    for (i32 step = 1; step < world_.options().num_ranks; ++step) {
      if (!visit((rank_ + step) % world_.options().num_ranks)) return false;
    }
    return true;
  }

  bool exchange(Script::Kind kind) {
    const u64 capacity = layout_.payload_bytes / sizeof(u64) - 1;
    for_each_peer([&](i32 peer) {
      const u64 count = script().count(sequence_, rank_, peer, capacity);
      if (mutants::kSkipZero && count == 0) return true;
      u64* payload = world_.cell(peer, layout_.payload(Phase::kCount, sequence_, rank_));
      send(Phase::kCount, peer, kind, [&] {
        delay();
        payload[0] = count;
        for (u64 idx = 0; idx < count; ++idx) {
          if (idx == count / 2) delay();
          payload[1 + idx] = script().word(sequence_, rank_, peer, idx);
        }
      });
      return true;
    });
    return for_each_peer([&](i32 peer) {
      if (!receive(Phase::kCount, peer, kind)) return false;
      delay();
      const u64* payload = world_.cell(rank_, layout_.payload(Phase::kCount, sequence_, peer));
      const u64 count = script().count(sequence_, peer, rank_, capacity);
      if (payload[0] != count) return fail("wrong word (count)", peer);
      for (u64 idx = 0; idx < count; ++idx) {
        if (payload[1 + idx] != script().word(sequence_, peer, rank_, idx)) return fail("wrong word", peer);
      }
      return true;
    });
  }

  bool finish(Script::Kind kind) {
    for_each_peer([&](i32 peer) { return send(Phase::kReduce, peer, kind, [] {}), true; });
    return for_each_peer([&](i32 peer) { return receive(Phase::kReduce, peer, kind); });
  }

  template <class WritePayload>
  void send(Phase phase, i32 peer, Script::Kind kind, const WritePayload& write_payload) {
    delay();
    u64* cell = world_.cell(peer, layout_.header(phase, sequence_, rank_));
    sync::send_header(cell, sync::pack_header(turn_, print_of(kind)), write_payload);
  }

  bool receive(Phase phase, i32 peer, Script::Kind kind) {
    delay();
    Pause pause(world_.words(rank_));
    const u64* cell = world_.cell(rank_, layout_.header(phase, sequence_, peer));
    if (!waited(sync::wait_header(cell, turn_, pause), peer)) return false;
    const sync::HeaderState state = sync::classify_header(sync::load_header(cell), turn_, print_of(kind));
    return state == sync::HeaderState::kMatch || fail("wrong fingerprint", peer);
  }

  // Sends to and receives from all peers in turn, a few rows at a time, so that full rings never block each other.
  bool move_rows() {
    const auto num_ranks = static_cast<std::size_t>(world_.options().num_ranks);
    std::vector<u32> sent(num_ranks), received(num_ranks);
    for (;;) {
      bool is_done = true, has_moved = false;
      const bool ok = for_each_peer([&](i32 peer) {
        const auto idx = static_cast<std::size_t>(peer);
        has_moved |= push_rows(peer, sent[idx]);
        const u32 before = received[idx];
        if (!take_rows(peer, received[idx])) return false;
        has_moved |= received[idx] != before;
        is_done &= sent[idx] == rows(rank_, peer) && received[idx] == rows(peer, rank_);
        return true;
      });
      if (!ok) return false;
      if (is_done) return true;
      if (has_moved) continue;
      Pause pause(world_.words(rank_));
      const auto ready = [&] {
        return !for_each_peer([&](i32 peer) {
          const auto idx = static_cast<std::size_t>(peer);
          const bool can_take = landed(peer) > received[idx];
          const bool can_push = sent[idx] < rows(rank_, peer) && sent[idx] < consumed(peer) + kRingSlots;
          return !can_take && !can_push;
        });
      };
      if (!waited(sync::wait_until(ready, pause), -1)) return false;
    }
  }

  u32 rows(i32 source, i32 target) const { return static_cast<u32>(script().count(sequence_ + 7, source, target, 20)); }
  u32 landed(i32 peer) const { return sync::load_progress(landed_word(rank_, peer), turn_); }
  u32 consumed(i32 peer) const {
    return sync::load_progress(world_.cell(rank_, layout_.progress_word(Channel::kConsumed, peer)), turn_);
  }
  u64* landed_word(i32 owner, i32 source) const {
    return world_.cell(owner, layout_.progress_word(Channel::kLanded, source));
  }
  u64* ring_row(i32 owner, i32 source, u32 row) const {
    return world_.cell(owner, layout_.ring(source) + row % kRingSlots * kRowWords * sizeof(u64));
  }

  bool push_rows(i32 peer, u32& sent) {
    bool has_moved = false;
    while (sent < rows(rank_, peer) && sent < consumed(peer) + kRingSlots) {
      u64* row = ring_row(peer, rank_, sent);
      for (u64 idx = 0; idx < kRowWords; ++idx) {
        if (idx == kRowWords / 2) delay();
        row[idx] = script().word(sequence_, rank_, peer, 100 * (1 + sent) + idx);
      }
      sync::post_progress(landed_word(peer, rank_), turn_, ++sent);
      has_moved = true;
    }
    return has_moved;
  }

  bool take_rows(i32 peer, u32& received) {
    const u32 available = landed(peer);
    for (; received < available; ++received) {
      delay();
      const u64* row = ring_row(rank_, peer, received);
      for (u64 idx = 0; idx < kRowWords; ++idx) {
        const u64 expected = script().word(sequence_, peer, rank_, 100 * (1 + received) + idx);
        if (row[idx] != expected) return fail("wrong word (row)", peer);
      }
      u64* word = world_.cell(peer, layout_.progress_word(Channel::kConsumed, rank_));
      sync::post_progress(word, turn_, received + 1);
    }
    return true;
  }

  bool barriers() {
    for (u32 n = 1; n <= kNumBarriers; ++n) {
      delay();
      for_each_peer([&](i32 peer) { return sync::post_progress(landed_word(peer, rank_), turn_, n), true; });
      delay();
      const bool ok = for_each_peer([&](i32 peer) {
        Pause pause(world_.words(rank_));
        return waited(sync::wait_progress(landed_word(rank_, peer), turn_, n, pause), peer);
      });
      if (!ok) return false;
    }
    return true;
  }

  bool waited(sync::WaitResult result, i32 peer) {
    if (result == sync::WaitResult::kDeadline) return fail("deadline passed", peer);
    return result == sync::WaitResult::kReady;
  }

  bool fail(const char* text, i32 peer) {
    char line[160];
    std::snprintf(line, sizeof(line), "%s: rank %d, peer %d, operation %llu of kind %d", text, rank_, peer,
                  static_cast<unsigned long long>(sequence_), static_cast<int>(script().kind(sequence_)));
    world_.fail(line);
    return false;
  }

  // Mostly nothing, sometimes a yield, now and then a sleep: all at the points where a race would show.
  void delay() {
    const u64 value = random_() % 64;
    if (value == 0) usleep(static_cast<useconds_t>(random_() % 200));
    if (value < 6) sched_yield();
  }

  Script script() const { return {world_.options().seed}; }
  static u16 print_of(Script::Kind kind) { return static_cast<u16>(100 + static_cast<int>(kind)); }

  World& world_;
  const WindowLayout& layout_;
  i32 rank_;
  std::mt19937_64 random_;
  u64 sequence_ = 0;
  sync::Turn turn_;
};

}  // namespace weft::test
