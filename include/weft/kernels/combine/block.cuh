// What the roles of a block of combine share: its arguments, its shared memory and the numbering of its tokens.
#pragma once

#include "weft/kernels/combine/args.h"
#include "weft/kernels/combine/ring.cuh"
#include "weft/kernels/nodes.cuh"
#include "weft/kernels/words.cuh"
#include "weft/layout/gpu_plan.h"
#include "weft/layout/routing.h"
#include "weft/transport/peers.cuh"

namespace weft::kernels {

// Progress words of (source, block).
constexpr i32 kPushChannel = 0;
constexpr i32 kSideChannel = 1;
static_assert(kSideChannel < kNumProgress);

struct Contributor {
  const u8* rows = nullptr;  // pulled: row 0 of its expert output
  i32 num_rows = 0;
  u32 is_pulled = 0;
};

// What a warp that makes sums hands to the warp that stores them.
struct alignas(16) PushItem {
  i32 index = -1;  // of the token; -1: nothing comes after it
  i32 owner = 0;
  i32 offset = 0;  // in the row on the wire, in bytes
  i32 num_bytes = 0;
};

// With nodes: where contributions go, and what a block has to do with its rings. All but the first two by the warp that loads.
template <CombineKernelConfig kConfig, bool kHasNodes>
struct CombineNodeShared {};
template <CombineKernelConfig kConfig>
struct CombineNodeShared<kConfig, true> {
  // Of a token of each rank: who adds for it in this node, and in which part of that one's landing.
  i32 land_at[kConfig.num_ranks];
  i32 land_part[kConfig.num_ranks];
  // To each rank that this one forwards for: the first chunk of this call; the index of the next token; records dealt out, and done.
  u64 first_put[kConfig.num_ranks];
  i32 next_index[kConfig.num_ranks];
  i32 num_dealt[kConfig.num_ranks];
  i32 num_done[kConfig.num_ranks];
  // From each node: who forwards there, -1: nobody; the first chunk of this call; records dealt out, and added.
  i32 forwarder[kConfig.num_nodes()];
  u64 first_taken[kConfig.num_nodes()];
  i32 num_read[kConfig.num_nodes()];
  i32 num_added[kConfig.num_nodes()];
  u32 done[kRingCells];  // what there is to say when the item of a cell is added: CombineNodes
};

template <CombineKernelConfig kConfig>
struct CombineShared : CombineNodeShared<kConfig, kConfig.has_nodes()> {
  static constexpr i32 kPushers = max_of(kConfig.sum_warps, 1);
  static constexpr i32 kSumSlots = max_of(kConfig.sum_warps * kConfig.out_slots(), 1);
  u32 has_failed;  // set by any thread: the block says nothing more to anyone
  Contributor contributor[kConfig.num_ranks];
  i32 num_items[kConfig.num_ranks];  // tokens of the source that this block sees to
  Ring<kConfig.ring_slots()> reduce[kConfig.reduce_rings];
  i32 own_row[kConfig.reduce_rings]
             [kConfig.adds_own_rows() ? kRingCells : 1];  // of the item in each of its cells; -1: none
  Ring<kConfig.push_slots> push;
  u64 sum_full[kSumSlots];
  u64 sum_empty[kSumSlots];
  PushItem sum_item[kSumSlots];
  u32 num_pushed[kPushers];  // tokens of the block whose pushed rows have arrived, but for those of the other warps
  i32 num_plan_items[2];
  u32 num_taken[2];  // of them, by warps
  u64 plan_full[2];
  u64 plan_empty[2];
};

template <CombineKernelConfig kConfig>
struct CombineBlock {
  static constexpr i32 kRanks = kConfig.num_ranks;
  static constexpr i32 kWidth = kConfig.plan_width();
  using Shared = CombineShared<kConfig>;
  using Peers = transport::Peers<kConfig.route>;

  const CombineKernelArgs& a;
  Shared& s;
  u8* dynamic;
  const transport::Flight& flight;
  i32 lane;

