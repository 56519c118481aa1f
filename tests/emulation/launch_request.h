// What the emulated driver hands to the library of a kernel, which exports the function.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulation {

struct LaunchRequest {
  const void* args = nullptr;  // of the kernel
  uint32_t num_blocks = 0, num_threads = 0;
  uint64_t shared_bytes = 0;  // dynamic
  uint64_t seed = 0;
  uint32_t most_sleep_us = 1;  // of a block that stands still now and then
  int* given_up = nullptr;     // set by a block that has found a mistake: all blocks of all ranks end
  char* found = nullptr;       // what it is, in words: of the first block of all ranks, others end because of it
  size_t found_bytes = 0;
};

// Runs all blocks at once, each in a thread of its own, and returns when all have ended. 0, or a mistake was found.
using LaunchFunction = int (*)(const LaunchRequest*);
// Bytes of the kernel's arguments.
using ArgsBytesFunction = size_t (*)();

constexpr const char* kLaunchSymbol = "emulated_launch";
constexpr const char* kArgsBytesSymbol = "emulated_args_bytes";

}  // namespace emulation
