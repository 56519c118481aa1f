// One block of a CUDA kernel on the CPU: every thread is a fiber of one operating-system thread, which no other block has, so
// a `__shared__` variable is `thread_local`. README.md says what this finds and what it cannot.
//
// Fibers change only where a thread may have to wait, and then to any that can go on: a missing barrier shows, because nothing
// runs in its natural order. A run is repeated by its seed, but for how fast the blocks are relative to each other.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <memory>
#include <set>
#include <string>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __shared__ static thread_local
#define __align__(num_bytes) alignas(num_bytes)
#define __grid_constant__
#define __launch_bounds__(...)

#include "weft/config/base.h"

struct Index {
  unsigned x = 0;
};
inline thread_local Index threadIdx, blockIdx, gridDim, blockDim;

namespace emulation {

using weft::i32;
using weft::i64;
using weft::u32;
using weft::u64;
using weft::u8;

struct Failed {  // a mistake that was found; whoever runs the block tells it
  std::string text;
};

[[noreturn, gnu::format(printf, 1, 2)]] inline void fail(const char* format, ...) {
  char text[400];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof(text), format, values);
  va_end(values);
  throw Failed{"block " + std::to_string(blockIdx.x) + " thread " + std::to_string(threadIdx.x) + ": " + text};
}

inline thread_local u64 random_state = 1;
inline u32 random_below(u32 limit) {  // xorshift64*
  random_state ^= random_state >> 12;
  random_state ^= random_state << 25;
  random_state ^= random_state >> 27;
  return static_cast<u32>((random_state * 0x2545f4914f6cdd1dull) >> 33) % limit;
}

// Now and then the whole block stands still for up to some milliseconds.
inline thread_local u32 most_sleep_us = 4000;
inline void maybe_sleep() {
  if (random_below(6) == 0) usleep(random_below(most_sleep_us));
}

// Memory that nobody has written holds this.
inline thread_local u8 poison = 0x5b;
inline thread_local u8* dynamic_shared = nullptr;  // behind it lies a page that nobody may touch
inline thread_local u64 dynamic_shared_bytes = 0;
inline u8* global_begin = nullptr;
inline u8* global_end = reinterpret_cast<u8*>(~u64{0});
inline thread_local const int* given_up = nullptr;  // not 0 once another block has found a mistake

// ---- bulk copies. A load is done late, at any time until somebody needs it, in every other block not before. A store reads shared memory when the thread waits
// for that, and writes when the thread waits for that: as late as it may.

struct Barrier {  // in the 8 bytes of an mbarrier
  u32 parity : 1;
  u32 num_arrivals : 15;
  u32 pending : 16;
  i32 num_bytes;
};
static_assert(sizeof(Barrier) == 8);

struct Load {
  u8* to;
  const u8* from;
  u32 num_bytes;
  Barrier* barrier;
};

struct Store {
  u8* to;
  const u8* from;
  u32 num_bytes;
  u32 group;
  bool is_read = false;
  std::vector<u8> held = {};

  void read() {
    if (!is_read) held.assign(from, from + num_bytes);
    is_read = true;
  }
  void write() {
    read();
    memcpy(to, held.data(), num_bytes);
  }
};

struct Fiber {
  jmp_buf context;
  ucontext_t start;
  u32 index = 0;
  bool has_started = false;
  const char* waits_for = "";
  std::list<Store> stores;
  u32 group = 0;  // of bulk stores, not committed yet
  std::list<Store> fetches;
  u32 fetch_group = 0;
};

// Threads that wait for each other: of a warp, or of a block.
struct Meeting {
  u32 mask = 0;
  const char* what = "";
  u32 num_expected = 0, num_arrived = 0;
  u64 value[32] = {}, result[32] = {};
  u64 either = 0, either_result = 0;
  std::vector<Fiber*> waiting;
};

class Block {
 public:
  using Body = void (*)(void*);

  Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() {
    if (stacks_ != nullptr) munmap(stacks_, kStackBytes * fibers_.size());
  }

