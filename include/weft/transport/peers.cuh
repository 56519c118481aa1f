// How bytes and signals reach a peer, and how those of peers are waited for. Nowhere else is the address of a peer's memory
// formed: the route is a field of a kernel's configuration.
//
//   place    where something lies in a rank's window
//   put      a row from shared memory, by bulk store: complete when its group is
//   put_words  a value from registers
//   notify   a header, post progress: what was put before, and completed, is there for whoever waits for it
//   wait     for what a peer has notified or posted; in this rank's own memory, whatever the route
#pragma once

#include "weft/config/route.h"
#include "weft/ptx/bulk.cuh"
#include "weft/transport/flight.cuh"
#include "weft/transport/rail_block.cuh"
#include "weft/transport/rail_loop.cuh"

namespace weft::transport {

template <Route kRoute>
class Peers;

// By load and store.
template <>
class Peers<Route::kDirect> {
 public:
  class Place {
   public:
    Place() = default;
    __device__ explicit Place(u8* address) : address_(address) {}
    __device__ Place operator+(u64 num_bytes) const { return Place(address_ + num_bytes); }
    // Of element `idx` of an array of T.
    template <class T, class Index>
    __device__ Place at(Index idx) const {
      return Place(reinterpret_cast<u8*>(reinterpret_cast<T*>(address_) + idx));
    }
    // Of any rank, for what only load and store can do: rows that are pulled, vectors of a lane.
    __device__ u8* address() const { return address_; }
    // Of this rank's own memory.
    __device__ u8* own() const { return address_; }

   private:
    u8* address_;
  };

  __device__ explicit Peers(const WindowView& view) : view_(view) {}

  // Of a rank's window; an offset is added.
  __device__ Place heap(i32 rank) const { return Place(view_.heap[rank]); }
  __device__ Place control(i32 rank) const { return Place(view_.control[rank]); }

  // Belongs to the bulk group that this thread commits next.
  __device__ void put(Place to, const u8* shared, u32 num_bytes) const {
    ptx::bulk_store(to.address(), shared, num_bytes);
  }
  // By value: by reference, loops that are unrolled keep values on the stack (40 bytes in dispatch of FP8 rows).
  template <class Value>
  __device__ void put_words(Place to, Value value) const {
    *reinterpret_cast<Value*>(to.address()) = value;
  }
  // Of a struct that lies there.
  template <class Struct, class Value>
  __device__ void put_field(Place to, Value Struct::* field, const Value& value) const {
    reinterpret_cast<Struct*>(to.address())->*field = value;
  }

  // Everything that the block has stored before its last barrier, and every completed bulk store of a thread that fenced
  // before that barrier, is visible to the peer that waits for this header. One thread calls it for each peer.
  __device__ void notify(Phase phase, const Flight& flight, i32 peer, i32 block) const {
    u64* cell = reinterpret_cast<u64*>(view_.control[peer] +
                                       view_.layout.header(phase, flight.turn.sequence, view_.rank, block));
    sync::send_header(cell, sync::pack_header(flight.turn, flight.print), [] {});
  }

  // The first header of an operation: the word behind it says who calls.
  __device__ void notify_call(const Flight& flight, i32 peer) const {
    u64* cell = reinterpret_cast<u64*>(view_.control[peer] +
                                       view_.layout.header(Phase::kCount, flight.turn.sequence, view_.rank, 0));
    cell[kCallerWord] = flight.caller;
    sync::send_header(cell, sync::pack_header(flight.turn, flight.print), [] {});
  }

  // In place of it: this rank can't take part, and `word` says why.
  __device__ void refuse_call(const Flight& flight, i32 peer, u64 word) const {
    u64* cell = reinterpret_cast<u64*>(view_.control[peer] +
                                       view_.layout.header(Phase::kCount, flight.turn.sequence, view_.rank, 0));
    cell[kCallerWord] = word;
    sync::send_header(cell, sync::pack_header(flight.turn, kRefusalFingerprint), [] {});
  }

