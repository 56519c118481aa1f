// Stands in for include/weft/ptx/bulk.cuh: the same functions on the emulator's copies and barriers.
#pragma once

#include "weft/config/base.h"

namespace weft::ptx {

template <class T>
inline T* kept(T* shared) {
  return shared;
}

inline void bulk_load(void* shared, const void* global, u32 num_bytes, u64* barrier) {
  emulation::check_copy(shared, global, num_bytes);
  emulation::block->start_load({static_cast<u8*>(shared), static_cast<const u8*>(global), num_bytes,
                                reinterpret_cast<emulation::Barrier*>(barrier)});
}

inline void bulk_prefetch(const void* global, u32 num_bytes) { emulation::check_prefetch(global, num_bytes); }

inline void bulk_store(void* global, const void* shared, u32 num_bytes) {
  emulation::check_copy(shared, global, num_bytes);
  emulation::block->self().store(static_cast<u8*>(global), static_cast<const u8*>(shared), num_bytes);
}

inline void bulk_commit() { ++emulation::block->self().group; }

// All but the last kPending groups.
template <int kPending>
void bulk_wait_read() {
  emulation::block->self().read_stores(kPending);
  emulation::block->maybe_yield();
}

template <int kPending>
void bulk_wait() {
  emulation::block->self().write_stores(kPending);
  emulation::block->maybe_yield();
}

inline void bulk_wait_all() { bulk_wait<0>(); }

inline void mbarrier_init(u64* barrier, u32 num_arrivals) {
  auto* state = reinterpret_cast<emulation::Barrier*>(barrier);
  *state = {0, num_arrivals & 0x7fffu, num_arrivals & 0xffffu, 0};
}

inline void mbarrier_arrive_expect(u64* barrier, u32 num_bytes) {
  emulation::arrive_expect(reinterpret_cast<emulation::Barrier*>(barrier), num_bytes);
}

inline void mbarrier_arrive(u64* barrier) { mbarrier_arrive_expect(barrier, 0); }

inline bool mbarrier_try_wait(u64* barrier, u32 parity) {
  return emulation::try_wait(reinterpret_cast<const emulation::Barrier*>(barrier), parity);
}

inline bool mbarrier_test_wait(u64* barrier, u32 parity) { return mbarrier_try_wait(barrier, parity); }

inline void fence_mbarrier_init() {}
inline void fence_proxy_async() {}
inline void fence_proxy_async_global() {}
inline void fence_proxy_async_shared() {}

}  // namespace weft::ptx
