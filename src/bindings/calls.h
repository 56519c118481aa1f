#pragma once

#include <nanobind/nanobind.h>

#include "engine/window.h"

namespace weft::bindings {

const Poll& signal_poll();  // raises what Python's signal handlers raise (Ctrl-C)

// Specs, buffers and results of calls, and the class that windows of both engines are.
void bind_calls(nanobind::module_& m);

}  // namespace weft::bindings
