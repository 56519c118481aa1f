// What the link can do: every block's one thread copies rows by bulk copies, without a header, a count or a wait for anyone.
//   push   shared memory -> peers' rows. Every GPU does so at once: destinations are interleaved row by row, because an
//          order by phases (everyone to the next rank, then to the one after) loses a quarter of the bandwidth
//   pull   peers' rows -> shared memory
// What is copied does not matter: `weft bench` measures the kernels' time and sets what Weft reaches against it.
#pragma once

#include "weft/kernels/link_limit.h"
#include "weft/ptx/bulk.cuh"
#include "weft/sync/wait.h"

namespace weft::kernels {

// The waits are for this block's own copies, which end by themselves; the bound is for a GPU that has gone wrong.
class LinkPause {
 public:
  __device__ sync::PauseResult turn() {
    return ++num_turns_ < kMaxTurns ? sync::PauseResult::kLookAgain : sync::PauseResult::kDeadline;
  }

 private:
  static constexpr u32 kMaxTurns = 1u << 24;  // of a try_wait, which itself waits for a short time
  u32 num_turns_ = 0;
};

template <LinkLimitConfig kConfig>
__device__ u8* link_row(const LinkLimitArgs& args, i64 row) {
  return args.peer[row % args.num_peers] + row / args.num_peers * kConfig.row_bytes;
}

template <LinkLimitConfig kConfig>
__device__ void push_rows(const LinkLimitArgs& args, u8* stages) {
  i32 stage = 0;
  for (i64 row = blockIdx.x; row < args.num_rows; row += gridDim.x) {
    ptx::bulk_store(link_row<kConfig>(args, row), stages + stage * kConfig.row_bytes, kConfig.row_bytes);
    ptx::bulk_commit();
    ptx::bulk_wait_read<kConfig.num_stages - 1>();
    stage = stage + 1 == kConfig.num_stages ? 0 : stage + 1;
  }
  ptx::bulk_wait_all();
}

template <LinkLimitConfig kConfig>
__device__ void pull_rows(const LinkLimitArgs& args, u8* stages) {
  __shared__ u64 full[kConfig.num_stages];
  for (i32 stage = 0; stage < kConfig.num_stages; ++stage) ptx::mbarrier_init(&full[stage], 1);
  ptx::fence_mbarrier_init();
  const i64 stride = gridDim.x;
  const auto load = [&](i64 row, i32 stage) {
    ptx::mbarrier_arrive_expect(&full[stage], kConfig.row_bytes);
    ptx::bulk_load(stages + stage * kConfig.row_bytes, link_row<kConfig>(args, row), kConfig.row_bytes, &full[stage]);
  };
  i64 next = blockIdx.x;
  for (i32 stage = 0; stage < kConfig.num_stages && next < args.num_rows; ++stage, next += stride) load(next, stage);
  i32 stage = 0;
  u32 parity = 0;
  for (i64 row = blockIdx.x; row < args.num_rows; row += stride) {
    LinkPause pause;
    const auto has_come = [&] { return ptx::mbarrier_try_wait(&full[stage], parity); };
    if (sync::wait_until(has_come, pause) != sync::WaitResult::kReady) return;
    if (next < args.num_rows) load(next, stage);
    next += stride;
    if (++stage == kConfig.num_stages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

template <LinkLimitConfig kConfig>
__device__ void link_limit(const LinkLimitArgs& args) {
  extern __shared__ __align__(128) u8 stages[];
  if (threadIdx.x != 0) return;
  if constexpr (kConfig.is_pull) {
    pull_rows<kConfig>(args, stages);
  } else {
    push_rows<kConfig>(args, stages);
  }
}

}  // namespace weft::kernels
