// Combine for small batches with nodes (docs/protocols/nodes.md, "Small batches"): the sums that this rank makes for ranks of other
// nodes, as records of rings, and the owner's sums, of its mates' contributions and of other nodes' records.
#pragma once

#include "weft/kernels/nodes.cuh"
#include "weft/kernels/small/combine_reduce.cuh"
#include "weft/kernels/small/unit_records.cuh"

namespace weft::kernels {

// What the warps of a block share.
template <SmallCombineKernelConfig kConfig>
class SmallCombineNodes {
 public:
  using Block = SmallCombineBlock<kConfig>;
  using Peers = transport::Peers<kConfig.route>;
  using Rows = UnitRecords<typename Peers::Ring>;
  static constexpr i32 kRanks = kConfig.num_ranks;
  static constexpr i32 kNodes = kConfig.num_nodes();
  static constexpr i32 kTopk = kConfig.top_k;
  static constexpr u32 kAll = 0xffffffffu;
  static_assert(kNodes <= 32 && kConfig.node_ranks <= 32);

  __device__ SmallCombineNodes(const Block& block, const transport::Flight& flight)
      : b_(block),
        flight_(flight),
        peers_(transport::peers_of<kConfig.route>(block.a, flight)),
        nodes_(block.a.view, peers_, flight) {}

  __device__ const Nodes<kConfig>& nodes() const { return nodes_; }

  // Of a handle whose members are others, or a graph of when there were others: others forward and add, and the slots may hold too
  // few rows, so no row goes. All ranks see it alike.
  __device__ bool has_moved() const {
    return Block::landing().has_no_places || static_cast<u32>(forward_plan().members()) != flight_.active.word;
  }

  // By all threads, before a barrier: who adds for whom, and in which part of its landing.
  __device__ void init() const {
    auto& s = Block::landing();
    const i32 thread = static_cast<i32>(threadIdx.x);
    if (thread < kRanks) {
      const bool is_away = nodes_.map.is_active(thread) && !nodes_.is_mate(thread);
      const i32 at = is_away ? nodes_.map.forwarder(thread, nodes_.node) : thread;
      s.at[thread] = at;
      s.part[thread] = is_away ? 1 + nodes_.nth_brought_by(at, thread) : 0;
      s.num_out[thread] = s.num_in[thread] = 0;
    }
    if (thread == 0) s.index = nodes_.map.index(nodes_.rank);
    if (thread < 32) {  // as the host, which knows the members of when it launched
      const i64 places = static_cast<i64>(kRanks) * b_.a.view.layout.small_tokens;
      const bool has_none = nodes_.has_more_parts_than(places / (kConfig.node_ranks * max(b_.a.max_tokens, 1)));
      if (thread == 0) s.has_no_places = has_none;
    }
  }

  // By one thread a node: a message, which says what this rank calls.
  __device__ void put_message(i32 node) const {
    const i32 to = node < kNodes && node != nodes_.node ? nodes_.forwarder_in(node) : -1;
    if (to < 0) return;
    GpuCountPayload payload;
    payload.rows_in_heap = Nodes<kConfig>::kRowsFollow;
    nodes_.begin_message(to, payload);
    nodes_.put_message(to, sizeof(RailMessage));
  }
  // False: a message has not come, the reason is recorded.
  __device__ bool relay() const {
    const i32 block = static_cast<i32>(blockIdx.x);
    return nodes_.relay_calls(block, Block::num_blocks(), [](const auto&, const u8*, i32, i32) {});
  }

  // ---- what this rank adds for others. By the warp that waits, when contributions of all mates are here

