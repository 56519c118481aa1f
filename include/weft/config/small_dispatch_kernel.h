// Structural configuration of the small-batch dispatch: one value is one compiled kernel (config/kernel.h says more).
#pragma once

#include "weft/config/base.h"
#include "weft/config/operation.h"
#include "weft/config/route.h"

namespace weft {

struct SmallDispatchKernelConfig {
  i32 num_ranks = 1;
  i32 num_experts = 1;
  i32 top_k = 1;
  i32 num_blocks = 1;
  i32 row_bytes = 16;           // of x
  i32 scale_row_bytes = 0;      // on the wire, of any size; 0: none
  i32 scale_word_bytes = 0;     // of column-major scales of the result; 0: row by row
  i32 hidden = 16;              // elements of a row, when quantised
  Dtype dtype = Dtype::kBytes;  // of x, when quantised
  Quantize quantize = Quantize::kNone;
  Layout layout = Layout::kRankMajor;
  bool topk_is_int64 = true;  // type of the ids that come in and go out
  bool is_cached = false;     // the routing is that of a handle, of a dispatch of any kind
  bool sends = true;          // the halves of staged use; both in a plain call
  bool receives = true;
  bool tells_counts = false;  // the host hears how many picks each local expert gets
  Route route = Route::kDirect;
  i32 node_ranks = 0;  // with nodes: most ranks of one (layout/rail.h)

  static constexpr i32 kWarps = 16;  // that move rows

  // Two more have to do with headers.
  WEFT_HD static constexpr i32 num_threads() { return (kWarps + 2) * 32; }
  WEFT_HD constexpr i32 num_local_experts() const { return num_experts / num_ranks; }
  WEFT_HD constexpr ExpertPlacement experts() const { return {num_ranks, num_local_experts()}; }
  WEFT_HD constexpr bool has_nodes() const { return leads_to_nodes(route); }
  WEFT_HD constexpr i32 num_nodes() const { return has_nodes() ? (num_ranks + node_ranks - 1) / node_ranks : 1; }
  WEFT_HD constexpr bool is_by_expert() const { return layout != Layout::kRankMajor; }
  WEFT_HD constexpr bool is_quantized() const { return quantize != Quantize::kNone; }
  WEFT_HD constexpr i32 wire_row_bytes() const { return is_quantized() ? hidden : row_bytes; }
  WEFT_HD constexpr i32 scales_at() const { return (wire_row_bytes() + 15) / 16 * 16; }  // in a slot
  // With nodes, in a record of a ring: a row and its scales as in a slot, then the weights of a first dispatch.
  WEFT_HD constexpr i32 weights_at() const { return (scales_at() + scale_row_bytes + 15) / 16 * 16; }
  WEFT_HD constexpr i32 record_bytes() const { return weights_at() + (is_cached ? 0 : (top_k * 4 + 15) / 16 * 16); }
  // Groups that rows are counted in, and entries of a token in the receive plan.
  WEFT_HD constexpr i32 num_groups() const { return is_by_expert() ? num_local_experts() : 1; }
  WEFT_HD constexpr i32 width() const { return is_by_expert() ? top_k : 1; }
  // A count for each warp and group; totals, begins, and picks kept for each expert.
  WEFT_HD constexpr i32 count_bytes() const { return ((kWarps + 2) * num_groups() + num_local_experts()) * 4; }
  // `num_places`: (source, token, entry) whose rows a block copies.
  WEFT_HD constexpr i32 shared_bytes(i32 num_places) const {
    return (count_bytes() + num_places * 4 + 127) / 128 * 128;
  }
};

}  // namespace weft
