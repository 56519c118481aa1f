// Combine between GPUs that reach each other by load and store: rank-major rows that lie in the heaps, pulled by the
// owners of the tokens. docs/protocols/nvlink-combine.md is the page to this file; in short:
//   count    block 0 tells every peer where its rows lie
//   reduce   each block pulls its tokens' rows chunk by chunk, adds them in float in the order of the ranks, rounds once
//   reduce   header: "I have read everything of yours"; the call ends with every peer's (R20)
#pragma once

#include "weft/config/kernel.h"
#include "weft/kernels/arguments.h"
#include "weft/ptx/convert.h"
#include "weft/transport/nvlink.cuh"

namespace weft::kernels {

template <CombineKernelConfig kConfig>
struct CombineShared {
  u64 full[kConfig.num_stages];
  u64 empty[kConfig.num_stages];
  u32 has_failed;                     // set by any thread: the block leaves without another header
  const u8* rows[kConfig.num_ranks];  // this rank's first row there
  i32 room[kConfig.num_ranks];        // rows from there that may be read
  u32 present[kConfig.num_stages];    // bit r: the stage holds a row of rank r
};

template <CombineKernelConfig kConfig>
class Combine {
 public:
  static constexpr i32 kRanks = kConfig.num_ranks;
  static constexpr i32 kRowBytes = kConfig.hidden * dtype_bytes(kConfig.dtype);
  static constexpr i32 kVector = 16 / dtype_bytes(kConfig.dtype);  // elements of a 16-byte access
  static constexpr i32 kGroupThreads = kSumThreads / kSumGroups;
  static_assert(kConfig.num_stages % kSumGroups == 0);
  using Shared = CombineShared<kConfig>;

  __device__ Combine(const CombineKernelArgs& args, Shared& shared, u8* stages)
      : a_(args), s_(shared), stages_(stages), lane_(static_cast<i32>(threadIdx.x % ptx::kWarpLanes)) {
    num_items_ = (args.num_tokens - static_cast<i32>(blockIdx.x) + kConfig.num_blocks - 1) / kConfig.num_blocks *
                 kConfig.num_chunks();
  }

  __device__ void run() {
    const transport::Flight flight = transport::begin_flight(a_.view);
    begin_ns_ = ptx::globaltimer_ns();
    if (threadIdx.x == 0) {
      s_.has_failed = 0;
      for (i32 stage = 0; stage < kConfig.num_stages; ++stage) {
        ptx::mbarrier_init(&s_.full[stage], 1);
        ptx::mbarrier_init(&s_.empty[stage], kGroupThreads / 32);
      }
      ptx::fence_mbarrier_init();
    }
    const i32 peer = static_cast<i32>(threadIdx.x);
    const bool has_peer = peer < kRanks && peer != a_.view.rank && a_.view.is_active(peer);
    if (blockIdx.x == 0 && has_peer) {
      u8* slot = a_.view.control[peer] + a_.view.layout.payload(Phase::kCount, flight.turn.sequence, a_.view.rank);
      auto* payload = reinterpret_cast<CountPayload*>(slot);
      payload->rows_offset = a_.rows_offset;
      payload->num_rows = a_.num_rows;
      transport::notify(a_.view, Phase::kCount, flight, peer, 0);
    }
    const transport::Verdict verdict = transport::wait_all(a_.view, Phase::kCount, flight, 0);
    if (verdict == transport::Verdict::kMismatch) transport::end_flight(a_.view, flight, a_.num_ended);
    if (verdict != transport::Verdict::kOk) return;
    if (peer < kRanks) read_place(peer, flight);
    // The rows were written by other kernels and acquired by generic loads; bulk loads read them next.
    ptx::fence_proxy_async();
    __syncthreads();
    if (s_.has_failed != 0) return;
    if (threadIdx.x >= kSumThreads) {
      load_rows();
    } else {
      sum_rows();
    }
    __syncthreads();
    if (s_.has_failed != 0) return;
    if (has_peer) transport::notify(a_.view, Phase::kReduce, flight, peer, static_cast<i32>(blockIdx.x));
    if (transport::wait_all(a_.view, Phase::kReduce, flight, static_cast<i32>(blockIdx.x)) != transport::Verdict::kOk)
      return;
    transport::end_flight(a_.view, flight, a_.num_ended);
  }

