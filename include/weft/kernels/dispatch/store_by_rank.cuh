// Dispatch of rank_major: rows from their stages to every rank that holds one of a token's experts, and scales that were given
// (docs/protocols/nvlink-dispatch.md, steps 4 and 5). Each of kStoreWarps warps stores those of its stages.
#pragma once

#include "weft/kernels/dispatch/nodes.cuh"
#include "weft/kernels/dispatch/stages.cuh"

namespace weft::kernels {

template <DispatchKernelConfig kConfig>
class DispatchStore<kConfig, false> : public DispatchStages<kConfig> {
 public:
  using Base = DispatchState<kConfig>;
  using Stages = DispatchStages<kConfig>;
  using Base::a, Base::s, Base::flight, Base::warp, Base::lane;
  using Base::kRanks, Base::kRowBytes, Base::kScaleBytes;
  using Stages::kStagedScales;

  __device__ explicit DispatchStore(const Base& base) : Stages(base) {}

  __device__ void store_rows(i32 store_warp) {
    i32 num_stored = 0;
    for (i32 j = 0;; ++j) {
      const i32 idx = this->stage_of(store_warp, j);
      const bool is_loaded = kConfig.has_nodes() ? this->wait_item(store_warp, j)
                                                 : this->wait_local(this->loaded(idx), this->parity_of(store_warp, j));
      if (__all_sync(0xffffffffu, is_loaded ? 1 : 0) == 0) break;
      const i32 token = s.token[idx];
      if (kConfig.has_nodes() ? token == kEndOfItems : token < 0) break;
      if constexpr (kConfig.has_nodes()) {
        DispatchNodes<kConfig> nodes(*this);
        if (!this->remember(store_warp, j, nodes.remembered(token, idx))) break;
        if (token == kArrivedRow) {
          const bool is_placed = nodes.wait_placed(idx);
          if (!is_placed) break;
          store_to_ranks(nodes.arrived_row(idx), this->stage(idx));
          nodes.store_picks(idx);
        } else {
          store_to_ranks(lane < kRanks && this->is_near(lane) ? row_of(token, lane) : -1, this->stage(idx));
          nodes.store_records(token, idx, this->stage(idx));
        }
      } else {
        store_to_ranks(lane < kRanks ? row_of(token, lane) : -1, this->stage(idx));
      }
      __syncwarp();
      ptx::bulk_commit();
      this->after_store(store_warp, j);
      num_stored = j + 1;
    }
    this->finish_stores(store_warp, num_stored);
  }

  // Rows of scales that were given: neighbouring threads have neighbouring pieces. In bulk they would take turns with the rows.
  __device__ void store_scales(i32 first_warp) {
    using Unit = Piece<piece_bytes(kScaleBytes)>;
    constexpr i32 kPieces = kScaleBytes / static_cast<i32>(sizeof(Unit));
    const i32 num_threads = (kConfig.num_warps() - first_warp) * 32;
    const i32 share = (a.num_tokens + kConfig.num_blocks - 1) / kConfig.num_blocks;
    const i32 begin = min(static_cast<i32>(blockIdx.x) * share, a.num_tokens);
    const i32 num_mine = min(share, a.num_tokens - begin) * kPieces;
    for (i32 idx = (warp - first_warp) * 32 + lane; idx < num_mine; idx += num_threads) {
      const i32 token = begin + idx / kPieces, piece = idx % kPieces;
      Unit unit;
      if constexpr (kScaleBytes % 4 == 0) {
        if (a.scale_stride > 0) unit = gather<Unit>(a.scales + i64{token} * 4, a.scale_stride, piece);
      }
      if (kScaleBytes % 4 != 0 || a.scale_stride == 0) {
        unit = reinterpret_cast<const Unit*>(a.scales + static_cast<i64>(token) * kScaleBytes)[piece];
      }
#pragma unroll
      for (i32 to = 0; to < kRanks; ++to) {
        const i32 row = row_of(token, to);
        if (row >= 0)
          this->peers().put_words((s.scales[to] + static_cast<i64>(row) * kScaleBytes).template at<Unit>(piece), unit);
      }
    }
  }

 protected:
  // The row of a token on a rank: how many came before it; -1: none. On a rank of another node 0: its row is not known here.
  __device__ i32 row_of(i32 token, i32 to) const {
    if constexpr (kConfig.is_cached) {
      if (!flight.is_active(to)) return -1;
      const i32 planned = GpuSendPlan<i32>{a.send_plan, a.num_tokens, kRanks}.row()[i64{token} * kRanks + to];
      return planned < s.limit[to] ? planned : -1;
    }
    const u32 goers = this->goers(to, token / 32);
    const u32 bit = 1u << (token % 32);
    if ((goers & bit) == 0) return -1;
    if constexpr (kConfig.has_nodes()) {
      if (!this->is_near(to)) return 0;
    }
    const i32 row = s.start[to] + this->rows_before(to, token / 32) + __popc(goers & (bit - 1));
    return row < s.limit[to] ? row : -1;
  }

 private:
  // The row goes to every rank that holds it. `row`: in lane r, that on rank r.
  __device__ void store_to_ranks(i32 row, const u8* stage) {
#pragma unroll
    for (i32 to = 0; to < kRanks; ++to) {
      const i64 row_there = __shfl_sync(0xffffffffu, row, to);
      if (row_there < 0) continue;
      if (lane == 0) this->peers().put(s.x[to] + row_there * kRowBytes, stage, kRowBytes);
      if constexpr (kStagedScales) {
        copy_short<kScaleBytes>((s.scales[to] + row_there * kScaleBytes).address(), stage + kConfig.scales_at(), lane);
      }
    }
  }
};

}  // namespace weft::kernels
