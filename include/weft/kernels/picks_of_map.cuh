// The ids that a routing map stands for: of each row the experts that are chosen, ascending, -1 behind them, and their weights.
// A warp has a token: each lane looks at one expert of 32, and its place is the number of picks before it. Nothing is sent and
// nobody is waited for but the kernel in front.
#pragma once

#include "weft/kernels/picks_of_map_arguments.h"
#include "weft/ptx/thread.cuh"

namespace weft::kernels {

// Weights are moved as they are: Weight is an unsigned integer of their size.
template <class Weight>
__device__ void picks_of_token(const PicksOfMapArgs& args, i64 token, i32 lane) {
  constexpr u32 kAll = 0xffffffffu;
  constexpr i32 kLanes = static_cast<i32>(ptx::kWarpLanes);
  const u8* chosen = args.chosen + token * args.num_experts;
  const Weight* probs = static_cast<const Weight*>(args.probs);
  i64* ids = args.topk_idx + token * args.top_k;
  Weight* weights = static_cast<Weight*>(args.topk_weights) + (probs == nullptr ? 0 : token * args.top_k);
  i32 num_picks = 0;
  for (i32 first = 0; first < args.num_experts; first += kLanes) {
    const i32 expert = first + lane;
    const bool is_pick = expert < args.num_experts && chosen[expert] != 0;
    const u32 picks = __ballot_sync(kAll, is_pick);
    const i32 k = num_picks + __popc(picks & ptx::lanes_below());
    if (is_pick && k < args.top_k) {
      ids[k] = expert;
      if (probs != nullptr) weights[k] = probs[token * args.num_experts + expert];
    }
    num_picks += __popc(picks);
  }
  for (i32 k = num_picks + lane; k < args.top_k; k += kLanes) {
    ids[k] = -1;
    if (probs != nullptr) weights[k] = 0;
  }
  if (num_picks <= args.top_k) return;
  __syncwarp();  // another lane has written the first id
  if (lane == 0) ids[0] = args.num_experts;
}

__device__ inline void picks_of_map(const PicksOfMapArgs& args) {
  constexpr i32 kLanes = static_cast<i32>(ptx::kWarpLanes);
  const i32 lane = static_cast<i32>(threadIdx.x % ptx::kWarpLanes);
  const i64 warp = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
  const i64 num_warps = static_cast<i64>(gridDim.x) * blockDim.x / kLanes;
  for (i64 token = warp; token < args.num_tokens; token += num_warps) {
    if (args.weight_bytes == 2) {
      picks_of_token<u16>(args, token, lane);
    } else {
      picks_of_token<u32>(args, token, lane);
    }
  }
}

}  // namespace weft::kernels
