// Before a combine of rank_major rows that do not lie in the heap (docs/protocols/nvlink-combine.md): rows of other ranks' tokens
// are copied into this rank's landing, each to its own number, and pulled from there. Local, at memory rate on all SMs.
#pragma once

#include "weft/kernels/stage_rows_arguments.h"
#include "weft/kernels/words.cuh"
#include "weft/layout/gpu_plan.h"
#include "weft/ptx/load_vector.cuh"
#include "weft/ptx/thread.cuh"

namespace weft::kernels {

class StageRows {
 public:
  __device__ explicit StageRows(const StageKernelArgs& args)
      : a(args),
        plan_{args.table, args.table_tokens, 1},
        lane_(static_cast<i32>(threadIdx.x % ptx::kWarpLanes)),
        num_pieces_(static_cast<i32>((args.row_bytes + kPieceBytes - 1) / kPieceBytes)) {}

  // Pieces of rows, dealt out to the warps; the number of the next row is read while a piece is copied.
  __device__ void run() const {
    const i64 num_warps = static_cast<i64>(gridDim.x) * blockDim.x / ptx::kWarpLanes;
    const i64 num_items = i64{a.max_tokens} * (a.num_sources - 1) * num_pieces_;
    i64 item = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / ptx::kWarpLanes;
    i64 next = row_of(item, num_items);
    for (; item < num_items; item += num_warps) {
      const i64 row = next;
      next = row_of(item + num_warps, num_items);
      if (row >= 0) copy(row, item % num_pieces_);
    }
  }

 private:
  static constexpr i32 kVectors = 7;  // of 16 bytes that a lane copies at a time
  static constexpr i32 kStepBytes = 32 * 16;
  static constexpr i64 kPieceBytes = i64{kVectors} * kStepBytes;

  // -1: there is none. R19: a peer has written it.
  __device__ i64 row_of(i64 item, i64 num_items) const {
    if (item >= num_items) return -1;
    const i64 pair = item / num_pieces_, token = pair / (a.num_sources - 1);
    const i32 other = static_cast<i32>(pair % (a.num_sources - 1));
    const i32 source = other < a.rank ? other : other + 1;
    if (token >= plan_.num_tokens()[source]) return -1;
    const i64 row = *plan_.row(source, token);
    return row < a.num_rows ? row : -1;
  }

  __device__ void copy(i64 row, i64 piece) const {
    const i64 at = row * a.row_bytes + piece * kPieceBytes + lane_ * 16;
    const i64 left = a.row_bytes - piece * kPieceBytes - lane_ * 16;
    Piece<16> words[kVectors];
#pragma unroll
    for (i32 step = 0; step < kVectors; ++step) {
      ptx::load_vector(words[step].word, a.rows + at + step * kStepBytes, step * kStepBytes < left);
    }
#pragma unroll
    for (i32 step = 0; step < kVectors; ++step) {
      if (step * kStepBytes < left) *reinterpret_cast<Piece<16>*>(a.landing + at + step * kStepBytes) = words[step];
    }
  }

  const StageKernelArgs& a;
  const GpuRecvPlan<const i32> plan_;
  const i32 lane_;
  const i32 num_pieces_;  // of a row
};

__device__ inline void stage_rows(const StageKernelArgs& args) { StageRows(args).run(); }

}  // namespace weft::kernels
