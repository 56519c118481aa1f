// Dispatch between GPUs that reach each other by load and store, rank-major, one launch a call.
// docs/protocols/nvlink-dispatch.md is the page to this file; in short:
//   count   each block counts the picks of all tokens; block 0 sends counts and the place of the result to every peer
//   send    each block stores its tokens' rows, ids and weights straight to their final places, then one header a peer
// Tokens are dealt out to blocks one by one: blocks then write near each other, and few pages are in use at a time.
// A block waits for the peers' blocks of its own number, so the call ends with every peer's last row (R20).
#pragma once

#include "weft/config/kernel.h"
#include "weft/kernels/arguments.h"
#include "weft/layout/routing.h"
#include "weft/transport/nvlink.cuh"

namespace weft::kernels {

constexpr i32 kWarps = kDispatchThreads / 32;

template <bool kIs64>
struct IdType {
  using Type = i32;
};
template <>
struct IdType<true> {
  using Type = i64;
};

template <DispatchKernelConfig kConfig>
struct DispatchShared {
  u64 full[kConfig.num_stages];
  u64 empty[kConfig.num_stages];
  u32 has_failed;                      // set by any thread: the block leaves without another header
  i32 histogram[kConfig.num_experts];  // block 0 only
  i32 total[kConfig.num_ranks];
  u8* x[kConfig.num_ranks];  // this rank's first row there
  u8* scales[kConfig.num_ranks];
  u8* ids[kConfig.num_ranks];
  u8* weights[kConfig.num_ranks];
  i32 room[kConfig.num_ranks];  // rows from there that may be written
};

// A group is 32 consecutive tokens. In dynamic shared memory, before the stages.
template <DispatchKernelConfig kConfig>
struct DispatchGroups {
  u32 goers[kConfig.num_ranks][kConfig.num_groups];   // bit l: token l of the group has a pick on the rank
  i32 before[kConfig.num_ranks][kConfig.num_groups];  // rows of earlier groups to the rank
};

template <DispatchKernelConfig kConfig>
class Dispatch {
 public:
  static constexpr i32 kRanks = kConfig.num_ranks;
  static constexpr i32 kTopk = kConfig.top_k;
  static constexpr i32 kLocal = kConfig.num_local_experts();
  static_assert(kConfig.num_stages % kStoreWarps == 0);
  using Shared = DispatchShared<kConfig>;
  using Id = typename IdType<kConfig.topk_is_int64>::Type;

  __device__ Dispatch(const DispatchKernelArgs& args, Shared& shared, u8* dynamic)
      : a_(args),
        s_(shared),
        g_(*reinterpret_cast<DispatchGroups<kConfig>*>(dynamic)),
        stages_(dynamic + kConfig.group_bytes()),
        warp_(static_cast<i32>(threadIdx.x / ptx::kWarpLanes)),
        lane_(static_cast<i32>(threadIdx.x % ptx::kWarpLanes)),
        num_items_((args.num_tokens - static_cast<i32>(blockIdx.x) + kConfig.num_blocks - 1) / kConfig.num_blocks) {}

  __device__ void run() {
    const transport::Flight flight = transport::begin_flight(a_.view);
    begin_ns_ = ptx::globaltimer_ns();
    init_shared();
    count_rows();
    if (blockIdx.x == 0) send_counts(flight);
    const transport::Verdict verdict = transport::wait_all(a_.view, Phase::kCount, flight, 0);
    if (verdict == transport::Verdict::kMismatch) transport::end_flight(a_.view, flight, a_.num_ended);
    if (verdict != transport::Verdict::kOk) return;
    read_counts(flight);
    if (s_.has_failed != 0) return;
    if (warp_ == 0) {
      load_rows();
    } else if (warp_ <= kStoreWarps) {
      store_rows(warp_ - 1);
    } else {
      store_ids(warp_ - 1 - kStoreWarps);
    }
    __syncthreads();
    if (s_.has_failed != 0) return;
    const i32 peer = static_cast<i32>(threadIdx.x);
    if (peer < kRanks && peer != a_.view.rank && a_.view.is_active(peer)) {
      transport::notify(a_.view, Phase::kSend, flight, peer, static_cast<i32>(blockIdx.x));
    }
    if (transport::wait_all(a_.view, Phase::kSend, flight, static_cast<i32>(blockIdx.x)) != transport::Verdict::kOk)
      return;
    transport::end_flight(a_.view, flight, a_.num_ended);
  }

