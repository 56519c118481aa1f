#include "bindings/arrays.h"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <vector>

namespace nb = nanobind;

namespace weft::bindings {
namespace {

nb::dlpack::dtype dlpack_dtype(const cpu::Array& array) {
  const auto make = [](nb::dlpack::dtype_code code, u8 bits) {
    return nb::dlpack::dtype{static_cast<u8>(code), bits, 1};
  };
  if (array.is_integer) return make(nb::dlpack::dtype_code::Int, array.is_int64 ? 64 : 32);
  switch (array.dtype) {
    case Dtype::kBf16: return make(nb::dlpack::dtype_code::Bfloat, 16);
    case Dtype::kFp16: return make(nb::dlpack::dtype_code::Float, 16);
    case Dtype::kFp32: return make(nb::dlpack::dtype_code::Float, 32);
    default: return make(nb::dlpack::dtype_code::UInt, 8);
  }
}

}  // namespace

nb::object to_ndarray(const cpu::Array& array) {
  if (array.block.owner == nullptr) return nb::none();
  auto* held = new std::shared_ptr<void>(array.block.owner);
  nb::capsule owner(held, [](void* pointer) noexcept { delete static_cast<std::shared_ptr<void>*>(pointer); });
  const std::vector<size_t> shape(array.shape.begin(), array.shape.end());
  const int device_type = array.gpu < 0 ? nb::device::cpu::value : nb::device::cuda::value;
  return nb::ndarray<>(array.block.data, shape.size(), shape.data(), owner, nullptr, dlpack_dtype(array), device_type,
                       std::max(array.gpu, 0))
      .cast();
}

}  // namespace weft::bindings
