// Dispatch with nodes: what crosses the network before the rows (docs/protocols/nodes.md, steps 1 and 2). By the warps that count.
#pragma once

#include "weft/kernels/dispatch/ids.cuh"
#include "weft/kernels/dispatch/nodes.cuh"

namespace weft::kernels {

template <DispatchKernelConfig kConfig>
class DispatchMessages : public DispatchIds<kConfig> {
 public:
  using Base = DispatchState<kConfig>;
  using Ids = DispatchIds<kConfig>;
  using Base::a, Base::s, Base::flight, Base::warp, Base::lane, Base::rank;
  using Base::kRanks, Base::kTopk, Base::kExperts, Base::kLocal, Base::kPlacement;
  using Ids::kCountWarps, Ids::kCountThreads;
  using Id = typename Ids::Id;
  static constexpr i32 kNodes = kConfig.num_nodes();

  __device__ explicit DispatchMessages(const Base& base) : Ids(base), nodes_(base.nodes()) {}

  // How many tokens go to each node: of the groups before each (by expert in exchange()), and of this block's run.
  __device__ void count_nodes() {
    if constexpr (kConfig.is_by_expert() && !kConfig.is_cached) {
      set_masks();
      meet();
    }
    if constexpr (kConfig.is_by_expert() || kConfig.is_cached) {
      DispatchNodes<kConfig>(*this).count_planned(warp - 1, kCountWarps);
    } else {
      for (i32 node = warp - 1; node < kNodes; node += kCountWarps) sum_goers(node);
    }
  }

  // By block 0: a message to each node, and those of others to all here. False: one has not come, the reason is recorded.
  __device__ bool exchange() {
    meet();
    if constexpr (kConfig.is_by_expert() && !kConfig.is_cached) find_goers();
    for (i32 node = 0; node < kNodes; ++node) {
      if (s.forwarder[node] >= 0) write_message(node, nodes_.message_to(s.forwarder[node]));
    }
    meet();
    const i32 node = thread();
    if (node < kNodes && s.forwarder[node] >= 0) nodes_.put_message(s.forwarder[node], message_bytes(node));
    return nodes_.relay_calls(warp - 1, kCountWarps, [this](const auto& words, const u8* message, i32, i32 mate) {
      if constexpr (kConfig.is_cached) return;
      const auto count = [&](i32 index, i32 at) {
        return reinterpret_cast<const i32*>(message + nodes_.layout().counts(index))[at];
      };
      const i32 begin = kConfig.is_by_expert() ? 0 : (mate - nodes_.first) * kLocal;
      const i32 end = kConfig.is_by_expert() ? nodes_.size * kLocal : begin + kLocal;
      for (i32 expert = begin + lane; expert < end; expert += 32) {
        this->peers().put_words(words.template at<i32>(kPlacement.expert_of(nodes_.first, 0) + expert),
                                count(expert / kLocal, 1 + expert % kLocal));
      }
      if (!kConfig.is_by_expert() && lane < nodes_.size) {
        this->peers().put_words(words.template at<i32>(kExperts + nodes_.first + lane), count(lane, 0));
      }
    });
  }

 private:
  using Ids::thread, Ids::meet;

  __device__ i32 num_groups() const { return (a.num_tokens + 31) / 32; }
  // Of all blocks: rows to the node.
  __device__ i32& num_rows(i32 node) const { return s.num_rows_to[node]; }

  // By a warp.
  __device__ void sum_goers(i32 node) {
    const i32 num_groups = this->num_groups();
    const i32 block = static_cast<i32>(blockIdx.x);
    const i32 begin = this->queue_begin(block, a.num_tokens), end = begin + this->queue_len(block, a.num_tokens);
    const i32 each = (num_groups + 31) / 32;
    const i32 first = min(lane * each, num_groups), last = min(first + each, num_groups);
    i32 sum = 0, num_here = 0;
    for (i32 group = first; group < last; ++group) {
      const u32 goers = goers_of(node, group);
      sum += __popc(goers);
      num_here += __popc(goers & this->bits_between(group, begin, end));
    }
    i32 before = this->inclusive_sum(sum) - sum;
    for (i32 group = first; group < last; ++group) {
      this->tokens_before(node, group) = before;
      before += __popc(goers_of(node, group));
    }
    num_here = __reduce_add_sync(0xffffffffu, num_here);
    if (lane == 31) {
      s.num_to[node] = num_here;
      num_rows(node) = before;
    }
  }

