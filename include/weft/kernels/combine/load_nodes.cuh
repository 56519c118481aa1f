// Combine with nodes, the warp that loads: items of this rank's tokens and of those that it adds for other nodes, each from a cursor of
// its own, so that a ring without a place, or a node whose sums have not come, keeps nobody else back (docs/protocols/nodes.md).
#pragma once

#include "weft/kernels/combine/nodes.cuh"
#include "weft/kernels/combine/reduce.cuh"

namespace weft::kernels {

// The ring of slots, whose writer says what the items that are added have made.
template <CombineKernelConfig kConfig, class RingType>
class CombineNodeWriter : public RingWriter<RingType> {
 public:
  using Base = RingWriter<RingType>;

  __device__ CombineNodeWriter(const CombineBlock<kConfig>& block, const CombineNodes<kConfig>& nodes, RingType& ring)
      : Base(ring), b_(block), nodes_(nodes) {}

  // Of the items that follow, when they are done.
  __device__ void set_done(u32 done) { done_ = done; }

  __device__ bool reserve(i32 count) {
    while (this->num_items_ == kRingCells || this->num_used_ + count > RingType::kSlots) {
      if (!wait_oldest()) return false;
    }
    return true;
  }
  __device__ void announce(const RingItem& item, u32 num_bytes) {
    const bool is_last = item.chunk == kConfig.num_parts() - 1;
    if (this->lane_ == 0) b_.s.done[this->cell_] = is_last ? done_ : 0;
    Base::announce(item, num_bytes);
  }

  // What is done by now.
  __device__ void retire() {
    while (this->num_items_ > 0) {
      const bool is_done = ptx::mbarrier_test_wait(&this->r_.empty[this->oldest_], this->oldest_parity_);
      if (__all_sync(0xffffffffu, is_done ? 1 : 0) == 0) return;
      tell_oldest();
    }
  }
  // Until all is done. False: the GPU has gone wrong.
  __device__ bool drain() {
    while (this->num_items_ > 0) {
      if (!wait_oldest()) return false;
    }
    return true;
  }

 private:
  __device__ bool wait_oldest() {
    if (!sync::wait_barrier(&this->r_.empty[this->oldest_], this->oldest_parity_)) return false;
    tell_oldest();
    return true;
  }
  __device__ void tell_oldest() {
    __syncwarp();
    if (this->lane_ == 0) nodes_.tell(b_.s.done[this->oldest_]);
    __syncwarp();
    this->drop_oldest();
  }

  const CombineBlock<kConfig>& b_;
  const CombineNodes<kConfig>& nodes_;
  u32 done_ = 0;
};

template <CombineKernelConfig kConfig>
class CombineNodeLoad {
 public:
  using Block = CombineBlock<kConfig>;
  using RingType = Ring<kConfig.ring_slots()>;
  using Writer = CombineNodeWriter<kConfig, RingType>;
  static constexpr i32 kRanks = kConfig.num_ranks;
  static_assert(kConfig.reduce_rings == 1);

  __device__ explicit CombineNodeLoad(const Block& block) : b_(block), reduce_(block, 0), nodes_(block) {}

  __device__ void run(i32 num_readers) {
    Writer writer(b_, nodes_, b_.s.reduce[0]);
    bool goes_on = true;
    while (goes_on && !has_ended_) {
      sync::LanePause pause(&b_.a.view.host->abort, awaited(), &b_.a.view.host->timeout_ns);
      const sync::WaitResult result = sync::wait_all_lanes([&] { return step(writer); }, pause);
      if (result != sync::WaitResult::kReady) {
        const i32 late = nodes_.late_peer(missing_, missing_side_);
        if (b_.lane == 0) transport::settle(b_.a.view, b_.flight, result, Phase::kReduce, late, 0);
        b_.leave();
      }
      goes_on = __any_sync(0xffffffffu, b_.has_failed()) == 0;
    }
    if (!writer.drain()) b_.fail_copy();
    if (b_.lane == 0) nodes_.finish_own();
    writer.end(num_readers);
  }

 private:
  // The ranks whose death ends the wait: side values are those of mates.
  __device__ u64 awaited() const {
    if (kConfig.has_side) return b_.flight.active.word;
    return b_.flight.active.word & ~b_.nodes().among_mates().active.word;
  }

  // By the whole warp: whether anything was dealt out, or there is no more to do.
  __device__ bool step(Writer& writer) {
    writer.retire();
    bool is_left = false, has_dealt = false;
    missing_ = 0;
    for (i32 source = 0, nth = 0; source < kRanks; ++source) {
      if (!nodes_.nodes().brings(source)) continue;
      has_dealt = deal_other(writer, source, nth++, is_left) || has_dealt;
    }
    has_dealt = deal_own(writer, is_left) || has_dealt;
    has_ended_ = !is_left;
    return has_dealt || has_ended_ || __any_sync(0xffffffffu, b_.has_failed()) != 0;
  }

