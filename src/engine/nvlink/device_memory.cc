#include "engine/nvlink/device_memory.h"

#include "base/status.h"
#include "weft/layout/checked.h"

namespace weft::nvlink {
namespace {

bool has(cuda::Device device, int attribute) {
  int value = 0;
  cuda::check(cuda::driver().device_get_attribute(&value, attribute, device), "cuDeviceGetAttribute");
  return value != 0;
}

cuda::AllocationProp properties(cuda::Device device, MemoryOptions options) {
  cuda::AllocationProp prop{};
  prop.type = cuda::kAllocationPinned;
  prop.handle_types = cuda::kHandlePosixFd;
  if (options.spans_machines) {
    if (!has(device, cuda::kFabricSupported)) {
      throw_unsupported("this GPU's driver offers no fabric handles; need: an NVLink domain with IMEX");
    }
    prop.handle_types |= cuda::kHandleFabric;
  }
  prop.location = {cuda::kLocationDevice, device};
  prop.flags.gpu_direct_rdma = has(device, cuda::kRdmaSupported) ? 1 : 0;
  return prop;
}

}  // namespace

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(handle_, other.handle_);
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  std::swap(is_mapped_, other.is_mapped_);
  return *this;
}

DeviceMemory::~DeviceMemory() {
  drop();
  if (address_ != 0) cuda::driver().address_free(address_, bytes_);
}

void DeviceMemory::drop() noexcept {
  if (std::exchange(is_mapped_, false)) cuda::driver().mem_unmap(address_, bytes_);
  if (handle_ != 0) cuda::driver().mem_release(std::exchange(handle_, 0));
}

void DeviceMemory::map() {
  const cuda::Driver& driver = cuda::driver();
  if (address_ == 0) cuda::check(driver.address_reserve(&address_, bytes_, 0, 0, 0), "cuMemAddressReserve");
  cuda::check(driver.mem_map(address_, bytes_, 0, handle_, 0), "cuMemMap");
  is_mapped_ = true;
  const cuda::AccessDesc access{{cuda::kLocationDevice, device_}, cuda::kAccessReadWrite};
  cuda::check(driver.set_access(address_, bytes_, &access, 1), "cuMemSetAccess");
}

DeviceMemory DeviceMemory::create(cuda::Device device, uint64_t bytes, MemoryOptions options) {
  const cuda::Driver& driver = cuda::driver();
  const cuda::AllocationProp prop = properties(device, options);
  size_t granularity = 0;
  cuda::check(driver.granularity(&granularity, &prop, cuda::kGranularityRecommended), "cuMemGetAllocationGranularity");
  const uint64_t whole = align_up(bytes, granularity);
  cuda::AllocationHandle handle = 0;
  cuda::check(driver.mem_create(&handle, whole, &prop, 0), "cuMemCreate");
  DeviceMemory memory(device, handle, whole);
  memory.map();
  return memory;
}

OwnedFd DeviceMemory::share() const {
  int fd = -1;
  cuda::check(cuda::driver().export_handle(&fd, handle_, cuda::kHandlePosixFd, 0), "cuMemExportToShareableHandle");
  return OwnedFd(fd);
}

cuda::FabricHandle DeviceMemory::share_fabric() const {
  cuda::FabricHandle fabric{};
  cuda::check(cuda::driver().export_handle(&fabric, handle_, cuda::kHandleFabric, 0), "cuMemExportToShareableHandle");
  return fabric;
}

DeviceMemory DeviceMemory::attach(cuda::Device device, void* shared, int kind, uint64_t bytes) {
  cuda::AllocationHandle handle = 0;
  cuda::check(cuda::driver().import_handle(&handle, shared, kind), "cuMemImportFromShareableHandle");
  DeviceMemory memory(device, handle, bytes);
  memory.map();
  return memory;
}

DeviceMemory DeviceMemory::attach(cuda::Device device, const OwnedFd& fd, uint64_t bytes) {
  return attach(device, reinterpret_cast<void*>(static_cast<intptr_t>(fd.get())), cuda::kHandlePosixFd, bytes);
}

DeviceMemory DeviceMemory::attach(cuda::Device device, const cuda::FabricHandle& fabric, uint64_t bytes) {
  cuda::FabricHandle copy = fabric;
  return attach(device, &copy, cuda::kHandleFabric, bytes);
}

void DeviceMemory::replace(DeviceMemory&& fresh) {
  if (address_ == 0) {
    *this = std::move(fresh);
    return;
  }
  if (fresh.bytes_ != bytes_) throw_internal("memory of another size can't take these addresses");
  drop();
  cuda::driver().mem_unmap(fresh.address_, fresh.bytes_);
  fresh.is_mapped_ = false;
  std::swap(handle_, fresh.handle_);
  std::swap(device_, fresh.device_);
  map();
}

}  // namespace weft::nvlink
