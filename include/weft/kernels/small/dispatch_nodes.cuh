// Small-batch dispatch with nodes: what crosses the network, and what this rank forwards (docs/protocols/nodes.md, "Small batches").
// Picks go by the message, rows by records of the ring between the blocks of a number; this rank writes both for its mates where the
// source itself would write on one node, so that the rest of the kernel knows of no nodes.
#pragma once

#include "weft/kernels/nodes.cuh"
#include "weft/kernels/small/dispatch_block.cuh"
#include "weft/kernels/small/unit_records.cuh"

namespace weft::kernels {

template <SmallDispatchKernelConfig kConfig>
class SmallDispatchNodes : public SmallDispatchState<kConfig> {
 public:
  using Base = SmallDispatchState<kConfig>;
  using Base::a, Base::flight, Base::lane, Base::rank;
  using Base::kRanks, Base::kTopk, Base::kExperts, Base::kLocal, Base::kAll, Base::kPlacement, Base::kSteps;
  using typename Base::Id;
  using Peers = transport::Peers<kConfig.route>;
  using Rows = UnitRecords<typename Peers::Ring>;
  static constexpr i32 kNodes = kConfig.num_nodes();
  static_assert(kNodes <= 32);

  __device__ explicit SmallDispatchNodes(const Base& base)
      : Base(base),
        peers_(transport::peers_of<kConfig.route>(base.a, base.flight)),
        nodes_(base.a.view, peers_, base.flight) {}

  __device__ const Nodes<kConfig>& nodes() const { return nodes_; }
  __device__ GpuRankMask mates() const { return nodes_.among_mates().active; }

  // Of a handle whose members are others: others forward, so no row goes. All ranks see it alike.
  __device__ bool has_moved() const {
    if constexpr (!kConfig.is_cached) return false;
    return static_cast<u32>(forward_plan().members()) != flight.active.word;
  }
  // Set by a warp whose wait has failed: the block puts nothing and says nothing more (R9).
  __device__ static u32& failure() {
    __shared__ u32 failed;
    return failed;
  }
  // By a whole warp, whose lanes must see it alike.
  __device__ static bool has_failed() { return __any_sync(kAll, ptx::ld_acquire_cta(&failure()) != 0 ? 1 : 0) != 0; }

  // ---- the sending half

  // By all threads of block 0: a message for each node. Behind a barrier one thread a node puts it.
  __device__ void write_messages() const {
    const i32 thread = static_cast<i32>(threadIdx.x);
    for (i32 node = 0; node < kNodes; ++node) {
      const i32 to = other_forwarder(node);
      if (to < 0) continue;
      if (thread == 0) {
        GpuCountPayload payload;
        payload.num_tokens = a.num_tokens;
        payload.rows_in_heap = Nodes<kConfig>::kRowsFollow;
        nodes_.begin_message(to, payload);
      }
      if constexpr (kConfig.is_cached) continue;
      auto* experts = reinterpret_cast<u16*>(nodes_.message_to(to) + nodes_.layout().experts(a.num_tokens));
      for (i32 pick = thread; pick < a.num_tokens * kTopk; pick += kConfig.num_threads()) {
        const i64 id = this->own_ids()[pick];
        experts[pick] = is_sent(id) && nodes_.map.node(rank_of(id)) == node
                            ? static_cast<u16>(id - kPlacement.expert_of(nodes_.map.first(node), 0))
                            : kNoRailExpert;
      }
    }
  }
  __device__ void put_message(i32 node) const {
    const i32 to = node < kNodes ? other_forwarder(node) : -1;
    if (to >= 0) nodes_.put_message(to, kConfig.is_cached ? sizeof(RailMessage) : picks_end(a.num_tokens));
  }

