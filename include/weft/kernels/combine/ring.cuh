// Rows on their way through shared memory: one warp fills slots by bulk loads, readers empty them item by item, in order.
// An item is one chunk of all rows that are added together, so a reader waits once for all of them.
// A cell (the barriers and the description of an item) belongs to one reader for good: the number of cells is a multiple of
// the number of readers. Who waits for phase n of a barrier has then seen phase n - 1 end, without which a wait by parity
// could pass a phase too early.
#pragma once

#include "weft/config/kernel.h"
#include "weft/sync/block_wait.cuh"

namespace weft::kernels {

constexpr i32 kRingEnd = -1;  // as the count of an item: nothing comes after it

struct alignas(16) RingItem {
  i32 first = 0;  // slot of its first row
  i32 count = 0;  // rows, in consecutive slots, or kRingEnd
  i32 index = 0;  // of the token among those of the block
  u16 chunk = 0;
  u16 owner = 0;  // push: rank whose token it is; reduce: which of its rows is not in a slot (combine/reduce.cuh)
};

template <i32 kSlotCount>
struct Ring {
  static constexpr i32 kSlots = kSlotCount;
  u64 full[kRingCells];
  u64 empty[kRingCells];
  RingItem item[kRingCells];

  // By every thread, side by side. `num_arrivals`: warps of a reader.
  __device__ void init(i32 num_arrivals) {
    const i32 cell = static_cast<i32>(threadIdx.x);
    if (cell >= kRingCells) return;
    ptx::mbarrier_init(&full[cell], 1);
    ptx::mbarrier_init(&empty[cell], num_arrivals);
  }
};

// The warp that loads. All its lanes hold the same numbers and call everything together.
template <class RingType>
class RingWriter {
 public:
  __device__ explicit RingWriter(RingType& ring) : r_(ring), lane_(static_cast<i32>(threadIdx.x % ptx::kWarpLanes)) {}

  // Waits for a cell and `count` slots. False: the GPU has gone wrong.
  __device__ bool reserve(i32 count) {
    while (num_items_ == kRingCells || num_used_ + count > RingType::kSlots) {
      if (!sync::wait_barrier(&r_.empty[oldest_], oldest_parity_)) return false;
      drop_oldest();
    }
    return true;
  }

  __device__ i32 cell() const { return cell_; }
  __device__ u64* barrier() const { return &r_.full[cell_]; }
  __device__ i32 slot(i32 idx) const {
    return head_ + idx < RingType::kSlots ? head_ + idx : head_ + idx - RingType::kSlots;
  }

  // Announces the item; then its rows are loaded into slot(0 .. count), `num_bytes` in all, and advance() ends it.
  __device__ void announce(RingItem item, u32 num_bytes) {
    item.first = head_;
    __syncwarp();
    if (lane_ == 0) {
      r_.item[cell_] = item;
      ptx::mbarrier_arrive_expect(&r_.full[cell_], num_bytes);
    }
    __syncwarp();
  }

  __device__ void advance(i32 count) {
    head_ = slot(count);
    num_used_ += count;
    ++num_items_;
    if (++cell_ == kRingCells) cell_ = 0;
  }

  // What each of `num_readers` sees last.
  __device__ void end(i32 num_readers) {
    RingItem item;
    item.count = kRingEnd;
    for (i32 reader = 0; reader < num_readers; ++reader) {
      if (!reserve(0)) return;
      announce(item, 0);
      advance(0);
    }
  }

 protected:
  // The oldest item has been read.
  __device__ void drop_oldest() {
    num_used_ -= r_.item[oldest_].count;
    --num_items_;
    if (++oldest_ == kRingCells) {
      oldest_ = 0;
      oldest_parity_ ^= 1;
    }
  }

  RingType& r_;
  const i32 lane_;
  i32 cell_ = 0, head_ = 0;
  i32 num_items_ = 0, num_used_ = 0;  // not yet known to be read
  i32 oldest_ = 0;
  u32 oldest_parity_ = 0;
};

// One of `num_readers` readers: a warp or a group of warps.
template <class RingType>
class RingReader {
 public:
  __device__ RingReader(RingType& ring, i32 reader, i32 num_readers) : r_(ring), cell_(reader), step_(num_readers) {}

  // False: the GPU has gone wrong. `timeout_ns`, unless null: for so long who fills the ring may wait for a peer, kFillerWaits
  // times between two items of this reader.
  template <u32 kFillerWaits = 2>
  __device__ bool wait(const u64* timeout_ns = nullptr) {
    return sync::wait_barrier<kFillerWaits>(&r_.full[cell_], parity_, timeout_ns);
  }
  __device__ const RingItem& item() const { return r_.item[cell_]; }
  __device__ i32 cell() const { return cell_; }

  __device__ void advance() {
    cell_ += step_;
    if (cell_ < kRingCells) return;
    cell_ -= kRingCells;
    parity_ ^= 1;
  }

  // Each warp of the reader, after its last access to the slots.
  __device__ void release() {
    __syncwarp();
    if (threadIdx.x % ptx::kWarpLanes == 0) ptx::mbarrier_arrive(&r_.empty[cell_]);
    advance();
  }

 private:
  RingType& r_;
  i32 cell_;
  const i32 step_;
  u32 parity_ = 0;
};

}  // namespace weft::kernels
