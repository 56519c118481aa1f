// Rails: who forwards for whom, and where slots, signals, credits and messages of a rank lie in its rail memory. Formulas only, for host
// and kernels; docs/protocols/rail.md explains them, sync/rail.h counts.
//
//   lane (of one peer): words of the blocks' rings | words of the messages | send slots | receive slots | messages out | messages in
#pragma once

#include "weft/config/base.h"
#include "weft/config/operation.h"
#include "weft/layout/checked.h"
#include "weft/layout/window.h"

namespace weft {

// Nodes are runs of `node_ranks` ranks, the last may have fewer.
struct RailMap {
  i32 num_ranks = 1;
  i32 node_ranks = 0;  // 0: all ranks are one node
  u64 active = ~u64{0};

  WEFT_HD constexpr bool has_rails() const { return node_ranks > 0 && node_ranks < num_ranks; }
  WEFT_HD constexpr i32 node_size() const { return has_rails() ? node_ranks : num_ranks; }  // of all nodes but the last
  WEFT_HD constexpr i32 num_nodes() const { return (num_ranks + node_size() - 1) / node_size(); }
  WEFT_HD constexpr i32 node(i32 rank) const { return rank / node_size(); }
  WEFT_HD constexpr i32 index(i32 rank) const { return rank % node_size(); }
  WEFT_HD constexpr i32 first(i32 node) const { return node * node_size(); }
  WEFT_HD constexpr i32 size(i32 node) const {
    const i32 left = num_ranks - first(node);
    return left < node_size() ? left : node_size();
  }
  WEFT_HD constexpr bool is_active(i32 rank) const { return (active >> rank & 1) != 0; }
  WEFT_HD constexpr bool are_mates(i32 one, i32 other) const { return node(one) == node(other); }

  // rail[node][index]: the living rank that stands for that index; -1: none lives.
  WEFT_HD constexpr i32 rail(i32 node, i32 index) const {
    for (i32 step = 0; step < size(node); ++step) {
      const i32 rank = first(node) + (index + step) % size(node);
      if (is_active(rank)) return rank;
    }
    return -1;
  }
  // Who brings to `node` what `source` sends there, and sums for it; the source itself in its own.
  WEFT_HD constexpr i32 forwarder(i32 source, i32 node_idx) const {
    return node(source) == node_idx ? source : rail(node_idx, index(source));
  }
};

constexpr u16 kNoRailExpert = 0xffff;  // in a message: no expert of this node

// What a message begins with. A first dispatch goes on as RailLayout says.
struct RailMessage {
  u64 header = 0;                                     // sync/header.h; of a refusal, too
  u64 caller = 0;                                     // kernels: the word behind the header
  u8 payload[WindowLayout::kPayloadFixedBytes] = {};  // CountPayload, RefusalPayload or NeedPayload
};

// One lane of a rank's rail memory is as large as any other.
struct RailShape {
  i32 num_lanes = 0;  // peers
  i32 num_blocks = 1;
  i32 node_ranks = 1;  // most of a node
  i32 num_local_experts = 1;
  i32 top_k = 1;
  i64 max_tokens = 0;
  i64 max_row_bytes = 0;  // data and scales
};

struct RailLayout {
  static constexpr u64 kMostRingBytes = u64{64} << 20;  // of all send rings, and of all receive rings
  static constexpr i32 kMostChunkRows = 16;
  static constexpr i32 kNumMessages = kNumParities;

  i32 num_blocks = 1;
  i32 num_slots = 4;   // of a ring, 2 to 4
  i32 chunk_rows = 1;  // records of a chunk
  i32 num_local_experts = 1;
  i32 node_ranks = 1;
  i32 top_k = 1;
  u64 slot_bytes = 0;
  u64 message_bytes = 0;
  u64 words_bytes = 0;  // of one ring
  u64 lane_bytes = 0;
  u64 total_bytes = 0;
  bool ok = false;

