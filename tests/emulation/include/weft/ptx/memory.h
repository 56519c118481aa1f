// Stands in for include/weft/ptx/memory.h. After a signal was sent, and after one was seen, the block may sleep: what others do
// meanwhile they do long before this block does what comes next. Lanes of a warp read and write at different times.
#pragma once

#include "weft/config/base.h"

namespace weft::ptx {

inline u64 ld_acquire_sys(const u64* word) {
  const u64 value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
  emulation::maybe_sleep();
  return value;
}

inline u64 ld_relaxed_sys(const u64* word) {
  while (emulation::random_below(32) == 0) emulation::block->poll("ld_relaxed_sys", false);
  return __atomic_load_n(word, __ATOMIC_RELAXED);
}

inline void ld_relaxed_sys(const u64* words, u64 (&values)[2]) {
  for (i32 idx = 0; idx < 2; ++idx) values[idx] = ld_relaxed_sys(words + idx);
}

inline void st_release_sys(u64* word, u64 value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
  emulation::maybe_sleep();
}

inline void st_relaxed_sys(u64* word, u64 value) {
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
  emulation::block->maybe_yield();
}

inline void fence_sys() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }

inline void add_release_sys(u64* word, u64 value) { __atomic_fetch_add(word, value, __ATOMIC_RELEASE); }

inline u64 atom_cas_acquire_sys(u64* word, u64 expected, u64 value) {
  __atomic_compare_exchange_n(word, &expected, value, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
  return expected;
}

}  // namespace weft::ptx
