#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "engine/nvlink/window.h"
#include "engine/poll.h"

namespace weft::bindings {

const Poll& signal_poll();  // raises what Python's signal handlers raise (Ctrl-C)
std::vector<double> microseconds(const std::vector<u64>& nanoseconds);
void bind_nvlink(nanobind::module_& m);
void bind_nvlink_calls(nanobind::module_& m, nanobind::class_<nvlink::Window>& window);

}  // namespace weft::bindings
