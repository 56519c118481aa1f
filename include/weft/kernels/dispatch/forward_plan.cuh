// Dispatch of rank_major with nodes: where the rows that this rank forwards lie at its mates, from the messages alone, for this
// block, for the mates' tables and for the handle (docs/protocols/nodes.md, step 3). A warp a source.
#pragma once

#include "weft/kernels/dispatch/nodes.cuh"

namespace weft::kernels {

template <DispatchKernelConfig kConfig>
class DispatchForwardPlan : public DispatchNodes<kConfig> {
 public:
  using Base = DispatchState<kConfig>;
  using Items = DispatchNodes<kConfig>;
  using Base::a, Base::s, Base::flight, Base::lane, Base::rank;
  using Base::kRanks, Base::kTopk, Base::kLocal;
  using Items::nodes_, Items::kNodeRanks;

  __device__ explicit DispatchForwardPlan(const Base& base) : Items(base) {}

  __device__ void run(i32 planner, i32 num_planners) {
    if (planner == 0) this->keep_members();
    i32 num_brought = 0;
    for (i32 source = 0; source < kRanks; ++source) {
      if (!nodes_.brings(source)) continue;
      const i32 nth = num_brought++;
      if (nth % num_planners == planner) plan_source(source, nth);
    }
  }

 private:
  __device__ void plan_source(i32 source, i32 nth) {
    const i32 num_tokens = s.num_tokens[source];
    const i32 begin = this->queue_begin(this->block(), num_tokens);
    const i32 end = begin + this->queue_len(this->block(), num_tokens);
    const GpuForwardPlan<i32> plan = this->plan();
    const u32* bits = this->tokens_from(source);
    this->keep_tokens(source, nth, begin, end);
    i32 next[kNodeRanks];  // row there of the next token that goes there
#pragma unroll
    for (i32 idx = 0; idx < kNodeRanks; ++idx) next[idx] = s.start_of[source][idx];
    i32 row = s.first_row[source];
    for (i32 first = 0; first < row; first += 32) {
      const u32 mates = first + lane < row ? mates_of(source, first + lane) : 0;
#pragma unroll
      for (i32 idx = 0; idx < kNodeRanks; ++idx) next[idx] += __popc(__ballot_sync(0xffffffffu, mates >> idx & 1u));
    }
    for (i32 group = begin / 32; group * 32 < end; ++group) {
      const u32 come = bits[group] & this->bits_between(group, begin, end);
      const i32 token = group * 32 + lane;
      const bool has_come = (come >> lane & 1u) != 0;
      const u32 mates = has_come ? mates_of(source, row + __popc(come & ptx::lanes_below())) : 0;
#pragma unroll
      for (i32 idx = 0; idx < kNodeRanks; ++idx) {
        const u32 goers = __ballot_sync(0xffffffffu, mates >> idx & 1u);
        const i32 there = next[idx] + __popc(goers & ptx::lanes_below()), to = nodes_.first + idx;
        next[idx] += __popc(goers);
        if (token < begin || token >= end || idx >= nodes_.size) continue;
        const bool is_kept = (mates >> idx & 1u) != 0 && there < min(s.limit[to], s.start_of[source + 1][idx]);
        plan.row(nth, token)[idx] = is_kept ? there : has_come ? kForwardNoRow : kNoForward;
        if (!flight.is_active(to)) continue;
        const i64 entry = (i64{source} - rank()) * a.view.layout.max_tokens + token;
        this->peers().put_words(s.table[to].template at<i32>(entry), is_kept ? there : -1);
      }
      row += __popc(come);
      __syncwarp();
      if (lane == 0) ptx::st_release_cta(&s.num_placed[source], static_cast<u32>(min(group * 32 + 32, end) - begin));
    }
    if (this->block() == kConfig.num_blocks - 1) check_rows(source, next);
  }

  // By the planner of the last tokens. R19: the message must have as many rows for each mate as its counts say.
  __device__ void check_rows(i32 source, const i32 (&next)[kNodeRanks]) {
    bool is_right = true;
#pragma unroll
    for (i32 idx = 0; idx < kNodeRanks; ++idx) {
      is_right = is_right && (idx >= nodes_.size || next[idx] == s.start_of[source + 1][idx]);
    }
    if (!is_right) this->fail(transport::ErrorCause::kBadPeerWord, Phase::kSend, source);
  }

  // Which mates a row goes to, by index.
  __device__ u32 mates_of(i32 source, i32 row) const {
    const u16* experts = this->experts_from(source) + i64{row} * kTopk;
    u32 mates = 0;
    for (i32 k = 0; k < kTopk; ++k) {
      const i32 index = experts[k] / kLocal;
      if (experts[k] != kNoRailExpert && index < nodes_.size && flight.is_active(nodes_.first + index))
        mates |= 1u << index;
    }
    return mates;
  }
};

}  // namespace weft::kernels
