// Gradients of a weighted combine, behind the dispatch that has brought the gradient of each row's token: out = weight * row,
// rounded once, and for the weight the dot product of row and y. Every row is read once and written once, by one warp. Nothing
// is sent and nobody is waited for but the kernel in front.
//
// The dot product is summed in fp32 in an order that does not depend on the launch, each product rounded before it is added:
// lane l adds the elements of the 16-byte vectors l, l + 32, ... one by one, from +0; then lanes 16, 8, 4, 2 and 1 apart are
// added. The cpu engine adds in the same order (src/engine/cpu/gradients.cc).
#pragma once

#include "weft/kernels/gradients_arguments.h"
#include "weft/kernels/numbers.cuh"
#include "weft/ptx/load_vector.cuh"
#include "weft/ptx/thread.cuh"

namespace weft::kernels {

// Vectors of either row that a lane has under way.
constexpr i32 kGradientVectors = 4;

template <Dtype kDtype>
__device__ void row_gradients(const GradientKernelArgs& args, i64 row, i32 lane) {
  using Row = Numbers<kDtype>;
  constexpr i32 kLanes = static_cast<i32>(ptx::kWarpLanes);
  const i32 num_vectors = args.hidden / Row::kVector;
  const i64 first_byte = row * args.hidden * Row::kBytes;
  const bool has_dot = args.y != nullptr;
  const float weight = args.weights[row];
  float sum = 0.0f;
  for (i32 first = lane; first < num_vectors; first += kLanes * kGradientVectors) {
    Packed gradient[kGradientVectors] = {}, y[kGradientVectors] = {};
#pragma unroll
    for (i32 step = 0; step < kGradientVectors; ++step) {
      const i32 vector = first + step * kLanes;
      const bool is_there = vector < num_vectors;
      ptx::load_vector(gradient[step].word, args.rows + first_byte + vector * i64{16}, is_there);
      ptx::load_vector(y[step].word, args.y + first_byte + vector * i64{16}, is_there && has_dot);
    }
#pragma unroll
    for (i32 step = 0; step < kGradientVectors; ++step) {
      const i32 vector = first + step * kLanes;
      if (vector >= num_vectors) break;
      float values[Row::kVector], others[Row::kVector];
      Row::unpack(gradient[step], values);
      Row::unpack(y[step], others);
#pragma unroll
      for (i32 at = 0; at < Row::kVector; ++at) {
        sum += values[at] * others[at];
        values[at] *= weight;
      }
      *reinterpret_cast<Packed*>(args.out + first_byte + vector * i64{16}) = Row::pack(values);
    }
  }
  if (!has_dot) return;
#pragma unroll
  for (i32 step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane == 0) args.grad_weights[row] = sum;
}

template <Dtype kDtype>
__device__ void all_gradients(const GradientKernelArgs& args) {
  const i32 lane = static_cast<i32>(threadIdx.x % ptx::kWarpLanes);
  const i64 warp = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / ptx::kWarpLanes;
  const i64 num_warps = static_cast<i64>(gridDim.x) * blockDim.x / ptx::kWarpLanes;
  for (i64 row = warp; row < args.num_rows; row += num_warps) row_gradients<kDtype>(args, row, lane);
}

// One kernel for all shapes and types: ranks that are threads load it before any of them waits for another.
__device__ inline void gradients(const GradientKernelArgs& args) {
  if (args.dtype == Dtype::kBf16) {
    all_gradients<Dtype::kBf16>(args);
  } else if (args.dtype == Dtype::kFp16) {
    all_gradients<Dtype::kFp16>(args);
  } else {
    all_gradients<Dtype::kFp32>(args);
  }
}

}  // namespace weft::kernels
