#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "bindings/calls.h"
#include "engine/nvlink/window.h"

namespace weft::bindings {

std::vector<double> microseconds(const std::vector<u64>& nanoseconds);
void bind_nvlink(nanobind::module_& m);
void bind_nvlink_calls(nanobind::module_& m, nanobind::class_<nvlink::Window, CallWindow>& window);

}  // namespace weft::bindings
