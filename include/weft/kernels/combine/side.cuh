// Side values of combine: a float for each pick goes back to the owner of its token. One warp of each block sends those of
// its tokens with plain stores, says so once, and gathers what the other ranks have sent.
#pragma once

#include "weft/kernels/combine/block.cuh"

namespace weft::kernels {

template <CombineKernelConfig kConfig>
class CombineSide {
 public:
  using Block = CombineBlock<kConfig>;
  static constexpr i32 kRanks = kConfig.num_ranks;
  static constexpr i32 kTopk = kConfig.top_k;

  __device__ explicit CombineSide(const Block& block) : b_(block) {}

  __device__ void run() const {
    for (i32 source = 0; source < kRanks; ++source) {
      if (b_.flight.is_active(source)) send(source);
    }
    __syncwarp();
    const bool is_peer = b_.lane < kRanks && is_near(b_.lane);
    const i32 block = static_cast<i32>(blockIdx.x);
    if (is_peer) b_.peers().post(b_.flight, b_.lane, block, kSideChannel, 1);
    const bool is_lost = is_peer && !transport::wait_progress(b_.a.view, b_.flight, b_.lane, block, kSideChannel, 1);
    if (is_lost) b_.leave();
    if (__any_sync(0xffffffffu, is_lost)) return;
    __syncwarp();  // each lane has acquired what one rank sent; all read it
    gather();
  }

 private:
  // A living rank; with nodes, of this one.
  __device__ bool is_near(i32 rank) const {
    if constexpr (kConfig.has_nodes()) return b_.nodes().is_mate(rank);
    return b_.flight.is_active(rank);
  }

  __device__ void send(i32 source) const {
    const GpuRecvPlan<const i32> plan{b_.a.recv_plan, b_.a.recv_plan_tokens, kConfig.plan_width()};
    const i32 num_values = b_.s.num_items[source] * kTopk;
#pragma unroll 4
    for (i32 at = b_.lane; at < num_values; at += 32) {
      const i32 k = at % kTopk;
      const i64 token = b_.token_of(at / kTopk);
      const i32 row = plan.row(source, token)[kConfig.is_by_expert() ? k : 0];
      if (row < 0 || row >= b_.a.num_rows) continue;  // R19
      const i64 place = kConfig.is_by_expert() ? row : static_cast<i64>(row) * kTopk + k;
      b_.peers().put_words(b_.side_landing(source, b_.a.view.rank, token).template at<float>(k), b_.a.side[place]);
    }
  }

  __device__ void gather() const {
    const i32 num_values = b_.s.num_items[b_.a.view.rank] * kTopk;
    const GpuSendPlan<const i32> plan{b_.a.send_plan, b_.a.send_plan_tokens, kConfig.is_by_expert() ? kTopk : kRanks};
#pragma unroll 4
    for (i32 at = b_.lane; at < num_values; at += 32) {
      const i32 k = at % kTopk;
      const i64 token = b_.token_of(at / kTopk);
      float total = 0.0f;
      const auto add = [&](i32 from) {
        if (is_near(from))
          total += reinterpret_cast<const float*>(b_.side_landing(b_.a.view.rank, from, token).own())[k];
      };
      if constexpr (kConfig.adds_side) {
        static_assert(!kConfig.is_by_expert());
#pragma unroll 1
        for (i32 from = 0; from < kRanks; ++from) {
          if (plan.row()[token * kRanks + from] >= 0) add(from);  // what a capacity dropped has no row
        }
      } else {
        const i32 from = plan.destination()[token * kTopk + k];
        if constexpr (kConfig.has_nodes()) {
          if (from >= 0 && !b_.nodes().map.are_mates(from, b_.a.view.rank)) continue;  // the warp that loads has it
        }
        if (from >= 0 && from < kRanks) add(from);
      }
      b_.a.side_out[token * kTopk + k] = total;
    }
  }

  const Block& b_;
};

}  // namespace weft::kernels