  __device__ u8* reduce_slot(i32 ring, i32 idx) const {
    return dynamic + (ring * kConfig.ring_slots() + idx) * kConfig.reduce_slot_bytes();
  }
  __device__ u8* sum_stages(i32 warp) const {
    return dynamic + kConfig.reduce_slots * kConfig.reduce_slot_bytes() + warp * kConfig.sum_warp_bytes();
  }
  // Of the slots of all warps that make sums.
  __device__ u8* sum_slot(i32 idx) const {
    return sum_stages(idx / kConfig.out_slots()) + kConfig.fetch_stages() * kConfig.stage_bytes() +
           idx % kConfig.out_slots() * kConfig.out_slot_bytes();
  }
  __device__ u8* push_slot(i32 idx) const { return sum_stages(kConfig.sum_warps) + idx * kConfig.push_slot_bytes(); }
  // Behind the slots: two pieces of the receive plan, the weights of their rows, and the contributions that they make.
  __device__ i32* plan_rows(i32 piece) const {
    return reinterpret_cast<i32*>(dynamic + kConfig.slots_bytes()) + piece * kConfig.plan_entries();
  }
  __device__ float* plan_weights(i32 piece) const {
    return reinterpret_cast<float*>(plan_rows(2)) + piece * kConfig.plan_entries();
  }
  __device__ RingItem* plan_items(i32 piece) const {
    u8* items = dynamic + kConfig.slots_bytes() + kConfig.plan_rows_bytes();
    return reinterpret_cast<RingItem*>(items) + piece * kConfig.plan_tokens() * kRanks;
  }

  // Tokens are dealt out to blocks one by one: blocks then work near each other, and few pages are in use at a time.
  __device__ i32 token_of(i32 index) const {
    return a.first_token + static_cast<i32>(blockIdx.x) + index * kConfig.num_blocks;
  }
  __device__ i32 num_items_below(i32 end_token) const {
    const i32 left = end_token - token_of(0);
    return left > 0 ? (left + kConfig.num_blocks - 1) / kConfig.num_blocks : 0;
  }

  __device__ Peers peers() const { return transport::peers_of<kConfig.route>(a, flight); }
  __device__ auto nodes() const { return Nodes<kConfig>(a.view, peers(), flight); }

  // By pick: the weights of the contributions in a cell of a ring.
  __device__ float* pick_weights(i32 ring, i32 cell) const {
    u8* weights = dynamic + kConfig.slots_bytes() + kConfig.plan_bytes();
    return reinterpret_cast<float*>(weights) + (ring * kRingCells + cell) * kConfig.top_k;
  }

  // Where the contribution of `contributor` to a token of `owner` lands; by pick: that of a pick.
  __device__ typename Peers::Place landing(i32 owner, i32 token, i32 contributor) const {
    if constexpr (kConfig.has_nodes()) {
      return peers().heap(s.land_at[owner]) + a.view.layout.landing_rows +
             node_place(owner, token, contributor) * kConfig.wire_row_bytes();
    }
    const i64 row = static_cast<i64>(token - a.first_token) * kConfig.contributions() + contributor;
    return peers().heap(owner) + a.view.layout.landing_rows + row * kConfig.wire_row_bytes();
  }

  // With nodes: of a mate's contribution, in the landing of who adds for the token.
  __device__ i64 node_place(i32 owner, i64 token, i32 contributor) const {
    const i64 place = static_cast<i64>(s.land_part[owner]) * (a.end_token - a.first_token) + token - a.first_token;
    return place * kConfig.node_ranks + contributor % kConfig.node_ranks;
  }
  // The side values of `contributor` for a token of `owner`, K floats.
  __device__ typename Peers::Place side_landing(i32 owner, i32 contributor, i64 token) const {
    if constexpr (kConfig.has_nodes()) {
      return (peers().heap(s.land_at[owner]) + a.view.layout.landing_weights)
          .template at<float>(node_place(owner, token, contributor) * kConfig.top_k);
    }
    return (peers().heap(owner) + a.view.layout.landing_weights)
        .template at<float>((contributor * a.view.layout.max_tokens + token) * kConfig.top_k);
  }

  // The block says nothing more to anyone; the reason has been recorded.
  __device__ void leave() const { *static_cast<volatile u32*>(&s.has_failed) = 1; }
  __device__ void fail(transport::ErrorCause cause, Phase phase, i32 peer) const {
    transport::record(a.view, flight, cause, phase, peer, 0);
    ptx::st_relaxed_sys(&a.view.words()->broken, static_cast<u64>(cause));
    leave();
  }
  // A copy of our own that does not end: the GPU has gone wrong.
  __device__ void fail_copy() const { fail(transport::ErrorCause::kDeadline, Phase::kReduce, a.view.rank); }
  __device__ bool has_failed() const { return *static_cast<volatile u32*>(&s.has_failed) != 0; }
};

}  // namespace weft::kernels
