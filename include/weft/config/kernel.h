// Structural configuration of the GPU kernels: one value is one compiled kernel, rendered into its source and cache key.
// What changes between calls (counts, offsets, T) is in the arguments and compiles nothing.
#pragma once

#include "weft/config/base.h"
#include "weft/config/operation.h"
#include "weft/config/order.h"
#include "weft/config/route.h"

namespace weft {

// Warps that store rows. A stage belongs to one of them for good: who waits for phase n of a barrier has then seen
// phase n - 1 end, without which a wait by parity could pass a phase too early.
constexpr i32 kStoreWarps = 2;
// By expert: warps that copy received rows to the places of their other picks, at most. Each has two rows of its own in shared
// memory, one being loaded while another is stored; where that would leave fewer than three warps, one.
constexpr i32 kMostFanWarps = 6;
constexpr i32 kFewFanStages = 6;

struct DispatchKernelConfig {
  i32 num_ranks = 1;
  i32 num_experts = 1;
  i32 top_k = 1;
  i32 num_blocks = 1;
  i32 row_bytes = 16;       // of x
  i32 scale_row_bytes = 0;  // on the wire, of any size; 0: none
  i32 hidden = 16;          // elements of a row, when quantised
  i32 num_stages = 2;       // rows that a block holds to send, a multiple of kStoreWarps and of num_quantize_warps
  i32 num_fan_stages = 0;   // by expert: received rows that a block holds to copy, even from kFewFanStages on
  i32 num_groups = 1;       // rank_major: of 32 tokens, as many as the largest call has
  i32 num_quantize_warps = 0;
  Dtype dtype = Dtype::kBytes;  // of x, when quantised
  Quantize quantize = Quantize::kNone;
  Layout layout = Layout::kRankMajor;
  bool topk_is_int64 = true;  // type of the ids that come in and go out
  bool is_cached = false;     // the routing comes from a handle
  bool is_spread = false;     // by expert: another kernel copies rows to the places of their other picks
  bool tells_counts = false;  // the host hears how many picks each local expert gets
  Route route = Route::kDirect;
  i32 node_ranks = 0;  // with nodes: most ranks of one (layout/rail.h)

  // Runs of its tokens that a block plans on their own when rows are placed by expert: few, since each needs a count for every
  // expert.
  static constexpr i32 kPeriods = 8;
  // With nodes, by expert: warps that find the places of rows to forward, each of one source at a time.
  static constexpr i32 kForwardPlanners = 4;

