// What all warps of a dispatch block share: its shared memory, and who takes which token.
#pragma once

#include "weft/config/kernel.h"
#include "weft/kernels/dispatch/args.h"
#include "weft/kernels/nodes.cuh"
#include "weft/kernels/route.cuh"
#include "weft/kernels/words.cuh"
#include "weft/transport/peers.cuh"

namespace weft::kernels {

constexpr i32 kRemembered = 64;        // items of a store warp that may wait for being told
constexpr u32 kAllArrived = 1u << 31;  // in num_arrived: there are no more

// What a stage holds that is no token of this rank, and the end of all.
constexpr i32 kEndOfItems = -1;
constexpr i32 kArrivedRow = -2;

// With nodes: what the stages hold, and what a block has to do with its rings.
template <DispatchKernelConfig kConfig, bool kHasNodes>
struct DispatchNodeShared {};
template <DispatchKernelConfig kConfig>
struct DispatchNodeShared<kConfig, true> {
  static constexpr i32 kNodes = kConfig.num_nodes();
  static constexpr i32 kRanks = kConfig.num_ranks;
  // Of the item in a stage. An own token: its record in the ring to each node, -1: none. An arrived row: its source, its token
  // there, and its record in [0].
  i32 record[kConfig.num_stages][kNodes];
  i32 source[kConfig.num_stages];
  i32 source_token[kConfig.num_stages];
  // To each node: who forwards there, -1: nobody; the first chunk of this call; records of this block, those dealt out, and those
  // that are complete.
  i32 forwarder[kNodes];
  u64 first_put[kNodes];
  i32 num_to[kNodes];
  i32 num_rows_to[kNodes];  // of all blocks
  i32 num_dealt[kNodes];
  i32 num_stored[kNodes];
  // From each rank that this one forwards for: the first chunk of this call; its rows before those of this block, and records of
  // this block; those dealt out, and those stored; the token at which to look for the next; tokens of the run whose rows have
  // places.
  u64 first_taken[kRanks];
  i32 first_row[kRanks];
  i32 num_from[kRanks];
  i32 num_loaded[kRanks];
  i32 num_done[kRanks];
  i32 next_token[kRanks];
  u32 num_placed[kRanks];
  i32 start_of[kRanks + 1][kConfig.node_ranks];  // rank_major: its first row on each mate; at last all rows
};

template <DispatchKernelConfig kConfig>
struct DispatchShared : DispatchNodeShared<kConfig, kConfig.has_nodes()> {
  using Place = typename transport::Peers<kConfig.route>::Place;
  u64 full[kConfig.num_stages];   // loaded
  u64 ready[kConfig.num_stages];  // quantised
  u64 empty[kConfig.num_stages];
  i32 token[kConfig.num_stages];  // that the stage holds; -1: no more come to its warps
  u64 fan_full[kConfig.num_fan_stages > 0 ? kConfig.num_fan_stages : 1];  // by expert: a received row is loaded
  u32 num_planned[DispatchKernelConfig::kPeriods];  // by expert: picks of a chunk whose places are known
  // By expert, of each store warp: the tokens of its last items, how many of its items are at their places, and how many the
  // ranks have been told of.
  i32 sent[kStoreWarps][kRemembered];
  u32 num_arrived[kStoreWarps];
  u32 num_told[kStoreWarps];
  u32 has_failed;                // set by any thread: the block leaves without another header
  u32 bad_source;                // 1 + a rank that has said a count that makes no sense; 0: none has
  u32 is_given_up;               // a rank has no room: all ranks see it and go on to the next call
  u32 has_bad_ids;               // among those that this block has counted; block 0: that any has
  GpuRankMask staged;            // whose result does not fit its heap
  GpuRankMask with_int64;        // rank_major: that have ids of 8 bytes, else of 4
  i32 total[kConfig.num_ranks];  // rank_major: rows from here to each rank
  i32 start[kConfig.num_ranks];  // rank_major: the first of them there
  i32 limit[kConfig.num_ranks];  // rows there; masked: rows of an expert there
  Place x[kConfig.num_ranks];    // row 0 there, in the heap or in the landing
  Place scales[kConfig.num_ranks];
  Place ids[kConfig.num_ranks];
  Place weights[kConfig.num_ranks];
  Place table[kConfig.num_ranks];  // int32 entries there for this rank's tokens
  i64 needed[kConfig.num_ranks];   // rows of the result there
  i32 num_tokens[kConfig.num_ranks];
  i32 own_rows;  // rank_major: rows that this rank receives
  BadIds bad_ids;
};

template <DispatchKernelConfig kConfig>
struct DispatchState {
  static constexpr i32 kRanks = kConfig.num_ranks;
  static constexpr i32 kTopk = kConfig.top_k;
  static constexpr i32 kExperts = kConfig.num_experts;
  static constexpr i32 kLocal = kConfig.num_local_experts();
  static constexpr ExpertPlacement kPlacement = kConfig.experts();
  static constexpr i32 kRowBytes = kConfig.wire_row_bytes();
  static constexpr i32 kScaleBytes = kConfig.scale_row_bytes;
  static constexpr i32 kTableWidth = kConfig.is_by_expert() ? kTopk : 1;
  static constexpr i32 kPeriods = DispatchKernelConfig::kPeriods;
  static constexpr u64 kOnePlanned = u64{1} << 32;  // in the word of a queue
  using Peers = transport::Peers<kConfig.route>;
  using Place = typename Peers::Place;

