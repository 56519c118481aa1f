// Results as DLPack arrays (nanobind's ndarray): torch takes them with torch.from_dlpack, without a copy.
#pragma once

#include <nanobind/nanobind.h>

#include "engine/array.h"

namespace weft::bindings {

// None for an array that the call did not make.
nanobind::object to_ndarray(const Array& array);

// The same as a tensor, by torch's function that takes a DLPack capsule: quicker than by way of an ndarray.
nanobind::object to_tensor(const Array& array, nanobind::handle from_dlpack);

}  // namespace weft::bindings
