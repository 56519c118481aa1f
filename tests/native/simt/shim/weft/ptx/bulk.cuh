// Bulk copies are not simulated.
#pragma once

#include <cstdlib>

#include "weft/config/base.h"

namespace weft::ptx {

inline bool mbarrier_try_wait(u64*, u32) { std::abort(); }

}  // namespace weft::ptx