  // Counts the records, and waits until rings have places for them. False: one has none, the reason is recorded.
  __device__ bool find_places() const {
    bool is_right = true;
    for (i32 source = 0, nth = 0; source < kRanks; ++source) {
      if (!nodes_.brings(source)) continue;
      const i32 num = count(num_units(source), [&](i32 idx) { return mates_with(nth, b_.place(idx).token) != 0; });
      ++nth;
      if (b_.lane == 0) Block::landing().num_out[source] = num;
      const Rows rows = rows_to(source);
      const i32 all = num + num_side_records();
      if (is_right) is_right = wait([&] { return b_.lane != 0 || rows.have_places(all); }, source);
    }
    __syncwarp();
    return is_right;
  }
  // Of each pick that of the mate that keeps it.
  __device__ void forward_side() const {
    for (i32 source = 0, nth = 0; source < kRanks; ++source) {
      if (!nodes_.brings(source)) continue;
      const i32 nth_source = nth++, num_tokens = min(recv_plan().num_tokens()[source], b_.a.max_tokens);
      const auto plan = forward_plan();
      for (i32 at = b_.lane; at < Block::num_tokens_here(num_tokens) * kTopk; at += 32) {
        const i32 token = Block::token_here(at / kTopk);
        const bool comes = plan.row(nth_source, token)[0] != kNoForward;
        const i32 keeper = comes ? plan.pick(nth_source, token)[at % kTopk] : kNoMate;
        const bool is_kept = keeper < nodes_.size;
        u8* record = rows_to(source).to(source_records(source) + at / side_each());
        reinterpret_cast<float*>(record)[at % side_each()] =
            is_kept ? 0.0f + *b_.landed_side(flight_, nodes_.rank, 1 + nth_source, keeper, token, at % kTopk) : 0.0f;
      }
    }
    __syncwarp();
  }
  // By a warp, behind a barrier of those that have made the sums: all chunks of the block go.
  __device__ void put_all() const {
    const i32 source = b_.lane;
    if (source >= kRanks || !nodes_.brings(source)) return;
    rows_to(source).put(source_records(source) + num_side_records());
  }

  // ---- what others have added for this rank. By the warp that waits

  // Waits for the records of all nodes. False: one has not come, the reason is recorded.
  __device__ bool wait_records() const {
    bool is_right = true;
    for (i32 node = 0; node < kNodes; ++node) {
      if (node == nodes_.node || nodes_.forwarder_in(node) < 0) continue;
      const GpuSendPlan<const i32> plan{b_.a.send_plan, b_.a.num_tokens, 0};
      const i32 num = count(b_.num_units(b_.a.num_tokens), [&](i32 idx) {
        return ((plan.ranks(b_.place(idx).token) & flight_.active).word & ranks_of(node)) != 0;
      });
      if (b_.lane == 0) Block::landing().num_in[node] = num;
      const Rows rows = rows_of(node);
      const i32 all = num + num_side_records();
      if (is_right) is_right = wait([&] { return b_.lane != 0 || rows.have_arrived(all); }, nodes_.forwarder_in(node));
    }
    __syncwarp();
    return is_right;
  }
  // The results of picks that went to other nodes, and of those of mates.
  __device__ void gather_side() const {
    const GpuSendPlan<const i32> plan{b_.a.send_plan, b_.a.num_tokens, kConfig.is_by_expert() ? kTopk : kRanks};
    for (i32 at = b_.lane; at < Block::num_tokens_here(b_.a.num_tokens) * kTopk; at += 32) {
      const i32 token = Block::token_here(at / kTopk);
      const i64 pick = static_cast<i64>(token) * kTopk + at % kTopk;
      const i32 from = plan.destination()[pick];
      float total = 0.0f;
      if (from >= 0 && from < kRanks && flight_.is_active(from)) {
        const i32 node = nodes_.map.node(from);
        total += node == nodes_.node
                     ? *b_.landed_side(flight_, nodes_.rank, 0, nodes_.map.index(from), token, at % kTopk)
                     : reinterpret_cast<const float*>(
                           rows_of(node).from(Block::landing().num_in[node] + at / side_each()))[at % side_each()];
      }
      b_.a.side_out[pick] = total;
    }
    __syncwarp();
  }
  // Behind a barrier of those that have added.
  __device__ void take_all() const {
    const i32 node = b_.lane;
    if (node >= kNodes || node == nodes_.node || nodes_.forwarder_in(node) < 0) return;
    rows_of(node).take(Block::landing().num_in[node] + num_side_records());
  }

