// Stands in for include/weft/ptx/fetch.cuh: a copy is done when the thread waits for its group, as late as it may.
#pragma once

#include "weft/ptx/bulk.cuh"

namespace weft::ptx {

template <int kOffset>
void fetch_vector(void* shared_base, const void* global_base) {
  u8* const shared = static_cast<u8*>(shared_base) + kOffset;
  const u8* const global = static_cast<const u8*>(global_base) + kOffset;
  check_copy(shared, global, 16);
  emulation::Fiber& self = emulation::block->self();
  memset(shared, emulation::poison, 16);
  self.fetches.push_back({shared, global, 16, self.fetch_group});
}

inline void fetch_commit() { ++emulation::block->self().fetch_group; }

template <int kPending>
void fetch_wait() {
  emulation::Fiber& self = emulation::block->self();
  self.fetches.remove_if([&](emulation::Store& fetch) {
    const bool is_due = fetch.group + kPending < self.fetch_group;
    if (is_due) fetch.write();
    return is_due;
  });
  emulation::block->maybe_yield();
}

}  // namespace weft::ptx
