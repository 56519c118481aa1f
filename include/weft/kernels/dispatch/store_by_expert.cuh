// Dispatch by expert: rows from their stages to the places of their picks, one on each rank; the receiver has the others copied
// (docs/protocols/nvlink-dispatch.md, steps 4 and 5). Each of kStoreWarps warps stores those of its stages.
#pragma once

#include "weft/kernels/dispatch/nodes.cuh"
#include "weft/kernels/dispatch/stages.cuh"
#include "weft/kernels/place_rows_arguments.h"

namespace weft::kernels {

template <DispatchKernelConfig kConfig>
class DispatchStore<kConfig, true> : public DispatchStages<kConfig> {
 public:
  using Base = DispatchState<kConfig>;
  using Stages = DispatchStages<kConfig>;
  using Base::a, Base::s, Base::flight, Base::lane, Base::rank;
  using Base::kRanks, Base::kTopk, Base::kLocal, Base::kRowBytes, Base::kScaleBytes;
  using Stages::kQuantized, Stages::kAlignedScales, Stages::kBulkScales;
  static constexpr i32 kSteps = (kTopk + 31) / 32;  // picks of a lane

  __device__ explicit DispatchStore(const Base& base) : Stages(base) {}

  __device__ void store_rows(i32 store_warp) {
    if constexpr (kConfig.has_nodes()) return store_items(store_warp);
    Item next;
    bool has_next = false;
    i32 num_stored = 0;
    for (i32 j = 0;; ++j) {
      const i32 idx = this->stage_of(store_warp, j);
      const bool is_loaded = this->wait_local(this->loaded(idx), this->parity_of(store_warp, j));
      if (__all_sync(0xffffffffu, is_loaded ? 1 : 0) == 0) break;
      const i32 token = s.token[idx];
      if (token < 0) break;
      if (!has_next && !fetch(next, token)) break;
      const Item item = next;
      if constexpr (kConfig.has_fan()) {
        if (!this->remember(store_warp, j, token)) break;
      }
      store_picks(token, item, this->stage(idx));
      __syncwarp();
      ptx::bulk_commit();
      has_next = fetch_early(next, store_warp, j + 1);
      this->after_store(store_warp, j);
      num_stored = j + 1;
    }
    this->finish_stores(store_warp, num_stored);
  }

 private:
  __device__ static i32 block() { return static_cast<i32>(blockIdx.x); }

  // Of pick `step * 32 + lane`: its row and the rank that holds it; -1: not sent.
  struct Item {
    i32 row[kSteps];
    i32 destination[kSteps];
  };

  // With nodes: tokens of this rank, and rows that have arrived.
  __device__ void store_items(i32 store_warp) {
    i32 num_stored = 0;
    for (i32 j = 0;; ++j) {
      const bool is_loaded = this->wait_item(store_warp, j);
      if (__all_sync(0xffffffffu, is_loaded ? 1 : 0) == 0) break;
      const i32 token = s.token[this->stage_of(store_warp, j)];
      if (token == kEndOfItems || !store_item(store_warp, j, token)) break;
      this->after_store(store_warp, j);
      num_stored = j + 1;
    }
    this->finish_stores(store_warp, num_stored);
  }
  // False: the GPU has gone wrong.
  __device__ bool store_item(i32 store_warp, i32 j, i32 token) {
    const i32 idx = this->stage_of(store_warp, j);
    DispatchNodes<kConfig> nodes(*this);
    if (!this->remember(store_warp, j, nodes.remembered(token, idx))) return false;
    if (token == kArrivedRow) {
      if (!nodes.wait_placed(idx)) return false;
      store_row(token, nodes.arrived_row(idx), lane, this->stage(idx));
      nodes.store_picks(idx);
    } else {
      Item item;
      if (!fetch(item, token)) return false;
      store_picks(token, item, this->stage(idx));
      nodes.store_records(token, idx, this->stage(idx));
    }
    __syncwarp();
    ptx::bulk_commit();
    return true;
  }

  // R19, of a plan that was made before: a graph may be replayed when ranks have left.
  __device__ bool is_place(i32 row, i32 to) const {
    if (to < 0 || !flight.is_active(to)) return false;
    if constexpr (kConfig.has_nodes()) {
      if (!this->is_near(to)) return true;  // its forwarder looks
    }
    const i64 limit = kConfig.layout == Layout::kMasked ? i64{s.limit[to]} * kLocal : s.limit[to];
    return this->is_staged(to) || row < limit;
  }

