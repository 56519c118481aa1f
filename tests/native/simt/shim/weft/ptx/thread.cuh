// What kernels that run on simulated blocks use of include/weft/ptx/thread.cuh.
#pragma once

#include "simt.h"
#include "weft/config/base.h"

namespace weft::ptx {

constexpr u32 kWarpLanes = simt::kLanes;

inline void nanosleep(u32) { simt::yield(); }
inline void bar_sync(u32 barrier, u32 num_threads) { simt::meet_or(barrier, num_threads, 0); }
inline u32 ld_acquire_cta(const u32* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline u32 atom_inc_wrap_gpu(u32* word, u32 last) {
  u32 before = __atomic_load_n(word, __ATOMIC_RELAXED);
  bool is_done = false;
  while (!is_done) {  // check: allow spin-loop: an atomic operation that the CPU does not have
    is_done = __atomic_compare_exchange_n(word, &before, before >= last ? 0 : before + 1, false, __ATOMIC_ACQ_REL,
                                          __ATOMIC_RELAXED);
  }
  return before;
}

}  // namespace weft::ptx
