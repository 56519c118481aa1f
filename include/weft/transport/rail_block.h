// The memory of a rail whose network is a block of each rank's grid (transport/rail_block.cuh): that of layout/rail.h, and behind it
// what the block needs. The lane of a peer is its rank.
#pragma once

#include "weft/config/route.h"
#include "weft/layout/rail.h"

namespace weft::transport {

// What the network has been asked to put of one slot.
struct BlockPost {
  u64 number = 0;     // 1 + that of the chunk or message
  u64 num_bytes = 0;  // in time before it
  u64 carried = 0;    // the network's: the last number that it has carried
  u64 unused = 0;
};

// Of the credits of a ring.
struct BlockCredits {
  u64 num_given = 0;
  u64 num_carried = 0;  // the network's
};

// A run-time argument of kernels whose route it is, in memory that they reach.
struct BlockRail {
  u8* memory[kMaxGpuRanks] = {};  // num_bytes() of each rank, zeroed; that of others is touched by the network alone
  RailLayout layout;
  u64 first_sequence = 0;  // of the last operation before the first that used this memory

  static constexpr u64 kMostSlots = 4;
  static constexpr u64 kRingBytes = sizeof(BlockCredits) + kMostSlots * sizeof(BlockPost);
  // Of this rank's memory: blocks that have ended, then blocks whose end the network has seen.
  WEFT_HD constexpr u64 head() const { return layout.total_bytes; }
  // The messages are the ring behind those of the blocks.
  WEFT_HD constexpr u64 credits(i32 lane, i32 block) const {
    const u64 ring = static_cast<u64>(lane) * (static_cast<u64>(layout.num_blocks) + 1) + static_cast<u64>(block);
    return head() + kCacheLine + ring * kRingBytes;
  }
  WEFT_HD constexpr u64 post(i32 lane, i32 block, u64 slot) const {
    return credits(lane, block) + sizeof(BlockCredits) + slot * sizeof(BlockPost);
  }
  WEFT_HD constexpr u64 num_bytes(i32 num_lanes) const { return credits(num_lanes, 0); }
};

}  // namespace weft::transport
