// Dispatch, before the counts are exchanged: who goes where, from the ids of this rank's tokens (docs/protocols/nvlink-dispatch.md,
// step 2). Every block counts all of them.
#pragma once

#include "weft/kernels/dispatch_state.cuh"

namespace weft::kernels {

template <DispatchKernelConfig kConfig>
class DispatchIds : public DispatchState<kConfig> {
 public:
  using Base = DispatchState<kConfig>;
  using Base::a, Base::s, Base::flight, Base::warp, Base::lane, Base::rank;
  using Base::kRanks, Base::kTopk, Base::kExperts, Base::kLocal, Base::kPeriods;
  using Id = typename IdType<kConfig.topk_is_int64>::Type;
  static constexpr i32 kThreads = kConfig.num_threads();
  static constexpr i32 kWarps = kConfig.num_warps();
  // Until counts have been sent the first warp loads rows and takes no part.
  static constexpr i32 kCountWarps = kWarps - 1;
  static constexpr i32 kCountThreads = kCountWarps * 32;

  __device__ explicit DispatchIds(const Base& base) : Base(base) {}

  __device__ void clear() {
    if constexpr (kConfig.is_cached) return;
    const i32 num_words = (kConfig.is_by_expert() ? 2 * kPeriods + 1 : 1) * kExperts;
    i32* words = kConfig.is_by_expert() ? this->index() : this->mine();
    for (i32 idx = static_cast<i32>(threadIdx.x); idx < num_words; idx += kThreads) words[idx] = 0;
  }

  __device__ void count_tokens() {
    if constexpr (kConfig.is_cached) return;
    if constexpr (kConfig.is_by_expert()) {
      count_picks();
      meet();
      for (i32 expert = thread(); expert < kExperts; expert += kCountThreads) sum_periods(expert);
    } else {
      const i32 num_groups = (a.num_tokens + 31) / 32;
      if constexpr (kSharesTokens) {
        count_groups(num_groups);
      } else {
        for (i32 first = warp - 1; first < num_groups; first += kCountWarps * kAhead) {
          Id ids[kAhead][kBatch];
          for (i32 k = 0; k < kTopk; k += kBatch) {
#pragma unroll
            for (i32 step = 0; step < kAhead; ++step) read_ids((first + step * kCountWarps) * 32 + lane, k, ids[step]);
#pragma unroll
            for (i32 step = 0; step < kAhead; ++step) count_ids(first + step * kCountWarps, num_groups, k, ids[step]);
          }
        }
      }
      meet();
      for (i32 to = warp - 1; to < kRanks; to += kCountWarps) sum_groups(to, num_groups);
    }
    meet();
  }

 protected:
  __device__ i32 thread() const { return static_cast<i32>(threadIdx.x) - 32; }
  __device__ static void meet() { ptx::bar_sync(1, kCountThreads); }