 private:
  // ---- counting

  __device__ void init_shared() {
    if (threadIdx.x == 0) {
      s_.has_failed = 0;
      for (i32 stage = 0; stage < kConfig.num_stages; ++stage) {
        ptx::mbarrier_init(&s_.full[stage], 1);
        ptx::mbarrier_init(&s_.empty[stage], 1);
      }
      ptx::fence_mbarrier_init();
    }
    for (i32 idx = threadIdx.x; idx < kConfig.num_experts; idx += kDispatchThreads) s_.histogram[idx] = 0;
    __syncthreads();
  }

  __device__ i32 expert_at(i32 token, i32 k) const {
    const i64 at = static_cast<i64>(token) * kTopk + k;
    const i64 id =
        kConfig.topk_is_int64 ? static_cast<const i64*>(a_.topk_idx)[at] : static_cast<const i32*>(a_.topk_idx)[at];
    const bool is_valid = id >= 0 && id < kConfig.num_experts;
    return is_valid && a_.view.is_active(static_cast<i32>(id) / kLocal) ? static_cast<i32>(id) : -1;
  }

  // Ids of a token as they are, by 16-byte loads where rows divide so; -1 beyond the last token.
  __device__ void read_ids(i32 token, Id (&ids)[kTopk]) const {
    constexpr i32 kPer = 16 / static_cast<i32>(sizeof(Id));
    struct alignas(16) Packed {
      Id value[kPer];
    };
#pragma unroll
    for (i32 k = 0; k < kTopk; ++k) ids[k] = -1;
    if (token >= a_.num_tokens) return;
    const Id* row = static_cast<const Id*>(a_.topk_idx) + static_cast<i64>(token) * kTopk;
    if constexpr (kTopk % kPer == 0) {
#pragma unroll
      for (i32 k = 0; k < kTopk; k += kPer) {
        const Packed packed = *reinterpret_cast<const Packed*>(row + k);
#pragma unroll
        for (i32 idx = 0; idx < kPer; ++idx) ids[k + idx] = packed.value[idx];
      }
    } else {
#pragma unroll
      for (i32 k = 0; k < kTopk; ++k) ids[k] = row[k];
    }
  }

  // Bit r: the token has a pick on rank r.
  __device__ u32 ranks_of(const Id (&ids)[kTopk], bool counts_experts) {
    u32 mask = 0;
#pragma unroll
    for (i32 k = 0; k < kTopk; ++k) {
      if (ids[k] < 0 || ids[k] >= kConfig.num_experts) continue;
      const i32 expert = static_cast<i32>(ids[k]);
      if (!a_.view.is_active(expert / kLocal)) continue;
      mask |= 1u << (expert / kLocal);
      if (counts_experts) atomicAdd(&s_.histogram[expert], 1);
    }
    return mask;
  }

  // Every block counts every token, so that no block waits for another; block 0 counts experts too.
  __device__ void count_rows() {
    const i32 num_groups = (a_.num_tokens + 31) / 32;
    constexpr i32 kAhead = kTopk <= 8 ? 4 : kTopk <= 16 ? 2 : 1;  // groups whose ids are on their way together
    for (i32 first = warp_; first < num_groups; first += kWarps * kAhead) {
      Id ids[kAhead][kTopk];
#pragma unroll
      for (i32 step = 0; step < kAhead; ++step) read_ids((first + step * kWarps) * 32 + lane_, ids[step]);
#pragma unroll
      for (i32 step = 0; step < kAhead; ++step) count_group(first + step * kWarps, num_groups, ids[step]);
    }
    __syncthreads();
    for (i32 rank = warp_; rank < kRanks; rank += kWarps) sum_groups(rank, num_groups);
    __syncthreads();
  }

