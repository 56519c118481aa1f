// The words of CUDA that kernels use, for g++: a block is a process, a thread is a thread. Lanes of a warp meet where the
// hardware would make them meet, and nowhere else.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

#define __device__
#define __host__
#define __shared__ static  // one block a process
#define __align__(n)

struct Dim {
  unsigned x;
};
inline thread_local Dim threadIdx;
inline Dim blockIdx, gridDim, blockDim;

struct Barrier {
  std::atomic<int> num_here{0}, generation{0};

  void wait(int num_threads) {
    const int mine = generation.load();
    if (num_here.fetch_add(1) + 1 == num_threads) {
      num_here.store(0);
      generation.fetch_add(1);
      generation.notify_all();
      return;
    }
    while (generation.load() == mine) generation.wait(mine);
  }
};

struct Warp {
  Barrier all;
  Barrier some[32][33];  // by first lane and number of lanes
  unsigned value[32];    // of collectives of the whole warp
  unsigned part[32];     // of the others
};
inline Warp* warps = nullptr;
inline Barrier block_barrier;
inline std::atomic<int> block_or{0};

constexpr unsigned kAllLanes = 0xffffffffu;
inline int lane_idx() { return static_cast<int>(threadIdx.x % 32); }
inline Warp& this_warp() { return warps[threadIdx.x / 32]; }

inline void __syncwarp(unsigned mask = kAllLanes) {
  const int count = __builtin_popcount(mask);
  (mask == kAllLanes ? this_warp().all : this_warp().some[__builtin_ctz(mask)][count]).wait(count);
}

template <class T>
T shuffled(unsigned mask, T value, int from) {
  static_assert(sizeof(T) == 4);
  unsigned* slots = mask == kAllLanes ? this_warp().value : this_warp().part;
  std::memcpy(&slots[lane_idx()], &value, 4);
  __syncwarp(mask);
  T result;
  std::memcpy(&result, &slots[from], 4);
  __syncwarp(mask);
  return result;
}
template <class T>
T __shfl_sync(unsigned mask, T value, int from) {
  return shuffled(mask, value, from);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return shuffled(mask, value, lane_idx() ^ bits);
}
inline unsigned __ballot_sync(unsigned mask, bool is_set) {
  unsigned result = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (shuffled(mask, is_set ? 1 : 0, lane) != 0) result |= 1u << lane;
  }
  return result;
}
inline bool __any_sync(unsigned mask, bool is_set) { return __ballot_sync(mask, is_set) != 0; }

inline void __syncthreads() { block_barrier.wait(static_cast<int>(blockDim.x)); }
inline int __syncthreads_or(int is_set) {
  if (is_set != 0) block_or.store(1);
  __syncthreads();
  const int result = block_or.load();
  __syncthreads();
  if (threadIdx.x == 0) block_or.store(0);
  __syncthreads();
  return result;
}

inline int __popc(unsigned value) { return __builtin_popcount(value); }
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
