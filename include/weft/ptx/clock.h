// The clock that deadlines are counted on: nanoseconds, monotonic, the same for all blocks of a GPU or threads of a process.
#pragma once

#include "weft/config/base.h"

#if !defined(__CUDACC_RTC__)
#include <time.h>
#endif

namespace weft::ptx {

WEFT_HD inline u64 globaltimer_ns() {
#if defined(__CUDA_ARCH__)
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
#else
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<u64>(now.tv_sec) * 1000000000ull + static_cast<u64>(now.tv_nsec);
#endif
}

// Of the SM, for differences on one SM: read in a few cycles, where the clock above takes a good part of a microsecond.
// Nanoseconds are half as many, within the few percent that GPUs run beside 2 GHz.
constexpr u64 kCyclesPerNs = 2;

WEFT_HD inline u64 cycles() {
#if defined(__CUDA_ARCH__)
  u64 now;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
  return now;
#else
  return globaltimer_ns() * kCyclesPerNs;
#endif
}

}  // namespace weft::ptx
