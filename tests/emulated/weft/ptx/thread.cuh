// Stands in for include/weft/ptx/thread.cuh.
#pragma once

#include "weft/config/base.h"

namespace weft::ptx {

constexpr u32 kWarpLanes = 32;

inline u32 lanes_below() { return (1u << lane_idx()) - 1; }
inline void nanosleep(u32) { usleep(50); }
inline void st_release_cta(u32* word, u32 value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
inline u32 ld_acquire_cta(const u32* word) {
  usleep(500);  // hundreds of threads poll on few cores
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
inline u32 atom_inc_wrap_gpu(u32* word, u32 last) {
  u32 before = __atomic_load_n(word, __ATOMIC_ACQUIRE);
  while (!__atomic_compare_exchange_n(word, &before, before >= last ? 0 : before + 1, false, __ATOMIC_ACQ_REL,
                                      __ATOMIC_ACQUIRE)) {
  }
  return before;
}

}  // namespace weft::ptx
