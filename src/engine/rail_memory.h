// The memory of the rails of a window whose ranks are in several nodes, alike in all engines: how it is laid out, and what an error
// says of it. docs/protocols/rail.md has the formulas of layout/rail.h in words.
#pragma once

#include <string>

#include "weft/layout/rail.h"

namespace weft {

// Of a window of the shape: a lane for each rank, of which those of this node are not touched.
template <class WindowShape>
RailShape rail_shape(const WindowShape& shape, i32 num_blocks, i64 max_row_bytes) {
  RailShape rails;
  rails.num_lanes = shape.num_ranks;
  rails.num_blocks = num_blocks;
  rails.node_ranks = static_cast<i32>(shape.node_ranks);
  rails.num_local_experts = shape.num_experts / shape.num_ranks;
  rails.top_k = shape.top_k;
  rails.max_tokens = shape.max_tokens;
  rails.max_row_bytes = max_row_bytes;
  return rails;
}

// Error kInvalidArgument: there can be none.
RailLayout make_rail_layout(const RailShape& shape);

// What a rank could not make or map, and what makes it smaller.
std::string rail_memory_text(u64 num_bytes);

}  // namespace weft
