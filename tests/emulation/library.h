// A kernel as a library for the emulated GPU: included behind the source that the library renders, which has the kernel.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "launch_request.h"
#include "run_block.h"

namespace emulation {

// The list of __shared__ variables lies beside the library.
inline std::string shared_variables_of(const void* symbol) {
  Dl_info info = {};
  dladdr(symbol, &info);
  return std::string(info.dli_fname) + ".shared_variables";
}

template <class Args>
int launch(void (*kernel)(const Args), const LaunchRequest& request, const std::string& shared_variables) {
  Args args;
  memcpy(&args, request.args, sizeof(args));
  Grid grid;
  grid.num_blocks = request.num_blocks;
  grid.num_threads = request.num_threads;
  grid.shared_bytes = request.shared_bytes;
  grid.seed = request.seed;
  grid.shared_variables = shared_variables.c_str();
  std::atomic<bool> has_failed = false;
  const auto run = [&](u32 idx) {
    most_sleep_us = request.most_sleep_us;
    given_up = request.given_up;
    try {
      run_block(kernel, args, grid, idx);
    } catch (const Failed& mistake) {
      has_failed = true;
      const bool is_first = __atomic_exchange_n(request.given_up, 1, __ATOMIC_RELAXED) == 0;
      if (is_first) strncpy(request.found, mistake.text.c_str(), request.found_bytes - 1);
    }
  };
  std::vector<std::thread> blocks;
  for (u32 idx = 0; idx < grid.num_blocks; ++idx) blocks.emplace_back(run, idx);
  for (std::thread& each : blocks) each.join();
  return has_failed ? 1 : 0;
}

}  // namespace emulation