  const DispatchKernelArgs& a;
  DispatchShared<kConfig>& s;
  u8* dynamic;
  transport::Flight flight;
  i32 warp, lane;

  __device__ i32 rank() const { return a.view.rank; }
  __device__ Peers peers() const { return transport::peers_of<kConfig.route>(a, flight); }
  // To which this rank stores.
  __device__ bool is_peer(i32 other) const {
    if constexpr (kConfig.has_nodes()) {
      if (!is_near(other)) return false;
    }
    return other < kRanks && other != rank() && flight.is_active(other);
  }
  __device__ bool is_near(i32 other) const {
    if constexpr (kConfig.has_nodes()) return nodes().map.are_mates(rank(), other);
    return true;
  }
  __device__ auto nodes() const { return Nodes<kConfig>(a.view, peers(), flight); }
  __device__ bool is_staged(i32 other) const { return s.staged.has(other); }

  // ---- dynamic shared memory: holes | groups or periods | counts | stages | fan stages

  __device__ i32* hole_begin() const { return reinterpret_cast<i32*>(dynamic); }  // [kLocal]
  __device__ i32* hole_end() const { return hole_begin() + kLocal; }
  __device__ i32* index() const { return hole_begin() + (kConfig.is_by_expert() ? 2 * kLocal : 0); }
  // A group is 32 consecutive tokens. Bit l of goers: token l of the group has a pick on the rank.
  __device__ u32& goers(i32 to, i32 group) const {
    return reinterpret_cast<u32*>(index())[to * kConfig.num_groups + group];
  }
  __device__ i32& rows_before(i32 to, i32 group) const { return index()[(kRanks + to) * kConfig.num_groups + group]; }
  // Picks of the expert in a chunk of this block; then those before the chunk, and planning counts on.
  __device__ i32* before(i32 period) const { return index() + period * kExperts; }
  // Picks of this rank's tokens for each expert.
  __device__ i32* mine() const {
    return index() + (kConfig.is_by_expert() ? kPeriods * kExperts : 2 * kRanks * kConfig.num_groups);
  }
  // With nodes: tokens that go to the node, in groups before this one.
  __device__ i32& tokens_before(i32 node, i32 group) const {
    return mine()[(kConfig.is_by_expert() ? 3 : 1) * kExperts + node * kConfig.num_groups + group];
  }
  // By expert, of a warp that plans rows to forward: the next place of each expert of the node, then that behind the last.
  __device__ i32* forward_places(i32 planner) const {
    return &tokens_before(kConfig.num_nodes(), 0) + planner * 2 * kConfig.node_experts();
  }
  // Tokens of a group that go to the node.
  __device__ u32 goers_to_node(const Nodes<kConfig>& nodes, i32 node, i32 group) const {
    u32 all = 0;
    for (i32 idx = 0; idx < nodes.map.size(node); ++idx) all |= goers(nodes.map.first(node) + idx, group);
    return all;
  }
  // Bits of a group that are tokens from `begin` on, before `end`.
  __device__ static u32 bits_between(i32 group, i32 begin, i32 end) {
    const i32 low = min(max(begin - group * 32, 0), 32), high = min(max(end - group * 32, 0), 32);
    const u32 below_high = high == 32 ? ~0u : (1u << high) - 1;
    return low == 32 ? 0u : below_high & ~((1u << low) - 1);
  }
  __device__ i32* place() const { return mine() + kExperts; }      // row of this rank's first pick of the expert
  __device__ i32* total_of() const { return place() + kExperts; }  // picks of all ranks for the expert

