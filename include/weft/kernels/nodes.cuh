// The nodes of a kernel's ranks, as one of them sees them, and the first headers of an operation, which cross the network by messages
// (docs/protocols/nodes.md). For dispatch and combine.
#pragma once

#include "weft/layout/gpu_plan.h"
#include "weft/transport/peers.cuh"

namespace weft::kernels {

template <auto kConfig>
class Nodes {
 public:
  using Peers = transport::Peers<kConfig.route>;
  using Ring = typename Peers::Ring;
  static constexpr i32 kRanks = kConfig.num_ranks;
  static constexpr i32 kNodeRanks = kConfig.node_ranks;
  static constexpr i32 kNodes = kConfig.num_nodes();
  // In place of `rows_in_heap` in the payload of a message: rows follow whose places nobody is asked for.
  static constexpr u64 kRowsFollow = 2;

  __device__ Nodes(const transport::WindowView& view, const Peers& peers, const transport::Flight& flight)
      : map{kRanks, kNodeRanks, flight.active.word},
        rank(view.rank),
        node(map.node(view.rank)),
        first(map.first(node)),
        size(map.size(node)),
        view_(view),
        peers_(peers),
        flight_(flight) {}

  // A living rank of this node, this one too.
  __device__ bool is_mate(i32 other) const { return map.are_mates(rank, other) && map.is_active(other); }
  // This rank is the forwarder of `source` here.
  __device__ bool brings(i32 source) const {
    return map.is_active(source) && !map.are_mates(rank, source) && map.forwarder(source, node) == rank;
  }
  // Which of those it is, of this rank's or of a mate's.
  __device__ i32 nth_brought(i32 source) const { return nth_brought_by(rank, source); }
  __device__ i32 nth_brought_by(i32 mate, i32 source) const {
    i32 nth = 0;
    for (i32 other = 0; other < source; ++other) {
      const bool is_brought = map.is_active(other) && !map.are_mates(rank, other) && map.forwarder(other, node) == mate;
      nth += is_brought ? 1 : 0;
    }
    return nth;
  }
  // By a whole warp: whether a rank has more parts of a landing than `most`, one of its own tokens and one of each rank that it brings.
  __device__ bool has_more_parts_than(i64 most) const {
    static_assert(kRanks <= 32);
    const i32 adder = static_cast<i32>(threadIdx.x % ptx::kWarpLanes);
    i64 num_parts = 1;
    for (i32 source = 0; source < kRanks; ++source) {
      const bool is_brought = adder < kRanks && map.is_active(adder) && map.is_active(source) &&
                              !map.are_mates(adder, source) && map.forwarder(source, map.node(adder)) == adder;
      num_parts += is_brought ? 1 : 0;
    }
    return __any_sync(0xffffffffu, num_parts > most ? 1 : 0) != 0;
  }
  // Where this rank's tokens for another node go; -1: nobody lives there.
  __device__ i32 forwarder_in(i32 other_node) const { return map.rail(other_node, map.index(rank)); }
  // The same operation among the ranks of this node.
  __device__ transport::Flight among_mates() const {
    transport::Flight mates = flight_;
    mates.active = mates.active & GpuRankMask{GpuRankMask::first(size).word << first};
    return mates;
  }

  __device__ const RailLayout& layout() const { return peers_.rail().layout; }
  __device__ Ring ring(i32 peer) const { return peers_.ring(peer, static_cast<i32>(blockIdx.x)); }
  __device__ u8* message_to(i32 peer) const { return messages(peer).message_out(message()); }
  __device__ const u8* message_from(i32 source) const { return messages(source).message_in(message()); }

  // By one thread: what a message begins with.
  __device__ void begin_message(i32 peer, const GpuCountPayload& payload) const {
    static_assert(sizeof(GpuCountPayload) <= WindowLayout::kPayloadFixedBytes);
    auto* message = reinterpret_cast<RailMessage*>(message_to(peer));
    message->header = sync::pack_header(flight_.turn, flight_.print);
    message->caller = flight_.caller;
    *reinterpret_cast<GpuCountPayload*>(message->payload) = payload;
  }
  // By one thread, behind a barrier since the message was written.
  __device__ void put_message(i32 peer, u64 num_bytes) const {
    ptx::fence_sys();
    messages(peer).put_message(message(), static_cast<u32>(align_up(num_bytes, 16)));
  }

  // By a warp for each source that this rank brings, the first being `nth` of them: when the message is here, it goes into the
  // source's cells at all mates and at this rank. `copy_parts(payload, message, source, mate)`: by the whole warp, what follows the
  // fixed part of the payload. False: a message has not come, the reason is recorded.
  template <class CopyParts>
  __device__ bool relay_calls(i32 nth, i32 num_warps, const CopyParts& copy_parts) const {
    bool is_right = true;
    i32 num_brought = 0;
    for (i32 source = 0; source < kRanks; ++source) {
      if (!brings(source) || num_brought++ % num_warps != nth) continue;
      if (is_right) is_right = relay_call(source, copy_parts);
    }
    return is_right;
  }

  // The `count` header of every rank: one thread a peer, as transport::wait_all().
  __device__ transport::Verdict wait_calls(i32 first_thread, transport::Verdict so_far) const {
    const i32 peer = static_cast<i32>(threadIdx.x) - first_thread;
    const bool is_peer = peer >= 0 && peer < kRanks && peer != rank && map.is_active(peer);
    return transport::worst_of(is_peer && so_far == transport::Verdict::kOk ? wait_call(peer) : so_far);
  }

