// Dispatch, before the counts are exchanged: who goes where, from the ids of this rank's tokens (docs/protocols/nvlink-dispatch.md,
// step 2). Each block counts its share and tells the others of its GPU, by words that say themselves of which operation they are.
#pragma once

#include "weft/kernels/dispatch/block.cuh"
#include "weft/sync/header.h"

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
  static_assert(kConfig.most_counted() < sync::kMaxProgress);

  __device__ explicit DispatchIds(const Base& base) : Base(base) {}

  __device__ void clear() {
    if constexpr (kConfig.is_cached) return;
    const i32 num_words = (kConfig.is_by_expert() ? kPeriods : 1) * kExperts;
    i32* words = kConfig.is_by_expert() ? this->index() : this->mine();
    for (i32 idx = static_cast<i32>(threadIdx.x); idx < num_words; idx += kThreads) words[idx] = 0;
  }

  // By all warps but the first. False: another block says nothing; the reason is recorded.
  __device__ bool count_tokens() {
    if constexpr (kConfig.is_cached) return true;
    const i32 num_groups = (a.num_tokens + 31) / 32;
    // Blocks that have a share: the first ones.
    const i32 num_counting = min(kConfig.is_by_expert() ? a.num_tokens : num_groups, kConfig.num_blocks);
    bool has_bad = false;  // noted afterwards: code that is hardly ever run takes time to be fetched
    if constexpr (kConfig.is_by_expert()) {
      count_picks(has_bad);
    } else if constexpr (kSharesTokens) {
      count_groups(num_groups, has_bad);
    } else {
      count_tokens_each(num_groups, has_bad);
    }
    if (has_bad) s.has_bad_ids = 1;
    meet();
    if (block() < num_counting) tell_picks();
    if constexpr (kConfig.is_by_expert()) {
      hear_picks(num_counting, warp - 1, kCountWarps);
      meet();
    } else {
      constexpr i32 kPickWarps = (kCountWarps + 1) / 2;  // of block 0: the others have the ballots meanwhile
      const i32 first_warp = block() == 0 ? kPickWarps : 0;
      if (warp - 1 < first_warp) {
        hear_picks(num_counting, warp - 1, kPickWarps);
      } else {
        hear_goers(num_groups, warp - 1 - first_warp, kCountWarps - first_warp);
      }
      meet();
      for (i32 to = warp - 1; to < kRanks; to += kCountWarps) sum_groups(to, num_groups);
    }
    if (block() == 0 && s.has_bad_ids != 0) note_bad_ids();
    meet();
    return s.has_failed == 0;
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

  // rank_major: some lanes share a token, each with 16 bytes of ids, if the ranks of all tokens that a lane has a part of fit a word.
  static constexpr i32 kIds16 = 16 / static_cast<i32>(sizeof(Id));
  static constexpr i32 kSharers = kTopk % kIds16 == 0 ? kTopk / kIds16 : 0;
  static constexpr bool kSharesTokens = kSharers > 0 && (kSharers & (kSharers - 1)) == 0 && 32 / kRanks >= kSharers;
  struct alignas(16) Ids16 {
    Id value[kIds16];
  };

  __device__ static i32 block() { return static_cast<i32>(blockIdx.x); }

  // ---- this block's share

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

  __device__ static bool is_bad(i64 id) { return is_bad_id<Base::kPlacement>(id); }

  // By expert: ids as they lie, so that neighbouring threads read neighbouring words.
  __device__ void count_picks(bool& has_bad) {
    constexpr i32 kPer = kTopk % kIds16 == 0 ? kIds16 : 1;  // ids of a token that a thread reads at once
    constexpr i32 kEach = kTopk / kPer;
    constexpr i32 kAtOnce = 4;
    struct alignas(kPer * sizeof(Id)) Packed {
      Id value[kPer];
    };
    const auto* packed =
        static_cast<const Packed*>(a.topk_idx) + static_cast<i64>(this->queue_begin(block(), a.num_tokens)) * kEach;
    const i32 num_packed = this->queue_len(block(), a.num_tokens) * kEach;
    const u32 in_chunk = static_cast<u32>(this->chunk_tokens() * kEach);
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
        if (at >= num_packed) break;
        i32* counts = this->before(static_cast<i32>(static_cast<u32>(at) / in_chunk));
#pragma unroll
        for (i32 idx = 0; idx < kPer; ++idx) {
          const i64 id = ids[step].value[idx];
          if (is_sent<Base::kPlacement>(flight, id)) atomicAdd(&counts[id], 1);
          has_bad = has_bad || is_bad(id);
        }
      }
    }
  }

  // rank_major: a block has groups block, block + num_blocks, ... Ids as they lie: neighbouring lanes read neighbouring words. A
  // group is kSharers loads of the warp.
  __device__ void count_groups(i32 num_groups, bool& has_bad) {
    constexpr i32 kGroupsAhead = kSharers <= 4 ? 2 : 1, kStep = kCountWarps * kConfig.num_blocks;
    const auto* packed = static_cast<const Ids16*>(a.topk_idx);
    const i32 num_packed = a.num_tokens * kSharers;
    for (i32 first = first_group(); first < num_groups; first += kStep * kGroupsAhead) {
      Ids16 ids[kGroupsAhead][kSharers];
#pragma unroll
      for (i32 step = 0; step < kGroupsAhead; ++step) {
#pragma unroll
        for (i32 part = 0; part < kSharers; ++part) {
          const i32 at = ((first + step * kStep) * kSharers + part) * 32 + lane;
          if (at < num_packed) ids[step][part] = packed[at];
        }
      }
#pragma unroll
      for (i32 step = 0; step < kGroupsAhead; ++step) {
        const i32 group = first + step * kStep;
        if (group >= num_groups) break;
        u32 masks = 0;
#pragma unroll
        for (i32 part = 0; part < kSharers; ++part) {
          const i32 at = (group * kSharers + part) * 32 + lane;
          if (at < num_packed) masks |= beside(ranks_of(ids[step][part].value, has_bad), part);
        }
        tell_goers(group, own_mask(masks));
      }
    }
  }

  // rank_major, where tokens can't be shared so: each lane has one.
  __device__ void count_tokens_each(i32 num_groups, bool& has_bad) {
    for (i32 group = first_group(); group < num_groups; group += kCountWarps * kConfig.num_blocks) {
      GpuRankMask mask = GpuRankMask::none();
      for (i32 k = 0; k < kTopk; k += kBatch) {
        Id ids[kBatch];
        read_ids(group * 32 + lane, k, ids);
        mask |= ranks_of(ids, has_bad);
      }
      tell_goers(group, mask);
    }
  }

  __device__ i32 first_group() const { return block() + (warp - 1) * kConfig.num_blocks; }

  // Counts them. The ranks that hold one of these ids.
  template <i32 kNum>
  __device__ GpuRankMask ranks_of(const Id (&ids)[kNum], bool& has_bad) const {
    GpuRankMask mask = GpuRankMask::none();
#pragma unroll
    for (i32 idx = 0; idx < kNum; ++idx) {
      const i64 id = ids[idx];
      has_bad = has_bad || is_bad(id);
      if (!is_sent<Base::kPlacement>(flight, id)) continue;
      mask |= GpuRankMask::only(static_cast<i32>(Base::kPlacement.rank_of(static_cast<u32>(id))));
      atomicAdd(&this->mine()[id], 1);
    }
    return mask;
  }

  // Masks of kRanks bits side by side in a word, one for each load of the group.
  __device__ static u32 beside(const GpuRankMask& mask, i32 part) { return mask.word << (part * kRanks); }

  // Of `masks`, for each load of the group that of one token, whose lanes lie side by side: the mask of token `lane`.
  __device__ GpuRankMask own_mask(u32 masks) const {
    constexpr i32 kTokens = 32 / max_of(kSharers, 1);  // of a load
#pragma unroll
    for (i32 step = 1; step < kSharers; step *= 2) masks |= __shfl_xor_sync(0xffffffffu, masks, step);
    masks = __shfl_sync(0xffffffffu, masks, lane % kTokens * kSharers);
    return GpuRankMask{masks >> (lane / kTokens * kRanks)} & GpuRankMask::first(kRanks);
  }

  // ---- between the blocks of this rank. A word holds all that it says, so none orders another.

  static constexpr i32 kParts = kRanks * static_cast<i32>(kGoersParts);  // words of a group
  static_assert(kParts <= 32);

  __device__ u64* word_at(u64 offset) const { return reinterpret_cast<u64*>(a.view.own_control() + offset); }

  __device__ void tell(u64 offset, u32 n) const {
    ptx::st_relaxed_sys(word_at(offset), sync::pack_progress(flight.turn, n));
  }

  // 0: the word still belongs to another operation.
  __device__ u32 heard(u64 word) const { return sync::progress_in(word, flight.turn); }

  // A lane for each rank and half of the group.
  __device__ void tell_goers(i32 group, const GpuRankMask& mask) const {
    u32 own = 0;
#pragma unroll
    for (i32 to = 0; to < kRanks; ++to) {
      const u32 ballot = __ballot_sync(0xffffffffu, mask.has(to));
      if (lane / 2 == to) own = lane % 2 == 0 ? ballot & 0xffff : ballot >> 16;
    }
    if (lane < kParts) tell(a.view.layout.goers_word(group, lane), own | 1u << 16);
  }

  __device__ void tell_picks() const {
    for (i32 expert = thread(); expert <= kExperts; expert += kCountThreads) {
      i32 sum = expert < kExperts ? 0 : static_cast<i32>(s.has_bad_ids);
      if (expert < kExperts) {
#pragma unroll
        for (i32 period = 0; period < (kConfig.is_by_expert() ? kPeriods : 1); ++period) {
          sum += kConfig.is_by_expert() ? this->before(period)[expert] : this->mine()[expert];
        }
      }
      tell(a.view.layout.picks_word(block(), expert), static_cast<u32>(sum) + 1);
    }
  }

  // By some warps, this one being `nth` of them: the ballots of all groups, the two words of each together.
  __device__ void hear_goers(i32 num_groups, i32 nth, i32 num_warps) {
    constexpr i32 kAtOnce = 5;
    const i32 num_ballots = num_groups * kRanks;
    const u64* words = word_at(a.view.layout.goers_word(0, 0));
    for (i32 first = nth * 32 * kAtOnce; first < num_ballots; first += num_warps * 32 * kAtOnce) {
      const i32 own = first + lane;  // and each 32nd from there: offsets that the compiler knows take no registers
      const u64* own_words = words + 2 * own;
      u32 ballots[kAtOnce];
      const auto look = [&] {
        u64 pair[kAtOnce][2] = {};
#pragma unroll
        for (i32 idx = 0; idx < kAtOnce; ++idx) {
          if (own + idx * 32 < num_ballots) ptx::ld_relaxed_sys(own_words + idx * 64, pair[idx]);
        }
        bool is_there = true;
#pragma unroll
        for (i32 idx = 0; idx < kAtOnce; ++idx) {
          const u32 low = heard(pair[idx][0]), high = heard(pair[idx][1]);
          is_there = is_there && (own + idx * 32 >= num_ballots || (low != 0 && high != 0));
          ballots[idx] = (low & 0xffff) | high << 16;
        }
        return is_there;
      };
      if (!transport::wait_blocks(a.view, flight, look)) {
        s.has_failed = 1;
        return;
      }
#pragma unroll
      for (i32 idx = 0; idx < kAtOnce; ++idx) {
        const i32 at = own + idx * 32;
        if (at < num_ballots) this->goers(at % kRanks, at / kRanks) = ballots[idx];
      }
    }
  }

  // By some warps, this one being `nth` of them: the picks of all blocks. Block 0 hears of bad ids too.
  __device__ void hear_picks(i32 num_counting, i32 nth, i32 num_warps) {
    const i32 num_words = kExperts + (block() == 0 ? 1 : 0);
    for (i32 first = nth * 32; first < num_words; first += num_warps * 32) {
      const i32 expert = first + lane;
      i32 all = 0, lower = 0;
      if (!add_blocks(min(expert, kExperts), num_counting, all, lower)) {
        s.has_failed = 1;
        return;
      }
      if (expert == kExperts && all > 0) s.has_bad_ids = 1;
      if (expert >= kExperts) continue;
      this->mine()[expert] = all;
      if constexpr (kConfig.is_by_expert()) sum_periods(expert, lower);
    }
  }

  // By a whole warp, each lane with its expert: what all blocks have counted, and those with lower numbers. The words of many
  // blocks are asked for together.
  __device__ bool add_blocks(i32 expert, i32 num_counting, i32& all, i32& lower) const {
    constexpr i32 kMost = kConfig.is_by_expert() ? 20 : 16, kRounds = (kConfig.num_blocks + kMost - 1) / kMost;
    constexpr i32 kAtOnce = (kConfig.num_blocks + kRounds - 1) / kRounds;
    const u64* first_word = word_at(a.view.layout.picks_word(0, expert));
    for (i32 first = 0; first < num_counting; first += kAtOnce) {
      const u64* words_there = first_word + first * (kExperts + 1);
      i32 num_here = 0, num_lower = 0;
      const auto look = [&] {
        u64 words[kAtOnce];
#pragma unroll
        for (i32 idx = 0; idx < kAtOnce; ++idx) {
          words[idx] = first + idx < num_counting ? ptx::ld_relaxed_sys(words_there + idx * (kExperts + 1)) : 0;
        }
        bool is_there = true;
        num_here = num_lower = 0;
#pragma unroll
        for (i32 idx = 0; idx < kAtOnce; ++idx) {
          const u32 n = heard(words[idx]);
          const i32 count = static_cast<i32>(n) - (first + idx < num_counting ? 1 : 0);
          is_there = is_there && count >= 0;
          num_here += count;
          num_lower += first + idx < block() ? count : 0;
        }
        return is_there;
      };
      if (!transport::wait_blocks(a.view, flight, look)) return false;
      all += num_here;
      lower += num_lower;
    }
    return true;
  }

  // How many picks of the expert come before each of this block's chunks.
  __device__ void sum_periods(i32 expert, i32 lower) {
    i32 sum = lower;
    for (i32 period = 0; period < kPeriods; ++period) {
      const i32 in_period = this->before(period)[expert];
      this->before(period)[expert] = sum;
      sum += in_period;
    }
  }

  // One warp: prefix sums over the groups, of which each lane has some side by side.
  __device__ void sum_groups(i32 to, i32 num_groups) {
    const i32 each = (num_groups + 31) / 32;
    const i32 begin = min(lane * each, num_groups), end = min(begin + each, num_groups);
    i32 sum = 0;
    for (i32 group = begin; group < end; ++group) sum += __popc(this->goers(to, group));
    i32 before = inclusive_sum(sum) - sum;
    for (i32 group = begin; group < end; ++group) {
      this->rows_before(to, group) = before;
      before += __popc(this->goers(to, group));
    }
    if (lane == 31) s.total[to] = before;
  }

  // Of all tokens; by block 0, if any is bad.
  __device__ void note_bad_ids() {
    const i32 num_ids = a.num_tokens * kTopk;
    for (i32 at = thread(); at < num_ids; at += kCountThreads) {
      if (is_bad(static_cast<const Id*>(a.topk_idx)[at])) s.bad_ids.note(at);
    }
  }
};

}  // namespace weft::kernels
