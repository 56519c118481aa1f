// Second launch of a dispatch by expert (docs/protocols/nvlink-place.md): each received row lies at the place of its first pick
// here; a warp copies a piece of it to the places of the other picks. Holes are zeroed, weights of peers' picks brought over.
// Local, at memory rate on all SMs that are free: it waits for the dispatch in front and for nobody else.
#pragma once

#include "weft/kernels/place_rows_arguments.h"
#include "weft/kernels/unload.cuh"
#include "weft/kernels/words.cuh"
#include "weft/ptx/load_vector.cuh"
#include "weft/ptx/memory.h"

namespace weft::kernels {

// 16-byte vectors of a row that a lane holds at a time; a piece is what a warp has so.
constexpr i32 kPlaceVectors = 7;
constexpr i64 kPlaceBytes = i64{kPlaceVectors} * 32 * 16;

class PlaceRows {
 public:
  __device__ explicit PlaceRows(const PlaceKernelArgs& args)
      : a(args),
        plan_{args.table, args.table_tokens, args.top_k},
        lane_(static_cast<i32>(threadIdx.x % ptx::kWarpLanes)),
        warp_((static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / ptx::kWarpLanes),
        num_warps_(static_cast<i64>(gridDim.x) * blockDim.x / ptx::kWarpLanes) {}

  __device__ void run() const {
    if (ptx::ld_relaxed_sys(a.broken) != 0) return;
    fill_holes();
    const i64 num_pieces = (a.row_bytes + kPlaceBytes - 1) / kPlaceBytes;
    const i64 num_items = i64{a.max_tokens} * a.num_sources * num_pieces;
    for (i64 item = warp_; item < num_items; item += num_warps_) {
      const i64 pair = item / num_pieces;
      place(static_cast<i32>(pair % a.num_sources), pair / a.num_sources, item % num_pieces);
    }
  }

 private:
  // R19: what a peer has written, but nothing outside of the result.
  __device__ i64 row_of(i32 source, i64 token, i32 k) const {
    const i64 row = k < a.top_k ? plan_.row(source, token)[k] : -1;
    return row < a.num_rows ? row : -1;
  }

  __device__ void place(i32 source, i64 token, i64 piece) const {
    if (token >= plan_.num_tokens()[source]) return;
    const bool is_own = source == a.rank;
    const bool has_weights = a.weights != nullptr && !is_own && piece == 0;  // its own the dispatch has written
    const bool is_placed = is_own && token % kStraightOf < a.num_straight;
    if (is_placed) return;
    i64 primary = -1;
    Piece<16> words[kPlaceVectors] = {};
    for (i32 first = 0; first < a.top_k; first += 32) {
      const i64 row = row_of(source, token, first + lane_);
      if (has_weights && row >= 0) {
        a.weights[row] = a.landed_weights[(source * a.table_tokens + token) * a.top_k + first + lane_];
      }
      u32 picks = __ballot_sync(0xffffffffu, row >= 0);
      if (picks == 0) continue;
      if (primary < 0) {
        const i32 holder = __ffs(static_cast<i32>(picks)) - 1;
        primary = __shfl_sync(0xffffffffu, row, holder);
        picks &= picks - 1;
        // One pick in all, as far as these lanes know: nothing to load.
        if (picks != 0 || first + 32 < a.top_k) load(primary, piece, words);
      }
      for (; picks != 0; picks &= picks - 1) {
        const i64 other = __shfl_sync(0xffffffffu, row, __ffs(static_cast<i32>(picks)) - 1);
        store(other, piece, words);
        if (piece == 0 && a.scale_row_bytes > 0) {
          copy_bytes(a.scales + other * a.scale_row_bytes, a.scales + primary * a.scale_row_bytes, a.scale_row_bytes,
                     lane_);
        }
      }
    }
  }

  __device__ void load(i64 row, i64 piece, Piece<16> (&words)[kPlaceVectors]) const {
    const u8* from = a.x + row * a.row_bytes;
#pragma unroll
    for (i32 step = 0; step < kPlaceVectors; ++step) {
      const i64 at = byte_of(piece, step);
      ptx::load_vector(words[step].word, from + at, at < a.row_bytes);
    }
  }

  __device__ void store(i64 row, i64 piece, const Piece<16> (&words)[kPlaceVectors]) const {
    u8* to = a.x + row * a.row_bytes;
#pragma unroll
    for (i32 step = 0; step < kPlaceVectors; ++step) {
      const i64 at = byte_of(piece, step);
      if (at < a.row_bytes) *reinterpret_cast<Piece<16>*>(to + at) = words[step];
    }
  }

  __device__ i64 byte_of(i64 piece, i32 step) const { return piece * kPlaceBytes + (step * 32 + lane_) * i64{16}; }

  // ---- holes: some warps for each group

  __device__ void fill_holes() const {
    const i64 sharers = max(num_warps_ / a.num_groups, i64{1});
    for (i64 group = warp_ % a.num_groups; group < a.num_groups; group += num_warps_) {
      if (warp_ / a.num_groups >= sharers) break;
      const i64 shift = a.is_masked ? group * a.capacity : 0;
      const i64 begin = (a.is_masked ? shift : i64{a.offsets[group]}) + a.counts[group];
      const i64 end = min(a.is_masked ? shift + a.capacity : i64{a.offsets[group + 1]}, a.num_rows);
      fill(max(begin, i64{0}) + warp_ / a.num_groups, end, sharers);
    }
    if (a.is_masked || a.capacity < 0 || a.weights == nullptr) return;
    const i64 thread = warp_ * 32 + lane_;
    for (i64 row = max(i64{a.offsets[a.num_groups]}, i64{0}) + thread; row < a.capacity; row += num_warps_ * 32) {
      a.weights[row] = 0.0f;
    }
  }

  __device__ void fill(i64 begin, i64 end, i64 step) const {
    for (i64 row = begin; row < end; row += step) {
      if (lane_ == 0 && a.weights != nullptr) a.weights[row] = 0.0f;
      if (!a.zeroes_rows) continue;
      auto* words = reinterpret_cast<Piece<16>*>(a.x + row * a.row_bytes);
      for (i64 idx = lane_; idx < a.row_bytes / 16; idx += 32) words[idx] = Piece<16>{};
      for (i64 at = lane_; at < a.scale_row_bytes; at += 32) a.scales[row * a.scale_row_bytes + at] = 0;
    }
  }

  const PlaceKernelArgs& a;
  const GpuRecvPlan<const i32> plan_;
  const i32 lane_;
  const i64 warp_, num_warps_;
};

__device__ inline void place_rows(const PlaceKernelArgs& args) { PlaceRows(args).run(); }

}  // namespace weft::kernels