 private:
  // R19: only rows inside the peer's heap are read.
  __device__ void read_place(i32 rank, const transport::Flight& flight) {
    u64 offset = a_.rows_offset;
    i64 num_rows = a_.num_rows;
    if (rank != a_.view.rank && a_.view.is_active(rank)) {
      const u8* slot =
          a_.view.control[a_.view.rank] + a_.view.layout.payload(Phase::kCount, flight.turn.sequence, rank);
      offset = reinterpret_cast<const CountPayload*>(slot)->rows_offset;
      num_rows = reinterpret_cast<const CountPayload*>(slot)->num_rows;
    }
    const u64 heap_bytes = a_.view.heap_bytes[rank];
    const bool is_sound =
        num_rows >= 0 && offset <= heap_bytes && static_cast<u64>(num_rows) <= (heap_bytes - offset) / kRowBytes;
    if (!is_sound) s_.has_failed = 1;
    if (!is_sound) transport::record(a_.view, flight, transport::ErrorCause::kBadPeerWord, Phase::kCount, rank, 0);
    const i32 start = a_.row_start[rank];
    s_.room[rank] = is_sound ? static_cast<i32>(num_rows) - start : 0;
    s_.rows[rank] = a_.view.heap[rank] + offset + static_cast<i64>(start) * kRowBytes;
  }

  __device__ static i32 chunk_elements(i32 chunk) { return min(kConfig.chunk, kConfig.hidden - chunk * kConfig.chunk); }
  __device__ u8* stage(i32 idx) const { return stages_ + static_cast<i64>(idx) * kConfig.stage_bytes(); }

  __device__ i32 token_of(i32 item) const {
    return static_cast<i32>(blockIdx.x) + item / kConfig.num_chunks() * kConfig.num_blocks;
  }

  // A token ahead of its use: the loads are on their way while the rows of the one before are.
  __device__ void read_slots(i32 item, i32* slot) const {
    if (item >= num_items_) return;
    const i32* slots = a_.slot + static_cast<i64>(token_of(item)) * kRanks;
#pragma unroll
    for (i32 rank = 0; rank < kRanks; ++rank) slot[rank] = slots[rank];
  }

  __device__ void load_rows() {
    if (lane_ != 0) return;
    i32 slot[kRanks] = {}, next_slot[kRanks] = {};
    read_slots(0, next_slot);
    for (i32 item = 0; item < num_items_; ++item) {
      const i32 chunk = item % kConfig.num_chunks();
      if (chunk == 0) {
#pragma unroll
        for (i32 rank = 0; rank < kRanks; ++rank) slot[rank] = next_slot[rank] < s_.room[rank] ? next_slot[rank] : -1;
        read_slots(item + kConfig.num_chunks(), next_slot);
      }
      const i32 idx = item % kConfig.num_stages;
      if (item >= kConfig.num_stages && !wait_local(&s_.empty[idx], (item / kConfig.num_stages - 1) & 1)) return;
      const u32 num_bytes = static_cast<u32>(chunk_elements(chunk) * dtype_bytes(kConfig.dtype));
      u32 present = 0;
#pragma unroll
      for (i32 rank = 0; rank < kRanks; ++rank) present |= slot[rank] >= 0 ? 1u << rank : 0u;
      s_.present[idx] = present;
      ptx::mbarrier_arrive_expect(&s_.full[idx], static_cast<u32>(__popc(present)) * num_bytes);
#pragma unroll
      for (i32 rank = 0; rank < kRanks; ++rank) {
        if (slot[rank] < 0) continue;
        ptx::bulk_load(
            stage(idx) + rank * kConfig.chunk_bytes(),
            s_.rows[rank] + static_cast<i64>(slot[rank]) * kRowBytes + static_cast<i64>(chunk) * kConfig.chunk_bytes(),
            num_bytes, &s_.full[idx]);
      }
    }
  }

  __device__ void sum_rows() {
    const i32 thread = static_cast<i32>(threadIdx.x) % kGroupThreads;
    for (i32 item = static_cast<i32>(threadIdx.x) / kGroupThreads; item < num_items_; item += kSumGroups) {
      const i32 idx = item % kConfig.num_stages;
      const i32 chunk = item % kConfig.num_chunks();
      const i32 token = token_of(item);
      if (!wait_local(&s_.full[idx], (item / kConfig.num_stages) & 1)) return;
      const u32 present = s_.present[idx];
      for (i32 first = thread * kVector; first < chunk_elements(chunk); first += kGroupThreads * kVector) {
        sum_vector(stage(idx), present, token, chunk * kConfig.chunk + first, first);
      }
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(&s_.empty[idx]);
    }
  }

