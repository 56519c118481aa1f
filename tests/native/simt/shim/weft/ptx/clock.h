// include/weft/ptx/clock.h for simulated blocks: who looks at the clock waits, so the other threads of the block go on.
#pragma once

#include <time.h>

#include "simt.h"
#include "weft/config/base.h"

namespace weft::ptx {

inline u64 globaltimer_ns() {
  simt::yield();
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<u64>(now.tv_sec) * 1000000000ull + static_cast<u64>(now.tv_nsec);
}

}  // namespace weft::ptx
