#pragma once

#include <nanobind/nanobind.h>

namespace weft::bindings {

void bind_nvlink(nanobind::module_& m);

}  // namespace weft::bindings