  // By a whole warp: the record of this block's nth token for each node that it goes to, in the node's lane; -1: it does not go.
  // False: a ring has no place for it, the reason is recorded.
  __device__ bool find_records(i32 nth, i32& record) const {
    const i32 before = num_before(nth, [this](i32 token) { return own_nodes(token); });
    const u32 to = __shfl_sync(kAll, own_nodes(this->token_of(this->unit(nth))), 0);
    const bool goes = lane < kNodes && (to >> lane & 1u) != 0;
    record = goes ? before : -1;
    if (to == 0) return true;
    u32 missing = 0;
    const auto look = [&] {
      const bool has_place = !goes || rows_to(lane).have_places(record + 1);
      missing = __ballot_sync(kAll, has_place ? 0 : 1);
      return has_place;
    };
    return wait(look, [&] { return other_forwarder(__ffs(static_cast<i32>(missing)) - 1); });
  }
  // Of a record that find_records() has found.
  __device__ u8* record_to(i32 node, i32 record) const { return rows_to(node).to(record); }
  // By the warp of a row's first step.
  __device__ void write_weights(i32 token, i32 record) const {
    if constexpr (kConfig.is_cached) return;
    for_records(record, [&](i32 node, i32 of_node) {
      auto* weights = reinterpret_cast<float*>(record_to(node, of_node) + kConfig.weights_at());
      for (i32 k = lane; k < kTopk; k += 32) {
        weights[k] = a.topk_weights == nullptr ? 1.0f : a.topk_weights[static_cast<i64>(token) * kTopk + k];
      }
    });
  }
  // `work(node, record)` by the whole warp, for each node in whose lane there is one.
  template <class Work>
  __device__ void for_records(i32 record, const Work& work) const {
    for (u32 left = __ballot_sync(kAll, record >= 0 ? 1 : 0); left != 0; left &= left - 1) {
      const i32 node = __ffs(static_cast<i32>(left)) - 1;
      work(node, __shfl_sync(kAll, record, node));
    }
  }

  // By a warp, behind a barrier since the rows were stored: all chunks of the block go, and headers to mates.
  __device__ void tell() const {
    const i32 num = num_before(this->num_units(), [this](i32 token) { return own_nodes(token); });
    const bool is_right = !has_failed();
    if (is_right && !has_moved() && lane < kNodes && other_forwarder(lane) >= 0) rows_to(lane).put(num);
    __syncwarp();
  }

  // ---- the receiving half

  // By a warp of each block, in turns of sources: messages become headers, payloads and picks of the source at each mate.
  __device__ void relay() const {
    nodes_.relay_calls(
        static_cast<i32>(blockIdx.x), kConfig.num_blocks,
        [this](const auto&, const u8* message, i32 source, i32 mate) { write_picks(message, source, mate); });
  }

  // By the warps that move rows, when the count headers match: the records of each source that this rank brings. False: one has not
  // come.
  __device__ bool forward(const i32* num_tokens) const {
    if constexpr (!kConfig.is_cached) {
      if (blockIdx.x == 0 && threadIdx.x == 0) forward_plan().members() = static_cast<i32>(flight.active.word);
    }
    if (has_moved()) {
      if (blockIdx.x == 0 && threadIdx.x == 0) {
        transport::record(a.view, flight, transport::ErrorCause::kMoved, Phase::kCount, rank(), 0);
      }
      return false;
    }
    i32 num_brought = 0;
    for (i32 source = 0; source < kRanks; ++source) num_brought += nodes_.brings(source) ? 1 : 0;
    this->share(num_brought, [&](i32 nth_source, i32 nth, i32 first, i32 stride) {
      const i32 source = brought(nth_source), token = this->token_of(this->unit(nth));
      if (token >= num_tokens[source] || has_failed()) return;
      forward_row(source, nth_source, nth, first, stride);
    });
    return true;
  }

  // By a warp, behind a barrier of those: the headers of the sources, and credits.
  __device__ void tell_forwarded(const i32* num_tokens) const {
    if (has_failed()) return;
    for (i32 source = 0, nth_source = 0; source < kRanks; ++source) {
      if (!nodes_.brings(source)) continue;
      if (lane < nodes_.size && nodes_.map.is_active(nodes_.first + lane)) {
        peers_.relay(Phase::kSend, flight, source, nodes_.first + lane, static_cast<i32>(blockIdx.x));
      }
      const i32 nth_of = nth_source++;
      if (has_moved()) continue;
      const i32 num = num_before(this->num_units(), [&](i32 token) {
        return token < num_tokens[source] && has_come(source, nth_of, token) ? 1u : 0u;
      });
      if (lane == 0) rows_from(source).take(num);
      __syncwarp();
    }
  }

