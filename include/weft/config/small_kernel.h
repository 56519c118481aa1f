// Structural configuration of combine for small batches. What depends on T or on the number of blocks is in the arguments,
// so that calls of every size share a kernel.
#pragma once

#include "weft/config/base.h"
#include "weft/config/operation.h"
#include "weft/config/order.h"
#include "weft/config/route.h"

namespace weft {

struct SmallCombineKernelConfig {
  i32 num_ranks = 1;
  i32 top_k = 1;
  i32 hidden = 8;
  Dtype dtype = Dtype::kBf16;
  Layout layout = Layout::kRankMajor;
  bool wire_is_fp8 = false;
  bool has_side = false;
  bool adds_side = false;  // as CombineKernelConfig
  bool sends = true;       // which halves of the operation this kernel is
  bool receives = true;
  Order order;
  Route route = Route::kDirect;
  i32 node_ranks = 0;  // with nodes: most ranks of one, the domains of `order`

  // Warps that move rows: with two more, as many as leave 128 registers to each thread.
  static constexpr i32 kWorkers = 14;
  static constexpr i32 kVectors = 4;     // most 16-byte accesses that a lane of them has under way for a row
  static constexpr i32 kNarrowRows = 8;  // most rows that it has one such access for

  WEFT_HD constexpr bool has_nodes() const { return leads_to_nodes(route); }
  WEFT_HD constexpr i32 num_network_blocks() const { return route == Route::kNodes ? 1 : 0; }  // of a grid, at its end
  WEFT_HD constexpr i32 num_nodes() const { return has_nodes() ? (num_ranks + node_ranks - 1) / node_ranks : 1; }
  WEFT_HD constexpr bool is_by_expert() const { return layout != Layout::kRankMajor; }
  WEFT_HD constexpr bool is_by_pick() const { return order.is_by_pick(); }         // by expert alone
  WEFT_HD constexpr i32 plan_width() const { return is_by_expert() ? top_k : 1; }  // of the receive plan
  WEFT_HD constexpr i32 row_bytes() const { return hidden * dtype_bytes(dtype); }

  // In a slot: the row, with FP8 its codes and behind them a float scale for each group of 128.
  WEFT_HD constexpr i32 scales_at() const { return (hidden + 15) / 16 * 16; }
  WEFT_HD constexpr i32 wire_row_bytes() const {
    return wire_is_fp8 ? scales_at() + (hidden + kQuantizeGroup - 1) / kQuantizeGroup * 4 : row_bytes();
  }

  // With nodes, in a record of a ring: a node's sum of a part of a row; with FP8 its codes and behind them the scales of these.
  WEFT_HD constexpr bool record_is_fp8() const { return wire_is_fp8 || order.sum_is_fp8; }
  WEFT_HD constexpr i32 record_elements(i32 part) const { return part < hidden ? part : hidden; }
  WEFT_HD constexpr i32 record_scales_at(i32 part) const { return (record_elements(part) + 15) / 16 * 16; }
  WEFT_HD constexpr i32 record_bytes(i32 part) const {
    const i32 scales = (record_elements(part) + kQuantizeGroup - 1) / kQuantizeGroup * 4;
    if (record_is_fp8()) return record_scales_at(part) + (scales + 15) / 16 * 16;
    return (record_elements(part) * dtype_bytes(dtype) + 15) / 16 * 16;
  }
  // Behind the sums of a block, as large as they are: the side values of so many tokens.
  WEFT_HD constexpr i32 num_side_records(i32 num_tokens, i32 part) const {
    return has_side ? (num_tokens * top_k * 4 + record_bytes(part) - 1) / record_bytes(part) : 0;
  }

  // Two more have to do with headers and side values.
  WEFT_HD static constexpr i32 num_threads() { return (kWorkers + 2) * 32; }
};

}  // namespace weft
