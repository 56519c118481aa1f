// One block of a CUDA kernel on the CPU: every thread is a fiber of one operating-system thread, which no other block has, so
// a `__shared__` variable is `thread_local`. README.md says what this finds and what it cannot.
//
// Fibers change only where a thread may have to wait, and then to any that can go on: a missing barrier shows, because nothing
// runs in its natural order. A run is repeated by its seed, but for how fast the blocks are relative to each other.
//
// What does not depend on the kernel lies in emulator.cc, driver.cc and library.cc, which are compiled once and not with
// each kernel: that is half of what compiling takes.
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

[[noreturn, gnu::format(printf, 1, 2)]] void fail(const char* format, ...);

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

  void read();
  void write();
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

  void store(u8* to, const u8* from, u32 num_bytes);
  void fetch(u8* to, const u8* from, u32 num_bytes);
  // Of all groups but the last `num_pending`.
  void read_stores(u32 num_pending);
  void write_stores(u32 num_pending);
  void write_fetches(u32 num_pending);
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
  ~Block();

  // Runs `body(argument)` in every thread. Throws Failed.
  void run(u32 num_threads, Body body, void* argument);

  Fiber& self() { return *self_; }

  // All of `num_expected` threads call it before any returns.
  void meet(Meeting& meeting, const char* what, u32 num_expected);

  // Without waiting. True: this was the last of them.
  bool arrive(Meeting& meeting, const char* what, u32 num_expected);

  // The meeting of the lanes in `mask`, this thread among them.
  Meeting& lanes(u32 mask);

  Meeting& barrier(u32 number);

  // Lets others go on; this thread looks again later. `is_remote`: another block may change what it waits for.
  void poll(const char* what, bool is_remote);

  void maybe_yield() {
    if (random_below(4) == 0) yield();
  }

  void let_next_begin() { lets_next_begin_ = true; }

  // Something that a thread of this block may wait for has happened.
  void note_change() { has_changed_ = true; }

  void start_load(const Load& load);

  // A thread waits for it.
  void expect(const Barrier* barrier);

  void settle(Barrier* barrier);

 private:
  static void enter();

  void yield();
  void step();
  void leave();
  void wake_pollers();
  bool end_one_load(bool needed);
  [[noreturn]] void fail_stuck();

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

// What each lane gives, and then what all have given.
const u64* exchange_words(u32 mask, u64 value, const char* what);
template <class T>
const u64* exchange(u32 mask, T value, const char* what) {
  static_assert(sizeof(T) <= 8);
  u64 word = 0;
  memcpy(&word, &value, sizeof(T));
  return exchange_words(mask, word, what);
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

// ---- what ptx/bulk.cuh has

void check_copy(const void* shared, const void* global, u32 num_bytes);
void check_prefetch(const void* global, u32 num_bytes);
void arrive_expect(Barrier* barrier, u32 num_bytes);
bool try_wait(const Barrier* barrier, u32 parity);

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
