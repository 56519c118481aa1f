// One block of a launch, in the operating-system thread that calls it.
#pragma once

#include "emulator.h"

namespace emulation {

struct Grid {
  u32 num_blocks = 0, num_threads = 0;
  u64 shared_bytes = 0;  // dynamic
  u64 seed = 0;
  const char* shared_variables = nullptr;  // a path
};

// `body(argument)` in each thread of block `idx`. Throws Failed.
void run_block(const Grid& grid, u32 idx, Block::Body body, void* argument);

}  // namespace emulation
