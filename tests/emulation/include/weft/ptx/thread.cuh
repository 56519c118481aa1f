// Stands in for include/weft/ptx/thread.cuh.
#pragma once

#include "weft/config/base.h"

namespace weft::ptx {

constexpr u32 kWarpLanes = 32;

inline u32 lanes_below() { return (1u << (threadIdx.x % kWarpLanes)) - 1; }

inline u32 match_any(i32 key) { return __match_any_sync(0xffffffffu, key); }

inline void nanosleep(u32) { emulation::block->poll("nanosleep", true); }

inline void wait_for_kernel_before() {}  // kernels here begin when the one before has ended

inline void let_next_kernel_begin() { emulation::block->let_next_begin(); }

inline void bar_sync(u32 barrier, u32 num_threads) {
  if (num_threads % kWarpLanes != 0) emulation::fail("bar.sync of %u threads, which are no whole warps", num_threads);
  emulation::meet_block(barrier, num_threads, barrier == 0 ? "__syncthreads" : "bar_sync");
}

inline void bar_sync_apart(u32 barrier, u32 num_threads) { bar_sync(barrier, num_threads); }

inline void bar_arrive(u32 barrier, u32 num_threads) {
  emulation::block->arrive(emulation::block->barrier(barrier), "bar_sync", num_threads);
}

inline u32 atom_inc_gpu(u32* word) { return atomicAdd(word, 1u); }

inline u64 atom_add_gpu(u64* word, u64 value) { return __atomic_fetch_add(word, value, __ATOMIC_RELAXED); }

inline void st_release_cta(u32* word, u32 value) {
  *word = value;
  emulation::block->note_change();
  emulation::block->maybe_yield();
}

// Read in a loop, so that others must have their turn. Lanes of a warp may read at different times, some much later.
inline u32 ld_acquire_cta(const u32* word) {
  do {
    emulation::block->poll("ld_acquire_cta", false);
  } while (emulation::random_below(8) == 0);
  return *word;
}

inline u32 atom_inc_wrap_gpu(u32* word, u32 last) {
  u32 seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(word, &seen, seen >= last ? 0 : seen + 1, true, __ATOMIC_ACQ_REL,
                                      __ATOMIC_RELAXED)) {
  }
  return seen;
}

inline u32 atom_inc_wrap_relaxed_gpu(u32* word, u32 last) { return atom_inc_wrap_gpu(word, last); }

}  // namespace weft::ptx
