// Dispatch by expert in two launches: the first brings a row once a (token, rank), the second copies it to its other places
// (docs/protocols/nvlink-place.md).
#pragma once

#include <string>

#include "engine/call.h"
#include "engine/nvlink/gpu.h"
#include "weft/layout/gpu_window.h"

namespace weft::nvlink {

// Whether a call is made so; from values equal on all ranks.
bool is_spread(const GpuWindowShape& shape, const DispatchSpec& spec);
// Of kStraightOf tokens, whose own rows the first launch stores to all their places: as many as it has stores left for while rows
// are on the wire.
i32 num_straight(const GpuWindowShape& shape, const DispatchSpec& spec);

const Kernel& place_rows_kernel(Gpu& gpu);
std::string render_place_rows();

}  // namespace weft::nvlink
