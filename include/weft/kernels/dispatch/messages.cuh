// Dispatch with nodes: what crosses the network before the rows (docs/protocols/nodes.md, steps 1 and 2). By the warps that count.
#pragma once

#include "weft/kernels/dispatch/ids.cuh"

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

  // How many tokens go to each node: of the groups before each, and of this block's run.
  __device__ void count_nodes() {
    const i32 num_groups = this->num_groups();
    const i32 block = static_cast<i32>(blockIdx.x);
    const i32 begin = this->queue_begin(block, a.num_tokens), end = begin + this->queue_len(block, a.num_tokens);
    for (i32 node = warp - 1; node < kNodes; node += kCountWarps) {
      const i32 each = (num_groups + 31) / 32;
      const i32 first = min(lane * each, num_groups), last = min(first + each, num_groups);
      i32 sum = 0, num_here = 0;
      for (i32 group = first; group < last; ++group) {
        const u32 goers = this->goers_to_node(nodes_, node, group);
        sum += __popc(goers);
        num_here += __popc(goers & this->bits_between(group, begin, end));
      }
      i32 before = this->inclusive_sum(sum) - sum;
      for (i32 group = first; group < last; ++group) {
        this->tokens_before(node, group) = before;
        before += __popc(this->goers_to_node(nodes_, node, group));
      }
      num_here = __reduce_add_sync(0xffffffffu, num_here);
      if (lane == 31) {
        s.num_to[node] = num_here;
        num_rows(node) = before;
      }
    }
  }

  // By block 0: a message to each node, and those of others to all here. False: one has not come, the reason is recorded.
  __device__ bool exchange() {
    meet();
    for (i32 node = 0; node < kNodes; ++node) {
      if (s.forwarder[node] >= 0) write_message(node, nodes_.message_to(s.forwarder[node]));
    }
    meet();
    const i32 node = thread();
    if (node < kNodes && s.forwarder[node] >= 0) {
      nodes_.put_message(s.forwarder[node], nodes_.layout().experts(a.num_tokens) +
                                                static_cast<u64>(num_rows(node)) * kTopk * sizeof(u16));
    }
    return nodes_.relay_calls(warp - 1, kCountWarps, [this](const auto& words, const u8* message, i32 mate) {
      const auto count = [&](i32 index, i32 at) {
        return reinterpret_cast<const i32*>(message + nodes_.layout().counts(index))[at];
      };
      for (i32 local = lane; local < kLocal; local += 32) {
        this->peers().put_words(words.template at<i32>(kPlacement.expert_of(mate, local)),
                                count(mate - nodes_.first, 1 + local));
      }
      if (lane < nodes_.size) {
        this->peers().put_words(words.template at<i32>(kExperts + nodes_.first + lane), count(lane, 0));
      }
    });
  }

 private:
  using Ids::thread, Ids::meet;

  __device__ i32 num_groups() const { return (a.num_tokens + 31) / 32; }
  // Of all blocks: rows to the node.
  __device__ i32& num_rows(i32 node) const { return s.num_rows_to[node]; }

  __device__ void write_message(i32 node, u8* message) const {
    const RailLayout& layout = nodes_.layout();
    const i32 first = nodes_.map.first(node), size = nodes_.map.size(node);
    if (thread() == 0) {
      GpuCountPayload payload;
      payload.num_tokens = a.num_tokens;
      nodes_.begin_message(s.forwarder[node], payload);
    }
    for (i32 at = thread(); at < size * (1 + kLocal); at += kCountThreads) {
      const i32 to = first + at / (1 + kLocal), local = at % (1 + kLocal) - 1;
      auto* counts = reinterpret_cast<i32*>(message + layout.counts(to - first));
      counts[1 + local] = local < 0 ? s.total[to] : this->mine()[kPlacement.expert_of(to, local)];
    }
    auto* tokens = reinterpret_cast<u32*>(message + layout.tokens());
    auto* experts = reinterpret_cast<u16*>(message + layout.experts(a.num_tokens));
    for (i32 group = warp - 1; group < num_groups(); group += kCountWarps) {
      const u32 goers = this->goers_to_node(nodes_, node, group);
      if (lane == 0) tokens[group] = goers;
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