  __device__ void count_group(i32 group, i32 num_groups, const Id (&ids)[kTopk]) {
    const u32 mask = ranks_of(ids, blockIdx.x == 0);
    if (group >= num_groups) return;
#pragma unroll
    for (i32 rank = 0; rank < kRanks; ++rank) {
      const u32 goers = __ballot_sync(0xffffffffu, (mask >> rank & 1u) != 0);
      if (lane_ == 0) g_.goers[rank][group] = goers;
    }
  }

  // One warp: prefix sums over the groups.
  __device__ void sum_groups(i32 rank, i32 num_groups) {
    i32 carry = 0;
    for (i32 first = 0; first < num_groups; first += 32) {
      const i32 group = first + lane_;
      const i32 mine = group < num_groups ? __popc(g_.goers[rank][group]) : 0;
      i32 sum = mine;
#pragma unroll
      for (i32 step = 1; step < 32; step *= 2) {
        const i32 other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane_ >= step) sum += other;
      }
      if (group < num_groups) g_.before[rank][group] = carry + sum - mine;
      carry += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane_ == 0) s_.total[rank] = carry;
  }

  // Tokens of this block, one by one.
  __device__ i32 token_of(i32 item) const { return static_cast<i32>(blockIdx.x) + item * kConfig.num_blocks; }

  // How many earlier tokens went to the rank; -1: this one does not.
  __device__ i32 slot_of(i32 token, i32 rank) const {
    const u32 goers = g_.goers[rank][token / 32];
    const u32 bit = 1u << (token % 32);
    return (goers & bit) != 0 ? g_.before[rank][token / 32] + __popc(goers & (bit - 1)) : -1;
  }

  // ---- counts and places

  __device__ void send_counts(const transport::Flight& flight) {
    for (i32 peer = 0; peer < kRanks; ++peer) {
      if (peer == a_.view.rank || !a_.view.is_active(peer)) continue;
      u8* slot = a_.view.control[peer] + a_.view.layout.payload(Phase::kCount, flight.turn.sequence, a_.view.rank);
      i32* words = reinterpret_cast<i32*>(slot + WindowLayout::kPayloadFixedBytes);
      for (i32 idx = threadIdx.x; idx < kLocal + kRanks; idx += kDispatchThreads) {
        words[idx] = idx < kLocal ? s_.histogram[peer * kLocal + idx] : s_.total[idx - kLocal];
      }
      if (threadIdx.x == 0) reinterpret_cast<CountPayload*>(slot)->placement = a_.placement;
    }
    __syncthreads();
    const i32 peer = static_cast<i32>(threadIdx.x);
    if (peer < kRanks && peer != a_.view.rank && a_.view.is_active(peer)) {
      transport::notify(a_.view, Phase::kCount, flight, peer, 0);
    }
  }

  __device__ const u8* payload_from(i32 source, const transport::Flight& flight) const {
    return a_.view.control[a_.view.rank] + a_.view.layout.payload(Phase::kCount, flight.turn.sequence, source);
  }

  __device__ i32 rows_between(i32 source, i32 destination, const transport::Flight& flight) const {
    if (!a_.view.is_active(source)) return 0;
    if (source == a_.view.rank) return s_.total[destination];
    const i32* words = reinterpret_cast<const i32*>(payload_from(source, flight) + WindowLayout::kPayloadFixedBytes);
    return static_cast<i32>(clamp_count(words[kLocal + destination], kMaxRowsPerPair));
  }

