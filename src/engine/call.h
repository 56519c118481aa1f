// A call as the bindings hand it to a window of either engine, in two parts. The spec is what a kernel and a plan of Python's side
// are chosen by: equal in all calls of a plan. The buffers are what differs from call to call: how many rows, and where they are.
// Addresses are numbers; 0 stands for what is not given.
#pragma once

#include <vector>

#include "engine/array.h"
#include "weft/config/base.h"
#include "weft/config/operation.h"
#include "weft/config/order.h"

namespace weft {

constexpr i32 kAutoBlocks = -1;  // as many as are free where that pays, else 0

// What both calls have. Equal on all ranks but for timeout_ns. The cpu engine reads no num_blocks, is_small, sends and receives.
struct CallSpec {
  Layout layout = Layout::kRankMajor;
  i64 alignment = 1;
  i64 capacity = kNoCapacity;
  i64 max_tokens = 0;  // of any rank in this call
  i64 hidden = 0;
  Dtype dtype = Dtype::kBytes;  // of the rows that are given
  i32 num_blocks = 16;
  u32 object = 0;  // number of the ExpertParallel among those of the window
  u64 timeout_ns = 0;
  bool is_small = false;  // by the kernels for small batches
  bool sends = true;      // small batches: the half that sends, the half that receives, or both
  bool receives = true;
};

struct DispatchSpec : CallSpec {
  i64 row_bytes = 0;
  Quantize quantize = Quantize::kNone;
  i64 scale_row_bytes = 0;    // of scales that travel along
  bool topk_is_int64 = true;  // type of the ids that come in and go out; ranks may differ
  bool cached = false;        // the routing is that of the plans
  bool zeroes_holes = true;   // expert_major
  bool tells_need = false;  // not cached, not in halves: a rank of more than max_tokens says so, and every rank leaves
  // nvlink alone
  i64 scale_stride = 0;          // bytes between columns of scales in words of 4 (rank_major, or small); 0: row by row
  bool scales_are_fp32 = false;  // those of the result are, too; else bytes
  i32 scale_word_bytes = 0;      // small: scales of the result are column-major, of such words; 0: row by row
  bool tells_counts = false;     // exact sizes: the host hears the counts, too
  i32 spread_blocks = kAutoBlocks;  // by expert, not small: SMs of place_rows; 0: one kernel does all
};

struct CombineSpec : CallSpec {
  bool has_side = false;
  bool adds_side =
      false;  // rank_major, has_side: each lane is summed over all ranks that hold the token, not taken from its pick's
  bool bias_is_2d = false, bias_is_fp32 = false;
  SumOrder order = SumOrder::kRank;
  i32 sum_domain = 0;        // ranks of a domain; 0: none (weft/config/order.h)
  bool wire_is_fp8 = false;  // what is added travels as e4m3 with a float scale per kQuantizeGroup values
  // nvlink, rank_major rows that are not in the heap: SMs that bring them into the landing, from where they are pulled; 0: pushed
  i32 stage_blocks = kAutoBlocks;
};

// What both calls have.
struct Buffers {
  u64 stream = 0;         // nvlink
  i64 num_tokens = 0;     // of this rank
  u64 send_plan = 0;      // int32, of a first dispatch written
  u64 recv_plan = 0;      // int32, read; of a first small dispatch written, of gpu_recv_plan_len
  i64 recv_plan_len = 0;  // cpu
};

struct DispatchBuffers : Buffers {
  u64 x = 0;             // [num_tokens] rows of row_bytes
  u64 scales = 0;        // [num_tokens] rows of scale_row_bytes
  u64 topk_idx = 0;      // [num_tokens, K]; not read when cached
  u64 topk_weights = 0;  // float [num_tokens, K], or 0: all 1
  u64 experts = 0;       // cpu, not cached: ids are logical and go through this ExpertTable; 0: they are physical
  // int32: counts [L], offsets [R + 1] or [L + 1], number of rows. Written, with the send plan; 0: the engine finds memory for both
  // (not small). When cached, nvlink and not rank_major: read, as the first dispatch wrote them.
  u64 sizes = 0;
  u64 overflow = 0;  // int64 [], added to; of a cached call it may be 0: nobody counts
  // Small batches: the caller's memory for `num_rows` rows, written. nvlink, cached: num_rows is what the handle's results have.
  i64 num_rows = 0;
  u64 out_x = 0, out_scales = 0, out_ids = 0, out_weights = 0;
};

struct CombineBuffers : Buffers {
  u64 y = 0;              // [num_rows, hidden] in the layout of the dispatch (masked: L * C rows)
  i64 num_rows = 0;       // of y, all of them
  u64 weights = 0;        // float [num_rows], or 0: plain sum
  u64 owner_weights = 0;  // float [num_tokens, K], SumOrder::kPick: in place of `weights`; a pick of weight 0 is absent
  u64 owner_ids = 0;      // int32 or int64 [num_tokens, K] beside owner_weights, or 0: a pick below 0 is absent
  u64 side = 0;           // float [num_rows, K] (rank_major) or [num_rows], or 0 with has_side: no rows
  u64 bias = 0;           // [hidden] or [num_tokens, hidden], or 0
  u64 out = 0;            // [num_tokens, hidden], written
  u64 side_out = 0;       // float [num_tokens, K], written if has_side
  bool owner_ids_are_int64 = false;
};

struct DispatchArgs : DispatchSpec, DispatchBuffers {
  bool makes_send_plan() const { return !cached && !is_small && sizes == 0; }
};
struct CombineArgs : CombineSpec, CombineBuffers {};

// Gradients of a weighted combine at this rank's rows. nvlink: rows are multiples of 16 bytes, at multiples of 16.
struct GradientArgs {
  u64 stream = 0;               // nvlink
  Dtype dtype = Dtype::kBytes;  // of rows, y and out
  i64 hidden = 0;
  i64 num_rows = 0;
  u64 rows = 0;          // [num_rows, hidden], gradient of the token that each row belongs to
  u64 y = 0;             // [num_rows, hidden], or 0: weights need no gradient
  u64 weights = 0;       // float [num_rows]
  u64 out = 0;           // [num_rows, hidden], may be `rows`
  u64 grad_weights = 0;  // float [num_rows]; not written without y
};

struct DispatchResult {
  // nvlink: in the heap, or empty if !in_heap: then the caller makes tensors and calls Window::unload on the same stream, before
  // any other call on the window. Shapes: x [rows, ...] or [L, C, ...]; scales bytes (float with Quantize::kFp8, and if those
  // given are).
  Array x, scales, topk_idx, topk_weights, recv_plan;
  Array send_plan, sizes;  // if the engine makes them
  bool has_begun = true;   // else there is no room for a send plan and nothing was done: call again with memory for it
  bool in_heap = true;
  bool is_captured = false;  // nvlink: recorded in a graph
  i64 result_rows = 0;       // N (masked: L * C), rows that x has
  std::vector<i32> counts;   // nvlink, with tells_counts: picks of each local expert
  // With tells_need: what max_tokens would have to be; nothing was sent, all else is empty. nvlink: of exact sizes; with a capacity a
  // later call raises NeedOfRoom before it sends anything.
  i64 needed_tokens = 0;
  // cpu, where the host sees them
  i64 num_rows = 0;  // that hold data
  i64 num_bad_ids = 0;
  i64 first_bad_id = 0;
  i64 first_bad_at = 0;  // flat position in topk_idx
  i64 rows_sent = 0;     // to other ranks
  i64 bytes_sent = 0;    // to other ranks
};

// Memory that the host can reach.
template <class T>
T* memory_at(u64 address) {
  return reinterpret_cast<T*>(address);
}
inline u64 address_of(const void* pointer) { return reinterpret_cast<u64>(pointer); }

}  // namespace weft
