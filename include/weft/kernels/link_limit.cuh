// What the link can do: every block's one thread copies rows by bulk copies, without a header, a count or a wait for
// anyone.
//   push   shared memory -> peers' rows. Every GPU does so at once: destinations are interleaved row by row, because an
//          order by phases (everyone to the next rank, then to the one after) loses a quarter of the bandwidth
//   pull   peers' rows -> shared memory
// Each block goes from peer to peer, and begins with another one than its neighbour, however many blocks there are.
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

// The rows of this block in turn: those at one place in the memory of every peer, then those at its next place. Steps
// of gridDim.x rows would keep a block at one peer wherever the number of blocks is a multiple of that of the peers.
template <LinkLimitConfig kConfig>
class LinkRows {
 public:
  __device__ explicit LinkRows(const LinkLimitArgs& args)
      : args_(args),
        num_places_(args.num_rows / args.num_peers),
        peer_(static_cast<i32>(blockIdx.x) % args.num_peers) {}

  __device__ bool has_next() const { return place_ < num_places_; }

  __device__ u8* next() {
    u8* row = args_.peer[peer_] + place_ * kConfig.row_bytes;
    peer_ = peer_ + 1 == args_.num_peers ? 0 : peer_ + 1;
    if (++num_at_place_ == args_.num_peers) {
      num_at_place_ = 0;
      place_ += gridDim.x;
    }
    return row;
  }

 private:
  const LinkLimitArgs& args_;
  const i64 num_places_;
  i64 place_ = blockIdx.x;
  i32 peer_;
  i32 num_at_place_ = 0;
};

template <LinkLimitConfig kConfig>
__device__ void push_rows(const LinkLimitArgs& args, u8* stages) {
  i32 stage = 0;
  for (LinkRows<kConfig> rows(args); rows.has_next();) {
    ptx::bulk_store(rows.next(), stages + stage * kConfig.row_bytes, kConfig.row_bytes);
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
  LinkRows<kConfig> rows(args);
  i64 num_loading = 0;
  const auto load = [&](i32 stage) {
    ptx::mbarrier_arrive_expect(&full[stage], kConfig.row_bytes);
    ptx::bulk_load(stages + stage * kConfig.row_bytes, rows.next(), kConfig.row_bytes, &full[stage]);
    ++num_loading;
  };
  for (i32 stage = 0; stage < kConfig.num_stages && rows.has_next(); ++stage) load(stage);
  i32 stage = 0;
  u32 parity = 0;
  for (; num_loading > 0; --num_loading) {
    LinkPause pause;
    const auto has_come = [&] { return ptx::mbarrier_try_wait(&full[stage], parity); };
    if (sync::wait_until(has_come, pause) != sync::WaitResult::kReady) return;
    if (rows.has_next()) load(stage);
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
