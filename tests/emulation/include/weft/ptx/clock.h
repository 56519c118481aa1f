// Stands in for include/weft/ptx/clock.h. Whoever reads the clock waits for another block: others have their turn first.
#pragma once

#include <time.h>

#include "weft/config/base.h"

namespace weft::ptx {

inline u64 globaltimer_ns() {
  emulation::block->poll("globaltimer_ns", true);
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<u64>(now.tv_sec) * 1000000000ull + static_cast<u64>(now.tv_nsec);
}

constexpr u64 kCyclesPerNs = 2;
inline u64 cycles() { return globaltimer_ns() * kCyclesPerNs; }

}  // namespace weft::ptx
