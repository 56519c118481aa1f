// Random bytes of the kernel: nobody can guess them.
#pragma once

#include <sys/random.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace weft {

template <size_t kBytes>
std::array<uint8_t, kBytes> random_bytes() {
  std::array<uint8_t, kBytes> random{};
  if (getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size())) {
    throw_system_error("getrandom", errno);
  }
  return random;
}

}  // namespace weft
