// The rail over a network: NCCL's GIN puts chunks and gives credits. Only what is compiled for the network engine may include this
// file, behind scaleout/headers.py's prologue; no other header knows NCCL.
//
//   ring (peer, block) lies where layout/rail.h says, in memory that is registered as one window
//   signal of a slot, credits: signals of GIN, always weak ones: such a signal says that its own put has settled, and nothing of others
//   context: block mod their number; one ring uses one context, whose signals are its own
#pragma once

#include <nccl.h>
#include <nccl_device.h>

#include "weft/config/base.h"
#include "weft/layout/rail.h"
#include "weft/sync/rail.h"

namespace weft::transport {

// A run-time argument of kernels. `lane` of a peer is its rank in the group, as in layout/rail.h.
struct GinRail {
  ncclDevComm comm;
  ncclWindow_t window;
  RailLayout layout;
  u64 first_signal = 0;
  i32 rank = 0;
  i32 num_contexts = 1;
  i32 first_peer = 0;   // the team's ranks are this one and every `peer_stride`-th behind it
  i32 peer_stride = 1;  // 1: the team of all ranks, else that of a rail
};

// Number of a signal in its context: a ring has one for each slot, then its credits.
class GinSignals {
 public:
  WEFT_HD constexpr GinSignals(u64 first, i32 num_blocks, i32 num_slots)
      : first_(first), num_rings_(static_cast<u64>(num_blocks) + 1), num_words_(static_cast<u64>(num_slots) + 1) {}

  WEFT_HD constexpr u64 slot(i32 lane, i32 block, u64 n) const { return ring(lane, block) + n % (num_words_ - 1); }
  WEFT_HD constexpr u64 credits(i32 lane, i32 block) const { return ring(lane, block) + num_words_ - 1; }
  WEFT_HD constexpr u64 message(i32 lane, u64 n) const {
    return ring(lane, static_cast<i32>(num_rings_) - 1) + n % RailLayout::kNumMessages;
  }
  // To ask NCCL for.
  WEFT_HD constexpr u64 count(i32 num_lanes) const { return static_cast<u64>(num_lanes) * num_rings_ * num_words_; }

 private:
  WEFT_HD constexpr u64 ring(i32 lane, i32 block) const {
    return first_ + (static_cast<u64>(lane) * num_rings_ + static_cast<u64>(block)) * num_words_;
  }

  u64 first_;
  u64 num_rings_;
  u64 num_words_;
};

// By one thread of a block. `n` counts chunks of the ring (peer, block), or messages of the peer; it only grows (R6).
class GinRing {
 public:
  __device__ GinRing(const GinRail& rail, i32 peer, i32 block)
      : rail_(rail),
        signals_(rail.first_signal, rail.layout.num_blocks, rail.layout.num_slots),
        gin_(rail.comm, block % rail.num_contexts),
        peer_(peer),
        block_(block) {}

  // The caller has a place, so this never waits for the network. What other threads stored to the slot is there at system scope.
  __device__ void put(u64 n, u32 num_bytes) const {
    send(rail_.layout.receive_slot(rail_.rank, n, block_), rail_.layout.send_slot(peer_, n, block_), num_bytes,
         signals_.slot(rail_.rank, block_, n));
  }
  __device__ bool has_arrived(u64 n) const {
    return read(signals_.slot(peer_, block_, n)) >= sync::rail_fills(n, static_cast<u32>(rail_.layout.num_slots));
  }
  __device__ void give_credit() const {
    gin_.signal(team(), team_rank(), ncclGin_WeakSignalAdd{signal(signals_.credits(rail_.rank, block_)), 1});
  }
  // Chunks that the peer has read.
  __device__ u64 credits() const { return read(signals_.credits(peer_, block_)); }

  // Of the ring of messages, `block` == num_blocks.
  __device__ void put_message(u64 n, u32 num_bytes) const {
    send(rail_.layout.message_in(rail_.rank, n), rail_.layout.message_out(peer_, n), num_bytes,
         signals_.message(rail_.rank, n));
  }
  __device__ bool has_message(u64 n) const {
    return read(signals_.message(peer_, n)) >= sync::rail_fills(n, RailLayout::kNumMessages);
  }

 private:
  __device__ ncclTeam team() const {
    return rail_.peer_stride == 1 ? ncclTeamWorld(rail_.comm) : ncclTeamRail(rail_.comm);
  }
  __device__ i32 team_rank() const { return (peer_ - rail_.first_peer) / rail_.peer_stride; }
  __device__ static ncclGinSignal_t signal(u64 number) { return static_cast<ncclGinSignal_t>(number); }
  __device__ u64 read(u64 number) const { return gin_.readSignal(signal(number), 64, cuda::memory_order_acquire); }
  __device__ void send(u64 to, u64 from, u32 num_bytes, u64 number) const {
    gin_.put(team(), team_rank(), rail_.window, to, rail_.window, from, num_bytes,
             ncclGin_WeakSignalAdd{signal(number), 1}, ncclGin_None{}, ncclCoopThread{}, ncclGin_None{},
             cuda::thread_scope_thread, cuda::thread_scope_system);
  }

  const GinRail& rail_;
  GinSignals signals_;
  ncclGin gin_;
  i32 peer_;
  i32 block_;
};

}  // namespace weft::transport