  WEFT_HD static constexpr RailLayout make(const RailShape& shape) {
    RailLayout layout;
    const u64 num_rings = static_cast<u64>(shape.num_lanes) * static_cast<u64>(shape.num_blocks);
    if (num_rings == 0 || shape.node_ranks * shape.num_local_experts >= kNoRailExpert) return layout;
    // Data and scales each go on to a multiple of 16.
    const u64 record =
        align_up(static_cast<u64>(shape.max_row_bytes), 16) + 32 + align_up(static_cast<u64>(shape.top_k) * 4, 16);
    layout.num_blocks = shape.num_blocks;
    layout.num_local_experts = shape.num_local_experts;
    layout.node_ranks = shape.node_ranks;
    layout.top_k = shape.top_k;
    layout.chunk_rows = kMostChunkRows;
    while (layout.chunk_rows > 1 && 2 * num_rings * record * static_cast<u64>(layout.chunk_rows) > kMostRingBytes)
      layout.chunk_rows /= 2;
    layout.slot_bytes = align_up(record * static_cast<u64>(layout.chunk_rows), 256);
    while (layout.num_slots > 2 && num_rings * layout.slot_bytes * static_cast<u64>(layout.num_slots) > kMostRingBytes)
      --layout.num_slots;
    layout.words_bytes = align_up((kFirstSignal + static_cast<u64>(layout.num_slots)) * sizeof(u64), kCacheLine);
    layout.message_bytes = align_up(layout.experts(shape.max_tokens) + static_cast<u64>(shape.max_tokens) *
                                                                           static_cast<u64>(shape.top_k) * sizeof(u16),
                                    256);
    const CheckedSize lane = CheckedSize(layout.slots(0)) +
                             CheckedSize(layout.slot_bytes) * CheckedSize(ring_slots(layout)) +
                             CheckedSize(layout.message_bytes) * CheckedSize(2 * kNumMessages);
    layout.lane_bytes = lane.aligned(4096).value;
    const CheckedSize total = lane.aligned(4096) * CheckedSize(static_cast<u64>(shape.num_lanes));
    layout.total_bytes = total.value;
    layout.ok = total.ok;
    return layout;
  }

  // ---- words of a lane, all u64; the ring of block `num_blocks` is that of the messages

  // Of this rank alone: chunks that it has put, chunks that it has read.
  WEFT_HD constexpr u64 num_put(i32 lane, i32 block) const { return words(lane, block); }
  WEFT_HD constexpr u64 num_taken(i32 lane, i32 block) const { return words(lane, block) + sizeof(u64); }
  // Added to by the network: chunks that the peer has read, and how often each receive slot was filled.
  WEFT_HD constexpr u64 credits(i32 lane, i32 block) const { return words(lane, block) + 2 * sizeof(u64); }
  WEFT_HD constexpr u64 signals(i32 lane, i32 block) const { return words(lane, block) + kFirstSignal * sizeof(u64); }
  WEFT_HD constexpr u64 signal(i32 lane, i32 block, u64 n) const {
    return signals(lane, block) + n % static_cast<u64>(num_slots) * sizeof(u64);
  }
  WEFT_HD constexpr u64 message_signal(i32 lane, u64 n) const {
    return signals(lane, num_blocks) + n % kNumMessages * sizeof(u64);
  }

  // ---- slots of chunk or message n

  WEFT_HD constexpr u64 send_slot(i32 lane, u64 n, i32 block = 0) const {
    return slots(lane) +
           (static_cast<u64>(block) * static_cast<u64>(num_slots) + n % static_cast<u64>(num_slots)) * slot_bytes;
  }
  WEFT_HD constexpr u64 receive_slot(i32 lane, u64 n, i32 block = 0) const {
    return send_slot(lane, n, num_blocks + block);
  }
  WEFT_HD constexpr u64 message_out(i32 lane, u64 n) const {
    return slots(lane) + ring_slots(*this) * slot_bytes + n % kNumMessages * message_bytes;
  }
  WEFT_HD constexpr u64 message_in(i32 lane, u64 n) const {
    return message_out(lane, n) + kNumMessages * message_bytes;
  }

  // ---- parts of a message, from its beginning

  // i32: rows for that rank of the node, then its picks by expert.
  WEFT_HD constexpr u64 counts(i32 index) const {
    return sizeof(RailMessage) + static_cast<u64>(index) * static_cast<u64>(1 + num_local_experts) * sizeof(i32);
  }
  WEFT_HD constexpr u64 tokens() const { return align_up(counts(node_ranks), 16); }  // u32, a bit each
  WEFT_HD constexpr u64 experts(i64 num_tokens) const {                              // u16 [rows, K]
    return align_up(tokens() + static_cast<u64>((num_tokens + 31) / 32) * sizeof(u32), 16);
  }

 private:
  static constexpr u64 kFirstSignal = 8;  // a line of what one side writes, then signals

  WEFT_HD static constexpr u64 ring_slots(const RailLayout& layout) {
    return 2 * static_cast<u64>(layout.num_blocks) * static_cast<u64>(layout.num_slots);
  }
  WEFT_HD constexpr u64 words(i32 lane, i32 block) const {
    return static_cast<u64>(lane) * lane_bytes + static_cast<u64>(block) * words_bytes;
  }
  WEFT_HD constexpr u64 slots(i32 lane) const { return align_up(words(lane, num_blocks + 1), 256); }
};

}  // namespace weft