  // By one thread: that of one of them. A forwarder that has not come keeps the headers of others back: it is named.
  __device__ transport::Verdict wait_call(i32 peer) const {
    const u64* cell = call_cell(peer);
    const i32 forwarder = map.forwarder(peer, node);
    u64* waited_ns = blockIdx.x == 0 ? &view_.words()->waited_ns[peer] : nullptr;
    const u64 awaited = u64{1} << peer | u64{1} << forwarder;
    sync::LanePause pause(&view_.host->abort, awaited, &view_.host->timeout_ns, 0, waited_ns);
    u64 seen;
    const sync::WaitResult result = sync::wait_header(cell, flight_.turn, pause, seen);
    const bool is_kept_back = result != sync::WaitResult::kReady && forwarder != rank && !has_call(forwarder);
    if (!transport::settle(view_, flight_, result, Phase::kCount, is_kept_back ? forwarder : peer, seen)) {
      return transport::Verdict::kBroken;
    }
    return transport::judge(view_, Phase::kCount, flight_, peer, cell, seen);
  }

  // Rings can't be counted on any more: this operation is given up, and the window takes no other.
  __device__ void break_window() const {
    ptx::st_relaxed_sys(&view_.words()->broken, static_cast<u64>(transport::ErrorCause::kBadPeerWord));
  }

  // Of the operation's handle, by all threads behind wait_calls(): whether those who made it are the members, and who adds has places
  // for all that it adds for, which a graph of when there were more may lack. All ranks see it alike.
  __device__ bool holds(const GpuForwardPlan<const i32>& plan, bool has_places = true) const {
    if (has_places && static_cast<u32>(plan.members()) == flight_.active.word) return true;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      transport::record(view_, flight_, transport::ErrorCause::kMoved, Phase::kCount, rank, 0);
    }
    return false;
  }

  const RailMap map;
  const i32 rank, node, first, size;

 private:
  // Number of this operation's, of every pair. Sequences have 32 bits, and go on at 0.
  __device__ u64 message() const {
    return static_cast<u32>(ptx::ld_relaxed_sys(&view_.words()->sequence) - peers_.rail().first_sequence);
  }
  __device__ Ring messages(i32 peer) const { return peers_.ring(peer, layout().num_blocks); }

  template <class CopyParts>
  __device__ bool relay_call(i32 source, const CopyParts& copy_parts) const {
    const i32 lane = static_cast<i32>(threadIdx.x % ptx::kWarpLanes);
    bool has_come = true;
    if (lane == 0) has_come = wait_message(source);
    if (__all_sync(0xffffffffu, has_come ? 1 : 0) == 0) return false;
    __syncwarp();  // all lanes read what one has acquired
    const auto* message = reinterpret_cast<const RailMessage*>(message_from(source));
    for (i32 mate = first; mate < first + size; ++mate) {
      if (!map.is_active(mate)) continue;
      const auto slot = peers_.control(mate) + view_.layout.payload(flight_.turn.sequence, source);
      for (i32 idx = lane; idx < static_cast<i32>(sizeof(GpuCountPayload) / sizeof(u64)); idx += 32) {
        peers_.put_words(slot.template at<u64>(idx), reinterpret_cast<const u64*>(message->payload)[idx]);
      }
      copy_parts(slot + sizeof(GpuCountPayload), message_from(source), source, mate);
    }
    __syncwarp();
    if (lane < size && map.is_active(first + lane)) {
      peers_.relay_call(flight_, source, first + lane, message->header, message->caller);
    }
    if (lane == 0) check_follows(*message);
    return true;
  }

  // By one thread. Rows of an operation that this rank has not called will lie in its ring, where nobody takes them.
  __device__ void check_follows(const RailMessage& message) const {
    const auto* payload = reinterpret_cast<const GpuCountPayload*>(message.payload);
    if (payload->rows_in_heap != kRowsFollow) return;
    if (sync::classify_header(message.header, flight_.turn, flight_.print) == sync::HeaderState::kMatch) return;
    break_window();
  }

  __device__ bool wait_message(i32 source) const {
    sync::LanePause pause(&view_.host->abort, u64{1} << source, &view_.host->timeout_ns);
    const Ring ring = messages(source);
    const u64 n = message();
    const sync::WaitResult result = sync::wait_until([&] { return ring.has_message(n); }, pause);
    return transport::settle(view_, flight_, result, Phase::kCount, source, 0);
  }

  __device__ const u64* call_cell(i32 peer) const {
    return reinterpret_cast<const u64*>(view_.own_control() +
                                        view_.layout.header(Phase::kCount, flight_.turn.sequence, peer, 0));
  }
  __device__ bool has_call(i32 peer) const {
    const u64 seen = ptx::ld_relaxed_sys(call_cell(peer));
    return sync::classify_header(seen, flight_.turn, flight_.print) != sync::HeaderState::kNotYet;
  }

  const transport::WindowView& view_;
  const Peers peers_;
  const transport::Flight& flight_;
};

// Nothing, of a kernel without nodes.
struct NoNodes {};

}  // namespace weft::kernels
