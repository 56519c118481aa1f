// Stands in for include/weft/ptx/bulk.cuh, as unhelpful as the rules allow: loads complete late and in any order, stores
// read shared memory and arrive no sooner than their thread waits for them.
#pragma once

#include "weft/config/base.h"

namespace weft::ptx {

struct Mbarrier {
  u32 phase : 1, num_arrivals : 15, num_pending : 16;
  i32 num_bytes;
};
static_assert(sizeof(Mbarrier) == 8);

struct Copy {
  void* to;
  const void* from;
  u32 num_bytes;
  u64* barrier;
  int group;
};

inline u8 *shared_begin = nullptr, *shared_end = nullptr;
inline std::mutex barrier_mutex, load_mutex;
inline std::atomic<int> num_flips{0};
inline std::deque<Copy> loads;
inline std::atomic<bool> has_ended{false};
inline thread_local std::deque<Copy> stores;
inline thread_local int num_groups = 0;

inline void check_copy(const void* shared, const void* global, u32 num_bytes) {
  const u8* begin = static_cast<const u8*>(shared);
  const bool is_inside = begin >= shared_begin && begin + num_bytes <= shared_end;
  const u64 bits = reinterpret_cast<u64>(shared) | reinterpret_cast<u64>(global) | num_bytes;
  if (is_inside && bits % 16 == 0 && num_bytes > 0) return;
  std::fprintf(stderr, "a bulk copy of %u bytes, %p, %p\n", num_bytes, shared, global);
  _exit(10);
}

// With the mutex held.
inline void settle(Mbarrier& barrier) {
  if (barrier.num_pending != 0 || barrier.num_bytes != 0) return;
  barrier.phase ^= 1;
  barrier.num_pending = barrier.num_arrivals;
  num_flips.fetch_add(1);
  num_flips.notify_all();
}

// The copy engine: a thread of its own.
inline void* run_loads(void*) {
  unsigned seed = static_cast<unsigned>(getpid());
  while (!has_ended) {
    Copy load{};
    {
      const std::lock_guard guard(load_mutex);
      if (!loads.empty()) {
        const auto chosen = loads.begin() + static_cast<long>(static_cast<size_t>(rand_r(&seed)) % loads.size());
        load = *chosen;
        loads.erase(chosen);
      }
    }
    if (load.to == nullptr) {
      usleep(30);
      continue;
    }
    std::memcpy(load.to, load.from, load.num_bytes);
    const std::lock_guard guard(barrier_mutex);
    auto& barrier = *reinterpret_cast<Mbarrier*>(load.barrier);
    barrier.num_bytes -= static_cast<i32>(load.num_bytes);
    settle(barrier);
  }
  return nullptr;
}

inline void bulk_load(void* shared, const void* global, u32 num_bytes, u64* barrier) {
  check_copy(shared, global, num_bytes);
  const std::lock_guard guard(load_mutex);
  loads.push_back({shared, global, num_bytes, barrier, 0});
}
inline void bulk_store(void* global, const void* shared, u32 num_bytes) {
  check_copy(shared, global, num_bytes);
  stores.push_back({global, shared, num_bytes, nullptr, num_groups});
}
inline void bulk_commit() { ++num_groups; }
inline void run_stores(int num_pending) {
  while (!stores.empty() && stores.front().group < num_groups - num_pending) {
    std::memcpy(stores.front().to, stores.front().from, stores.front().num_bytes);
    stores.pop_front();
  }
}
template <int kPending>
inline void bulk_wait_read() {
  run_stores(kPending);
}
template <int kPending>
inline void bulk_wait() {
  run_stores(kPending);
}
inline void bulk_wait_all() { run_stores(0); }

inline void mbarrier_init(u64* barrier, u32 num_arrivals) {
  auto& state = *reinterpret_cast<Mbarrier*>(barrier);
  state.phase = 0;
  state.num_arrivals = state.num_pending = num_arrivals;
  state.num_bytes = 0;
}
inline void mbarrier_arrive_expect(u64* barrier, u32 num_bytes) {
  const std::lock_guard guard(barrier_mutex);
  auto& state = *reinterpret_cast<Mbarrier*>(barrier);
  state.num_bytes += static_cast<i32>(num_bytes);
  --state.num_pending;
  settle(state);
}
inline void mbarrier_arrive(u64* barrier) { mbarrier_arrive_expect(barrier, 0); }
inline bool mbarrier_try_wait(u64* barrier, u32 parity) {
  const int seen = num_flips.load();
  {
    const std::lock_guard guard(barrier_mutex);
    if (reinterpret_cast<Mbarrier*>(barrier)->phase != parity) return true;
  }
  num_flips.wait(seen);
  return false;
}

inline void fence_mbarrier_init() {}
inline void fence_proxy_async() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void fence_proxy_async_shared() { std::atomic_thread_fence(std::memory_order_seq_cst); }

}  // namespace weft::ptx