  // Everything that this thread has stored before (bulk stores: that have completed and were fenced) is visible to the peer
  // that waits for progress n of this channel.
  __device__ void post(const Flight& flight, i32 peer, i32 block, i32 channel, u32 n) const {
    sync::post_progress(
        reinterpret_cast<u64*>(view_.control[peer] + view_.layout.progress_word(view_.rank, block, channel)),
        flight.turn, n);
  }

  // Everything that came before a fence of this thread is visible to the peer that waits for this token.
  __device__ void post_token(const Flight& flight, i32 peer, i32 token) const {
    u64* word = reinterpret_cast<u64*>(view_.control[peer] + view_.layout.arrived_word(view_.rank, token));
    ptx::st_relaxed_sys(word, sync::pack_progress(flight.turn, 1));
  }

 private:
  const WindowView& view_;
};

using DirectPeers = Peers<Route::kDirect>;

// By load and store to the ranks of this node; rings lead to those of others.
template <class RouteRail, class RailRing>
class NodePeers : public Peers<Route::kDirect> {
 public:
  using Rail = RouteRail;
  using Ring = RailRing;

  __device__ NodePeers(const WindowView& view, const Rail& rail, const Flight&)
      : Peers<Route::kDirect>(view), view_(view), rail_(rail) {}

  __device__ const Rail& rail() const { return rail_; }
  __device__ Ring ring(i32 peer, i32 block) const { return Ring(rail_, view_.rank, peer, block); }

  // The first header of `source`, which it has sent by a message, to a rank of this node.
  __device__ void relay_call(const Flight& flight, i32 source, i32 peer, u64 header, u64 caller) const {
    u64* cell = reinterpret_cast<u64*>(view_.control[peer] +
                                       view_.layout.header(Phase::kCount, flight.turn.sequence, source, 0));
    cell[kCallerWord] = caller;
    sync::send_header(cell, header, [] {});
  }

  // Another header of `source`, whose rows this rank has forwarded; as notify().
  __device__ void relay(Phase phase, const Flight& flight, i32 source, i32 peer, i32 block) const {
    u64* cell =
        reinterpret_cast<u64*>(view_.control[peer] + view_.layout.header(phase, flight.turn.sequence, source, block));
    sync::send_header(cell, sync::pack_header(flight.turn, flight.print), [] {});
  }

