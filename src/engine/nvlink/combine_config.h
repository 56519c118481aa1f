// How combine shares out what a block and a landing have.
#pragma once

#include "weft/config/kernel.h"
#include "weft/layout/gpu_window.h"

namespace weft::nvlink {

// Chooses chunk and slots for blocks of `shared_bytes`. Error kUnsupported: it does not fit. `has_push`: this rank's rows are
// not pulled. With FP8 on the wire the chunk is part of the wire format: equal on all ranks since has_push is.
CombineKernelConfig with_slots(CombineKernelConfig config, bool has_push, int shared_bytes);

// Tokens of each rank whose contributions, `rows_a_token` of each, fit the landing together; 0: none do.
i64 tokens_in_landing(const CombineKernelConfig& config, const GpuWindowLayout& layout, i64 rows_a_token);

}  // namespace weft::nvlink
