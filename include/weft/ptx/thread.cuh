// Who and where this thread is, and small things that have no better place. Device only.
#pragma once

#include "weft/config/base.h"

namespace weft::ptx {

constexpr u32 kWarpLanes = 32;

__device__ inline u32 lanes_below() {
  u32 mask;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
  return mask;
}

// The lanes that have the same key as this one. All lanes call it.
__device__ inline u32 match_any(i32 key) { return __match_any_sync(0xffffffffu, key); }

__device__ inline void nanosleep(u32 num_ns) { asm volatile("nanosleep.u32 %0;" ::"r"(num_ns)); }

// Kernels one after the other in a stream, the second launched so that it may begin early (PTX ISA 7.8, "griddepcontrol").
// Until all kernels before this one have ended and what they have written is visible. All threads, before any other access
// to global memory.
__device__ inline void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Blocks of the next kernel may take free room once all blocks of this one have said so, or ended.
__device__ inline void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// A barrier of some warps of a block, all of which come to the same place; 0 is that of __syncthreads.
__device__ inline void bar_sync(u32 barrier, u32 num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

// Comes to the barrier without waiting for the others; what was stored before is visible behind their bar_sync.
__device__ inline void bar_arrive(u32 barrier, u32 num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

// bar_sync for warps that meet from different places: synccheck wants this form there.
__device__ inline void bar_sync_apart(u32 barrier, u32 num_threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

// Adds one; returns what was there. Within the GPU, no order.
__device__ inline u32 atom_inc_gpu(u32* word) { return atomicAdd(word, 1u); }

// The same with 64 bits, of which a caller may use parts.
__device__ inline u64 atom_add_gpu(u64* word, u64 value) {
  u64 before;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(word), "l"(value) : "memory");
  return before;
}

// A word that threads of a block hand to each other: everything stored before is visible to whoever reads it.
__device__ inline void st_release_cta(u32* word, u32 value) {
  asm volatile("st.release.cta.b32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ inline u32 ld_acquire_cta(const u32* word) {
  u32 value;
  asm volatile("ld.acquire.cta.b32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Counts 0 .. last and starts again; returns what was there. Within the GPU, acquire and release.
__device__ inline u32 atom_inc_wrap_gpu(u32* word, u32 last) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(last) : "memory");
  return before;
}

// The same without an order.
__device__ inline u32 atom_inc_wrap_relaxed_gpu(u32* word, u32 last) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(last) : "memory");
  return before;
}

}  // namespace weft::ptx