  // Where this rank's rows begin on every destination, from the counts of all sources (R19: within the peer's heap).
  __device__ void read_counts(const transport::Flight& flight) {
    const i32 rank = static_cast<i32>(threadIdx.x);
    if (rank < kRanks) {
      i32 start = 0;
      for (i32 source = 0; source < a_.view.rank; ++source) start += rows_between(source, rank, flight);
      Placement place = a_.placement;
      if (rank != a_.view.rank && a_.view.is_active(rank)) {
        place = reinterpret_cast<const CountPayload*>(payload_from(rank, flight))->placement;
      }
      const auto fits = [&](u64 offset, u64 row_bytes) {
        return offset <= a_.view.heap_bytes[rank] &&
               static_cast<u64>(place.num_rows) <= (a_.view.heap_bytes[rank] - offset) / row_bytes;
      };
      constexpr u64 kIdBytes = kTopk * (kConfig.topk_is_int64 ? 8 : 4);
      const bool is_sound = place.num_rows >= 0 && fits(place.x, kConfig.row_bytes) && fits(place.meta_idx, kIdBytes) &&
                            fits(place.meta_weights, kTopk * 4) &&
                            (kConfig.scale_row_bytes == 0 || fits(place.scales, max(kConfig.scale_row_bytes, 1)));
      s_.room[rank] = is_sound ? max(static_cast<i32>(place.num_rows) - start, 0) : 0;
      s_.x[rank] = a_.view.heap[rank] + place.x + static_cast<i64>(start) * kConfig.row_bytes;
      s_.scales[rank] = a_.view.heap[rank] + place.scales + static_cast<i64>(start) * kConfig.scale_row_bytes;
      s_.ids[rank] = a_.view.heap[rank] + place.meta_idx + start * kIdBytes;
      s_.weights[rank] = a_.view.heap[rank] + place.meta_weights + static_cast<i64>(start) * kTopk * 4;
      if (!is_sound) s_.has_failed = 1;
      if (!is_sound) transport::record(a_.view, flight, transport::ErrorCause::kBadPeerWord, Phase::kCount, rank, 0);
      if (blockIdx.x == 0) {
        a_.row_start[rank] = start;
        a_.num_rows_to[rank] = s_.total[rank];
      }
    }
    if (blockIdx.x == 0) write_counts(flight);
    __syncthreads();
  }

  __device__ void write_counts(const transport::Flight& flight) {
    for (i32 expert = threadIdx.x; expert < kLocal; expert += kDispatchThreads) {
      i32 count = s_.histogram[a_.view.rank * kLocal + expert];
      for (i32 source = 0; source < kRanks; ++source) {
        if (source == a_.view.rank || !a_.view.is_active(source)) continue;
        count += reinterpret_cast<const i32*>(payload_from(source, flight) + WindowLayout::kPayloadFixedBytes)[expert];
      }
      a_.counts[expert] = count;
    }
    if (threadIdx.x != 0) return;
    i32 offset = 0;
    for (i32 source = 0; source < kRanks; ++source) {
      a_.offsets[source] = a_.source_offset[source] = offset;
      offset += rows_between(source, a_.view.rank, flight);
    }
    a_.offsets[kRanks] = a_.source_offset[kRanks] = offset;
    *a_.num_rows = offset;
    // The host waits for this while the rows are on their way.
    transport::HostWords* host = a_.view.host;
    host->num_rows = offset;
    ptx::st_release_sys(&host->counted_sequence, static_cast<u64>(flight.turn.sequence));
  }

  // ---- rows

  __device__ u8* stage(i32 idx) const { return stages_ + static_cast<i64>(idx) * kConfig.stage_bytes(); }

  __device__ void load_rows() {
    if (lane_ != 0) return;
    for (i32 item = 0; item < num_items_; ++item) {
      const i32 idx = item % kConfig.num_stages;
      const i64 token = token_of(item);
      if (item >= kConfig.num_stages && !wait_local(&s_.empty[idx], (item / kConfig.num_stages - 1) & 1)) return;
      ptx::mbarrier_arrive_expect(&s_.full[idx], kConfig.row_bytes + kConfig.scale_row_bytes);
      ptx::bulk_load(stage(idx), a_.x + token * kConfig.row_bytes, kConfig.row_bytes, &s_.full[idx]);
      if constexpr (kConfig.scale_row_bytes > 0) {
        ptx::bulk_load(stage(idx) + kConfig.row_bytes, a_.scales + token * kConfig.scale_row_bytes,
                       kConfig.scale_row_bytes, &s_.full[idx]);
      }
    }
  }

