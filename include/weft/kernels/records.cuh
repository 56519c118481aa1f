// Records of a call in the ring to, or from, a peer: where each lies, when it may be filled or read, and what is said of its chunk. Rows of a
// dispatch and sums of a combine go so (docs/protocols/nodes.md); the rules of a ring are those of sync/rail.h.
#pragma once

#include "weft/layout/rail.h"
#include "weft/sync/rail.h"

namespace weft::kernels {

template <class Ring, i32 kRecordBytes>
class Records {
 public:
  // `first`: the chunk of record 0. Chunks of a call are full, but for the last one.
  __device__ Records(const RailLayout& layout, const Ring& ring, u64 first)
      : ring_(ring), first_(first), num_slots_(static_cast<u32>(layout.num_slots)), chunk_rows_(layout.chunk_rows) {}

  // Of a chunk's first record; the others are there with it.
  __device__ bool has_place(i32 record) const {
    return !begins_chunk(record) || sync::rail_has_place(chunk(record), ring_.credits(), num_slots_);
  }
  __device__ bool has_arrived(i32 record) const { return !begins_chunk(record) || ring_.has_arrived(chunk(record)); }

  __device__ u8* to(i32 record) const { return ring_.send_slot(chunk(record)) + place(record); }
  __device__ const u8* from(i32 record) const { return ring_.receive_slot(chunk(record)) + place(record); }

  // ---- by the lane that tells, of the first `num_done` records

  // The next record, if there is one, is of another chunk.
  __device__ bool ends_chunk(i32 num_done) const { return begins_chunk(num_done); }
  __device__ bool is_put(i32 num_done) const { return *ring_.num_put() > chunk(num_done - 1); }
  // The chunk of the last of them goes. Others have written its records, and this lane has acquired them.
  __device__ void put(i32 num_done) const {
    const u64 n = chunk(num_done - 1);
    ptx::fence_sys();
    ring_.put(n, static_cast<u32>(place(num_done - 1) + kRecordBytes));
    *ring_.num_put() = n + 1;
  }
  // The oldest chunk has been read to its end.
  __device__ void take() const {
    ++*ring_.num_taken();
    ring_.give_credit();
  }

 private:
  __device__ bool begins_chunk(i32 record) const { return record % chunk_rows_ == 0; }
  __device__ i32 place(i32 record) const { return record % chunk_rows_ * kRecordBytes; }
  __device__ u64 chunk(i32 record) const { return first_ + static_cast<u64>(record / chunk_rows_); }

  const Ring ring_;
  const u64 first_;
  const u32 num_slots_;
  const i32 chunk_rows_;
};

}  // namespace weft::kernels
