// The one clock of the host code: CLOCK_MONOTONIC in nanoseconds, the same for all processes of a machine.
#pragma once

#include <ctime>

#include <cstdint>

namespace weft {

inline uint64_t now_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

// now + seconds; a wait without a bound does not exist, so an endless or absurd value is cut to 30 years.
inline uint64_t deadline_after_s(double seconds) noexcept {
  constexpr double kLongestS = 1e9;
  const double bounded_s = seconds > 0 ? (seconds < kLongestS ? seconds : kLongestS) : 0;
  return now_ns() + static_cast<uint64_t>(bounded_s * 1e9);
}

}  // namespace weft