  struct alignas(16) Vector {
    u32 word[4];
  };

  __device__ static void unpack(const Vector& packed, float* values) {
#pragma unroll
    for (i32 idx = 0; idx < kVector; ++idx) {
      if constexpr (kConfig.dtype == Dtype::kFp32) {
        values[idx] = ptx::bits_float(packed.word[idx]);
      } else {
        const u16 half = static_cast<u16>(packed.word[idx / 2] >> (idx % 2 * 16));
        values[idx] = kConfig.dtype == Dtype::kBf16 ? ptx::bf16_to_float(half) : ptx::fp16_to_float(half);
      }
    }
  }

  __device__ static Vector pack(const float* values) {
    Vector packed;
#pragma unroll
    for (i32 word = 0; word < 4; ++word) {
      if constexpr (kConfig.dtype == Dtype::kFp32) {
        packed.word[word] = ptx::float_bits(values[word]);
      } else if constexpr (kConfig.dtype == Dtype::kBf16) {
        packed.word[word] =
            ptx::float_to_bf16(values[2 * word]) | static_cast<u32>(ptx::float_to_bf16(values[2 * word + 1])) << 16;
      } else {
        packed.word[word] =
            ptx::float_to_fp16(values[2 * word]) | static_cast<u32>(ptx::float_to_fp16(values[2 * word + 1])) << 16;
      }
    }
    return packed;
  }

  // The order of additions is part of the contract: ranks ascending from +0, then bias; one rounding.
  __device__ void sum_vector(const u8* rows, u32 present, i32 token, i32 column, i32 first) const {
    float total[kVector] = {};
    float values[kVector];
#pragma unroll
    for (i32 rank = 0; rank < kRanks; ++rank) {
      if ((present >> rank & 1u) == 0) continue;
      unpack(*reinterpret_cast<const Vector*>(rows + rank * kConfig.chunk_bytes() + first * dtype_bytes(kConfig.dtype)),
             values);
#pragma unroll
      for (i32 idx = 0; idx < kVector; ++idx) total[idx] += values[idx];
    }
    if (a_.bias != nullptr) {
      const u8* bias = a_.bias + token * a_.bias_row_bytes;
#pragma unroll
      for (i32 idx = 0; idx < kVector; ++idx) {
        if (a_.bias_is_fp32 || kConfig.dtype == Dtype::kFp32) {
          total[idx] += reinterpret_cast<const float*>(bias)[column + idx];
        } else {
          const u16 half = reinterpret_cast<const u16*>(bias)[column + idx];
          total[idx] += kConfig.dtype == Dtype::kBf16 ? ptx::bf16_to_float(half) : ptx::fp16_to_float(half);
        }
      }
    }
    u8* out = a_.out + static_cast<i64>(token) * kRowBytes + static_cast<i64>(column) * dtype_bytes(kConfig.dtype);
    *reinterpret_cast<Vector*>(out) = pack(total);
  }

  // The copies behind a local barrier are this block's own and end by themselves, so an abort does not cut them short: what
  // is in flight is drained. One that takes seconds means a broken GPU: the block then says nothing more to anyone (R9).
  __device__ bool wait_local(u64* barrier, u32 parity) {
    constexpr u64 kLocalTimeoutNs = 20000000000ull;
    sync::LanePause pause(nullptr, begin_ns_ + kLocalTimeoutNs);
    if (sync::wait_barrier(barrier, parity, pause) == sync::WaitResult::kReady) return true;
    s_.has_failed = 1;
    return false;
  }

  const CombineKernelArgs& a_;
  Shared& s_;
  u8* stages_;
  const i32 lane_;
  i32 num_items_;  // chunks of this block's tokens
  u64 begin_ns_ = 0;
};

template <CombineKernelConfig kConfig>
__device__ void combine(const CombineKernelArgs& args) {
  extern __shared__ __align__(128) u8 stages[];
  __shared__ CombineShared<kConfig> shared;
  Combine<kConfig>(args, shared, stages).run();
}

}  // namespace weft::kernels