  __device__ i32 inclusive_sum(i32 sum) const {
#pragma unroll
    for (i32 step = 1; step < 32; step *= 2) {
      const i32 other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    return sum;
  }

 private:
  static constexpr i32 kBatch = kTopk <= 16 ? kTopk : kTopk % 16 == 0 ? 16 : kTopk % 8 == 0 ? 8 : 1;  // ids at once
  static constexpr i32 kAhead = kBatch <= 8 ? 4 : 1;  // groups whose ids are on their way together

  // rank_major: some lanes share a token, each with 16 bytes of ids, if the ranks of all tokens that a lane has a part of fit a word.
  static constexpr i32 kIds16 = 16 / static_cast<i32>(sizeof(Id));
  static constexpr i32 kSharers = kTopk % kIds16 == 0 ? kTopk / kIds16 : 0;
  static constexpr bool kSharesTokens = kSharers > 0 && (kSharers & (kSharers - 1)) == 0 && 32 / kRanks >= kSharers;
  struct alignas(16) Ids16 {
    Id value[kIds16];
  };

  // Ids k .. k + kBatch - 1 of a token as they are, by 16-byte loads where rows divide so; -1 beyond the last token.
  __device__ void read_ids(i32 token, i32 k, Id (&ids)[kBatch]) const {
    constexpr i32 kPer = 16 / static_cast<i32>(sizeof(Id));
    struct alignas(16) Packed {
      Id value[kPer];
    };
#pragma unroll
    for (i32 idx = 0; idx < kBatch; ++idx) ids[idx] = -1;
    if (token >= a.num_tokens) return;
    const Id* row = static_cast<const Id*>(a.topk_idx) + static_cast<i64>(token) * kTopk + k;
    if constexpr (kTopk % kPer == 0 && kBatch % kPer == 0) {
#pragma unroll
      for (i32 idx = 0; idx < kBatch; idx += kPer) {
        const Packed packed = *reinterpret_cast<const Packed*>(row + idx);
#pragma unroll
        for (i32 part = 0; part < kPer; ++part) ids[idx + part] = packed.value[part];
      }
    } else {
#pragma unroll
      for (i32 idx = 0; idx < kBatch; ++idx) ids[idx] = row[idx];
    }
  }

  __device__ static bool is_bad(i64 id) { return static_cast<u64>(id + 1) > static_cast<u64>(kExperts); }
  __device__ static bool is_expert(i64 id) { return static_cast<u64>(id) < static_cast<u64>(kExperts); }
  __device__ bool is_sent(i64 id) const { return is_expert(id) && flight.is_active(static_cast<i32>(id) / kLocal); }

  // By expert: ids as they lie, so that neighbouring threads read neighbouring words.
  __device__ void count_picks() {
    constexpr i32 kPer = kTopk % kIds16 == 0 ? kIds16 : 1;  // ids of a token that a thread reads at once
    constexpr i32 kAtOnce = 8;
    struct alignas(kPer * sizeof(Id)) Packed {
      Id value[kPer];
    };
    const auto* packed = static_cast<const Packed*>(a.topk_idx);
    const i32 num_packed = a.num_tokens * (kTopk / kPer);
    const i32 in_chunk = a.chunk_tokens * (kTopk / kPer);
    const i32 step_chunks = kCountThreads / in_chunk, step_rest = kCountThreads % in_chunk;
    i32 chunk = thread() / in_chunk, rest = thread() % in_chunk;  // counted on: a division for each would take longer
    bool has_bad = false;  // noted afterwards: code that is hardly ever run takes time to be fetched
    for (i32 first = thread(); first < num_packed; first += kAtOnce * kCountThreads) {
      Packed ids[kAtOnce];
#pragma unroll
      for (i32 step = 0; step < kAtOnce; ++step) {
        const i32 at = first + step * kCountThreads;
        if (at < num_packed) ids[step] = packed[at];
      }
#pragma unroll
      for (i32 step = 0; step < kAtOnce; ++step) {
        const i32 at = first + step * kCountThreads;
        if (at >= num_packed) continue;
        const i32 period = min(chunk / kConfig.num_blocks, kPeriods - 1);
        i32* counts =
            chunk % kConfig.num_blocks < static_cast<i32>(blockIdx.x) ? this->before(period) : this->rest(period);
        chunk += step_chunks;
        rest += step_rest;
        if (rest >= in_chunk) {
          rest -= in_chunk;
          ++chunk;
        }
#pragma unroll
        for (i32 idx = 0; idx < kPer; ++idx) {
          const i64 id = ids[step].value[idx];
          if (is_sent(id)) atomicAdd(&counts[id], 1);
          has_bad = has_bad || is_bad(id);
        }
      }
    }
    if (blockIdx.x != 0 || !has_bad) return;
    for (i32 at = thread(); at < num_packed; at += kCountThreads) {
#pragma unroll
      for (i32 idx = 0; idx < kPer; ++idx) {
        if (is_bad(packed[at].value[idx])) note_bad_id(at * kPer + idx);
      }
    }
  }

  // rank_major, ids as they lie: neighbouring lanes read neighbouring words. A group is kSharers loads of the warp.
  __device__ void count_groups(i32 num_groups) {
    constexpr i32 kGroupsAhead = kSharers <= 4 ? 4 : 1;
    const auto* packed = static_cast<const Ids16*>(a.topk_idx);
    const i32 num_packed = a.num_tokens * kSharers;
    bool has_bad = false;
    for (i32 first = warp - 1; first < num_groups; first += kCountWarps * kGroupsAhead) {
      Ids16 ids[kGroupsAhead][kSharers];
#pragma unroll
      for (i32 step = 0; step < kGroupsAhead; ++step) {
#pragma unroll
        for (i32 part = 0; part < kSharers; ++part) {
          const i32 at = ((first + step * kCountWarps) * kSharers + part) * 32 + lane;
          if (at < num_packed) ids[step][part] = packed[at];
        }
      }
#pragma unroll
      for (i32 step = 0; step < kGroupsAhead; ++step) {
        const i32 group = first + step * kCountWarps;
        u32 masks = 0;
#pragma unroll
        for (i32 part = 0; part < kSharers; ++part) {
          const i32 at = (group * kSharers + part) * 32 + lane;
          if (at < num_packed) masks |= ranks_of(ids[step][part], has_bad) << (part * kRanks);
        }
        if (group < num_groups) note_goers(group, own_mask(masks));
      }
    }
    if (blockIdx.x != 0 || !has_bad) return;
    for (i32 at = thread(); at < num_packed; at += kCountThreads) {
#pragma unroll
      for (i32 idx = 0; idx < kIds16; ++idx) {
        if (is_bad(packed[at].value[idx])) note_bad_id(at * kIds16 + idx);
      }
    }
  }

  // Bit r: rank r holds one of these ids.
  __device__ u32 ranks_of(const Ids16& ids, bool& has_bad) {
    u32 mask = 0;
#pragma unroll
    for (i32 idx = 0; idx < kIds16; ++idx) {
      const i64 id = ids.value[idx];
      if (is_expert(id)) mask |= 1u << (static_cast<u32>(id) / kLocal);
    }
    if (blockIdx.x == 0) {
#pragma unroll
      for (i32 idx = 0; idx < kIds16; ++idx) {
        const i64 id = ids.value[idx];
        if (is_sent(id)) atomicAdd(&this->mine()[id], 1);
        has_bad = has_bad || is_bad(id);
      }
    }
    return mask & flight.active_mask;
  }

  // Of `masks`, for each load of the group that of one token, whose lanes lie side by side: the mask of token `lane`.
  __device__ u32 own_mask(u32 masks) const {
    constexpr u32 kMask = kRanks < 32 ? (1u << kRanks) - 1 : ~0u;
    constexpr i32 kTokens = 32 / max_of(kSharers, 1);  // of a load
#pragma unroll
    for (i32 step = 1; step < kSharers; step *= 2) masks |= __shfl_xor_sync(0xffffffffu, masks, step);
    masks = __shfl_sync(0xffffffffu, masks, lane % kTokens * kSharers);
    return masks >> (lane / kTokens * kRanks) & kMask;
  }

  __device__ void note_goers(i32 group, u32 mask) const {
#pragma unroll
    for (i32 to = 0; to < kRanks; ++to) {
      const u32 ballot = __ballot_sync(0xffffffffu, (mask >> to & 1u) != 0);
      if (lane == 0) this->goers(to, group) = ballot;
    }
  }

  // rank_major, where tokens can't be shared so.
  __device__ void count_ids(i32 group, i32 num_groups, i32 first_k, const Id (&ids)[kBatch]) {
    const i32 token = group * 32 + lane;
    u32 mask = 0;
#pragma unroll
    for (i32 idx = 0; idx < kBatch; ++idx) {
      const i64 id = ids[idx];
      if (blockIdx.x == 0 && (id < -1 || id >= kExperts)) note_bad_id(token * kTopk + first_k + idx);
      if (!is_sent(id)) continue;
      mask |= 1u << (static_cast<i32>(id) / kLocal);
      if (blockIdx.x == 0) atomicAdd(&this->mine()[id], 1);
    }
    if (group >= num_groups) return;
#pragma unroll
    for (i32 to = 0; to < kRanks; ++to) {
      const u32 ballot = __ballot_sync(0xffffffffu, (mask >> to & 1u) != 0);
      if (lane == 0) this->goers(to, group) = first_k == 0 ? ballot : this->goers(to, group) | ballot;
    }
  }

  __device__ void note_bad_id(i32 at) {
    atomicAdd(&s.num_bad_ids, 1);
    atomicMin(&s.first_bad_at, at);
  }

  // One warp: prefix sums over the groups.
  __device__ void sum_groups(i32 to, i32 num_groups) {
    i32 carry = 0;
    for (i32 first = 0; first < num_groups; first += 32) {
      const i32 group = first + lane;
      const i32 mine = group < num_groups ? __popc(this->goers(to, group)) : 0;
      const i32 sum = inclusive_sum(mine);
      if (group < num_groups) this->rows_before(to, group) = carry + sum - mine;
      carry += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0) s.total[to] = carry;
  }

  // How many picks of the expert come before each of this block's chunks.
  __device__ void sum_periods(i32 expert) {
    i32 sum = 0;
    for (i32 period = 0; period < kPeriods; ++period) {
      const i32 in_period = this->before(period)[expert] + this->rest(period)[expert];
      this->before(period)[expert] += sum;
      sum += in_period;
    }
    this->mine()[expert] = sum;
  }
};

}  // namespace weft::kernels
