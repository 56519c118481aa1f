// Plain structs beside those of engine/call.h.
#pragma once

#include "engine/call.h"

namespace weft::nvlink {

// Where the rows of a dispatch that found no room go from the landing. Sizes as in DispatchResult; recv_plan:
// gpu_recv_plan_len of the window's max_tokens. A repeated dispatch has x and scales only.
struct UnloadArgs {
  u64 x = 0, scales = 0, topk_idx = 0, topk_weights = 0, recv_plan = 0;
};

struct WindowStats {
  u64 num_dispatches = 0;
  u64 num_combines = 0;
  u64 num_staged = 0;  // results that found no room in the heap
};

}  // namespace weft::nvlink