  // Tokens of a group that go to the node. By expert they are in the message already.
  __device__ u32 goers_of(i32 node, i32 group) const {
    if constexpr (kConfig.is_by_expert()) {
      return reinterpret_cast<const u32*>(nodes_.message_to(s.forwarder[node]) + nodes_.layout().tokens())[group];
    } else {
      return this->goers_to_node(nodes_, node, group);
    }
  }

  // By expert: ranks that have a pick of a token.
  __device__ GpuRankMask ranks_with(i32 token) const {
    GpuRankMask ranks = GpuRankMask::none();
    for (i32 k = 0; k < kTopk && token < a.num_tokens; ++k) {
      const Id id = static_cast<const Id*>(a.topk_idx)[i64{token} * kTopk + k];
      if (is_sent<kPlacement>(flight, id)) ranks |= GpuRankMask::only(kPlacement.rank_of(static_cast<i32>(id)));
    }
    return ranks;
  }
  // Of the tokens of this block's run.
  __device__ void set_masks() const {
    const i32 begin = this->queue_begin(static_cast<i32>(blockIdx.x), a.num_tokens);
    const i32 end = begin + this->queue_len(static_cast<i32>(blockIdx.x), a.num_tokens);
    const GpuSendPlan<i32> plan{a.send_plan, a.num_tokens, kTopk};
    for (i32 token = begin + thread(); token < end; token += kCountThreads) plan.set_ranks(token, ranks_with(token));
  }
  // Which tokens go to each node, and how many of them are in the groups before each.
  __device__ void find_goers() {
    for (i32 group = warp - 1; group < num_groups(); group += kCountWarps) {
      const GpuRankMask ranks = ranks_with(group * 32 + lane);
      for (i32 node = 0; node < kNodes; ++node) {
        if (s.forwarder[node] < 0) continue;
        const u32 of_node = GpuRankMask::first(nodes_.map.size(node)).word << nodes_.map.first(node);
        const u32 goers = __ballot_sync(0xffffffffu, (ranks.word & of_node) != 0);
        u8* message = nodes_.message_to(s.forwarder[node]);
        if (lane == 0) reinterpret_cast<u32*>(message + nodes_.layout().tokens())[group] = goers;
      }
    }
    meet();
    for (i32 node = warp - 1; node < kNodes; node += kCountWarps) {
      if (s.forwarder[node] >= 0) sum_goers(node);
    }
    meet();
  }

  // Of a handle, what is in front of the parts.
  __device__ u64 message_bytes(i32 node) const {
    if constexpr (kConfig.is_cached) return sizeof(RailMessage);
    return nodes_.layout().experts(a.num_tokens) + static_cast<u64>(num_rows(node)) * kTopk * sizeof(u16);
  }

  __device__ void write_message(i32 node, u8* message) const {
    const RailLayout& layout = nodes_.layout();
    const i32 first = nodes_.map.first(node), size = nodes_.map.size(node);
    if (thread() == 0) {
      GpuCountPayload payload;
      payload.num_tokens = a.num_tokens;
      nodes_.begin_message(s.forwarder[node], payload);
    }
    if constexpr (kConfig.is_cached) return;
    for (i32 at = thread(); at < size * (1 + kLocal); at += kCountThreads) {
      const i32 to = first + at / (1 + kLocal), local = at % (1 + kLocal) - 1;
      auto* counts = reinterpret_cast<i32*>(message + layout.counts(to - first));
      counts[1 + local] = local >= 0               ? this->mine()[kPlacement.expert_of(to, local)]
                          : kConfig.is_by_expert() ? 0
                                                   : s.total[to];
    }
    auto* tokens = reinterpret_cast<u32*>(message + layout.tokens());
    auto* experts = reinterpret_cast<u16*>(message + layout.experts(a.num_tokens));
    for (i32 group = warp - 1; group < num_groups(); group += kCountWarps) {
      const u32 goers = goers_of(node, group);
      if (!kConfig.is_by_expert() && lane == 0) tokens[group] = goers;
      if ((goers >> lane & 1u) == 0) continue;
      const i64 row = this->tokens_before(node, group) + __popc(goers & ptx::lanes_below());
      const Id* ids = static_cast<const Id*>(a.topk_idx) + (i64{group} * 32 + lane) * kTopk;
      for (i32 k = 0; k < kTopk; ++k) {
        const i64 in_node = static_cast<i64>(ids[k]) - kPlacement.expert_of(first, 0);
        const bool is_there = in_node >= 0 && in_node < i64{size} * kLocal && is_sent<Base::kPlacement>(flight, ids[k]);
        experts[row * kTopk + k] = is_there ? static_cast<u16>(in_node) : kNoRailExpert;
      }
    }
  }

  const Nodes<kConfig> nodes_;
};

}  // namespace weft::kernels
