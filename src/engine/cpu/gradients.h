// Gradients of a weighted combine at this rank's rows, behind the dispatch that has brought the gradient of each row's token.
#pragma once

#include "engine/call.h"

namespace weft::cpu {

// out = weight * row, rounded once; grad_weights: the dot product of row and y, added as on GPUs (kernels/gradients.cuh).
void gradients(const GradientArgs& args);

}  // namespace weft::cpu
