// What is the same for all kernels: see library.h.
#include "library.h"

#include <dlfcn.h>

#include <atomic>
#include <thread>

namespace emulation {

int launch(const LaunchRequest& request, const void* symbol, Block::Body body, void* kernel) {
  Dl_info info = {};
  dladdr(symbol, &info);
  const std::string shared_variables = std::string(info.dli_fname) + ".shared_variables";
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
      run_block(grid, idx, body, kernel);
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
