// The rail over a network: NCCL's GIN puts chunks and gives credits. Only kernels whose route it is include this file, behind
// the prologue of weft.scaleout.headers; no other header knows NCCL.
//
//   ring (peer, block) lies where layout/rail.h says, in memory that is registered as one window
//   signal of a slot, credits: signals of GIN, always weak ones: such a signal says that its own put has settled, and nothing of others
//   context: block mod their number; one ring uses one context, whose signals are its own
#pragma once

#include <nccl.h>
#include <nccl_device.h>

#include "weft/sync/rail.h"
#include "weft/transport/peers.cuh"
#include "weft/transport/rail_gin.h"

namespace weft::transport {

// By one thread of a block. `n` counts chunks of the ring (peer, block), or messages of the peer; it only grows (R6).
class GinRing {
 public:
  __device__ GinRing(const GinRail& rail, i32 rank, i32 peer, i32 block)
      : rail_(rail),
        signals_(rail.layout.num_blocks, rail.layout.num_slots),
        gin_(*reinterpret_cast<const ncclDevComm*>(rail.comm), block % rail.num_contexts),
        rank_(rank),
        peer_(peer),
        block_(block) {
    static_assert(sizeof(ncclDevComm) <= GinRail::kMostCommBytes && alignof(ncclDevComm) <= 16);
  }

  // The caller has a place, so this never waits for the network. What other threads stored to the slot is there at system scope.
  __device__ void put(u64 n, u32 num_bytes) const {
    send(rail_.layout.receive_slot(rank_, n, block_), rail_.layout.send_slot(peer_, n, block_), num_bytes,
         signals_.slot(rank_, block_, n));
  }
  __device__ bool has_arrived(u64 n) const {
    return read(signals_.slot(peer_, block_, n)) >= sync::rail_fills(n, static_cast<u32>(rail_.layout.num_slots));
  }
  __device__ void give_credit() const {
    gin_.signal(team(), team_rank(), ncclGin_WeakSignalAdd{signal(signals_.credits(rank_, block_)), 1});
  }
  // Chunks that the peer has read.
  __device__ u64 credits() const { return read(signals_.credits(peer_, block_)); }

  // Of the ring of messages, `block` == num_blocks.
  __device__ void put_message(u64 n, u32 num_bytes) const {
    send(rail_.layout.message_in(rank_, n), rail_.layout.message_out(peer_, n), num_bytes, signals_.message(rank_, n));
  }
  __device__ bool has_message(u64 n) const {
    return read(signals_.message(peer_, n)) >= sync::rail_fills(n, RailLayout::kNumMessages);
  }

  // All that was put is there, as far as the network says; credits are not looked at.
  __device__ bool has_settled() const {
    const auto counter = static_cast<ncclGinCounter_t>(signals_.counter(peer_, block_));
    return gin_.readCounter(counter, 56, cuda::memory_order_acquire) >= *at(rail_.num_posted(peer_, block_));
  }

  // ---- this rank's memory of the ring

  __device__ u8* send_slot(u64 n) const { return rail_.memory + rail_.layout.send_slot(peer_, n, block_); }
  __device__ const u8* receive_slot(u64 n) const { return rail_.memory + rail_.layout.receive_slot(peer_, n, block_); }
  __device__ u8* message_out(u64 n) const { return rail_.memory + rail_.layout.message_out(peer_, n); }
  __device__ const u8* message_in(u64 n) const { return rail_.memory + rail_.layout.message_in(peer_, n); }
  __device__ u64* num_put() const { return at(rail_.layout.num_put(peer_, block_)); }
  __device__ u64* num_taken() const { return at(rail_.layout.num_taken(peer_, block_)); }

 private:
  __device__ u64* at(u64 offset) const { return reinterpret_cast<u64*>(rail_.memory + offset); }
  __device__ ncclTeam team() const {
    return rail_.is_rail_team != 0 ? ncclTeamRail(gin_.comm) : ncclTeamWorld(gin_.comm);
  }
  __device__ i32 team_rank() const { return rail_.team_rank[peer_]; }
  __device__ static ncclGinSignal_t signal(u64 number) { return static_cast<ncclGinSignal_t>(number); }
  __device__ u64 read(u64 number) const { return gin_.readSignal(signal(number), 64, cuda::memory_order_acquire); }
  __device__ void send(u64 to, u64 from, u32 num_bytes, u64 number) const {
    const auto window = static_cast<ncclWindow_t>(rail_.window);
    const auto counter = static_cast<ncclGinCounter_t>(signals_.counter(peer_, block_));
    ++*at(rail_.num_posted(peer_, block_));
    gin_.put(team(), team_rank(), window, to, window, from, num_bytes, ncclGin_WeakSignalAdd{signal(number), 1},
             ncclGin_WeakCounterInc{counter}, ncclCoopThread{}, ncclGin_None{}, cuda::thread_scope_thread,
             cuda::thread_scope_system);
  }

  const GinRail& rail_;
  GinSignals signals_;
  ncclGin gin_;
  i32 rank_;
  i32 peer_;
  i32 block_;
};

// The network carries by itself: no block of the grid is it.
__device__ inline bool serve_route(const WindowView&, const GinRail&) { return false; }

// By all threads, at their end: what a peer waits for must not be lost when this rank closes its window. A thread a peer; at the
// deadline it is given up, and the peer sees what is missing. An operation that goes on leaves that to its last launch: none holds SMs
// for what crosses meanwhile.
__device__ inline void leave_route(const WindowView& view, const GinRail& rail, bool goes_on) {
  if (goes_on) return;
  __syncthreads();
  const i32 peer = static_cast<i32>(threadIdx.x);
  if (peer >= view.num_ranks || peer == view.rank) return;
  const GinRing ring(rail, view.rank, peer, static_cast<i32>(blockIdx.x));
  const GinRing messages(rail, view.rank, peer, rail.layout.num_blocks);
  sync::LanePause pause(&view.host->abort, u64{1} << peer, &view.host->timeout_ns);
  sync::wait_until([&] { return ring.has_settled() && (blockIdx.x != 0 || messages.has_settled()); }, pause);
}

template <>
class Peers<Route::kGin> : public NodePeers<GinRail, GinRing> {
  using NodePeers::NodePeers;
};

}  // namespace weft::transport
