// Dispatch by expert with nodes: where the picks of the rows that this rank forwards lie at its mates, from the messages alone, for
// this block, for the mates' tables and for the handle (docs/protocols/nodes.md, "By expert"). A warp a source.
#pragma once

#include "weft/kernels/dispatch/nodes.cuh"
#include "weft/layout/routing.h"

namespace weft::kernels {

template <DispatchKernelConfig kConfig>
class DispatchForwardPicks : public DispatchNodes<kConfig> {
 public:
  using Base = DispatchState<kConfig>;
  using Items = DispatchNodes<kConfig>;
  using Base::a, Base::s, Base::flight, Base::lane, Base::rank;
  using Base::kRanks, Base::kTopk, Base::kLocal;
  using Items::nodes_, Items::kNodeRanks;

  __device__ explicit DispatchForwardPicks(const Base& base) : Items(base) {}

  // The last warps: the first have this rank's own tokens to plan.
  __device__ void run(i32 planner, i32 num_planners) {
    const i32 own = num_planners - 1 - planner;
    const i32 num = min(num_planners, DispatchKernelConfig::kForwardPlanners);
    if (own >= num) return;
    if (own == 0) this->keep_members();
    i32 num_brought = 0;
    for (i32 source = 0; source < kRanks; ++source) {
      if (!nodes_.brings(source)) continue;
      const i32 nth = num_brought++;
      if (nth % num == own) plan_source(source, nth, this->forward_places(own));
    }
  }

 private:
  static_assert(kTopk <= 32);
  static constexpr i32 kTokens = 32 / kTopk;  // at a time, with all their picks

  __device__ i32 num_experts() const { return nodes_.size * kLocal; }
  __device__ i32 first_expert() const { return Base::kPlacement.expert_of(nodes_.first, 0); }

  // `next`: of each expert of the node, the place of the source's next pick, then that behind its last.
  __device__ void plan_source(i32 source, i32 nth, i32* next) {
    const i32* last = next + kConfig.node_experts();
    const i32 num_tokens = s.num_tokens[source];
    const i32 begin = this->queue_begin(this->block(), num_tokens);
    const i32 end = begin + this->queue_len(this->block(), num_tokens);
    const u32* bits = this->tokens_from(source);
    this->keep_tokens(source, nth, begin, end);
    find_places(source, next);
    count_earlier(source, next);
    i32 row = s.first_row[source];
    for (i32 first = begin; first < end; first += kTokens) {
      const i32 token = first + lane / kTopk, k = lane % kTopk;
      const bool has_token = lane < kTokens * kTopk && token < end;
      const bool has_come = has_token && (bits[token / 32] >> (token % 32) & 1u) != 0;
      const i32 expert = has_come ? expert_of(source, row + num_come(bits, first, token), k) : -1;
      const u32 same = ptx::match_any(expert);
      const i32 in_group = (expert >= 0 ? next[expert] : 0) + __popc(same & ptx::lanes_below());
      __syncwarp();
      if (expert >= 0 && (same >> lane) == 1u) next[expert] = in_group + 1;  // the last of its kind
      __syncwarp();
      const i32 mate = expert >= 0 ? expert / kLocal : -1;
      // R19: nothing where picks of another source lie.
      const bool is_kept = expert >= 0 && in_group < min(s.limit[nodes_.first + mate], last[expert]);
      const i32 shift = kConfig.layout == Layout::kMasked ? expert % kLocal * static_cast<i32>(a.capacity) : 0;
      keep({source, nth, token, k, has_token, has_come}, is_kept ? in_group + shift : -1, mate);
      row += num_come(bits, first, min(first + kTokens, end));
      __syncwarp();
      if (lane == 0) {
        ptx::st_release_cta(&s.num_placed[source], static_cast<u32>(min(first + kTokens, end) - begin));
      }
    }
    if (this->block() == kConfig.num_blocks - 1) check_picks(source, next);
  }

  struct Pick {
    i32 source, nth, token, k;
    bool has_token, has_come;
  };

