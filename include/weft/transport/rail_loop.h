// The memory of a loop-back network: rings of slots between blocks of the same number, one ring a direction and peer. One
// message is one slot with a signal of its own; nothing is assumed of the order in which slots arrive.
//
//   sender    takes slot n of its send ring (n only grows), fills it, says "full"; it may while the peer has read n - num_slots
//   network   copies full slots into the peer's receive ring, in any order, then stores the signal of the slot
//   receiver  takes the messages of a ring in the order of n, and says how many it has read: the sender's credit
#pragma once

#include "weft/config/base.h"
#include "weft/layout/gpu_window.h"

namespace weft::transport {

// A run-time argument of kernels whose route it is, in memory that they reach.
struct LoopRail {
  u8* memory[kMaxGpuRanks] = {};  // rail_bytes() of each rank, zeroed; that of others is touched by the network alone
  i32 num_ranks = 1;
  i32 num_blocks = 1;  // that have rings
  i32 num_slots = 4;
  u64 slot_bytes = 256;

  static constexpr u64 kHeadBytes = kCacheLine;  // of a ring and of the rail: a few words
  WEFT_HD constexpr u64 signals_bytes() const { return static_cast<u64>(num_slots) * 2 * sizeof(u64); }
  WEFT_HD constexpr u64 ring_bytes() const {
    return (kHeadBytes + signals_bytes() + static_cast<u64>(num_slots) * slot_bytes + kCacheLine - 1) / kCacheLine *
           kCacheLine;
  }
  WEFT_HD constexpr u64 rail_bytes() const {
    return kHeadBytes + 2 * static_cast<u64>(num_ranks) * static_cast<u64>(num_blocks) * ring_bytes();
  }
  // From the start of a rank's memory.
  WEFT_HD constexpr u64 ring(bool is_send, i32 peer, i32 block) const {
    const u64 row = (is_send ? 0 : static_cast<u64>(num_ranks)) + static_cast<u64>(peer);
    return kHeadBytes + (row * static_cast<u64>(num_blocks) + static_cast<u64>(block)) * ring_bytes();
  }
};

// Words of a rank: blocks that have ended, and launches that the network and the receiver have seen to.
struct LoopHead {
  u64 num_ended = 0;
  u64 num_carried = 0;
  u64 num_received = 0;
};

// What a slot begins with; data follow.
struct LoopMessage {
  u32 kind = 0;
  u32 num_bytes = 0;  // of data, a multiple of 4
  u32 is_control = 0;
  u32 unused = 0;
  u64 offset = 0;  // where it goes, in the receiver's control memory or heap
  u64 word = 0;    // a signal's value
};
static_assert(sizeof(LoopMessage) == 32);

}  // namespace weft::transport