  WEFT_HD constexpr i32 num_local_experts() const { return num_experts / num_ranks; }
  WEFT_HD constexpr ExpertPlacement experts() const { return {num_ranks, num_local_experts()}; }
  WEFT_HD constexpr bool is_by_expert() const { return layout != Layout::kRankMajor; }
  WEFT_HD constexpr bool has_fan() const { return is_by_expert() && !is_spread; }
  WEFT_HD constexpr bool has_nodes() const { return leads_to_nodes(route); }
  WEFT_HD constexpr i32 num_nodes() const { return has_nodes() ? (num_ranks + node_ranks - 1) / node_ranks : 1; }
  // What has been stored is told while more is on its way.
  WEFT_HD constexpr bool has_tell() const { return has_fan() || has_nodes(); }
  WEFT_HD constexpr bool is_quantized() const { return quantize != Quantize::kNone; }
  WEFT_HD constexpr i32 wire_row_bytes() const { return is_quantized() ? hidden : row_bytes; }
  // A row as it comes in, or as it goes out: quantised in place, with its scales behind the wider of the two.
  WEFT_HD constexpr i32 scales_at() const { return (row_bytes + 15) / 16 * 16; }
  WEFT_HD constexpr i32 staged_scale_bytes() const {
    return is_by_expert() || is_quantized() || has_nodes() ? scale_row_bytes : 0;
  }
  WEFT_HD constexpr i32 stage_bytes() const { return (scales_at() + staged_scale_bytes() + 127) / 128 * 128; }
  // Picks that a block counts at most; the blocks of a rank tell each other by progress words, with 1 added.
  WEFT_HD constexpr i64 most_counted() const {
    return static_cast<i64>((num_groups + num_blocks - 1) / num_blocks) * 32 * top_k;
  }
  // Who goes where. rank_major: a ballot and a prefix sum for each group and rank; else counts for each period and expert.
  WEFT_HD constexpr i32 index_bytes() const {
    const i32 holes = is_by_expert() ? 2 * num_local_experts() * 4 : 0;
    const i32 groups = is_by_expert() ? kPeriods * num_experts * 4 : num_groups * num_ranks * 8;
    const i32 counts = (is_by_expert() ? 3 : 1) * num_experts * 4;
    const i32 nodes = has_nodes() ? num_groups * num_nodes() * 4 + (is_by_expert() ? forward_bytes() : 0) : 0;
    return (holes + (is_cached ? 0 : groups + counts + nodes) + 127) / 128 * 128;
  }
  // By expert: for each planner and expert of the node, the next place, and that behind the last.
  WEFT_HD constexpr i32 node_experts() const { return node_ranks * num_local_experts(); }
  WEFT_HD constexpr i32 forward_bytes() const { return kForwardPlanners * 2 * node_experts() * 4; }
  // A row as it has arrived.
  WEFT_HD constexpr i32 fan_stage_bytes() const { return (wire_row_bytes() + scale_row_bytes + 127) / 128 * 128; }
  WEFT_HD constexpr i32 fan_depth() const { return num_fan_stages < kFewFanStages ? 1 : 2; }
  WEFT_HD constexpr i32 num_fan_warps() const { return num_fan_stages / fan_depth(); }
  WEFT_HD constexpr i32 shared_bytes() const {
    return index_bytes() + num_stages * stage_bytes() + num_fan_stages * fan_stage_bytes();
  }
  // With nodes: items that are loaded while a warp waits for the next one of its own, each of which may be waited for.
  WEFT_HD constexpr u32 filler_waits() const {
    return static_cast<u32>(num_quantize_warps > kStoreWarps ? num_quantize_warps : kStoreWarps);
  }
  // Load, store, quantise, and those that write ids (rank_major) or tell what has gone, plan and copy what arrives; many in
  // all, since all count.
  WEFT_HD constexpr i32 num_warps() const {
    const i32 busy = 1 + kStoreWarps + num_quantize_warps + (is_by_expert() ? kMostFanWarps + 1 : 2);
    return busy < 16 ? 16 : busy;
  }
  WEFT_HD constexpr i32 num_threads() const { return num_warps() * 32; }
};

// Combine: items (chunks of a token's rows) in flight, a multiple of the groups of warps that share them.
constexpr i32 kRingCells = 24;

struct CombineKernelConfig {
  i32 num_ranks = 1;
  i32 num_blocks = 1;
  i32 top_k = 1;
  i32 hidden = 8;
  i32 chunk = 8;         // elements of a row that stand together on the wire; with FP8 a multiple of kQuantizeGroup
  i32 slot_chunks = 1;   // of a contribution in a slot, to be added at a time; more than one only with FP8
  i32 reduce_slots = 2;  // contributions at a time that wait in a block to be added
  i32 reduce_rings = 1;  // that those slots are shared out to, each with a warp that loads
  i32 push_slots = 0;    // rows at a time that wait to be pushed as they are
  i32 sum_warps = 0;     // that make sums or FP8 rows and push them; both 0: this rank's rows are pulled
  Dtype dtype = Dtype::kBf16;
  Layout layout = Layout::kRankMajor;
  bool wire_is_fp8 = false;
  bool has_side = false;
  bool adds_side = false;  // rank_major: lanes of side values are summed over all ranks that hold the token
  Route route = Route::kDirect;
  Order order;
  i32 node_ranks = 0;  // with nodes: most ranks of one, the domains of `order`

