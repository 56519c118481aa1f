// One block of a launch, in the operating-system thread that calls it. Included behind the source that the library renders.
#pragma once

#include <algorithm>
#include <fstream>

#include "emulator.h"

namespace emulation {

// The dynamic shared memory of this block. It ends exactly at a page that nobody may touch, but for what brings its beginning to
// a multiple of 128.
class DynamicShared {
 public:
  explicit DynamicShared(u64 num_bytes) : room_((num_bytes + 127) / 128 * 128) {
    const u64 size = room_;
    room_ = (size + kPage - 1) / kPage * kPage;
    void* base = mmap(nullptr, room_ + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) fail("no shared memory");
    base_ = static_cast<u8*>(base);
    if (mprotect(base_ + room_, kPage, PROT_NONE) != 0) fail("no page behind the shared memory");
    dynamic_shared_bytes = size;
    dynamic_shared = base_ + room_ - size;
    memset(dynamic_shared, poison, size);
  }
  ~DynamicShared() { munmap(base_, room_ + kPage); }
  DynamicShared(const DynamicShared&) = delete;
  DynamicShared& operator=(const DynamicShared&) = delete;

 private:
  static constexpr u64 kPage = 4096;
  u64 room_;
  u8* base_ = nullptr;
};

// `path`: "offset bytes" lines: __shared__ variables, by their distance from random_state, which lies beside them.
inline void poison_shared(const char* path) {
  std::ifstream file(path);
  if (!file) fail("no list of __shared__ variables: %s", path);
  i64 offset = 0, num_bytes = 0;
  u8* const beside = reinterpret_cast<u8*>(&random_state);
  while (file >> offset >> num_bytes) memset(beside + offset, poison, static_cast<size_t>(num_bytes));
}

struct Grid {
  u32 num_blocks = 0, num_threads = 0;
  u64 shared_bytes = 0;  // dynamic
  u64 seed = 0;
  const char* shared_variables = nullptr;  // a path
};

// Throws Failed.
template <class Args>
void run_block(void (*kernel)(const Args), const Args& args, const Grid& grid, u32 idx) {
  threadIdx.x = 0;
  blockIdx.x = idx;
  blockDim.x = grid.num_threads;
  gridDim.x = grid.num_blocks;
  random_state = (grid.seed * 64 + idx) * 0x9e3779b97f4a7c15ull | 1u;
  for (i32 round = 0; round < 8; ++round) random_below(2);
  poison_shared(grid.shared_variables);
  const DynamicShared memory(grid.shared_bytes);
  usleep(std::min(random_below(3) * 500, most_sleep_us));
  struct Work {
    void (*kernel)(const Args);
    const Args& args;
  } work{kernel, args};
  Block mine;
  block = &mine;
  mine.run(
      grid.num_threads,
      [](void* given) {
        const auto* of = static_cast<const Work*>(given);
        of->kernel(of->args);
      },
      &work);
}

}  // namespace emulation
