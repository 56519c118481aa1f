// What the warps that tell ranks how far a block's stores to them have come have in common (combine/push.cuh,
// dispatch/tell.cuh).
#pragma once

#include "weft/transport/peers.cuh"

namespace weft::kernels {

constexpr u32 kPostStops = ~0u;  // in a word that a warp which stores writes: it has failed, nothing more is posted

}  // namespace weft::kernels
