// Small-batch dispatch, the receiving half: which picks each warp looks at, and what ids say of them.
#pragma once

#include "weft/kernels/small/dispatch_block.cuh"

namespace weft::kernels {

// An entry is (source, token, k), k < kWidth; entries are numbered in this order. A run of them for each warp.
template <SmallDispatchKernelConfig kConfig>
class SmallDispatchPicks : public SmallDispatchState<kConfig> {
 public:
  using Base = SmallDispatchState<kConfig>;
  using Base::a, Base::flight, Base::warp, Base::lane, Base::rank, Base::own_ids, Base::local_of;
  using Base::kRanks, Base::kTopk, Base::kWarps;
  static constexpr i32 kWidth = kConfig.width();
  static constexpr bool kByExpert = kConfig.is_by_expert();

  __device__ explicit SmallDispatchPicks(const Base& base) : Base(base) {}

  // The block that writes counts: the last, which of few tokens has none.
  __device__ static bool is_counting() { return blockIdx.x == kConfig.num_blocks - 1; }

  // The first part of a token that this block copies; num_parts or more: none.
  __device__ i32 first_part_of(i32 token) const {
    const i32 behind = static_cast<i32>(blockIdx.x) - token * a.num_parts % kConfig.num_blocks;
    return behind < 0 ? behind + kConfig.num_blocks : behind;
  }

  // Of a pick that is there. Own ids come from the caller where this launch has them: other blocks wait for nobody.
  __device__ i32 local_expert(i32 source, i32 token, i32 k) const {
    if (kConfig.sends && source == rank()) return local_of(own_ids()[token * kTopk + k]);
    return this->local_of_pick(ptx::ld_relaxed_sys(&this->slot_picks(rank(), source, token)[k]));
  }

  // 32 entries at a time, all lanes together; a batch is several of those. rank_major: an entry is a token, its ids are read
  // together.
  static constexpr i32 kTogether = kByExpert ? 8 : 1;
  struct Batch {
    i32 first = -1;        // number of its first entry
    i32 from[kTogether];   // source << 16 | token
    i32 group[kTogether];  // -1: no row
    u32 wanted;            // bit: what this block needs to know the place of
  };
  static constexpr i32 kNoToken = 0xffff;

  __device__ i32 num_entries() const { return kRanks * a.max_tokens * kWidth; }

  // A run of entries for each warp.
  __device__ i32 first_of(i32 of_warp) const {
    return min(of_warp * ((num_entries() + kWarps * 32 - 1) / (kWarps * 32) * 32), num_entries());
  }
  __device__ i32 number_of(const Batch& batch, i32 idx) const { return batch.first + idx * 32 + lane; }

  // All that needs nothing from others. The source is found by comparisons: a division by a variable takes longer.
  __device__ void begin_batch(i32 first, Batch& batch) const {
    batch.first = first;
    batch.wanted = 0;
#pragma unroll
    for (i32 idx = 0; idx < kTogether; ++idx) {
      const i32 number = number_of(batch, idx), row = number / kWidth;
      i32 source = 0;
#pragma unroll
      for (i32 each = 1; each < kRanks; ++each) source += row >= each * a.max_tokens ? 1 : 0;
      const i32 token = row - source * a.max_tokens;
      const bool is_entry = number < first_of(warp + 1);
      batch.from[idx] = source << 16 | (is_entry ? token : kNoToken);
      batch.group[idx] = -1;
      const bool is_wanted = first_part_of(token) < a.num_parts || (!kByExpert && is_counting());
      if (is_entry && is_wanted) batch.wanted |= 1u << idx;
    }
  }

  // Picks, as their sources say. Their words may be there long before the header behind them; when that has come, or never
  // will, they are not waited for any longer. False: some are missing, and the header too. By a whole warp.
  __device__ bool read_batch(Batch& batch, const u32* has_heard) const {
    struct HeaderPause {
      const u32* has_heard;
      __device__ sync::PauseResult turn() {
        const bool is_over = __all_sync(Base::kAll, ptx::ld_acquire_cta(has_heard) != 0) != 0;
        return is_over ? sync::PauseResult::kAbort : sync::PauseResult::kLookAgain;
      }
    };
    HeaderPause pause{has_heard};
    if constexpr (kByExpert) {
      u32 missing = 0;
#pragma unroll
      for (i32 idx = 0; idx < kTogether; ++idx) {
        const i32 source = batch.from[idx] >> 16, token = batch.from[idx] & kNoToken;
        if (!is_told(source, token)) continue;
        missing |= 1u << idx;
        batch.group[idx] = static_cast<i32>(a.view.layout.small_pick(flight.turn.sequence, source, token)) +
                           number_of(batch, idx) % kWidth;  // of its word, until it is known
      }
      const u64* words = reinterpret_cast<const u64*>(a.view.own_control() + a.view.layout.small_picks);
      const auto are_there = [&] {
        u64 pick[kTogether];
#pragma unroll
        for (i32 idx = 0; idx < kTogether; ++idx) {  // all these loads are under way together
          pick[idx] = 0;
          if ((missing >> idx & 1u) != 0) pick[idx] = ptx::ld_relaxed_sys(&words[batch.group[idx]]);
        }
#pragma unroll
        for (i32 idx = 0; idx < kTogether; ++idx) {
          if (!this->is_there(pick[idx])) continue;
          batch.group[idx] = this->local_of_pick(pick[idx]);
          missing &= ~(1u << idx);
        }
        return __all_sync(Base::kAll, missing == 0) != 0;
      };
      return sync::wait_until(are_there, pause) == sync::WaitResult::kReady;
    } else {
      const i32 token = batch.from[0] & kNoToken, source = batch.from[0] >> 16;
      i32 expert = -1;
      const auto are_there = [&] {
        u32 are_mine = 1;
#pragma unroll 8
        for (i32 k = 0; k < kTopk && is_told(source, token); ++k) {
          const u64 pick = ptx::ld_relaxed_sys(&this->slot_picks(rank(), source, token)[k]);
          are_mine &= this->is_there(pick) ? 1u : 0u;
          expert = max(expert, this->local_of_pick(pick));
        }
        return __all_sync(Base::kAll, are_mine != 0) != 0;
      };
      const bool has_all = sync::wait_until(are_there, pause) == sync::WaitResult::kReady;
      batch.group[0] = max(batch.group[0], min(expert, 0));
      return has_all;
    }
  }

  // Own ids come from the caller where this launch has them.
  __device__ void read_own(Batch& batch) const {
    if constexpr (!kConfig.sends) return;
#pragma unroll
    for (i32 idx = 0; idx < kTogether; ++idx) {
      const i32 source = batch.from[idx] >> 16, token = batch.from[idx] & kNoToken;
      if (source != rank() || token >= a.num_tokens) continue;
      if constexpr (kByExpert) {
        batch.group[idx] = local_of(own_ids()[token * kTopk + number_of(batch, idx) % kWidth]);
      } else {
        batch.group[idx] = group_of_own(token);
      }
    }
  }

 private:
  // Its picks are in words that the source has written, or will.
  __device__ bool is_told(i32 source, i32 token) const {
    return token != kNoToken && flight.is_active(source) && !(kConfig.sends && source == rank());
  }

  // rank_major.
  __device__ i32 group_of_own(i32 token) const {
    i32 group = -1;
    for (i32 k = 0; k < kTopk; ++k) group = local_of(own_ids()[token * kTopk + k]) >= 0 ? 0 : group;
    return group;
  }
};

}  // namespace weft::kernels
