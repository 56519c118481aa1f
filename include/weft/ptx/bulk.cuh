// Bulk (TMA) copies between global and shared memory, the barriers that loads complete on, and the fences between the
// generic and the async proxy. Device only, sm_90 and later; PTX ISA 8.0, "cp.async.bulk" and "mbarrier".
// Addresses and sizes are multiples of 16 bytes.
#pragma once

#include "weft/config/base.h"

namespace weft::ptx {

__device__ inline u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// The same pointer to shared memory, from a register that is kept: the compiler makes that of a variable anew at every use, from a
// special register that takes tens of cycles to read. By a whole warp.
template <class T>
__device__ inline T* kept(T* shared) {
  return static_cast<T*>(__cvta_shared_to_generic(__shfl_sync(0xffffffffu, shared_address(shared), 0)));
}

// Completes on `barrier` (complete_tx of num_bytes).
__device__ inline void bulk_load(void* shared, const void* global, u32 num_bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(num_bytes), "r"(shared_address(barrier))
               : "memory");
}

// To the L2 cache, for loads by threads that come later.
__device__ inline void bulk_prefetch(const void* global, u32 num_bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(num_bytes) : "memory");
}

// Belongs to the bulk group that this thread commits next.
__device__ inline void bulk_store(void* global, const void* shared, u32 num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(num_bytes)
               : "memory");
}

__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// All but the last kPending groups of this thread have read their shared memory: it may be written again.
template <int kPending>
__device__ inline void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// All but the last kPending groups of this thread are complete: their writes are done.
template <int kPending>
__device__ inline void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// All bulk groups of this thread are complete: their writes are done. What must come before a completion signal (R8).
__device__ inline void bulk_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ inline void mbarrier_init(u64* barrier, u32 num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_arrivals) : "memory");
}

__device__ inline void mbarrier_arrive_expect(u64* barrier, u32 num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_bytes)
               : "memory");
}

__device__ inline void mbarrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Whether the phase of this parity has ended; suspends for a short hardware-chosen time if not.
__device__ inline bool mbarrier_try_wait(u64* barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n\t.reg .pred p;\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// The same look, but it never suspends.
__device__ inline bool mbarrier_test_wait(u64* barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n\t.reg .pred p;\n\t"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// Makes initialised barriers visible to the async proxy.
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Orders generic accesses of this thread before its later bulk copies, and completed bulk copies before generic accesses.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// The same for global memory alone. The form above is a MEMBAR.GPU in machine code too, which waits for what is under way.
__device__ inline void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// The same for shared memory alone: does not wait for what is under way in global memory.
__device__ inline void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace weft::ptx
