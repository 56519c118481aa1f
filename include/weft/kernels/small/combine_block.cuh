// What the roles of a block of combine for small batches share: who does what, and where it lies.
#pragma once

#include "weft/config/small_kernel.h"
#include "weft/kernels/small/combine_args.h"
#include "weft/layout/gpu_plan.h"
#include "weft/transport/peers.cuh"

namespace weft::kernels {

// Columns [column, end) of a token's row.
struct SmallPlace {
  i32 token;
  i32 column;
  i32 end;
};

// With nodes, in shared memory: whose landing has this rank's contributions to the tokens of each rank, in which part, and where in it;
// then records of the block to each rank, and of each node.
template <i32 kRanks>
struct SmallLanding {
  i32 at[kRanks], part[kRanks], index;
  i32 num_out[kRanks], num_in[kRanks];
  bool has_no_places;
};

template <SmallCombineKernelConfig kConfig>
struct SmallCombineBlock {
  const SmallCombineKernelArgs& a;
  i32 lane;

  // One more may be the network.
  __device__ static i32 num_blocks() { return static_cast<i32>(gridDim.x) - kConfig.num_network_blocks(); }
  __device__ static SmallLanding<kConfig.num_ranks>& landing() {
    __shared__ SmallLanding<kConfig.num_ranks> shared;
    return shared;
  }

  __device__ i32 num_units(i32 num_tokens) const {
    return a.split.num_units(num_tokens, static_cast<i32>(blockIdx.x), num_blocks());
  }
  // Tokens whose side values the block has.
  __device__ static i32 token_here(i32 item) { return static_cast<i32>(blockIdx.x) + item * num_blocks(); }
  __device__ static i32 num_tokens_here(i32 num_tokens) {
    const i32 left = num_tokens - static_cast<i32>(blockIdx.x);
    return left > 0 ? (left + num_blocks() - 1) / num_blocks() : 0;
  }

  // Units of this block whose contributions are announced ahead of the others, so that adding them begins while those are on
  // their way; the same on every rank. 0: too few for a header of their own.
  __device__ i32 num_early() const {
    if constexpr (kConfig.has_nodes()) return 0;
    const i32 units = num_units(a.max_tokens);
    return units * kConfig.num_ranks < 4 * kConfig.kWorkers ? 0 : units / 2;
  }

  // A lane has one vector of a job, so it can have those of many rows at once.
  __device__ bool is_narrow() const { return a.split.part <= SmallSplit::granule(kConfig.dtype); }

  // Of the block's unit with this index.
  __device__ SmallPlace place(i32 index) const {
    const i32 unit = static_cast<i32>(blockIdx.x) + index * num_blocks();
    SmallPlace place;
    place.token = unit / a.split.num_parts;
    place.column = (unit - place.token * a.split.num_parts) * a.split.part;
    place.end = min(place.column + a.split.part, kConfig.hidden);
    return place;
  }

  // First element of the lane's vector `idx` of a place.
  __device__ i32 element(const SmallPlace& place, i32 idx) const {
    return place.column + (idx * 32 + lane) * (16 / dtype_bytes(kConfig.dtype));
  }

  // Where the contribution of `contributor` to a token of `owner` lies.
  __device__ u8* slot(const transport::Flight& flight, i32 owner, i32 contributor, i32 token) const {
    const auto heap = transport::DirectPeers(a.view).heap(owner);
    return (heap + a.view.layout.small_row(flight.turn.sequence, contributor, token)).address();
  }

  // With nodes: where a mate's contribution lies in a part of the landing of who adds.
  __device__ i32 landed_at(i32 part, i32 mate, i32 token) const {
    return (part * kConfig.node_ranks + mate) * a.max_tokens + token;
  }
  __device__ u8* landed(const transport::Flight& flight, i32 at, i32 part, i32 mate, i32 token) const {
    return slot(flight, at, 0, landed_at(part, mate, token));
  }
  __device__ float* landed_side(const transport::Flight& flight, i32 at, i32 part, i32 mate, i32 token, i32 k) const {
    return side_slot(flight, at, 0, landed_at(part, mate, token), k);
  }
  __device__ float* side_slot(const transport::Flight& flight, i32 owner, i32 contributor, i32 token, i32 k) const {
    const GpuWindowLayout& layout = a.view.layout;
    return reinterpret_cast<float*>((transport::DirectPeers(a.view).heap(owner) + layout.small_weights).address()) +
           layout.small_pick(flight.turn.sequence, contributor, token) + k;
  }
  // Where this rank's contribution to a token of `owner` goes, and a side value.
  __device__ u8* own_slot(const transport::Flight& flight, i32 owner, i32 token) const {
    if constexpr (kConfig.has_nodes()) {
      return landed(flight, landing().at[owner], landing().part[owner], landing().index, token);
    } else {
      return slot(flight, owner, a.view.rank, token);
    }
  }
  __device__ float* own_side_slot(const transport::Flight& flight, i32 owner, i32 token, i32 k) const {
    if constexpr (kConfig.has_nodes()) {
      return landed_side(flight, landing().at[owner], landing().part[owner], landing().index, token, k);
    } else {
      return side_slot(flight, owner, a.view.rank, token, k);
    }
  }

  // By pick: where the row of a pick lies. The slots of all contributors are dealt out by token and pick, since each has one writer.
  __device__ u8* pick_slot(const transport::Flight& flight, i32 owner, i32 token, i32 k) const {
    return slot(flight, owner, 0, token * kConfig.top_k + k);
  }
};

}  // namespace weft::kernels
