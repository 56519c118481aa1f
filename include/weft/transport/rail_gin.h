// What the kernels of a rail over a network are told (transport/rail_gin.cuh): no header of NCCL's is needed to fill it. The lane of a
// peer is its rank.
#pragma once

#include "weft/config/route.h"
#include "weft/layout/rail.h"

namespace weft::transport {

// A run-time argument of kernels whose route it is, in memory that they reach. A new generation of the rail has another.
struct GinRail {
  static constexpr u64 kMostCommBytes = 4096;

  alignas(16) u8 comm[kMostCommBytes] = {};  // ncclDevComm, as the library has filled it
  void* window = nullptr;                    // ncclWindow_t of `memory`
  u8* memory = nullptr;                      // this rank's, of num_bytes()
  RailLayout layout;
  i32 team_rank[kMaxGpuRanks] = {};  // by peer
  i32 num_contexts = 1;
  i32 is_rail_team = 0;    // connections along rails alone, else to all ranks
  u64 first_sequence = 0;  // of the last operation before the first that used this memory

  // Of this rank alone, behind the layout: what it has put into the ring.
  WEFT_HD constexpr u64 num_posted(i32 lane, i32 block) const {
    const u64 ring = static_cast<u64>(lane) * (static_cast<u64>(layout.num_blocks) + 1) + static_cast<u64>(block);
    return layout.total_bytes + ring * sizeof(u64);
  }
  WEFT_HD constexpr u64 num_bytes(i32 num_lanes) const { return num_posted(num_lanes, 0); }
};

// Number of a signal in its context: a ring has one for each slot, then its credits. A counter a ring: its puts that have been
// answered. The ring of block `num_blocks` is that of the messages.
class GinSignals {
 public:
  WEFT_HD constexpr GinSignals(i32 num_blocks, i32 num_slots)
      : num_rings_(static_cast<u64>(num_blocks) + 1), num_words_(static_cast<u64>(num_slots) + 1) {}

  WEFT_HD constexpr u64 slot(i32 lane, i32 block, u64 n) const { return ring(lane, block) + n % (num_words_ - 1); }
  WEFT_HD constexpr u64 credits(i32 lane, i32 block) const { return ring(lane, block) + num_words_ - 1; }
  WEFT_HD constexpr u64 message(i32 lane, u64 n) const {
    return ring(lane, static_cast<i32>(num_rings_) - 1) + n % RailLayout::kNumMessages;
  }
  WEFT_HD constexpr u64 counter(i32 lane, i32 block) const {
    return static_cast<u64>(lane) * num_rings_ + static_cast<u64>(block);
  }
  // To ask NCCL for.
  WEFT_HD constexpr u64 count(i32 num_lanes) const { return static_cast<u64>(num_lanes) * num_rings_ * num_words_; }
  WEFT_HD constexpr u64 num_counters(i32 num_lanes) const { return static_cast<u64>(num_lanes) * num_rings_; }

 private:
  WEFT_HD constexpr u64 ring(i32 lane, i32 block) const {
    return (static_cast<u64>(lane) * num_rings_ + static_cast<u64>(block)) * num_words_;
  }

  u64 num_rings_;
  u64 num_words_;
};

}  // namespace weft::transport
