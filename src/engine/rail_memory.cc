#include "engine/rail_memory.h"

#include "base/status.h"

namespace weft {

RailLayout make_rail_layout(const RailShape& shape) {
  const RailLayout layout = RailLayout::make(shape);
  if (layout.ok) return layout;
  throw_invalid_argument("window shape: nodes of " + std::to_string(shape.node_ranks) + " ranks with " +
                         std::to_string(shape.num_local_experts) + " experts each; allowed: up to " +
                         std::to_string(kNoRailExpert - 1) + " experts a node, sizes within 64 bits");
}

std::string rail_memory_text(u64 num_bytes) {
  return "rail memory: " + std::to_string(num_bytes) +
         " bytes, through which rows go to other nodes; less with a smaller max_tokens_per_rank, top_k or hidden";
}

}  // namespace weft
