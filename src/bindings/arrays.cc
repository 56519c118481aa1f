#include "bindings/arrays.h"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <memory>
#include <vector>

namespace nb = nanobind;

namespace weft::bindings {
namespace {

nb::dlpack::dtype dlpack_dtype(const Array& array) {
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

// DLManagedTensor of DLPack, with what it points to.
struct ManagedTensor {
  nb::dlpack::dltensor tensor;
  void* context = nullptr;
  void (*free)(ManagedTensor*) = nullptr;
  std::vector<i64> shape;
  std::shared_ptr<void> owner;
};
constexpr const char* kCapsuleName = "dltensor";  // torch changes it when it takes the tensor over

void free_unused(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, kCapsuleName) == 0) return;
  auto* managed = static_cast<ManagedTensor*>(PyCapsule_GetPointer(capsule, kCapsuleName));
  managed->free(managed);
}

}  // namespace

nb::object to_tensor(const Array& array, nb::handle from_dlpack) {
  if (array.block.owner == nullptr) return nb::none();
  auto managed = std::make_unique<ManagedTensor>();
  managed->shape = array.shape;
  managed->owner = array.block.owner;
  managed->free = [](ManagedTensor* self) { delete self; };
  managed->tensor = {};
  managed->tensor.data = array.block.data;
  managed->tensor.device.device_type = array.gpu < 0 ? nb::device::cpu::value : nb::device::cuda::value;
  managed->tensor.device.device_id = std::max(array.gpu, 0);
  managed->tensor.ndim = static_cast<int32_t>(managed->shape.size());
  managed->tensor.dtype = dlpack_dtype(array);
  managed->tensor.shape = managed->shape.data();
  PyObject* capsule = PyCapsule_New(managed.get(), kCapsuleName, free_unused);
  if (capsule == nullptr) throw nb::python_error();
  [[maybe_unused]] const ManagedTensor* owned = managed.release();  // by the capsule
  return from_dlpack(nb::steal(capsule));
}

nb::object to_ndarray(const Array& array) {
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
