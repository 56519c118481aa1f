#pragma once

#include <nanobind/nanobind.h>

namespace weft::bindings {

// Calls that later ones are told by: by the values of their options, and by what their tensors look like.
void bind_known_calls(nanobind::module_& m);

}  // namespace weft::bindings