  __device__ u8* stage(i32 idx) const { return dynamic + kConfig.index_bytes() + idx * kConfig.stage_bytes(); }
  __device__ u8* fan_stage(i32 idx) const { return stage(kConfig.num_stages) + idx * kConfig.fan_stage_bytes(); }

  // ---- tokens by expert: those of a block lie side by side and are its queue, in kPeriods chunks that are planned on their own.

  // Of a rank with so many tokens: the first one of a block, and how many it has.
  __device__ static i32 queue_begin(i32 block, i32 num_tokens) {
    return num_tokens / kConfig.num_blocks * block + min(block, num_tokens % kConfig.num_blocks);
  }
  __device__ static i32 queue_len(i32 block, i32 num_tokens) {
    return num_tokens / kConfig.num_blocks + (block < num_tokens % kConfig.num_blocks ? 1 : 0);
  }

  // Of this block.
  __device__ i32 chunk_tokens() const {
    return max((queue_len(static_cast<i32>(blockIdx.x), a.num_tokens) + kPeriods - 1) / kPeriods, 1);
  }

  // Counts what this rank's blocks have taken of a queue, and what of it is planned.
  __device__ u64* queue_word(i32 block) const {
    return reinterpret_cast<u64*>(a.view.own_control() + a.view.layout.queue(block));
  }

  // Stages of a store warp are its own for good, and so are those of a warp that quantises.
  __device__ static i32 stage_of(i32 store_warp, i32 item) {
    return (item * kStoreWarps + store_warp) % kConfig.num_stages;
  }
  __device__ static u32 parity_of(i32 store_warp, i32 item) {
    return static_cast<u32>((item * kStoreWarps + store_warp) / kConfig.num_stages) & 1u;
  }

  // By expert: weights of this rank's result.
  __device__ float* own_weights() const { return reinterpret_cast<float*>(a.view.own_heap() + a.placement.weights); }

  // ---- failure

  __device__ void fail(transport::ErrorCause cause, Phase phase, i32 peer) {
    transport::record(a.view, flight, cause, phase, peer, 0);
    ptx::st_relaxed_sys(&a.view.words()->broken, static_cast<u64>(cause));
    s.has_failed = 1;
  }

  // A copy of our own that does not end: the GPU has gone wrong, and this block says nothing more to anyone.
  __device__ bool wait_local(u64* barrier, u32 parity) {
    if (sync::wait_barrier(barrier, parity)) return true;
    fail(transport::ErrorCause::kDeadline, Phase::kSend, rank());
    return false;
  }
  // With nodes: the same of a copy whose begin may have to wait for a peer, and so may that of each item before it.
  __device__ bool wait_long(u64* barrier, u32 parity) {
    if (sync::wait_barrier<kConfig.filler_waits()>(barrier, parity, &a.view.host->timeout_ns)) return true;
    fail(transport::ErrorCause::kDeadline, Phase::kSend, rank());
    return false;
  }
};

}  // namespace weft::kernels
