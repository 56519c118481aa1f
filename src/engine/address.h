// Addresses that Python hands over: 0 stands for what is not given.
#pragma once

#include <string>

#include "base/status.h"
#include "weft/config/base.h"

namespace weft {

// Where `length` things are read or written there is memory: a tensor without any has address 0 too.
inline void check_address(const char* name, u64 address, i64 length) {
  if (address != 0 || length <= 0) return;
  throw_invalid_argument(std::string(name) + ": no memory at address 0, and " + std::to_string(length) +
                         " bytes or values to read or write; give a tensor with memory of its own");
}

inline void check_address(const char* name, const void* address, i64 length) {
  check_address(name, reinterpret_cast<u64>(address), length);
}

}  // namespace weft
