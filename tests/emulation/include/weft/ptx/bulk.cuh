// Stands in for include/weft/ptx/bulk.cuh: the same functions on the emulator's copies and barriers.
#pragma once

#include "weft/config/base.h"

namespace weft::ptx {

inline void check_copy(const void* shared, const void* global, u32 num_bytes) {
  const u8* begin = static_cast<const u8*>(shared);
  const u8* place = static_cast<const u8*>(global);
  const bool is_shared = begin >= emulation::dynamic_shared &&
                         begin + num_bytes <= emulation::dynamic_shared + emulation::dynamic_shared_bytes;
  const bool is_global = place >= emulation::global_begin && place + num_bytes <= emulation::global_end;
  const bool is_aligned = (reinterpret_cast<u64>(shared) | reinterpret_cast<u64>(global) | num_bytes) % 16 == 0;
  if (!is_shared || !is_global || !is_aligned || num_bytes == 0) {
    emulation::fail("bulk copy of %u bytes between shared %p and global %p", num_bytes, shared, global);
  }
}

template <class T>
inline T* kept(T* shared) {
  return shared;
}

inline void bulk_load(void* shared, const void* global, u32 num_bytes, u64* barrier) {
  check_copy(shared, global, num_bytes);
  emulation::block->start_load({static_cast<u8*>(shared), static_cast<const u8*>(global), num_bytes,
                                reinterpret_cast<emulation::Barrier*>(barrier)});
}

inline void bulk_prefetch(const void* global, u32 num_bytes) {
  const u8* place = static_cast<const u8*>(global);
  const bool is_aligned = (reinterpret_cast<u64>(global) | num_bytes) % 16 == 0;
  if (place < emulation::global_begin || place + num_bytes > emulation::global_end || !is_aligned) {
    emulation::fail("prefetch of %u bytes of global %p", num_bytes, global);
  }
}

inline void bulk_store(void* global, const void* shared, u32 num_bytes) {
  check_copy(shared, global, num_bytes);
  emulation::Fiber& self = emulation::block->self();
  self.stores.push_back({static_cast<u8*>(global), static_cast<const u8*>(shared), num_bytes, self.group});
}

inline void bulk_commit() { ++emulation::block->self().group; }

// All but the last kPending groups.
template <int kPending>
void bulk_wait_read() {
  emulation::Fiber& self = emulation::block->self();
  for (emulation::Store& store : self.stores) {
    if (store.group + kPending < self.group) store.read();
  }
  emulation::block->maybe_yield();
}

template <int kPending>
void bulk_wait() {
  emulation::Fiber& self = emulation::block->self();
  self.stores.remove_if([&](emulation::Store& store) {
    const bool is_due = store.group + kPending < self.group;
    if (is_due) store.write();
    return is_due;
  });
  emulation::block->maybe_yield();
}

inline void bulk_wait_all() { bulk_wait<0>(); }

inline void mbarrier_init(u64* barrier, u32 num_arrivals) {
  auto* state = reinterpret_cast<emulation::Barrier*>(barrier);
  *state = {0, num_arrivals & 0x7fffu, num_arrivals & 0xffffu, 0};
}

inline void mbarrier_arrive_expect(u64* barrier, u32 num_bytes) {
  auto* state = reinterpret_cast<emulation::Barrier*>(barrier);
  if (state->pending == 0) emulation::fail("more arrive at a barrier than it counts");
  state->num_bytes += static_cast<i32>(num_bytes);
  state->pending -= 1;
  emulation::block->settle(state);
  emulation::block->maybe_yield();
}

inline void mbarrier_arrive(u64* barrier) { mbarrier_arrive_expect(barrier, 0); }

inline bool mbarrier_try_wait(u64* barrier, u32 parity) {
  const auto* state = reinterpret_cast<const emulation::Barrier*>(barrier);
  while (state->parity == parity) {
    emulation::block->expect(state);
    emulation::block->poll("mbarrier_try_wait", false);
    if (emulation::random_below(8) != 0) break;
  }
  return state->parity != parity;
}

inline bool mbarrier_test_wait(u64* barrier, u32 parity) { return mbarrier_try_wait(barrier, parity); }

inline void fence_mbarrier_init() {}
inline void fence_proxy_async() {}
inline void fence_proxy_async_global() {}
inline void fence_proxy_async_shared() {}

}  // namespace weft::ptx
