// How many picks each expert has, how many tokens each rank, and which ranks a token goes to. Every token is read once, by one
// thread. Nothing is sent and nobody is waited for but the kernel in front.
#pragma once

#include "weft/kernels/count_picks_arguments.h"
#include "weft/ptx/thread.cuh"

namespace weft::kernels {

template <class Id>
__device__ u64 ranks_of_token(const CountPicksArgs& args, i64 token) {
  const Id* ids = static_cast<const Id*>(args.topk_idx) + token * args.top_k;
  const i32 num_local = args.num_experts / args.num_ranks;
  u64 ranks = 0;
  for (i32 k = 0; k < args.top_k; ++k) {
    const i64 id = ids[k];
    if (id < 0 || id >= args.num_experts) continue;
    atomicAdd(&args.experts[id], 1);
    ranks |= u64{1} << (static_cast<i32>(id) / num_local);
  }
  return ranks;
}

// Whole warps go through the loops: a warp adds what its tokens have of a rank at once.
__device__ inline void count_picks(const CountPicksArgs& args) {
  constexpr i32 kLanes = static_cast<i32>(ptx::kWarpLanes);
  const i32 lane = static_cast<i32>(threadIdx.x % ptx::kWarpLanes);
  const i64 warp = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
  const i64 num_warps = static_cast<i64>(gridDim.x) * blockDim.x / kLanes;
  for (i64 first = warp * kLanes; first < args.num_tokens; first += num_warps * kLanes) {
    const i64 token = first + lane;
    const bool is_token = token < args.num_tokens;
    u64 ranks = 0;
    if (is_token) ranks = args.is_int64 ? ranks_of_token<i64>(args, token) : ranks_of_token<i32>(args, token);
    for (i32 rank = 0; rank < args.num_ranks; ++rank) {
      const bool is_here = (ranks >> rank & 1) != 0;
      if (is_token) args.is_in_rank[token * args.num_ranks + rank] = is_here ? 1 : 0;
      const u32 here = __ballot_sync(0xffffffffu, is_here);
      if (lane == 0 && here != 0) atomicAdd(&args.ranks[rank], __popc(here));
    }
  }
}

}  // namespace weft::kernels
