// Combine of rank_major rows that do not lie in the heap: brought into the landing first, then pulled
// (docs/protocols/nvlink-combine.md).
#pragma once

#include <string>

#include "engine/call.h"
#include "engine/nvlink/gpu.h"
#include "weft/layout/gpu_window.h"

namespace weft::nvlink {

// Whether a call is made so on ranks whose rows lie elsewhere, if the landing has room for all of its tokens; from values equal on
// all ranks: nobody pushes into a landing that rows are pulled from.
bool is_brought(const GpuWindowShape& shape, const CombineSpec& spec);

const Kernel& stage_rows_kernel(Gpu& gpu);
std::string render_stage_rows();

}  // namespace weft::nvlink