  // ---- for the warps that add

  __device__ i32 num_units(i32 source) const {
    return b_.num_units(min(recv_plan().num_tokens()[source], b_.a.max_tokens));
  }
  // Which mates contribute to a token of the nth source that this rank brings, a bit each, and kCame if it came here.
  static constexpr u32 kCame = 1u << 31;
  static_assert(kConfig.node_ranks < 31);
  __device__ u32 mates_with(i32 nth_source, i32 token) const {
    const i32* entries = forward_plan().row(nth_source, token);
    if (entries[0] == kNoForward) return 0;
    u32 mates = kCame;
    for (i32 mate = 0; mate < nodes_.size; ++mate) {
      if (entries[mate] >= 0 && nodes_.is_mate(nodes_.first + mate)) mates |= 1u << mate;
    }
    return mates;
  }
  __device__ u32 ranks_of(i32 node) const {
    return GpuRankMask::first(nodes_.map.size(node)).word << nodes_.map.first(node);
  }
  __device__ Rows rows_to(i32 source) const {
    const auto ring = nodes_.ring(source);
    return {nodes_.layout(), ring, *ring.num_put(), record_bytes()};
  }
  __device__ Rows rows_of(i32 node) const {
    const auto ring = nodes_.ring(nodes_.forwarder_in(node));
    return {nodes_.layout(), ring, *ring.num_taken(), record_bytes()};
  }

 private:
  __device__ i32 record_bytes() const { return kConfig.record_bytes(b_.a.split.part); }
  __device__ GpuRecvPlan<const i32> recv_plan() const {
    return {b_.a.recv_plan, b_.a.recv_plan_tokens, kConfig.plan_width()};
  }
  __device__ GpuForwardPlan<const i32> forward_plan() const {
    return {b_.a.forward_plan, b_.a.view.layout.max_tokens, kConfig.node_ranks, kTopk};
  }
  __device__ i32 source_records(i32 source) const { return Block::landing().num_out[source]; }

  // Behind the sums of a block its tokens' side values, for all of them, whether they came or not.
  __device__ i32 num_side_records() const {
    return kConfig.num_side_records(Block::num_tokens_here(b_.a.max_tokens), b_.a.split.part);
  }
  __device__ i32 side_each() const { return record_bytes() / static_cast<i32>(sizeof(float)); }

  // By a whole warp: of the indices below `num`, how many `is_one` is true of.
  template <class IsOne>
  __device__ i32 count(i32 num, const IsOne& is_one) const {
    i32 found = 0;
    for (i32 first = 0; first < num; first += 32) {
      const i32 idx = first + b_.lane;
      found += __popc(__ballot_sync(kAll, idx < num && is_one(idx) ? 1 : 0));
    }
    return found;
  }

  template <class Look>
  __device__ bool wait(const Look& look, i32 late) const {
    sync::LanePause pause(&b_.a.view.host->abort, u64{1} << late, &b_.a.view.host->timeout_ns);
    const sync::WaitResult result = sync::wait_all_lanes(look, pause);
    if (result != sync::WaitResult::kReady && b_.lane == 0) {
      transport::settle(b_.a.view, flight_, result, Phase::kReduce, late, 0);
    }
    __syncwarp();
    return result == sync::WaitResult::kReady;
  }

  const Block& b_;
  const transport::Flight& flight_;
  const Peers peers_;
  const Nodes<kConfig> nodes_;
};

// By the warps that move rows. Rounds of a unit for each of them: lane w has what all must know of that of warp w.
template <SmallCombineKernelConfig kConfig>
class SmallCombineNodeSums : public SmallCombineReduce<kConfig> {
 public:
  using Base = SmallCombineReduce<kConfig>;
  using Block = typename Base::Block;
  using Row = typename Base::Row;
  using Codes = typename Base::Codes;
  using typename Base::Part;
  using Shared = SmallCombineNodes<kConfig>;
  static constexpr i32 kWorkers = kConfig.kWorkers;
  static constexpr i32 kVector = Row::kVector;
  static constexpr i32 kNodes = kConfig.num_nodes();
  static constexpr u32 kAll = 0xffffffffu;

