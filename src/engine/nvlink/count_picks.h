// What V1 of DeepEP calls a dispatch's layout, in one kernel: nothing is sent, and no window is needed.
#pragma once

#include <string>

#include "engine/count_picks.h"

namespace weft::nvlink {

class Gpu;

std::string render_count_picks();  // the source of its kernel

// On the stream that is given; the counts are zero before.
void count_picks(Gpu& gpu, u64 stream, const CountPicks& call);

}  // namespace weft::nvlink
