// Windows whose ranks are in several nodes: which calls there are, and the memory of their rails, over a network that is a block of
// each rank's grid or NCCL's (docs/protocols/nodes.md, "What a host has to do").
#pragma once

#include <string>

#include "engine/call.h"
#include "weft/layout/gpu_plan.h"
#include "weft/layout/gpu_window.h"
#include "weft/transport/rail_block.h"
#include "weft/transport/rail_gin.h"

namespace weft::nvlink {

inline bool has_nodes(const GpuWindowShape& shape) { return shape.node_ranks > 0; }
inline bool has_gin(const GpuWindowShape& shape) { return has_nodes(shape) && shape.network != 0; }
inline Route route_of(const GpuWindowShape& shape) {
  return has_gin(shape) ? Route::kGin : has_nodes(shape) ? Route::kNodes : Route::kDirect;
}

// All are one node if there are none.
RailMap rail_map(const GpuWindowShape& shape, u64 active);

// A window with nodes has, behind the memory of its rail, the kernels' argument.
RailLayout rail_layout(const GpuWindowShape& shape);
u64 rail_bytes(const GpuWindowShape& shape);     // of a rank, with the argument; 0: no nodes
u64 rail_argument(const GpuWindowShape& shape);  // where that lies

// int32 of a handle, with nodes behind its send plan; else 0. Of any members.
i64 forward_plan_len(const GpuWindowShape& shape);

// Rows of a landing that a token of a combine takes, on the rank where it takes most.
i64 landing_rows_a_token(const GpuWindowShape& shape, u64 active);

// Small batches, whose rings hold a whole call: records of a block.
i64 ring_records(const GpuWindowShape& shape, i32 record_bytes);
// Error kUnsupported: one is too large for its rings or its landing.
[[noreturn]] void refuse_small(const std::string& what);

// Error kUnsupported: not with nodes. The same on all ranks.
void check_nodes(const GpuWindowShape& shape, const DispatchSpec& spec);
void check_nodes(const GpuWindowShape& shape, const CombineSpec& spec);

}  // namespace weft::nvlink
