// Dispatch of rank_major: ids, weights, table and plan, beside the rows (docs/protocols/nvlink-dispatch.md, step 4).
#pragma once

#include "weft/kernels/dispatch/store_by_rank.cuh"

namespace weft::kernels {

template <DispatchKernelConfig kConfig>
class DispatchIdsOut : public DispatchStore<kConfig, false> {
 public:
  using Base = DispatchState<kConfig>;
  using Rows = DispatchStore<kConfig, false>;
  using Base::a, Base::s, Base::flight, Base::warp, Base::lane, Base::rank;
  using Base::kRanks, Base::kTopk, Base::kExperts, Base::kLocal;
  using Id = typename IdType<kConfig.topk_is_int64>::Type;
  using typename Base::Place;

  __device__ explicit DispatchIdsOut(const Base& base) : Rows(base) {}

  // A block takes tokens one after the other, so that neighbouring threads write to neighbouring places: over the wire each 16
  // bytes alone would cost as much as 64.
  __device__ void run(i32 first_warp) {
    const i32 thread = (warp - first_warp) * 32 + lane;
    const i32 num_threads = (kConfig.num_warps() - first_warp) * 32;
    const i32 share = (a.num_tokens + kConfig.num_blocks - 1) / kConfig.num_blocks;
    const i32 begin = min(static_cast<i32>(blockIdx.x) * share, a.num_tokens);
    const i32 num_mine = min(share, a.num_tokens - begin);
    GpuSendPlan<i32> plan{a.send_plan, a.num_tokens, kRanks};
    for (i32 idx = thread; idx < num_mine; idx += num_threads) {
      const i32 token = begin + idx;
      GpuRankMask mask = GpuRankMask::none();
      for (i32 to = 0; to < kRanks; ++to) {
        const i32 row = row_of(token, to);
        plan.row()[static_cast<i64>(token) * kRanks + to] = row;
        if (flight.is_active(to) && this->is_near(to))
          this->peers().put_words(s.table[to].template at<i32>(token), row);
        mask |= row >= 0 ? GpuRankMask::only(to) : GpuRankMask::none();
      }
      plan.set_ranks(token, mask);
    }
    for (i32 idx = thread; idx < num_mine * kIdPieces; idx += num_threads) {
      store_id_piece(begin + idx / kIdPieces, idx % kIdPieces * kIdStep);
    }
    clear_tail(thread, num_threads);
  }

 private:
  using Rows::row_of;
  static constexpr i32 kIdStep = kTopk % 4 == 0 ? 4 : 1;  // picks of a thread
  static constexpr i32 kIdPieces = kTopk / kIdStep;

  __device__ void store_id_piece(i32 token, i32 k) {
    struct alignas(kIdStep == 4 ? 16 : 4) Weights {
      float value[kIdStep];
    };
    const i64 first = static_cast<i64>(token) * kTopk + k;
    i32 id[kIdStep], destination[kIdStep];
    float weight[kIdStep];
#pragma unroll
    for (i32 idx = 0; idx < kIdStep; ++idx) {
      destination[idx] = -1;
      const i64 given = static_cast<const Id*>(a.topk_idx)[first + idx];
      id[idx] = given >= 0 && given < kExperts ? static_cast<i32>(given) : -1;
      weight[idx] = a.topk_weights == nullptr ? 1.0f : a.topk_weights[first + idx];
    }
#pragma unroll 1
    for (i32 to = 0; to < kRanks; ++to) {
      const i32 row = row_of(token, to);
      if (row < 0) continue;
      i32 ids[kIdStep];
      Weights weights;
#pragma unroll
      for (i32 idx = 0; idx < kIdStep; ++idx) {
        const i32 local = id[idx] - Base::kPlacement.expert_of(to, 0);
        const bool is_here = id[idx] >= 0 && local >= 0 && local < kLocal;
        if (is_here) destination[idx] = to;
        ids[idx] = is_here ? local : -1;
        weights.value[idx] = is_here ? weight[idx] : 0.0f;
      }
      if (!this->is_near(to)) continue;
      const i64 place = static_cast<i64>(row) * kTopk + k;
      if (s.with_int64.has(to)) {
        write_ids<i64>(s.ids[to], place, ids);
      } else {
        write_ids<i32>(s.ids[to], place, ids);
      }
      this->peers().put_words(s.weights[to].template at<float>(place), weights);
    }
    const GpuSendPlan<i32> plan{a.send_plan, a.num_tokens, kRanks};
#pragma unroll
    for (i32 idx = 0; idx < kIdStep; ++idx) plan.destination()[first + idx] = destination[idx];
  }

  template <class There>
  __device__ void write_ids(Place to, i64 place, const i32 (&ids)[kIdStep]) const {
    struct alignas(kIdStep == 4 ? 16 : sizeof(There)) Ids {
      There value[kIdStep];
    } wanted;
#pragma unroll
    for (i32 idx = 0; idx < kIdStep; ++idx) wanted.value[idx] = ids[idx];
    this->peers().put_words(to.template at<There>(place), wanted);
  }

  // With a capacity: rows that hold nothing have no ids and no weights.
  __device__ void clear_tail(i32 thread, i32 num_threads) {
    if (a.capacity < 0) return;
    const i64 num_rows =
        min(static_cast<i64>(this->is_staged(rank()) ? kRanks * a.view.layout.max_tokens : a.capacity), a.capacity);
    const i64 stride = static_cast<i64>(num_threads) * kConfig.num_blocks;
    const i64 first = s.own_rows * static_cast<i64>(kTopk) + static_cast<i64>(blockIdx.x) * num_threads + thread;
    for (i64 pick = first; pick < num_rows * kTopk; pick += stride) {
      reinterpret_cast<Id*>(s.ids[rank()].own())[pick] = -1;
      reinterpret_cast<float*>(s.weights[rank()].own())[pick] = 0.0f;
    }
  }
};

}  // namespace weft::kernels
