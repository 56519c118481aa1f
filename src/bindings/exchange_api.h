// What torch fills in of a tensor for any caller.
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

}  // namespace weft::bindings
