#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "engine/cpu/pause.h"

namespace weft::bindings {

const cpu::Poll& signal_poll();  // raises what Python's signal handlers raise (Ctrl-C)
std::vector<double> microseconds(const std::vector<u64>& nanoseconds);
void bind_nvlink(nanobind::module_& m);

}  // namespace weft::bindings