  WEFT_HD constexpr bool is_by_expert() const { return layout != Layout::kRankMajor; }
  WEFT_HD constexpr bool has_nodes() const { return leads_to_nodes(route); }
  WEFT_HD constexpr i32 num_nodes() const { return has_nodes() ? (num_ranks + node_ranks - 1) / node_ranks : 1; }
  WEFT_HD constexpr bool has_push() const { return push_slots > 0 || sum_warps > 0; }
  // A contribution is a pick's row as it is, added by the owner with its weight; by expert alone.
  WEFT_HD constexpr bool is_by_pick() const { return order.is_by_pick(); }
  WEFT_HD constexpr bool makes_sums() const { return is_by_expert() && !is_by_pick(); }
  // Contributions are computed before they are pushed.
  WEFT_HD constexpr bool has_partials() const { return makes_sums() || wire_is_fp8; }
  // This rank's own contributions go to its own landing too.
  WEFT_HD constexpr bool lands_own() const { return has_partials() || is_by_pick(); }
  // This rank's own rows are added from where they are; bulk loads have enough to do with the rows that are pushed.
  WEFT_HD constexpr bool adds_own_rows() const { return has_push() && !lands_own(); }
  // To a token, at most.
  WEFT_HD constexpr i32 contributions() const { return is_by_pick() ? top_k : num_ranks; }
  WEFT_HD constexpr i32 plan_width() const { return is_by_expert() ? top_k : 1; }  // of the receive plan

  WEFT_HD constexpr i32 row_bytes() const { return hidden * dtype_bytes(dtype); }
  WEFT_HD constexpr i32 num_chunks() const { return (hidden + chunk - 1) / chunk; }
  WEFT_HD constexpr i32 chunk_elements(i32 idx) const {
    return hidden % chunk == 0 || idx + 1 < num_chunks() ? chunk : hidden - idx * chunk;
  }

  WEFT_HD constexpr i32 ring_slots() const { return reduce_slots / reduce_rings; }
  // What a slot holds of a contribution.
  WEFT_HD constexpr i32 part() const { return chunk * slot_chunks; }
  WEFT_HD constexpr i32 num_parts() const { return (hidden + part() - 1) / part(); }
  WEFT_HD constexpr i32 part_elements(i32 idx) const {
    return hidden % part() == 0 || idx + 1 < num_parts() ? part() : hidden - idx * part();
  }

  // On the wire a chunk is its elements, with FP8 then a float scale for each group of 128.
  WEFT_HD constexpr i32 scales_at(i32 elements) const { return (elements + 15) / 16 * 16; }
  WEFT_HD constexpr i32 wire_bytes(i32 elements) const {
    const i32 scales = ((elements + kQuantizeGroup - 1) / kQuantizeGroup * 4 + 15) / 16 * 16;
    return wire_is_fp8 ? scales_at(elements) + scales : elements * dtype_bytes(dtype);
  }
  // Of elements that begin with a chunk.
  WEFT_HD constexpr i32 wire_bytes_of(i32 elements) const {
    const i32 whole = elements / chunk;
    return whole * wire_bytes(chunk) + (elements > whole * chunk ? wire_bytes(elements - whole * chunk) : 0);
  }
  WEFT_HD constexpr i32 wire_row_bytes() const { return wire_bytes_of(hidden); }
  // With nodes: a node's sum on the network, of elements that begin with a part.
  WEFT_HD constexpr bool node_sum_is_fp8() const { return has_nodes() && order.sum_is_fp8; }
  WEFT_HD constexpr i32 node_bytes_of(i32 elements) const {
    CombineKernelConfig as_sent = *this;
    as_sent.wire_is_fp8 = wire_is_fp8 || order.sum_is_fp8;
    return as_sent.wire_bytes_of(elements);
  }

