// The only place of the native code that reads the environment. docs/environment.md holds the table for users.
#pragma once

#include <cstdint>

#include "base/log.h"

namespace weft {

struct Env {
  int log_level = kLogWarning;  // WEFT_LOG_LEVEL: debug | info | warning | error | off
  uint64_t spin_us = 20;        // WEFT_SPIN_US: 0..1000000, how long a waiting CPU rank spins before it sleeps
};

// Read once, at the first call. Error kInvalidArgument names a variable with a value that is not allowed.
const Env& env();

}  // namespace weft
