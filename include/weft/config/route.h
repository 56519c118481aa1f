// Which way leads to a peer.
#pragma once

#include "weft/config/base.h"

namespace weft {

enum class Route : u8 {
  kDirect = 0,  // its memory is mapped: load and store
  kLoop = 1     // rings that a network empties, here one without hardware (transport/rail_loop.cuh)
};

}  // namespace weft
