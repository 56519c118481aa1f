// Records of a small batch in the ring to, or from, a peer (docs/protocols/nodes.md, "Small batches"). As kernels/records.cuh, but a
// chunk holds as many records as its slot has room for, a ring holds a whole call, and any warp may have any record.
#pragma once

#include "weft/layout/rail.h"
#include "weft/sync/rail.h"

namespace weft::kernels {

template <class Ring>
class UnitRecords {
 public:
  // `first`: the chunk of record 0.
  __device__ UnitRecords(const RailLayout& layout, const Ring& ring, u64 first, i32 record_bytes)
      : ring_(ring),
        first_(first),
        num_slots_(static_cast<u32>(layout.num_slots)),
        record_bytes_(record_bytes),
        each_(static_cast<i32>(layout.slot_bytes / static_cast<u64>(record_bytes))) {}

  __device__ i32 num_chunks(i32 num_records) const { return (num_records + each_ - 1) / each_; }

  // Of the first `num_records`: whether their slots may be filled, whether they have arrived. By one thread.
  __device__ bool have_places(i32 num_records) const {
    const i32 num = num_chunks(num_records);
    return num == 0 || sync::rail_has_place(first_ + static_cast<u64>(num) - 1, ring_.credits(), num_slots_);
  }
  __device__ bool have_arrived(i32 num_records) const {
    for (i32 idx = 0; idx < num_chunks(num_records); ++idx) {
      if (!ring_.has_arrived(first_ + static_cast<u64>(idx))) return false;
    }
    return true;
  }

  __device__ u8* to(i32 record) const { return ring_.send_slot(chunk(record)) + place(record); }
  __device__ const u8* from(i32 record) const { return ring_.receive_slot(chunk(record)) + place(record); }

  // ---- by one thread, behind a barrier of the warps that have written, or read, all of them

  __device__ void put(i32 num_records) const {
    if (num_records == 0) return;
    ptx::fence_sys();
    for (i32 idx = 0; idx < num_chunks(num_records); ++idx) {
      const i32 here = min(num_records - idx * each_, each_);
      ring_.put(first_ + static_cast<u64>(idx), static_cast<u32>(here * record_bytes_));
    }
    *ring_.num_put() = first_ + static_cast<u64>(num_chunks(num_records));
  }
  __device__ void take(i32 num_records) const {
    for (i32 idx = 0; idx < num_chunks(num_records); ++idx) ring_.give_credit();
    *ring_.num_taken() = first_ + static_cast<u64>(num_chunks(num_records));
  }

 private:
  __device__ u64 chunk(i32 record) const { return first_ + static_cast<u64>(record / each_); }
  __device__ i32 place(i32 record) const { return record % each_ * record_bytes_; }

  const Ring ring_;
  const u64 first_;
  const u32 num_slots_;
  const i32 record_bytes_, each_;
};

}  // namespace weft::kernels
