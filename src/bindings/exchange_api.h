// What torch fills in of a tensor for any caller, and looks at that.
#pragma once

#include <nanobind/ndarray.h>

#include "weft/config/base.h"

namespace weft::bindings {

// DLPackExchangeAPI of DLPack 1.3, up to what is used of it.
struct ExchangeApi {
  u32 major = 0, minor = 0;
  ExchangeApi* older = nullptr;
  void (*unused[3])() = {};
  int (*look_at)(void* tensor, nanobind::dlpack::dltensor* out) = nullptr;  // -1: a Python error is set
};

inline u64 place_of(const nanobind::dlpack::dltensor& tensor) {
  return reinterpret_cast<u64>(tensor.data) + tensor.byte_offset;
}

inline bool is_on(const nanobind::dlpack::dltensor& tensor, const nanobind::dlpack::device& device) {
  return tensor.device.device_type == device.device_type && tensor.device.device_id == device.device_id;
}

inline bool is_dense(const nanobind::dlpack::dltensor& tensor) {
  i64 stride = 1;
  for (i32 dim = tensor.ndim - 1; dim >= 0; --dim) {
    if (tensor.shape[dim] != 1 && tensor.strides != nullptr && tensor.strides[dim] != stride) return false;
    stride *= tensor.shape[dim];
  }
  return true;
}

}  // namespace weft::bindings
