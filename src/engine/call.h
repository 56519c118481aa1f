// A call as the bindings hand it to a window of either engine: plain numbers, and addresses of the memory that the engine works on
// as numbers, too.
#pragma once

#include "engine/array.h"
#include "weft/config/base.h"
#include "weft/config/operation.h"
#include "weft/config/order.h"

namespace weft {

// What both calls have. Equal on all ranks but for num_tokens, stream, timeout_ns and what is an address. The cpu engine reads
// no num_blocks, stream, is_small, sends and receives.
struct CallArgs {
  Layout layout = Layout::kRankMajor;
  i64 alignment = 1;
  i64 capacity = kNoCapacity;
  i64 max_tokens = 0;  // of any rank in this call
  i64 hidden = 0;
  i64 num_tokens = 0;  // of this rank
  i32 num_blocks = 16;
  u32 object = 0;  // number of the ExpertParallel among those of the window
  u64 timeout_ns = 0;
  u64 stream = 0;
  bool is_small = false;  // by the kernels for small batches
  bool sends = true;      // small batches: this launch is the half that sends, the half that receives, or both
  bool receives = true;
};

constexpr i32 kAutoSpread = -1;  // as many as are free where that pays, else 0

struct DispatchArgs : CallArgs {
  u64 x = 0;  // [num_tokens] rows of row_bytes
  i64 row_bytes = 0;
  Dtype dtype = Dtype::kBytes;  // of x
  Quantize quantize = Quantize::kNone;
  u64 scales = 0;  // [num_tokens] rows of scale_row_bytes that travel along, or 0
  i64 scale_row_bytes = 0;
  u64 topk_idx = 0;  // [num_tokens, K]; not read when cached
  bool topk_is_int64 = true;
  u64 topk_weights = 0;   // float [num_tokens, K], or 0: all 1
  bool cached = false;    // the routing is that of the plans
  u64 send_plan = 0;      // int32, written, or read when cached
  u64 recv_plan = 0;      // int32, read when cached
  i64 recv_plan_len = 0;  // cpu, when cached
  i64 num_rows = 0;       // nvlink, cached without capacity: rows of the result (N)
  // Written. nvlink, when cached and not rank_major: read, as the first dispatch wrote them; cpu, when cached: 0.
  u64 counts = 0;                // int32 [L]
  u64 offsets = 0;               // int32 [R + 1] or [L + 1]
  u64 num_rows_out = 0;          // int32 []
  u64 overflow = 0;              // int64 [], added to; of a cached call it may be 0: nobody counts
  bool zeroes_holes = true;      // expert_major
  bool makes_send_plan = false;  // a first dispatch, not small: the engine finds memory for send plan and sizes, too
  // nvlink alone
  i64 scale_stride = 0;          // bytes between columns of scales in words of 4 (rank_major, or small); 0: row by row
  bool scales_are_fp32 = false;  // those of the result are, too; else bytes
  i32 spread_blocks = kAutoSpread;  // by expert, not small: SMs of place_rows; 0: one kernel does all
  // Small batches: the caller's memory for `room` rows, written; recv_plan, of gpu_recv_plan_len, too.
  i64 room = 0;
  i32 scale_word_bytes = 0;  // out_scales are column-major, of such words; 0: row by row
  u64 out_x = 0, out_scales = 0, out_ids = 0, out_weights = 0;
};

struct DispatchResult {
  // nvlink: in the heap, or empty if !in_heap: then the caller makes tensors and calls Window::unload on the same stream, before
  // any other call on the window. Shapes: x [rows, ...] or [L, C, ...]; scales bytes (float with Quantize::kFp8, and if those
  // given are).
  Array x, scales, topk_idx, topk_weights, recv_plan;
  Array send_plan, sizes;  // with makes_send_plan; sizes: counts, offsets, number of rows
  bool has_begun = true;   // else there is no room for a send plan and nothing was done: call again with memory for it
  bool in_heap = true;
  i64 result_rows = 0;  // N (masked: L * C), rows that x has
  // cpu, where the host sees them
  i64 num_rows = 0;  // that hold data
  i64 num_bad_ids = 0;
  i64 first_bad_id = 0;
  i64 first_bad_at = 0;  // flat position in topk_idx
  i64 rows_sent = 0;     // to other ranks
  i64 bytes_sent = 0;    // to other ranks
};

struct CombineArgs : CallArgs {
  u64 y = 0;         // [num_rows, hidden] in the layout of the dispatch (masked: L * C rows)
  i64 num_rows = 0;  // of y, all of them
  Dtype dtype = Dtype::kBf16;
  u64 weights = 0;  // float [num_rows], or 0: plain sum
  u64 side = 0;     // float [num_rows, K] (rank_major) or [num_rows], or 0 with has_side: no rows
  bool has_side = false;
  u64 bias = 0;  // [hidden] or [num_tokens, hidden], or 0
  bool bias_is_2d = false, bias_is_fp32 = false;
  u64 out = 0;       // [num_tokens, hidden], written
  u64 side_out = 0;  // float [num_tokens, K], written if has_side
  u64 send_plan = 0, recv_plan = 0;
  i64 recv_plan_len = 0;             // cpu
  SumOrder order = SumOrder::kRank;  // cpu; the kernels know kRank alone
  u64 owner_weights = 0;  // float [num_tokens, K], SumOrder::kPick: in place of `weights`; a pick of weight 0 is absent
  bool wire_is_fp8 = false;  // contributions travel as e4m3 with a float scale per kQuantizeGroup values
  // nvlink, rank_major rows that are not in the heap: SMs that bring them into the landing, from where they are pulled; 0: pushed
  i32 stage_blocks = kAutoSpread;
};

// Memory that the host can reach.
template <class T>
T* memory_at(u64 address) {
  return reinterpret_cast<T*>(address);
}
inline u64 address_of(const void* pointer) { return reinterpret_cast<u64>(pointer); }

}  // namespace weft