  // Shared memory of a block.
  WEFT_HD constexpr i32 reduce_slot_bytes() const { return (wire_bytes_of(part()) + 127) / 128 * 128; }
  WEFT_HD constexpr i32 push_slot_bytes() const { return (chunk * dtype_bytes(dtype) + 127) / 128 * 128; }
  // A warp that makes sums or FP8 rows: a ring of stages, each a unit of one row that is being fetched, and slots that bulk
  // stores read. Sums go out unit by unit, their FP8 chunk by chunk; FP8 rows need no slot.
  WEFT_HD constexpr i32 fetch_stages() const { return !is_by_expert() ? 1 : wire_is_fp8 ? 5 : 3; }
  WEFT_HD constexpr i32 stage_bytes() const { return sum_unit() * dtype_bytes(dtype); }
  WEFT_HD constexpr i32 out_slots() const { return is_by_expert() ? 2 : 0; }
  WEFT_HD constexpr i32 out_slot_bytes() const {
    return wire_is_fp8 ? (wire_bytes(chunk) + 127) / 128 * 128 : stage_bytes();
  }
  WEFT_HD constexpr i32 sum_warp_bytes() const {
    return fetch_stages() * stage_bytes() + out_slots() * out_slot_bytes();
  }
  WEFT_HD constexpr i32 slots_bytes() const {
    return reduce_slots * reduce_slot_bytes() + sum_warps * sum_warp_bytes() + push_slots * push_slot_bytes();
  }
  // Tokens whose entries of the receive plan are read at a time.
  WEFT_HD constexpr i32 plan_tokens() const {
    const i32 fitting = 512 / (num_ranks * plan_width());
    return fitting < 1 ? 1 : fitting > 8 ? 8 : fitting;
  }
  // Two pieces of the receive plan, one in use and one being read: rows, weights, and items of 16 bytes.
  WEFT_HD constexpr i32 plan_entries() const { return plan_tokens() * num_ranks * plan_width(); }
  WEFT_HD constexpr i32 plan_rows_bytes() const {
    return (2 * plan_entries() * (is_by_expert() ? 8 : 4) + 15) / 16 * 16;
  }
  WEFT_HD constexpr i32 plan_bytes() const {
    if (!has_push()) return 0;
    return plan_rows_bytes() + (has_partials() ? 2 * plan_tokens() * num_ranks * 16 : 0);
  }
  // By pick: the owner's weights of the contributions in each cell.
  WEFT_HD constexpr i32 pick_weights_bytes() const {
    return is_by_pick() ? (reduce_rings * kRingCells * top_k * 4 + 15) / 16 * 16 : 0;
  }
  WEFT_HD constexpr i32 shared_bytes() const { return slots_bytes() + plan_bytes() + pick_weights_bytes(); }

  WEFT_HD constexpr bool makes_partials() const { return has_push() && has_partials(); }
  // 16-byte vectors that a lane of a warp that makes sums has of a row at a time: more where each costs no sums.
  WEFT_HD constexpr i32 sum_vectors() const { return wire_is_fp8 && !is_by_expert() ? 8 : 4; }
  // Of a row that such a warp makes at a time: with FP8 what stands together on the wire.
  WEFT_HD constexpr i32 sum_chunk() const { return wire_is_fp8 ? chunk : hidden; }
  WEFT_HD constexpr i32 most_of_unit() const { return sum_vectors() * 32 * (16 / dtype_bytes(dtype)); }
  // A unit: elements that a warp has of a row at a time. With FP8 chunks are cut into equal ones, of whole groups.
  WEFT_HD constexpr i32 sum_unit() const {
    if (!wire_is_fp8) return most_of_unit();
    const i32 units = (chunk + most_of_unit() - 1) / most_of_unit();
    return ((chunk + units - 1) / units + kQuantizeGroup - 1) / kQuantizeGroup * kQuantizeGroup;
  }
  // Few and large groups to reduce, since each warp of a group pays for each of its items, and while a group adds, the slots of
  // its item load nothing. Where sums go out as they are, one: the warps that make them need the registers.
  WEFT_HD constexpr i32 reduce_groups() const { return makes_partials() && !wire_is_fp8 ? 1 : 2; }
  // Waits of the warp that loads between two items of a group: for its contributions, each item; with nodes first for one to deal
  // out, too.
  WEFT_HD constexpr u32 filler_waits() const { return has_nodes() ? 4 : 2; }
  WEFT_HD constexpr i32 reduce_warps() const { return makes_partials() ? 3 : 8; }
  // That store what is pushed in bulk. Rows as they are come from one warp and go on in their order; sums come from many, which one
  // would keep waiting. FP8 rows of rank_major are stored by the threads that make them.
  WEFT_HD constexpr i32 push_warps() const { return !has_partials() ? 1 : is_by_expert() ? 2 : 0; }
  // One warp a ring loads for the owners' sums; for the push one reads the plan, some make sums and some store them, or one loads
  // rows and one stores them, one tells how far they are; one has the side values.
  WEFT_HD constexpr i32 num_warps() const {
    const i32 push = (has_partials() ? sum_warps : 1) + push_warps() + 2;
    return reduce_rings + reduce_groups() * reduce_warps() + (has_push() ? push : 0) + (has_side ? 1 : 0);
  }
  WEFT_HD constexpr i32 num_threads() const { return num_warps() * 32; }
};

}  // namespace weft