  __device__ SmallCombineNodeSums(const Block& block, i32 warp, const transport::Flight& flight)
      : Base(block, warp), flight_(flight), shared_(block, flight) {}

  // The sums for ranks of other nodes, into their rings.
  __device__ void forward() const {
    if (this->b_.is_narrow()) return forward_all<1>();
    forward_all<kConfig.kVectors>();
  }
  // Those of this rank's tokens, when all that they need is here.
  __device__ void add_own() const {
    if (this->b_.is_narrow()) return add_all<1>();
    add_all<kConfig.kVectors>();
  }

 private:
  using Sums = Domains<kConfig.order, kConfig.dtype>;

  template <i32 kVectors>
  __device__ void forward_all() const {
    const auto& nodes = shared_.nodes();
    for (i32 source = 0, nth = 0; source < kConfig.num_ranks; ++source) {
      if (!nodes.brings(source)) continue;
      const auto rows = shared_.rows_to(source);
      const i32 nth_source = nth++, num_units = shared_.num_units(source);
      i32 num_before = 0;
      for (i32 first = 0; first < num_units; first += kWorkers) {
        const i32 idx = first + this->b_.lane;
        const bool is_unit = this->b_.lane < kWorkers && idx < num_units;
        const u32 mates = is_unit ? shared_.mates_with(nth_source, this->b_.place(idx).token) : 0;
        const u32 come = __ballot_sync(kAll, mates != 0 ? 1 : 0);
        const u32 mine = __shfl_sync(kAll, mates, this->warp_);
        const i32 record = num_before + __popc(come & ((1u << this->warp_) - 1u));
        num_before += __popc(come);
        if (mine == 0) continue;
        make<kVectors>(this->b_.place(first + this->warp_), 1 + nth_source, mine & ~Shared::kCame, rows.to(record));
      }
    }
  }

  // Of the contributions of mates to one unit.
  template <i32 kVectors>
  __device__ void sum_of(const SmallPlace& place, i32 part, u32 mates, float (&sum)[kVectors][kVector]) const {
    for (u32 left = mates; left != 0; left &= left - 1) {
      Part of_mate[kVectors];
      this->load(landed(part, __ffs(static_cast<i32>(left)) - 1, place.token), place, of_mate);
#pragma unroll
      for (i32 idx = 0; idx < kVectors; ++idx) this->add_part(of_mate[idx], sum[idx]);
    }
  }
  __device__ const u8* landed(i32 part, i32 mate, i32 token) const {
    return this->b_.landed(flight_, shared_.nodes().rank, part, mate, token);
  }

  template <i32 kVectors>
  __device__ void make(const SmallPlace& place, i32 part, u32 mates, u8* record) const {
    if constexpr (kConfig.wire_is_fp8) {  // of one rank: as it is
      static_assert(kConfig.node_ranks == 1 && !kConfig.order.has_domains());
      Part only[kVectors] = {};
      if (mates != 0) this->load(landed(part, 0, place.token), place, only);
#pragma unroll
      for (i32 idx = 0; idx < kVectors; ++idx) {
        const i32 element = this->b_.element(place, idx);
        if (element >= place.end) continue;
        *reinterpret_cast<typename Codes::Codes*>(record + (element - place.column)) = only[idx].codes;
        if (element % kQuantizeGroup == 0) scales_in(record, place)[element / kQuantizeGroup] = only[idx].scale;
      }
    } else {
      float sum[kVectors][kVector] = {};
      sum_of(place, part, mates, sum);
#pragma unroll
      for (i32 idx = 0; idx < kVectors; ++idx) {
        const i32 element = this->b_.element(place, idx);
        if constexpr (kConfig.order.sum_is_fp8) {
          Sums::store(sum[idx], record - place.column, element, scales_in(record, place), element < place.end);
        } else if (element < place.end) {
          *reinterpret_cast<Packed*>(record + (element - place.column) * Row::kBytes) = Row::pack(sum[idx]);
        }
      }
    }
  }
  // In a record, the scale of the row's group 0, if it were there.
  __device__ float* scales_in(u8* record, const SmallPlace& place) const {
    return reinterpret_cast<float*>(record + kConfig.record_scales_at(this->b_.a.split.part)) -
           place.column / kQuantizeGroup;
  }

