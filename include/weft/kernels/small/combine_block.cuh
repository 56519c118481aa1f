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

template <SmallCombineKernelConfig kConfig>
struct SmallCombineBlock {
  const SmallCombineKernelArgs& a;
  i32 lane;

  __device__ i32 num_units(i32 num_tokens) const {
    return a.split.num_units(num_tokens, static_cast<i32>(blockIdx.x), static_cast<i32>(gridDim.x));
  }

  // Units of this block whose contributions are announced ahead of the others, so that adding them begins while those are on
  // their way; the same on every rank. 0: too few for a header of their own.
  __device__ i32 num_early() const {
    const i32 units = num_units(a.max_tokens);
    return units * kConfig.num_ranks < 4 * kConfig.kWorkers ? 0 : units / 2;
  }

  // A lane has one vector of a job, so it can have those of many rows at once.
  __device__ bool is_narrow() const { return a.split.part <= SmallSplit::granule(kConfig.dtype); }

  // Of the block's unit with this index.
  __device__ SmallPlace place(i32 index) const {
    const i32 unit = static_cast<i32>(blockIdx.x) + index * static_cast<i32>(gridDim.x);
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

  // By pick: where the row of a pick lies. The slots of all contributors are dealt out by token and pick, since each has one writer.
  __device__ u8* pick_slot(const transport::Flight& flight, i32 owner, i32 token, i32 k) const {
    return slot(flight, owner, 0, token * kConfig.top_k + k);
  }
};

}  // namespace weft::kernels