  // What is needed to know of a token. False: the GPU has gone wrong.
  __device__ bool fetch(Item& item, i32 token) {
    if constexpr (!kConfig.is_cached) {
      const i32 at = token - this->queue_begin(block(), a.num_tokens), chunk = this->chunk_tokens();
      const bool is_own = at >= 0 && at < this->queue_len(block(), a.num_tokens);
      if (is_own && !wait_planned(at / chunk, at % chunk)) return false;
    }
    const GpuSendPlan<i32> plan{a.send_plan, a.num_tokens, kTopk};
    const i64 first = static_cast<i64>(token) * kTopk;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      const i32 k = step * 32 + lane;
      item.row[step] = k < kTopk ? plan.row()[first + k] : -1;
      item.destination[step] = k < kTopk ? plan.destination()[first + k] : -1;
      if (kConfig.is_cached && !is_place(item.row[step], item.destination[step])) item.destination[step] = -1;
    }
    return true;
  }

  // Until the places of this token of a chunk of this block are known, and of those before it.
  __device__ bool wait_planned(i32 period, i32 at) {
    const u32 num_picks = static_cast<u32>((at + 1) * kTopk);
    if (sync::wait_any_lane([&] { return ptx::ld_acquire_cta(&s.num_planned[period]) >= num_picks; })) {
      __syncwarp();  // all lanes see what one has acquired
      return true;
    }
    this->fail(transport::ErrorCause::kDeadline, Phase::kSend, rank());
    return false;
  }

  // The same of item j while the one before it is stored, if it is loaded by now.
  __device__ bool fetch_early(Item& item, i32 store_warp, i32 j) {
    const i32 idx = this->stage_of(store_warp, j);
    const bool is_loaded = ptx::mbarrier_test_wait(this->loaded(idx), this->parity_of(store_warp, j));
    if (__all_sync(0xffffffffu, is_loaded ? 1 : 0) == 0) return false;
    return s.token[idx] >= 0 && fetch(item, s.token[idx]);
  }

  // The row goes to the place of its first pick on each rank; on this rank, to those of all its picks, unless another
  // kernel copies it there.
  __device__ void store_picks(i32 token, const Item& item, const u8* stage) {
    GpuRankMask mask = GpuRankMask::none();  // ranks that have it
    const bool goes_straight = !kConfig.is_spread || token % kStraightOf < a.num_straight;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      const i32 to = item.destination[step];
      const bool is_first = (ptx::match_any(to) & ptx::lanes_below()) == 0 && !mask.has_or_any(to);
      const bool is_staged = to >= 0 && this->is_staged(to);
      bool is_stored = to >= 0 && (is_first || (to == rank() && !is_staged && goes_straight));
      if constexpr (kConfig.has_nodes()) is_stored = is_stored && this->is_near(to);
      const i32 landing_row = rank() * static_cast<i32>(a.view.layout.max_tokens) + token;
      store_row(token, !is_stored ? -1 : is_staged ? landing_row : item.row[step], to, stage);
      mask.word |= __reduce_or_sync(0xffffffffu, to >= 0 ? 1u << to : 0u);
    }
    if (!kConfig.is_cached && lane == 0) GpuSendPlan<i32>{a.send_plan, a.num_tokens, kTopk}.set_ranks(token, mask);
  }

  // Each lane stores the row to its own place, -1: nowhere.
  __device__ void store_row(i32 token, i32 row, i32 to, const u8* stage) {
    const u8* staged_scales = stage + kConfig.scales_at();
    if (row >= 0) {
      this->peers().put(s.x[to] + static_cast<i64>(row) * kRowBytes, stage, kRowBytes);
      if constexpr (kScaleBytes > 0 && kBulkScales) {
        this->peers().put(s.scales[to] + static_cast<i64>(row) * kScaleBytes, staged_scales, kScaleBytes);
      }
    }
    if constexpr (kScaleBytes > 0 && !kBulkScales) {
      const u8* from = kQuantized || kAlignedScales ? staged_scales : a.scales + static_cast<i64>(token) * kScaleBytes;
      const bool is_wanted = __any_sync(0xffffffffu, row >= 0 ? 1 : 0) != 0;
      u8* place = row >= 0 ? (s.scales[to] + static_cast<i64>(row) * kScaleBytes).address() : nullptr;
      store_short<kScaleBytes>(ShortRow<kScaleBytes>(from, lane, is_wanted), place);
    }
  }
};

}  // namespace weft::kernels