  template <i32 kVectors>
  __device__ void add_all() const {
    const GpuSendPlan<const i32> plan{this->b_.a.send_plan, this->b_.a.num_tokens, 0};
    const i32 num_units = this->b_.num_units(this->b_.a.num_tokens);
    i32 num_before = 0;  // lane n: records of node n
    for (i32 first = 0; first < num_units; first += kWorkers) {
      const i32 idx = first + this->b_.lane;
      const bool is_unit = this->b_.lane < kWorkers && idx < num_units;
      const u32 ranks = is_unit ? (plan.ranks(this->b_.place(idx).token) & flight_.active).word : 0;
      i32 record = 0;
      for (i32 node = 0; node < kNodes; ++node) {
        const u32 come = __ballot_sync(kAll, (ranks & shared_.ranks_of(node)) != 0 ? 1 : 0);
        if (this->b_.lane == node) {
          record = num_before + __popc(come & ((1u << this->warp_) - 1u));
          num_before += __popc(come);
        }
      }
      const u32 mine = __shfl_sync(kAll, ranks, this->warp_);
      if (first + this->warp_ >= num_units) continue;
      add_nodes<kVectors>(this->b_.place(first + this->warp_), mine, record);
    }
  }

  // Node by node.
  template <i32 kVectors>
  __device__ void add_nodes(const SmallPlace& place, u32 ranks, i32 record) const {
    const auto& nodes = shared_.nodes();
    float total[kVectors][kVector] = {};
    for (i32 node = 0; node < kNodes; ++node) {
      const u32 of_node = ranks & shared_.ranks_of(node);
      const i32 nth = __shfl_sync(kAll, record, node);
      if (of_node == 0) continue;
      if (node != nodes.node) {
        add_record<kVectors>(place, shared_.rows_of(node).from(nth), total);
      } else if constexpr (kConfig.order.has_domains()) {
        float sum[kVectors][kVector] = {};
        sum_of(place, 0, of_node >> nodes.first, sum);
#pragma unroll
        for (i32 idx = 0; idx < kVectors; ++idx) Sums::add(sum[idx], total[idx]);
      } else {
        sum_of(place, 0, of_node >> nodes.first, total);
      }
    }
#pragma unroll
    for (i32 idx = 0; idx < kVectors; ++idx) {
      this->write(place.token, this->b_.element(place, idx), place.end, total[idx]);
    }
  }

  template <i32 kVectors>
  __device__ void add_record(const SmallPlace& place, const u8* record, float (&total)[kVectors][kVector]) const {
#pragma unroll
    for (i32 idx = 0; idx < kVectors; ++idx) {
      const i32 element = this->b_.element(place, idx);
      if (element >= place.end) continue;
      float values[kVector];
      if constexpr (kConfig.record_is_fp8()) {
        Codes::unpack(Codes::load(record - place.column, element), values);
        const float scale = *(reinterpret_cast<const float*>(record + kConfig.record_scales_at(this->b_.a.split.part)) +
                              (element - place.column) / kQuantizeGroup);
#pragma unroll
        for (i32 at = 0; at < kVector; ++at) total[idx][at] = ptx::add_exact_product(total[idx][at], values[at], scale);
      } else {
        Row::unpack(*reinterpret_cast<const Packed*>(record + (element - place.column) * Row::kBytes), values);
#pragma unroll
        for (i32 at = 0; at < kVector; ++at) total[idx][at] += values[at];
      }
    }
  }

  const transport::Flight& flight_;
  const Shared shared_;
};

}  // namespace weft::kernels
