// Gradients of a weighted combine at this rank's rows: nothing is sent.
#pragma once

#include <string>

namespace weft::nvlink {

std::string render_gradients();  // the source of its kernel

}  // namespace weft::nvlink