  // The next token of another node's rank: a contributor's lane has its row.
  __device__ bool deal_other(Writer& writer, i32 source, i32 nth, bool& is_left) {
    const i32 index = b_.s.next_index[source];
    if (index >= b_.s.num_items[source]) {
      __syncwarp();
      u32 is_done = 0;
      if (b_.lane == 0) is_done = nodes_.finish(source) ? 1 : 0;
      is_left = is_left || __shfl_sync(0xffffffffu, is_done, 0) == 0;
      __syncwarp();
      return false;
    }
    is_left = true;
    const auto& nodes = nodes_.nodes();
    const GpuForwardPlan<const i32> plan{b_.a.forward_plan, b_.a.view.layout.max_tokens, kConfig.node_ranks,
                                         kConfig.top_k};
    const bool is_mate = b_.lane < kRanks && nodes.is_mate(b_.lane);
    const i32 entry = is_mate ? plan.row(nth, b_.token_of(index))[b_.lane - nodes.first] : kNoForward;
    const bool has_come = __any_sync(0xffffffffu, entry != kNoForward ? 1 : 0) != 0;
    // Lanes may read the credits at different times: one of them says what there is.
    if (__any_sync(0xffffffffu, has_come && nodes_.has_place(source) ? 1 : 0) == 0 && has_come) return false;
    __syncwarp();
    if (has_come) {
      if constexpr (kConfig.has_side) {
        if (!has_side_ && !nodes_.side_has_come(missing_side_)) return false;
        has_side_ = true;
        nodes_.write_side(source, b_.token_of(index), plan.pick(nth, b_.token_of(index)));
      }
      writer.set_done(nodes_.done_of(source));
      const i32 item = nodes_.index_of(source, b_.s.num_dealt[source]);
      if (!reduce_.load_item(writer, item, max(entry, -1), source, index, nullptr)) return false;
    }
    __syncwarp();
    if (b_.lane == 0) {
      b_.s.num_dealt[source] += has_come ? 1 : 0;
      b_.s.next_index[source] = index + 1;
    }
    __syncwarp();
    return true;
  }

  // The next token of this rank: the lane of a node's first rank has what has come of that node.
  __device__ bool deal_own(Writer& writer, bool& is_left) {
    const auto& nodes = nodes_.nodes();
    if (own_index_ >= b_.s.num_items[b_.a.view.rank]) return false;
    is_left = true;
    const GpuSendPlan<const i32> plan{b_.a.send_plan, b_.a.send_plan_tokens,
                                      kConfig.is_by_expert() ? kConfig.top_k : kRanks};
    const bool is_rank = b_.lane < kRanks && b_.flight.is_active(b_.lane);
    const i64 token = b_.token_of(own_index_);
    const auto planned_row = [&] {
      if constexpr (kConfig.is_by_expert()) return static_cast<i32>(plan.ranks(token).bit(b_.lane)) - 1;
      return plan.row()[token * kRanks + b_.lane];
    };
    const i32 planned = is_rank ? planned_row() : -1;
    const u32 holders = __ballot_sync(0xffffffffu, planned >= 0 ? 1 : 0);
    const bool is_near = b_.lane < kRanks && nodes.map.are_mates(nodes.rank, b_.lane);
    const i32 node = b_.lane < kRanks ? nodes.map.node(b_.lane) : 0;
    const u32 of_node = ((1u << nodes.map.size(node)) - 1) << nodes.map.first(node);
    const bool has_node = b_.lane < kRanks && !is_near && b_.lane == nodes.map.first(node) && (holders & of_node) != 0;
    const bool is_missing = has_node && !nodes_.has_record(node);
    missing_ = __reduce_or_sync(0xffffffffu, is_missing ? 1u << node : 0u);
    if (missing_ != 0) return false;
    const u8* record = has_node ? nodes_.next_record(node) : nullptr;
    const u32 from = __reduce_or_sync(0xffffffffu, has_node ? 1u << node : 0u);
    if (has_node) ptx::fence_proxy_async();  // what another's network has written is loaded in bulk by this lane
    writer.set_done(nodes_.done_own(from));
    if constexpr (kConfig.has_side) nodes_.read_side(token, from, plan.destination() + token * kConfig.top_k);
    const i32 row = is_near ? planned : has_node ? 0 : -1;
    if (!reduce_.load_item(writer, own_index_, row, b_.a.view.rank, own_index_, record)) return false;
    __syncwarp();
    if (has_node) ++b_.s.num_read[node];
    __syncwarp();
    ++own_index_;
    return true;
  }

  const Block& b_;
  CombineReduce<kConfig> reduce_;
  const CombineNodes<kConfig> nodes_;
  i32 own_index_ = 0;
  u32 missing_ = 0;       // nodes whose record is awaited
  u32 missing_side_ = 0;  // mates whose side values are awaited, by rank
  bool has_side_ = false;
  bool has_ended_ = false;
};

}  // namespace weft::kernels
