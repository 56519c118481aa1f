// Copies of 16 bytes from global to shared memory that a thread starts and waits for by itself ("cp.async"): many may be under
// way without registers. Device only; PTX ISA, "cp.async". Other threads may read what one has waited for behind a barrier.
#pragma once

#include "weft/ptx/bulk.cuh"

namespace weft::ptx {

// kOffset bytes behind both. Not kept in the L1 cache. Belongs to the group that this thread commits next.
template <int kOffset>
__device__ inline void fetch_vector(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %2], 16;" ::"r"(shared_address(shared)), "l"(global),
               "n"(kOffset)
               : "memory");
}

// A group may be empty.
__device__ inline void fetch_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All but the last kPending groups of this thread are there.
template <int kPending>
__device__ inline void fetch_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace weft::ptx
