// Small-batch dispatch, the receiving half: which picks each warp looks at, and what ids say of them.
#pragma once

#include "weft/kernels/small_dispatch_state.cuh"

namespace weft::kernels {

// An entry is (source, token, k), k < kWidth; entries are numbered in this order. A run of them for each warp.
template <SmallDispatchKernelConfig kConfig>
class SmallDispatchPicks : public SmallDispatchState<kConfig> {
 public:
  using Base = SmallDispatchState<kConfig>;
  using Base::a, Base::warp, Base::lane, Base::rank, Base::own_ids, Base::local_of;
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

  // Own ids come from the caller where this launch has them: other blocks wait for nobody.
  __device__ i32 local_expert(i32 source, i32 token, i32 k) const {
    if (kConfig.sends && source == rank()) return local_of(own_ids()[token * kTopk + k]);
    return local_of(this->slot_ids(rank(), source, token)[k]);
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

  // Ids, as their sources say, also where a source has no such token.
  __device__ void read_batch(Batch& batch) const {
    if constexpr (kByExpert) {
      i32 id[kTogether];
#pragma unroll
      for (i32 idx = 0; idx < kTogether; ++idx) {  // all these loads are under way together
        const i32 source = batch.from[idx] >> 16, token = batch.from[idx] & kNoToken;
        id[idx] = -1;
        if (token == kNoToken || (kConfig.sends && source == rank())) continue;
        id[idx] = this->slot_ids(rank(), source, token)[number_of(batch, idx) % kWidth];
      }
#pragma unroll
      for (i32 idx = 0; idx < kTogether; ++idx) batch.group[idx] = max(batch.group[idx], local_of(id[idx]));
    } else {
      const i32 token = batch.from[0] & kNoToken, source = batch.from[0] >> 16;
      const bool is_mine = kConfig.sends && source == rank();
      if (token != kNoToken && (!is_mine || token < a.num_tokens)) batch.group[0] = group_of_token(source, token);
    }
  }

  // Own ids come from the caller where this launch has them: they need not be waited for.
  __device__ void read_own(Batch& batch) const {
    if constexpr (kByExpert && kConfig.sends) {
#pragma unroll
      for (i32 idx = 0; idx < kTogether; ++idx) {
        const i32 source = batch.from[idx] >> 16, token = batch.from[idx] & kNoToken;
        if (source != rank() || token >= a.num_tokens) continue;
        batch.group[idx] = local_of(own_ids()[token * kTopk + number_of(batch, idx) % kWidth]);
      }
    }
  }

  // When the numbers of tokens are known.
  __device__ void check_batch(const i32* num_tokens, Batch& batch) const {
#pragma unroll
    for (i32 idx = 0; idx < kTogether; ++idx) {
      if ((batch.from[idx] & kNoToken) >= num_tokens[batch.from[idx] >> 16]) batch.group[idx] = -1;
    }
  }

 private:
  // rank_major.
  __device__ i32 group_of_token(i32 source, i32 token) const {
    i32 group = -1;
    for (i32 pick = 0; pick < kTopk; ++pick) group = local_expert(source, token, pick) >= 0 ? 0 : group;
    return group;
  }
};

}  // namespace weft::kernels