 private:
  __device__ i32 other_forwarder(i32 node) const { return node == nodes_.node ? -1 : nodes_.forwarder_in(node); }
  __device__ static i32 rank_of(i64 id) { return kPlacement.rank_of(static_cast<i32>(id)); }
  __device__ bool is_sent(i64 id) const { return id >= 0 && id < kExperts && flight.is_active(rank_of(id)); }
  __device__ u64 picks_end(i32 num_tokens) const {
    return nodes_.layout().experts(num_tokens) + static_cast<u64>(num_tokens) * kTopk * sizeof(u16);
  }
  __device__ i32 brought(i32 nth) const {
    for (i32 source = 0; source < kRanks; ++source) {
      if (nodes_.brings(source) && nth-- == 0) return source;
    }
    return 0;
  }
  __device__ GpuForwardPlan<i32> forward_plan() const {
    return {a.forward_plan, a.view.layout.max_tokens, kConfig.node_ranks, kTopk};
  }
  __device__ Rows rows_to(i32 node) const {
    const auto ring = nodes_.ring(other_forwarder(node));
    return {nodes_.layout(), ring, *ring.num_put(), kConfig.record_bytes()};
  }
  __device__ Rows rows_from(i32 source) const {
    const auto ring = nodes_.ring(source);
    return {nodes_.layout(), ring, *ring.num_taken(), kConfig.record_bytes()};
  }

  // Other nodes that a token of this rank goes to, a bit each. By one lane.
  __device__ u32 own_nodes(i32 token) const {
    u32 found = 0;
    if (token >= a.num_tokens) return found;
    if constexpr (kConfig.is_cached) {
      const GpuSendPlan<i32> plan{a.send_plan, a.num_tokens, 0};
      const GpuRankMask ranks = plan.ranks(token) & flight.active;
      for (i32 other = 0; other < kRanks; ++other) found |= ranks.bit(other) << nodes_.map.node(other);
    } else {
      for (i32 k = 0; k < kTopk; ++k) {
        const i64 id = this->own_ids()[static_cast<i64>(token) * kTopk + k];
        if (is_sent(id)) found |= 1u << nodes_.map.node(rank_of(id));
      }
    }
    return found & ~(1u << nodes_.node);
  }

  // By a whole warp, in lane n: of this block's tokens before the nth, those for which `nodes(token)` has bit n.
  template <class NodesOf>
  __device__ i32 num_before(i32 nth, const NodesOf& nodes) const {
    i32 mine = 0;
    for (i32 first = 0; first < nth; first += 32) {
      const i32 at = first + lane;
      const u32 of_token = at < nth ? nodes(this->token_of(this->unit(at))) : 0;
      for (i32 node = 0; node < kNodes; ++node) {
        const u32 goers = __ballot_sync(kAll, static_cast<i32>(of_token >> node & 1u));
        if (lane == node) mine += __popc(goers);
      }
    }
    return mine;
  }

  // By a whole warp, until `look` is true in all lanes; `late()`: who is named.
  template <class Look, class Late>
  __device__ bool wait(const Look& look, const Late& late) const {
    if (has_failed()) return false;
    sync::LanePause pause(&a.view.host->abort, flight.active.word & ~mates().word, &a.view.host->timeout_ns);
    const sync::WaitResult result = sync::wait_all_lanes(look, pause);
    if (result == sync::WaitResult::kReady) {
      __syncwarp();  // each lane has acquired its own; all read
      return true;
    }
    const i32 culprit = late();
    if (lane == 0) {
      transport::settle(a.view, flight, result, Phase::kSend, culprit, 0);
      ptx::st_release_cta(&failure(), 1);
    }
    return false;
  }

  // Picks of a source, as its message has them, into the words that it would write itself. A source without the token has no picks.
  __device__ void write_picks(const u8* message, i32 source, i32 mate) const {
    if constexpr (kConfig.is_cached) return;
    const auto* payload =
        reinterpret_cast<const GpuCountPayload*>(reinterpret_cast<const RailMessage*>(message)->payload);
    const i64 told = payload->num_tokens;
    const i32 num_tokens = static_cast<i32>(min(max(told, i64{0}), static_cast<i64>(a.max_tokens)));  // R19
    const auto* experts = reinterpret_cast<const u16*>(message + nodes_.layout().experts(num_tokens));
    u64* words = this->slot_picks(mate, source, 0);
    for (i32 pick = lane; pick < a.max_tokens * kTopk; pick += 32) {
      u32 n = Base::kNoPick;
      if (pick < num_tokens * kTopk && experts[pick] < nodes_.size * kLocal) {
        n = Base::kFirstPick + static_cast<u32>(kPlacement.expert_of(nodes_.first, 0) + experts[pick]);
      }
      ptx::st_relaxed_sys(&words[pick], sync::pack_progress(flight.turn, n));
    }
  }