 private:
  const WindowView& view_;
  const Rail& rail_;
};

// Route::kGin is in rail_gin.cuh.
template <>
class Peers<Route::kNodes> : public NodePeers<BlockRail, BlockRing> {
  using NodePeers::NodePeers;
};

// Of a kernel's arguments.
template <Route kRoute, class Args>
__device__ Peers<kRoute> peers_of(const Args& args, const Flight& flight) {
  if constexpr (kRoute == Route::kDirect) {
    return Peers<kRoute>(args.view);
  } else {
    return Peers<kRoute>(args.view, *static_cast<const typename Peers<kRoute>::Rail*>(args.rail), flight);
  }
}

// That take part in the operation.
template <auto kConfig>
__device__ u32 num_blocks() {
  return kConfig.route == Route::kDirect ? gridDim.x : static_cast<u32>(kConfig.num_blocks);
}

// Around a kernel: work(), and what the route does itself, in blocks of its own. `goes_on`: the operation does, in another launch.
template <Route kRoute, class Args, class Work>
__device__ void with_route(const Args& args, const Work& work, bool goes_on = false) {
  if constexpr (kRoute == Route::kDirect) {
    work();
  } else {
    const auto& rail = *static_cast<const typename Peers<kRoute>::Rail*>(args.rail);
    if (serve_route(args.view, rail)) return;
    work();
    leave_route(args.view, rail, goes_on);
  }
}

// ---- what is waited for

// Waits for n >= target of the peer's channel. One thread; false: leave, the reason is recorded.
__device__ inline bool wait_progress(const WindowView& view, const Flight& flight, i32 peer, i32 block, i32 channel,
                                     u32 target) {
  u64* word = reinterpret_cast<u64*>(view.own_control() + view.layout.progress_word(peer, block, channel));
  constexpr u32 kSleepNs = 200;
  sync::LanePause pause(&view.host->abort, u64{1} << peer, &view.host->timeout_ns, kSleepNs);
  const sync::WaitResult result = sync::wait_progress(word, flight.turn, target, pause);
  return settle(view, flight, result, Phase::kSend, peer, 0);
}

// Waits for a row of the peer. One thread a token; false: leave, the reason is recorded.
__device__ inline bool wait_token(const WindowView& view, const Flight& flight, i32 peer, i32 token) {
  u64* word = reinterpret_cast<u64*>(view.own_control() + view.layout.arrived_word(peer, token));
  constexpr u32 kSleepNs = 200;
  sync::LanePause pause(&view.host->abort, u64{1} << peer, &view.host->timeout_ns, kSleepNs);
  return settle(view, flight, sync::wait_progress(word, flight.turn, 1, pause), Phase::kSend, peer, 0);
}

// How far the peer's channel has come by now.
__device__ inline u32 progress(const WindowView& view, const Flight& flight, i32 peer, i32 block, i32 channel) {
  const u8* word = view.own_control() + view.layout.progress_word(peer, block, channel);
  return sync::load_progress(reinterpret_cast<const u64*>(word), flight.turn);
}

// What a header that has come says; anything but a match has left its reason in the host words, if this one `says` it.
__device__ inline Verdict judge(const WindowView& view, Phase phase, const Flight& flight, i32 peer, const u64* cell,
                                u64 seen, bool says = true) {
  if (sync::classify_header(seen, flight.turn, flight.print) == sync::HeaderState::kMatch) return Verdict::kOk;
  if (!says) return Verdict::kGivenUp;
  // Every block that sees it writes the same; before the record, whose last store makes it visible.
  if (phase == Phase::kCount) view.host->seen_caller[peer] = cell[kCallerWord];
  record(view, flight, ErrorCause::kMismatch, phase, peer, seen);
  return Verdict::kGivenUp;
}

// Waits for one peer's header. Block 0 notes how long.
__device__ inline Verdict wait(const WindowView& view, Phase phase, const Flight& flight, i32 peer, i32 block) {
  const u64* cell =
      reinterpret_cast<const u64*>(view.own_control() + view.layout.header(phase, flight.turn.sequence, peer, block));
  u64* waited_ns = blockIdx.x == 0 ? &view.words()->waited_ns[peer] : nullptr;
  sync::LanePause pause(&view.host->abort, u64{1} << peer, &view.host->timeout_ns, 0, waited_ns);
  u64 seen;
  const sync::WaitResult result = sync::wait_header(cell, flight.turn, pause, seen);
  if (!settle(view, flight, result, phase, peer, seen)) return Verdict::kBroken;
  return judge(view, phase, flight, peer, cell, seen);
}

// The same for a lane that waits for several headers: block 0 adds to `waited_ns` how long, and note_waited() follows.
__device__ inline Verdict wait(const WindowView& view, Phase phase, const Flight& flight, i32 peer, i32 block,
                               u64& waited_ns, bool says = true) {
  const u64* cell =
      reinterpret_cast<const u64*>(view.own_control() + view.layout.header(phase, flight.turn.sequence, peer, block));
  sync::NotingPause pause(&view.host->abort, u64{1} << peer, &view.host->timeout_ns, blockIdx.x == 0);
  u64 seen;
  const sync::WaitResult result = sync::wait_header(cell, flight.turn, pause, seen);
  waited_ns += pause.waited_ns();
  if (!settle(view, flight, result, phase, peer, seen)) return Verdict::kBroken;
  return judge(view, phase, flight, peer, cell, seen, says);
}

// The headers of `phase` and `block` from every active peer: one thread a peer, the worst verdict for the whole block.
// `first_thread`: whose peer is rank 0, for a block whose first threads are busy. `so_far`: what this thread has come to before;
// it does not wait if that is bad.
__device__ inline Verdict wait_all(const WindowView& view, Phase phase, const Flight& flight, i32 block,
                                   i32 first_thread = 0, Verdict so_far = Verdict::kOk) {
  const i32 peer = static_cast<i32>(threadIdx.x) - first_thread;
  const bool is_peer = peer >= 0 && peer < view.num_ranks && peer != view.rank && flight.is_active(peer);
  return worst_of(is_peer && so_far == Verdict::kOk ? wait(view, phase, flight, peer, block) : so_far);
}

}  // namespace weft::transport
