// What stands in the payload slots of the phases `count` and `notify`.
// Both structs are followed by one int32 per local expert of the rank that reads (count) or writes (notify) them; on a GPU
// the count payload goes on with the rows that the writer sends to each rank, so that one round of headers is enough.
#pragma once

#include "weft/config/base.h"
#include "weft/config/operation.h"
#include "weft/layout/window.h"

namespace weft {

// Where the rows of one source go in the receiver's memory. Offsets are bytes from the start of the receiver's heap;
// every value is checked by the writer of the rows before it is used (R19).
struct Placement {
  u64 in_heap = 0;  // 1: final places in the heap; 0: the staging ring of (source, receiver)
  u64 x = 0;        // row 0 of the result
  u64 scales = 0;   // row 0 of its scales
  u64 meta_idx =
      0;  // int32 [M, top_k] local expert ids, rank-major over all sources; before it their tokens (cpu/plan.h)
  u64 meta_weights = 0;   // float [M, top_k]
  i64 num_rows = 0;       // rows that the result holds
  i64 meta_start = 0;     // first rank-major row of this source
  i64 num_meta_rows = 0;  // M
};
static_assert(sizeof(Placement) == 64);

// dispatch: what this source will send to the reader. combine: where the writer's rows are, and where pushed rows may land.
struct CountPayload {
  OperationConfig config;
  i64 num_rows = 0;         // dispatch: rows for the reader
  u64 rows_in_heap = 0;     // combine: 1: my rows lie in my heap, pull them; 0: I push partial sums
  u64 rows_offset = 0;      // combine: heap offset of row 0
  u64 landing_in_heap = 0;  // combine: 1: push to landing_offset of my heap; 0: to my staging ring
  u64 landing_offset = 0;
  u64 landing_rows = 0;  // records that fit at a time
  Placement placement;   // cached dispatch: sizes are known, so the placement travels with the first header
};
static_assert(sizeof(CountPayload) <= WindowLayout::kPayloadFixedBytes);

struct NotifyPayload {
  Placement placement;
};

// A refusal: instead of either payload (R3).
struct RefusalPayload {
  u32 error_code = 0;
  char text[124] = {};
};
static_assert(sizeof(RefusalPayload) <= WindowLayout::kPayloadFixedBytes);

// A refusal with the error code kNeedOfRoom: the rank would take part in this call with room for so many tokens.
constexpr u32 kNeedOfRoom = 1000;

struct NeedPayload {
  u32 error_code = kNeedOfRoom;  // as in RefusalPayload
  i64 num_tokens = 0;
  OperationConfig config;
};
static_assert(sizeof(NeedPayload) <= WindowLayout::kPayloadFixedBytes);

}  // namespace weft