  // Runs `body(argument)` in every thread. Throws Failed.
  void run(u32 num_threads, Body body, void* argument) {
    body_ = body;
    argument_ = argument;
    warps_.resize((num_threads + 31) / 32);
    void* stacks = mmap(nullptr, kStackBytes * num_threads, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) fail("no memory for stacks");
    stacks_ = stacks;
    for (u32 idx = 0; idx < num_threads; ++idx) {
      fibers_.push_back(std::make_unique<Fiber>());
      Fiber* fiber = fibers_.back().get();
      fiber->index = idx;
      getcontext(&fiber->start);
      fiber->start.uc_stack.ss_sp = static_cast<u8*>(stacks) + kStackBytes * idx;
      fiber->start.uc_stack.ss_size = kStackBytes;
      makecontext(&fiber->start, &Block::enter, 0);
      ready_.push_back(fiber);
    }
    while (num_ended_ < num_threads) step();
    if (!loads_.empty()) fail("the block has ended while %zu bulk loads were under way", loads_.size());
  }

  Fiber& self() { return *self_; }

  // All of `num_expected` threads call it before any returns.
  void meet(Meeting& meeting, const char* what, u32 num_expected) {
    if (arrive(meeting, what, num_expected)) return;
    meeting.waiting.push_back(self_);
    self_->waits_for = what;
    leave();
  }

  // Without waiting. True: this was the last of them.
  bool arrive(Meeting& meeting, const char* what, u32 num_expected) {
    if (meeting.num_arrived == 0) {
      meeting.what = what;
      meeting.num_expected = num_expected;
    } else if (strcmp(meeting.what, what) != 0 || meeting.num_expected != num_expected) {
      fail("%s of %u threads, where others are in %s of %u", what, num_expected, meeting.what, meeting.num_expected);
    }
    if (++meeting.num_arrived < num_expected) return false;
    meeting.num_arrived = 0;
    memcpy(meeting.result, meeting.value, sizeof(meeting.value));
    meeting.either_result = meeting.either;
    meeting.either = 0;
    note_change();
    ready_.insert(ready_.end(), meeting.waiting.begin(), meeting.waiting.end());
    meeting.waiting.clear();
    maybe_yield();
    return true;
  }

  // The meeting of the lanes in `mask`, this thread among them.
  Meeting& lanes(u32 mask) {
    if ((mask >> (self_->index % 32) & 1u) == 0) fail("not in its own mask %x", mask);
    std::vector<std::unique_ptr<Meeting>>& known = warps_[self_->index / 32];
    for (const auto& meeting : known) {
      if (meeting->mask == mask) return *meeting;
    }
    known.push_back(std::make_unique<Meeting>());
    known.back()->mask = mask;
    return *known.back();
  }

  Meeting& barrier(u32 number) {
    if (number >= 16) fail("barrier %u: there are 16", number);
    return barriers_[number];
  }

  // Lets others go on; this thread looks again later. `is_remote`: another block may change what it waits for.
  void poll(const char* what, bool is_remote) {
    if (is_remote && lets_next_begin_) fail("%s: a wait for another block behind let_next_kernel_begin", what);
    if (given_up != nullptr && __atomic_load_n(given_up, __ATOMIC_RELAXED) != 0) fail("given up with another block");
    self_->waits_for = what;
    polls_remote_ = polls_remote_ || is_remote;
    polling_.push_back(self_);
    leave();
  }

  void maybe_yield() {
    if (random_below(4) != 0) return;
    ready_.push_back(self_);
    leave();
  }

  void let_next_begin() { lets_next_begin_ = true; }

  // Something that a thread of this block may wait for has happened.
  void note_change() { has_changed_ = true; }

  void start_load(const Load& load) {
    memset(load.to, poison, load.num_bytes);
    loads_.push_back(load);
  }

  // A thread waits for it.
  void expect(const Barrier* barrier) { expected_.insert(barrier); }

  void settle(Barrier* barrier) {
    if (barrier->pending != 0 || barrier->num_bytes != 0) return;
    expected_.erase(barrier);
    barrier->parity ^= 1u;
    barrier->pending = barrier->num_arrivals;
    note_change();
  }

 private:
  static void enter();

