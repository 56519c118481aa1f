// A thread block on the CPU, for tests that run a kernel's own source without a GPU: its threads are fibers of one thread,
// which change places wherever threads of a warp or block wait for each other, or a lane looks at the clock of a wait. Blocks
// are threads. What it can't show: orders that x86 keeps by itself, and speed.
#pragma once

#include <ucontext.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __shared__ static thread_local

namespace simt {

constexpr unsigned kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Who comes last lets the others go. Values of two generations are kept: nobody is further ahead than that.
struct Meeting {
  unsigned num_arrived = 0;
  unsigned generation = 0;
  std::array<std::array<std::uint64_t, kLanes>, 2> value{};
  std::array<int, 2> any{};
};

struct Fiber {
  ucontext_t context{};
  bool is_done = false;
};

struct Block {
  unsigned index = 0, num_blocks = 1, current = 0;
  std::vector<Fiber> fibers;
  std::vector<Meeting> warps;
  std::array<Meeting, 16> barriers;
  ucontext_t scheduler{};
  std::function<void()> kernel;
};
inline thread_local Block* block = nullptr;

inline void yield() { swapcontext(&block->fibers[block->current].context, &block->scheduler); }

// Waits until `count` have come; returns the generation of this meeting.
inline unsigned meet(Meeting& meeting, unsigned count) {
  const unsigned generation = meeting.generation;
  if (++meeting.num_arrived == count) {
    meeting.num_arrived = 0;
    meeting.any[(generation + 1) % 2] = 0;
    ++meeting.generation;
  }
  while (meeting.generation == generation) yield();  // check: allow spin-loop: the others run meanwhile
  return generation;
}

inline const std::array<std::uint64_t, kLanes>& exchange(unsigned lanes, std::uint64_t value) {
  if (lanes != kAllLanes) std::abort();  // part of a warp: not simulated
  Meeting& warp = block->warps[block->current / kLanes];
  warp.value[warp.generation % 2][block->current % kLanes] = value;
  return warp.value[meet(warp, kLanes) % 2];
}

inline int meet_or(unsigned barrier, unsigned count, int predicate) {
  Meeting& meeting = block->barriers[barrier];
  meeting.any[meeting.generation % 2] |= predicate != 0;
  return meeting.any[meet(meeting, count) % 2];
}

template <class T>
T from_lane(unsigned lanes, T value, unsigned lane) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  const std::uint64_t theirs = exchange(lanes, bits)[lane % kLanes];
  std::memcpy(&value, &theirs, sizeof(value));
  return value;
}

inline void run_fiber() {
  block->kernel();
  block->fibers[block->current].is_done = true;
  yield();
}

// Runs one block to its end, in this thread. Each round begins with another thread of the block.
inline void run_block(unsigned index, unsigned num_blocks, unsigned num_threads, std::function<void()> kernel) {
  constexpr std::size_t kStackBytes = 48 * 1024;
  Block own;
  own.index = index;
  own.num_blocks = num_blocks;
  own.kernel = std::move(kernel);
  own.fibers.resize(num_threads);
  own.warps.resize(num_threads / kLanes);
  std::vector<char> stacks(kStackBytes * num_threads);
  for (unsigned thread = 0; thread < num_threads; ++thread) {
    ucontext_t& context = own.fibers[thread].context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks.data() + kStackBytes * thread;
    context.uc_stack.ss_size = kStackBytes;
    makecontext(&context, run_fiber, 0);
  }
  block = &own;
  unsigned num_left = num_threads;
  for (unsigned round = 0; num_left > 0; ++round) {
    num_left = 0;
    for (unsigned turn = 0; turn < num_threads; ++turn) {
      own.current = (turn + round * 97) % num_threads;
      if (own.fibers[own.current].is_done) continue;
      ++num_left;
      swapcontext(&own.scheduler, &own.fibers[own.current].context);
    }
  }
  block = nullptr;
}

struct ThreadIndex {
  operator unsigned() const { return block->current; }
};
struct BlockIndex {
  operator unsigned() const { return block->index; }
};
struct NumBlocks {
  operator unsigned() const { return block->num_blocks; }
};
template <class X>
struct Vector {
  X x;
};

}  // namespace simt

inline constexpr simt::Vector<simt::ThreadIndex> threadIdx{};
inline constexpr simt::Vector<simt::BlockIndex> blockIdx{};
inline constexpr simt::Vector<simt::NumBlocks> gridDim{};

template <class T>
T __shfl_sync(unsigned lanes, T value, int lane) {
  return simt::from_lane(lanes, value, static_cast<unsigned>(lane));
}
template <class T>
T __shfl_xor_sync(unsigned lanes, T value, int step) {
  return simt::from_lane(lanes, value, simt::block->current ^ static_cast<unsigned>(step));
}
inline unsigned __ballot_sync(unsigned lanes, bool predicate) {
  unsigned ballot = 0, bit = 1;
  for (const std::uint64_t value : simt::exchange(lanes, predicate ? 1 : 0)) {
    if (value != 0) ballot |= bit;
    bit <<= 1;
  }
  return ballot;
}
inline int __any_sync(unsigned lanes, bool predicate) { return __ballot_sync(lanes, predicate) != 0 ? 1 : 0; }
inline int __syncthreads_or(int predicate) {
  return simt::meet_or(0, static_cast<unsigned>(simt::block->fibers.size()), predicate);
}
inline void __syncthreads() { __syncthreads_or(0); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline unsigned atomicCAS_system(unsigned* word, unsigned expected, unsigned value) {
  __atomic_compare_exchange_n(word, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
template <class T>
T min(T left, T right) {
  return left < right ? left : right;
}
template <class T>
T max(T left, T right) {
  return left > right ? left : right;
}