  // Each row goes to all its destinations; a stage is free when the stores have read it.
  __device__ void store_rows(i32 store_warp) {
    if (lane_ != 0) return;
    i32 previous = -1;
    for (i32 item = store_warp; item < num_items_; item += kStoreWarps) {
      const i32 idx = item % kConfig.num_stages;
      if (!wait_local(&s_.full[idx], (item / kConfig.num_stages) & 1)) return;
#pragma unroll
      for (i32 rank = 0; rank < kRanks; ++rank) {
        const i32 slot = slot_of(token_of(item), rank);
        if (slot < 0 || slot >= s_.room[rank]) continue;
        ptx::bulk_store(s_.x[rank] + static_cast<i64>(slot) * kConfig.row_bytes, stage(idx), kConfig.row_bytes);
        if constexpr (kConfig.scale_row_bytes > 0) {
          ptx::bulk_store(s_.scales[rank] + static_cast<i64>(slot) * kConfig.scale_row_bytes,
                          stage(idx) + kConfig.row_bytes, kConfig.scale_row_bytes);
        }
      }
      ptx::bulk_commit();
      if (previous >= 0) {
        ptx::bulk_wait_read<1>();
        ptx::mbarrier_arrive(&s_.empty[previous]);
      }
      previous = idx;
    }
    ptx::bulk_wait_read<0>();
    if (previous >= 0) ptx::mbarrier_arrive(&s_.empty[previous]);
    ptx::bulk_wait_all();
    ptx::fence_proxy_async();
  }

  // Local ids and weights of each row, and the send plan: one thread a row, 16 bytes at a time where they divide.
  __device__ void store_ids(i32 id_warp) {
    constexpr i32 kThreads = (kWarps - 1 - kStoreWarps) * 32;
    for (i32 pair = id_warp * 32 + lane_; pair < num_items_ * kRanks; pair += kThreads) {
      const i32 token = token_of(pair / kRanks);
      const i32 rank = pair % kRanks;
      const i32 slot = slot_of(token, rank);
      a_.slot[static_cast<i64>(token) * kRanks + rank] = slot;
      if (slot >= 0 && slot < s_.room[rank]) store_ids_of(token, rank, slot);
    }
  }

  __device__ void store_ids_of(i32 token, i32 rank, i32 slot) {
    struct alignas(16) Quad {
      float value[4];
    };
    struct alignas(16) Ids {
      Id value[16 / sizeof(Id)];
    };
    constexpr i32 kStep = kTopk % 4 == 0 ? 4 : 1;
    Id* ids = reinterpret_cast<Id*>(s_.ids[rank]) + static_cast<i64>(slot) * kTopk;
    float* weights = reinterpret_cast<float*>(s_.weights[rank]) + static_cast<i64>(slot) * kTopk;
#pragma unroll
    for (i32 k = 0; k < kTopk; k += kStep) {
      Quad quad;
      Id local[kStep];
#pragma unroll
      for (i32 idx = 0; idx < kStep; ++idx) {
        const i32 expert = expert_at(token, k + idx);
        const bool is_here = expert >= 0 && expert / kLocal == rank;
        local[idx] = is_here ? expert % kLocal : -1;
        quad.value[idx] = !is_here                     ? 0.0f
                          : a_.topk_weights == nullptr ? 1.0f
                                                       : a_.topk_weights[static_cast<i64>(token) * kTopk + k + idx];
      }
      if constexpr (kStep == 4) {
        *reinterpret_cast<Quad*>(weights + k) = quad;
        constexpr i32 kPer = 16 / static_cast<i32>(sizeof(Id));
#pragma unroll
        for (i32 part = 0; part < kStep; part += kPer) {
          Ids packed;
#pragma unroll
          for (i32 idx = 0; idx < kPer; ++idx) packed.value[idx] = local[part + idx];
          *reinterpret_cast<Ids*>(ids + k + part) = packed;
        }
      } else {
        weights[k] = quad.value[0];
        ids[k] = local[0];
      }
    }
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

  const DispatchKernelArgs& a_;
  Shared& s_;
  DispatchGroups<kConfig>& g_;
  u8* stages_;
  const i32 warp_, lane_;
  const i32 num_items_;  // tokens of this block
  u64 begin_ns_ = 0;
};

template <DispatchKernelConfig kConfig>
__device__ void dispatch(const DispatchKernelArgs& args) {
  extern __shared__ __align__(128) u8 dynamic[];
  __shared__ DispatchShared<kConfig> shared;
  Dispatch<kConfig>(args, shared, dynamic).run();
}

}  // namespace weft::kernels
