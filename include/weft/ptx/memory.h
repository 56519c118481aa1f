// Loads and stores with an order and a scope, one instruction each. On the host the same orders on std-free atomics:
// system scope is what the CPU has. A release pairs with the acquire that reads its value.
#pragma once

#include "weft/config/base.h"

namespace weft::ptx {

WEFT_HD inline u64 ld_acquire_sys(const u64* word) {
#if defined(__CUDA_ARCH__)
  u64 value;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

WEFT_HD inline u64 ld_relaxed_sys(const u64* word) {
#if defined(__CUDA_ARCH__)
  u64 value;
  asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_RELAXED);
#endif
}

// Two words side by side, on 16 bytes: each as above, in no order.
WEFT_HD inline void ld_relaxed_sys(const u64* words, u64 (&values)[2]) {
#if defined(__CUDA_ARCH__)
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(values[0]), "=l"(values[1])
               : "l"(words)
               : "memory");
#else
  for (i32 idx = 0; idx < 2; ++idx) values[idx] = __atomic_load_n(words + idx, __ATOMIC_RELAXED);
#endif
}

WEFT_HD inline void st_release_sys(u64* word, u64 value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

WEFT_HD inline void st_relaxed_sys(u64* word, u64 value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
#endif
}

// What this thread has stored, and what it has seen by then, comes before what it stores relaxed from here on.
WEFT_HD inline void fence_sys() {
#if defined(__CUDA_ARCH__)
  asm volatile("fence.acq_rel.sys;" ::: "memory");
#else
  __atomic_thread_fence(__ATOMIC_ACQ_REL);
#endif
}

// Everything stored before is visible to whoever acquires the sum.
WEFT_HD inline void add_release_sys(u64* word, u64 value) {
#if defined(__CUDA_ARCH__)
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
  __atomic_fetch_add(word, value, __ATOMIC_RELEASE);
#endif
}

// Stores `value` if the word is `expected`; returns what it was.
WEFT_HD inline u64 atom_cas_acquire_sys(u64* word, u64 expected, u64 value) {
#if defined(__CUDA_ARCH__)
  u64 seen;
  asm volatile("atom.acquire.sys.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(seen)
               : "l"(word), "l"(expected), "l"(value)
               : "memory");
  return seen;
#else
  __atomic_compare_exchange_n(word, &expected, value, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
  return expected;
#endif
}

}  // namespace weft::ptx