  // The expert of a pick of another rank, whose words are here; -1: none.
  __device__ i32 expert_of(i32 source, i32 token, i32 k) const {
    const u64 pick = ptx::ld_relaxed_sys(&this->slot_picks(rank(), source, token)[k]);
    return static_cast<i32>(sync::progress_in(pick, flight.turn)) - static_cast<i32>(Base::kFirstPick);
  }
  // By one lane: whether the source's token comes to this node.
  __device__ bool has_come(i32 source, i32 nth_source, i32 token) const {
    if constexpr (kConfig.is_cached) return forward_plan().row(nth_source, token)[0] != kNoForward;
    bool comes = false;
    for (i32 k = 0; k < kTopk; ++k) comes = comes || mate_of(expert_of(source, token, k)) >= 0;
    return comes;
  }
  // The living mate that has the expert, by its place in the node; -1: none.
  __device__ i32 mate_of(i32 expert) const {
    if (expert < 0) return -1;
    const i32 to = kPlacement.rank_of(expert);
    return nodes_.is_mate(to) ? to - nodes_.first : -1;
  }

  // By a whole warp.
  __device__ void forward_row(i32 source, i32 nth_source, i32 nth, i32 first, i32 stride) const {
    const i32 token = this->token_of(this->unit(nth));
    const GpuRankMask to = mates_with(source, nth_source, token, first == 0);
    const bool comes = __shfl_sync(kAll, has_come(source, nth_source, token) ? 1 : 0, 0) != 0;
    if (!comes) return;
    const i32 record = __shfl_sync(
        kAll, num_before(nth, [&](i32 earlier) { return has_come(source, nth_source, earlier) ? 1u : 0u; }), 0);
    const Rows rows = rows_from(source);
    const auto look = [&] { return lane != 0 || rows.have_arrived(record + 1); };
    if (!wait(look, [&] { return source; })) return;
    copy_record(rows.from(record), source, token, to, first, stride);
  }

  // The mates that have a pick of the token; of a first dispatch they go into the forward plan.
  __device__ GpuRankMask mates_with(i32 source, i32 nth_source, i32 token, bool writes) const {
    const auto plan = forward_plan();
    if constexpr (kConfig.is_cached) {
      const bool has_row = lane < nodes_.size && plan.row(nth_source, token)[lane] >= 0;
      return GpuRankMask{__ballot_sync(kAll, has_row ? 1 : 0) << nodes_.first} & flight.active;
    }
    u32 with = 0;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      const i32 k = step * 32 + lane;
      if (k >= kTopk) continue;
      const i32 mate = mate_of(expert_of(source, token, k));
      if (mate >= 0) with |= 1u << mate;
      if (writes) plan.set_pick(nth_source, token, k, mate >= 0 ? static_cast<u8>(mate) : kNoMate);
    }
    with = __reduce_or_sync(kAll, with);
    if (writes && lane < kConfig.node_ranks) {
      plan.row(nth_source, token)[lane] = with == 0 ? kNoForward : (with >> lane & 1u) != 0 ? 0 : kForwardNoRow;
    }
    return GpuRankMask{with << nodes_.first};
  }

  __device__ void copy_record(const u8* from, i32 source, i32 token, const GpuRankMask& to, i32 first,
                              i32 stride) const {
    using Unit = Piece<16>;
    constexpr i32 kUnits = kConfig.weights_at() / 16, kHeld = 6;
    const auto* units = reinterpret_cast<const Unit*>(from);
    for (i32 step = first; step * 32 < kUnits; step += stride * kHeld) {
      Unit held[kHeld];
#pragma unroll
      for (i32 idx = 0; idx < kHeld; ++idx) {
        const i32 unit = (step + idx * stride) * 32 + lane;
        if (unit < kUnits) held[idx] = units[unit];
      }
      this->for_ranks(to, [&](i32 mate) {
        auto* slot = reinterpret_cast<Unit*>(this->slot_row(mate, source, token));
#pragma unroll
        for (i32 idx = 0; idx < kHeld; ++idx) {
          const i32 unit = (step + idx * stride) * 32 + lane;
          if (unit < kUnits) slot[unit] = held[idx];
        }
      });
    }
    if (kConfig.is_cached || first != 0) return;
    const auto* weights = reinterpret_cast<const float*>(from + kConfig.weights_at());
    this->for_ranks(to, [&](i32 mate) {
      for (i32 k = lane; k < kTopk; k += 32) this->slot_weights(mate, source, token)[k] = weights[k];
    });
  }

  const Peers peers_;
  const Nodes<kConfig> nodes_;
};

}  // namespace weft::kernels
