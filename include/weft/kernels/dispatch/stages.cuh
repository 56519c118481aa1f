// Dispatch: what those who fill and empty stages share. A stage holds a row, loaded once and stored to every rank that wants it.
#pragma once

#include "weft/kernels/dispatch/block.cuh"
#include "weft/kernels/post.cuh"

namespace weft::kernels {

// By expert: longer rows of scales that suit a bulk copy are stored in bulk, and all that are made here, where threads have enough
// to do. Bulk stores of short ones take turns with the rows.
constexpr i32 kMostScalesByThreads = 512;

// The warps that store rows, in a file for each way in which rows are placed.
template <DispatchKernelConfig kConfig, bool kByExpert = kConfig.is_by_expert()>
class DispatchStore;

template <DispatchKernelConfig kConfig>
class DispatchStages : public DispatchState<kConfig> {
 public:
  using Base = DispatchState<kConfig>;
  using Base::s, Base::lane, Base::kScaleBytes;
  static constexpr bool kByExpert = kConfig.is_by_expert();
  static constexpr bool kQuantized = kConfig.is_quantized();
  static constexpr bool kAlignedScales = kScaleBytes % 16 == 0;  // they suit a bulk copy
  static constexpr bool kBulkScales = kAlignedScales && (kQuantized || kScaleBytes > kMostScalesByThreads);
  static constexpr bool kStagedScales = kConfig.staged_scale_bytes() > 0;

  __device__ explicit DispatchStages(const Base& base) : Base(base) {}

 protected:
  // Stores of a warp that read shared memory at a time: the stages of the others are being filled.
  static constexpr i32 kReading = kConfig.num_stages > kStoreWarps ? 1 : 0;

  __device__ void free_stage(i32 store_warp, i32 j) const {
    ptx::mbarrier_arrive(&s.empty[this->stage_of(store_warp, j)]);
  }

  // After item j was stored, by lanes that each wait for what they have stored: frees the stage of an earlier one, notes what
  // has arrived.
  __device__ void after_store(i32 store_warp, i32 j) {
    ptx::bulk_wait_read<kReading>();
    __syncwarp();  // all lanes have read the stage
    if (lane == 0 && j >= kReading) free_stage(store_warp, j - kReading);
    if constexpr (kConfig.has_tell()) {
      constexpr i32 kPending = 2, kEvery = 2;  // items under way, and between two notes
      if ((j + 1) % kEvery == 0) note_arrived<kPending>(store_warp, j + 1);
    }
  }

  // All but the last kPending of the items stored are there.
  template <i32 kPending>
  __device__ void note_arrived(i32 store_warp, i32 num_stored) {
    if (num_stored <= kPending) return;
    ptx::bulk_wait<kPending>();
    __syncwarp();
    if (lane == 0) ptx::st_release_cta(&s.num_arrived[store_warp], static_cast<u32>(num_stored - kPending));
  }

  // The token of item j, for the warp that tells. False: the GPU has gone wrong.
  __device__ bool remember(i32 store_warp, i32 j, i32 token) {
    const u32* num_told = &s.num_told[store_warp];
    const auto has_room = [&] { return ptx::ld_acquire_cta(num_told) + kRemembered > static_cast<u32>(j); };
    if (!sync::wait_any_lane(has_room)) {
      this->fail(transport::ErrorCause::kDeadline, Phase::kSend, this->rank());
      return false;
    }
    __syncwarp();
    if (lane == 0) s.sent[store_warp][j % kRemembered] = token;
    return true;
  }

  // With nodes: item j is loaded. Who deals them out may wait for a peer; what is complete by then may be what it waits for.
  __device__ bool wait_item(i32 store_warp, i32 j) {
    u64* barrier = loaded(this->stage_of(store_warp, j));
    const u32 parity = this->parity_of(store_warp, j);
    const bool is_there = ptx::mbarrier_test_wait(barrier, parity);
    if (__all_sync(0xffffffffu, is_there ? 1 : 0) == 0) note_arrived<0>(store_warp, j);
    return this->wait_long(barrier, parity);
  }

  __device__ u64* loaded(i32 idx) const { return kQuantized ? &s.ready[idx] : &s.full[idx]; }

  // All that the warp has stored: what it read is free, and what it stored is there.
  __device__ void finish_stores(i32 store_warp, i32 num_stored) {
    ptx::bulk_wait_read<0>();
    __syncwarp();
    if (lane == 0) {
      for (i32 j = max(num_stored - kReading, 0); j < num_stored; ++j) free_stage(store_warp, j);
    }
    if constexpr (kConfig.has_tell()) {
      note_arrived<1>(store_warp, num_stored);
    }
    ptx::bulk_wait_all();
    ptx::fence_proxy_async_global();
    __syncwarp();
    if constexpr (kConfig.has_tell()) {
      const u32 arrived = s.has_failed == 0 ? static_cast<u32>(num_stored) | kAllArrived : kPostStops;
      if (lane == 0) ptx::st_release_cta(&s.num_arrived[store_warp], arrived);
    }
  }
};

}  // namespace weft::kernels
