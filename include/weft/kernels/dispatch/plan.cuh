// Dispatch by expert, between counting and sending: the place of every pick of this block's tokens, for the block itself (the
// send plan) and for those that receive (table and weights). A warp takes a chunk, 32 picks at a time in the order (token, k),
// and is done before most rows have gone: afterwards no plain store to another GPU is under way, for which a release would wait.
// When all its chunks are planned, other blocks may take tokens over.
#pragma once

#include "weft/kernels/dispatch/block.cuh"
#include "weft/layout/gpu_plan.h"

namespace weft::kernels {

template <DispatchKernelConfig kConfig>
class DispatchPlan : public DispatchState<kConfig> {
 public:
  using Base = DispatchState<kConfig>;
  using Base::a, Base::s, Base::flight, Base::lane, Base::rank;
  using Base::kRanks, Base::kTopk, Base::kExperts, Base::kLocal, Base::kPeriods, Base::kOnePlanned, Base::kPlacement;
  using Id = typename IdType<kConfig.topk_is_int64>::Type;

  __device__ explicit DispatchPlan(const Base& base) : Base(base) {}

  // The first `planner` of `num_planners` warps takes the first chunk.
  __device__ void run(i32 planner, i32 num_planners) {
    for (i32 period = planner; period < kPeriods; period += num_planners) {
      plan_chunk(period);
      if (lane == 0) ptx::add_release_sys(this->queue_word(static_cast<i32>(blockIdx.x)), kOnePlanned);
    }
  }

 private:
  struct Pick {
    i32 expert = -1;  // -1: not sent
    float weight = 0.0f;
  };

  __device__ void plan_chunk(i32 period) {
    const i32 block = static_cast<i32>(blockIdx.x), num_tokens = this->queue_len(block, a.num_tokens);
    const i32 chunk = this->chunk_tokens(), first_token = min(period * chunk, num_tokens);
    const i64 begin = static_cast<i64>(this->queue_begin(block, a.num_tokens) + first_token) * kTopk;
    const i64 end = begin + static_cast<i64>(min(num_tokens - first_token, chunk)) * kTopk;
    Pick next = fetch(begin + lane, end);
    for (i64 first = begin; first < end; first += 32) {
      const Pick pick = next;
      next = fetch(first + 32 + lane, end);
      place_pick(first + lane, end, pick, this->before(period));
      __syncwarp();
      if (lane == 0) ptx::st_release_cta(&s.num_planned[period], static_cast<u32>(min(first + 32, end) - begin));
    }
  }

  __device__ Pick fetch(i64 at, i64 end) const {
    Pick pick;
    if (at >= end) return pick;
    const i64 id = static_cast<const Id*>(a.topk_idx)[at];
    const bool is_sent = id >= 0 && id < kExperts && flight.is_active(kPlacement.rank_of(static_cast<i32>(id)));
    pick.expert = is_sent ? static_cast<i32>(id) : -1;
    pick.weight = a.topk_weights == nullptr ? 1.0f : a.topk_weights[at];
    return pick;
  }

  // The picks of a chunk come in order through one warp, so `before` counts on.
  __device__ void place_pick(i64 at, i64 end, const Pick& pick, i32* before) {
    const i32 expert = pick.expert;
    const u32 same = ptx::match_any(expert);
    const i32 nth = (expert >= 0 ? before[expert] : 0) + __popc(same & ptx::lanes_below());
    __syncwarp();
    if (expert >= 0 && (same >> lane) == 1u) before[expert] = nth + 1;  // the last of its kind
    __syncwarp();
    const i32 to = expert >= 0 ? kPlacement.rank_of(expert) : -1;
    const i32 in_group = expert >= 0 ? this->place()[expert] + nth : 0;
    const bool is_kept = expert >= 0 && in_group < s.limit[to];
    const i32 shift =
        kConfig.layout == Layout::kMasked ? kPlacement.local_id(expert) * static_cast<i32>(a.capacity) : 0;
    if constexpr (kConfig.has_nodes()) {
      if (to >= 0 && !this->is_near(to)) {  // its forwarder finds the place
        if (at < end) tell(at, 0, to, pick.weight);
        return;
      }
    }
    if (at < end) tell(at, is_kept ? in_group + shift : -1, is_kept ? to : -1, pick.weight);
  }

  // Neighbouring lanes write neighbouring words.
  __device__ void tell(i64 at, i32 row, i32 destination, float weight) {
    const i64 slot = rank() * a.view.layout.max_tokens * kTopk + at;
#pragma unroll
    for (i32 to = 0; to < kRanks; ++to) {
      if (!flight.is_active(to)) continue;
      if constexpr (kConfig.has_nodes()) {
        if (!this->is_near(to)) continue;
      }
      this->peers().put_words(s.table[to].template at<i32>(at), destination == to ? row : -1);
      this->peers().put_words(s.weights[to].template at<float>(slot), weight);
    }
    if (destination == rank() && !this->is_staged(rank())) this->own_weights()[row] = weight;
    const GpuSendPlan<i32> plan{a.send_plan, a.num_tokens, kTopk};
    plan.row()[at] = row;
    plan.destination()[at] = destination;
  }
};

}  // namespace weft::kernels
