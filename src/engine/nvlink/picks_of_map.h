// The ids and weights that a routing map stands for, in one kernel: nothing is sent, and no window is needed.
#pragma once

#include <string>

#include "engine/picks_of_map.h"

namespace weft::nvlink {

class Gpu;

std::string render_picks_of_map();  // the source of its kernel

// On the stream that is given.
void picks_of_map(Gpu& gpu, u64 stream, const PicksOfMap& call);

}  // namespace weft::nvlink
