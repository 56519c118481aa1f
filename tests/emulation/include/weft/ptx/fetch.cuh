// Stands in for include/weft/ptx/fetch.cuh: a copy is done when the thread waits for its group, as late as it may.
#pragma once

#include "weft/ptx/bulk.cuh"

namespace weft::ptx {

template <int kOffset>
void fetch_vector(void* shared_base, const void* global_base) {
  u8* const shared = static_cast<u8*>(shared_base) + kOffset;
  const u8* const global = static_cast<const u8*>(global_base) + kOffset;
  emulation::check_copy(shared, global, 16);
  emulation::block->self().fetch(shared, global, 16);
}

inline void fetch_commit() { ++emulation::block->self().fetch_group; }

template <int kPending>
void fetch_wait() {
  emulation::block->self().write_fetches(kPending);
  emulation::block->maybe_yield();
}

}  // namespace weft::ptx