  // By the whole warp: a lane's pick in `row` of a mate, -1: nowhere. To the tables and the plan, which has the first row of each mate.
  __device__ void keep(const Pick& pick, i32 row, i32 mate) const {
    if (pick.has_come) this->plan().set_pick(pick.nth, pick.token, pick.k, row >= 0 ? static_cast<u8>(mate) : kNoMate);
    const u32 of_token = ((kTopk < 32 ? 1u << kTopk : 0u) - 1u) << (lane - pick.k);
    for (i32 idx = 0; idx < nodes_.size; ++idx) {
      const bool is_here = row >= 0 && mate == idx;
      const u32 kept = __ballot_sync(0xffffffffu, is_here ? 1 : 0) & of_token;
      const i32 primary = __shfl_sync(0xffffffffu, row, kept != 0 ? __ffs(static_cast<i32>(kept)) - 1 : 0);
      if (!pick.has_token) continue;
      if (pick.k == 0) {
        const i32 none = pick.has_come ? kForwardNoRow : kNoForward;
        this->plan().row(pick.nth, pick.token)[idx] = kept != 0 ? primary : none;
      }
      const i32 to = nodes_.first + idx;
      if (!flight.is_active(to)) continue;
      const i64 entry = ((i64{pick.source} - rank()) * a.view.layout.max_tokens + pick.token) * kTopk + pick.k;
      this->peers().put_words(s.table[to].template at<i32>(entry), is_here ? row : -1);
    }
  }

  // Picks of a rank for a global expert; the number was looked at when places were found.
  __device__ i32 picks_of(i32 source, i32 expert) const {
    if (!flight.is_active(source)) return 0;
    if (source == rank()) return this->mine()[expert];
    const u8* payload = a.view.own_control() + a.view.layout.payload(flight.turn.sequence, source);
    const i32* words = reinterpret_cast<const i32*>(payload + sizeof(GpuCountPayload));
    return static_cast<i32>(clamp_count(words[expert], i64{a.max_tokens} * kTopk));
  }

  // That of this rank's own first pick, and the picks of the sources between.
  __device__ void find_places(i32 source, i32* next) const {
    for (i32 expert = lane; expert < num_experts(); expert += 32) {
      const i32 global = first_expert() + expert;
      i32 place = this->place()[global];
      for (i32 other = rank(); other < source; ++other) place += picks_of(other, global);
      for (i32 other = source; other < rank(); ++other) place -= picks_of(other, global);
      next[expert] = place;
      next[kConfig.node_experts() + expert] = place + picks_of(source, global);
    }
    __syncwarp();
  }

  // Those of earlier blocks.
  __device__ void count_earlier(i32 source, i32* next) const {
    for (i32 at = lane; at < s.first_row[source] * kTopk; at += 32) {
      const i32 expert = expert_of(source, at / kTopk, at % kTopk);
      if (expert >= 0) atomicAdd(&next[expert], 1);
    }
    __syncwarp();
  }

  // In the node; -1: none of a living rank here.
  __device__ i32 expert_of(i32 source, i32 row, i32 k) const {
    const i32 expert = (this->experts_from(source) + i64{row} * kTopk)[k];
    return expert < num_experts() && flight.is_active(nodes_.first + expert / kLocal) ? expert : -1;
  }

  // Tokens from `first` on, before `end`, that have come; at most 32 tokens.
  __device__ i32 num_come(const u32* bits, i32 first, i32 end) const {
    i32 num = 0;
    for (i32 group = first / 32; group * 32 < end; ++group) {
      num += __popc(bits[group] & this->bits_between(group, first, end));
    }
    return num;
  }

  // By the planner of the last tokens. R19: the message must have as many picks of each expert as its counts say.
  __device__ void check_picks(i32 source, const i32* next) {
    bool is_right = true;
    for (i32 expert = lane; expert < num_experts(); expert += 32) {
      is_right = is_right && next[expert] == next[kConfig.node_experts() + expert];
    }
    if (!is_right) this->fail(transport::ErrorCause::kBadPeerWord, Phase::kSend, source);
  }
};

}  // namespace weft::kernels