  void step() {
    if (ready_.empty()) {
      wake_pollers();
    } else if (random_below(64) == 0) {
      end_one_load(holds_loads_);
    }
    if (ready_.empty()) return;
    const u32 idx = random_below(static_cast<u32>(ready_.size()));
    self_ = ready_[idx];
    ready_[idx] = ready_.back();
    ready_.pop_back();
    threadIdx.x = self_->index;
    if (_setjmp(scheduler_) != 0) {
      if (!found_.empty()) throw Failed{found_};
      return;
    }
    if (self_->has_started) _longjmp(self_->context, 1);
    self_->has_started = true;
    setcontext(&self_->start);
  }

  void leave() {
    if (_setjmp(self_->context) == 0) _longjmp(scheduler_, 1);
  }

  // Nobody can go on but those that look again and again.
  void wake_pollers() {
    constexpr u32 kMostIdleRounds = 8;
    const bool has_loaded = end_one_load(holds_loads_ && polls_remote_);
    num_idle_rounds_ = has_loaded || has_changed_ || polls_remote_ ? 0 : num_idle_rounds_ + 1;
    if (polling_.empty() && !has_loaded) fail_stuck();
    if (num_idle_rounds_ > kMostIdleRounds) fail_stuck();
    if (polls_remote_ && !has_loaded && !has_changed_) usleep(random_below(100));
    has_changed_ = polls_remote_ = false;
    ready_.swap(polling_);
  }

  // `needed`: only one that a thread waits for.
  bool end_one_load(bool needed) {
    std::vector<u32> chosen;
    for (u32 idx = 0; idx < loads_.size(); ++idx) {
      if (!needed || expected_.count(loads_[idx].barrier) != 0) chosen.push_back(idx);
    }
    if (chosen.empty()) return false;
    const u32 idx = chosen[random_below(static_cast<u32>(chosen.size()))];
    const Load load = loads_[idx];
    loads_.erase(loads_.begin() + idx);
    memcpy(load.to, load.from, load.num_bytes);
    load.barrier->num_bytes -= static_cast<i32>(load.num_bytes);
    settle(load.barrier);
    return true;
  }

  [[noreturn]] void fail_stuck() {
    std::vector<std::pair<const char*, u32>> counts;
    for (const auto& fiber : fibers_) {
      if (counts.empty() || strcmp(counts.back().first, fiber->waits_for) != 0)
        counts.emplace_back(fiber->waits_for, 0);
      ++counts.back().second;
    }
    std::string all;
    for (const auto& [what, count] : counts) all += std::string(", ") + std::to_string(count) + ": " + what;
    fail("no thread can go on%s", all.c_str());
  }

  static constexpr u64 kStackBytes = 128 << 10;
  void* stacks_ = nullptr;
  std::string found_;  // a mistake of a thread
  Body body_ = nullptr;
  void* argument_ = nullptr;
  jmp_buf scheduler_;
  Fiber* self_ = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> ready_, polling_;
  std::vector<std::vector<std::unique_ptr<Meeting>>> warps_;
  Meeting barriers_[16];
  std::vector<Load> loads_;
  std::set<const Barrier*> expected_;
  const bool holds_loads_ = random_below(2) == 0;
  u32 num_ended_ = 0, num_idle_rounds_ = 0;
  bool has_changed_ = false, polls_remote_ = false;
  bool lets_next_begin_ = false;
};

inline thread_local Block* block = nullptr;

inline void Block::enter() {
  Fiber& self = block->self();
  try {
    block->body_(block->argument_);
    if (!self.stores.empty()) fail("ended without waiting for %zu bulk stores", self.stores.size());
    if (!self.fetches.empty()) fail("ended without waiting for %zu fetches", self.fetches.size());
  } catch (const Failed& mistake) {
    block->found_ = mistake.text;
  }
  self.waits_for = "ended";
  ++block->num_ended_;
  block->note_change();
  _longjmp(block->scheduler_, 1);
}

// What each lane gives, and then what all have given.
template <class T>
const u64* exchange(u32 mask, T value, const char* what) {
  static_assert(sizeof(T) <= 8);
  Meeting& meeting = block->lanes(mask);
  const u32 lane = threadIdx.x % 32;
  meeting.value[lane] = 0;
  memcpy(&meeting.value[lane], &value, sizeof(T));
  block->meet(meeting, what, static_cast<u32>(__builtin_popcount(mask)));
  return meeting.result;
}

