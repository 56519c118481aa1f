// Side values of combine for small batches: a float for each pick goes back to the owner of its token. One warp of each block
// has those of tokens block, block + num_blocks, ...
#pragma once

#include "weft/kernels/small/combine_block.cuh"

namespace weft::kernels {

template <SmallCombineKernelConfig kConfig>
class SmallCombineSide {
 public:
  using Block = SmallCombineBlock<kConfig>;
  static constexpr i32 kRanks = kConfig.num_ranks;
  static constexpr i32 kTopk = kConfig.top_k;

  __device__ explicit SmallCombineSide(const Block& block) : b_(block) {}

  // Into this rank's slots at the owners. rank_major: all K values of a row; the owner takes those of its picks.
  __device__ void send(const transport::Flight& flight) const {
    const GpuRecvPlan<const i32> plan{b_.a.recv_plan, b_.a.recv_plan_tokens, kConfig.plan_width()};
    for (i32 owner = 0; owner < kRanks; ++owner) {
      if (!flight.is_active(owner)) continue;
      const i32 num_values = Block::num_tokens_here(min(plan.num_tokens()[owner], b_.a.max_tokens)) * kTopk;
      for (i32 at = b_.lane; at < num_values; at += 32) {
        const i32 k = at % kTopk;
        const i32 token = Block::token_here(at / kTopk);
        const i32 row = plan.row(owner, token)[kConfig.is_by_expert() ? k : 0];
        const bool is_row = row >= 0 && row < b_.a.num_rows;  // R19
        if (!is_row && row != kGpuDroppedRow) continue;       // the owner does not know what a capacity has dropped
        const i64 place = kConfig.is_by_expert() ? row : static_cast<i64>(row) * kTopk + k;
        *b_.own_side_slot(flight, owner, token, k) = is_row ? b_.a.side[place] : 0.0f;
      }
    }
  }

  __device__ void gather(const transport::Flight& flight) const {
    const i32 num_values = Block::num_tokens_here(b_.a.num_tokens) * kTopk;
    const GpuSendPlan<const i32> plan{b_.a.send_plan, b_.a.num_tokens, kConfig.is_by_expert() ? kTopk : kRanks};
    for (i32 at = b_.lane; at < num_values; at += 32) {
      const i32 k = at % kTopk;
      const i32 token = Block::token_here(at / kTopk);
      const i64 pick = static_cast<i64>(token) * kTopk + k;
      float total = 0.0f;
      const auto add = [&](i32 from) {
        if (flight.is_active(from)) total += *b_.side_slot(flight, b_.a.view.rank, from, token, k);
      };
      if constexpr (kConfig.adds_side) {
        static_assert(!kConfig.is_by_expert());
        const GpuRankMask ranks = plan.ranks(token);
#pragma unroll 1
        for (i32 from = 0; from < kRanks; ++from) {
          if (ranks.has(from)) add(from);
        }
      } else {
        const i32 from = plan.destination()[pick];
        if (from >= 0 && from < kRanks) add(from);
      }
      b_.a.side_out[pick] = total;
    }
  }

 private:
  const Block& b_;
};

}  // namespace weft::kernels
