#pragma once

#include <nanobind/nanobind.h>

namespace weft::bindings {

void bind_jit(nanobind::module_& m);

}  // namespace weft::bindings
