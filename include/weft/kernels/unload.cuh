// Takes the rows of a dispatch out of the landing, into ordinary tensors. Plain loads and stores: the dispatch before it on
// the stream has ended, the next one cannot begin before this has (docs/protocols/nvlink-dispatch.md). One warp a row of the
// landing; a row that several picks of its token asked for is read once for each. Holes are not written here.
#pragma once

#include "weft/kernels/unload_arguments.h"
#include "weft/layout/gpu_plan.h"
#include "weft/ptx/thread.cuh"

namespace weft::kernels {

struct alignas(16) Copied16 {
  u64 word[2];
};

// A whole warp. Words as wide as both addresses and the length allow.
template <class Word>
__device__ void copy_words(u8* to, const u8* from, i64 num_bytes, i32 lane) {
  const Word* source = reinterpret_cast<const Word*>(from);
  Word* target = reinterpret_cast<Word*>(to);
  for (i64 idx = lane; idx < num_bytes / static_cast<i64>(sizeof(Word)); idx += ptx::kWarpLanes)
    target[idx] = source[idx];
}

__device__ inline void copy_bytes(u8* to, const u8* from, i64 num_bytes, i32 lane) {
  const u64 bits = reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from) | static_cast<u64>(num_bytes);
  if (bits % 16 == 0) {
    copy_words<Copied16>(to, from, num_bytes, lane);
  } else if (bits % 4 == 0) {
    copy_words<u32>(to, from, num_bytes, lane);
  } else {
    copy_words<u8>(to, from, num_bytes, lane);
  }
}

__device__ inline void unload_row(const UnloadKernelArgs& args, i64 from, i64 to, i32 lane) {
  copy_bytes(args.x + to * args.row_bytes, args.rows + from * args.row_stride, args.row_bytes, lane);
  if (args.scale_row_bytes > 0) {
    copy_bytes(args.x_scales + to * args.scale_row_bytes, args.scales + from * args.scale_stride, args.scale_row_bytes,
               lane);
  }
}

__device__ inline void unload(const UnloadKernelArgs& args) {
  const i32 lane = static_cast<i32>(threadIdx.x % ptx::kWarpLanes);
  const i64 warp = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / ptx::kWarpLanes;
  const i64 num_warps = static_cast<i64>(gridDim.x) * blockDim.x / ptx::kWarpLanes;
  if (args.table == nullptr) {
    for (i64 row = warp; row < args.num_rows; row += num_warps) unload_row(args, row, row, lane);
    return;
  }
  const GpuRecvPlan<const i32> plan{args.table, args.max_tokens, args.top_k};
  for (i64 place = warp; place < args.num_sources * args.max_tokens; place += num_warps) {
    const i32 source = static_cast<i32>(place / args.max_tokens);
    const i64 token = place % args.max_tokens;
    if (token >= plan.num_tokens()[source]) continue;
    for (i32 k = 0; k < args.top_k; ++k) {
      // Written by a peer: never beyond the result (R19).
      const i64 row = plan.row(source, token)[k];
      if (row < 0 || row >= args.num_rows) continue;
      unload_row(args, place, row, lane);
      if (lane == 0 && args.x_weights != nullptr) args.x_weights[row] = args.weights[place * args.top_k + k];
    }
  }
}

}  // namespace weft::kernels