template <class T>
T shuffle(u32 mask, T value, u32 source, const char* what) {
  const u64* given = exchange(mask, value, what);
  if ((mask >> source & 1u) == 0) fail("%s from lane %u, which is not in the mask %x", what, source, mask);
  T found;
  memcpy(&found, &given[source], sizeof(T));
  return found;
}

template <class T, class Add>
T reduce(u32 mask, T value, const char* what, Add add) {
  const u64* given = exchange(mask, value, what);
  T sum{};
  for (u32 lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1u) != 0) sum = add(sum, static_cast<T>(given[lane]));
  }
  return sum;
}

inline void meet_block(u32 number, u32 num_threads, const char* what) {
  block->meet(block->barrier(number), what, num_threads);
}

}  // namespace emulation

// ---- what CUDA has without a header

inline void __syncwarp(unsigned mask = 0xffffffffu) { emulation::exchange(mask, 0, "__syncwarp"); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const unsigned lanes = static_cast<unsigned>(width), first = threadIdx.x % 32 / lanes * lanes;
  return emulation::shuffle(mask, value, first + static_cast<unsigned>(source) % lanes, "__shfl_sync");
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return emulation::shuffle(mask, value, (threadIdx.x % 32) ^ static_cast<unsigned>(bits), "__shfl_xor_sync");
}
// A lane with nobody so far below it gets its own value.
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
  const unsigned lane = threadIdx.x % 32;
  return emulation::shuffle(mask, value, lane >= delta ? lane - delta : lane, "__shfl_up_sync");
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  const unsigned lane = threadIdx.x % 32;
  return emulation::shuffle(mask, value, lane + delta < 32 ? lane + delta : lane, "__shfl_down_sync");
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const emulation::u64* given = emulation::exchange(mask, predicate != 0, "__ballot_sync");
  unsigned votes = 0;
  for (unsigned lane = 0; lane < 32; ++lane) votes |= (mask >> lane & 1u) != 0 && given[lane] != 0 ? 1u << lane : 0u;
  return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0 ? 1 : 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask ? 1 : 0; }

template <class T>
unsigned __match_any_sync(unsigned mask, T key) {
  const emulation::u64* given = emulation::exchange(mask, key, "__match_any_sync");
  const unsigned own = threadIdx.x % 32;
  unsigned same = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    same |= (mask >> lane & 1u) != 0 && given[lane] == given[own] ? 1u << lane : 0u;
  }
  return same;
}

template <class T>
T __reduce_add_sync(unsigned mask, T value) {
  return emulation::reduce(mask, value, "__reduce_add_sync", [](T left, T right) { return left + right; });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  return emulation::reduce(mask, value, "__reduce_or_sync", [](unsigned left, unsigned right) { return left | right; });
}

inline void __syncthreads() { emulation::meet_block(0, blockDim.x, "__syncthreads"); }
inline int __syncthreads_or(int predicate) {
  emulation::Meeting& meeting = emulation::block->barrier(0);
  meeting.either |= predicate != 0 ? 1u : 0u;
  emulation::block->meet(meeting, "__syncthreads_or", blockDim.x);
  return static_cast<int>(meeting.either_result);
}

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value)); }

// Atomic among blocks too, since words of a window are shared by processes.
template <class T>
T atomicAdd(T* word, T value) {
  return __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicOr(T* word, T value) {
  return __atomic_fetch_or(word, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicMin(T* word, T value) {
  T seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (value < seen && !__atomic_compare_exchange_n(word, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return seen;
}
template <class T>
T atomicMax(T* word, T value) {
  T seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (seen < value && !__atomic_compare_exchange_n(word, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return seen;
}
template <class T>
T atomicCAS(T* word, T expected, T value) {
  __atomic_compare_exchange_n(word, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

template <class T>
constexpr T min(T left, T right) {
  return right < left ? right : left;
}
template <class T>
constexpr T max(T left, T right) {
  return left < right ? right : left;
}
