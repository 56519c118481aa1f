#include "engine/nvlink/device_memory.h"

#include "weft/layout/checked.h"

namespace weft::nvlink {
namespace {

cuda::AllocationProp properties(cuda::Device device) {
  cuda::AllocationProp prop{};
  prop.type = cuda::kAllocationPinned;
  prop.handle_types = cuda::kHandlePosixFd;
  prop.location = {cuda::kLocationDevice, device};
  return prop;
}

uint64_t rounded(cuda::Device device, uint64_t bytes) {
  const cuda::AllocationProp prop = properties(device);
  size_t granularity = 0;
  cuda::check(cuda::driver().granularity(&granularity, &prop, cuda::kGranularityRecommended),
              "cuMemGetAllocationGranularity");
  return align_up(bytes, granularity);
}

}  // namespace

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

DeviceMemory::~DeviceMemory() {
  if (address_ == 0) return;
  cuda::driver().mem_unmap(address_, bytes_);
  cuda::driver().address_free(address_, bytes_);
}

void DeviceMemory::map(cuda::Device device, cuda::AllocationHandle handle, uint64_t bytes) {
  const cuda::Driver& driver = cuda::driver();
  cuda::check(driver.address_reserve(&address_, bytes, 0, 0, 0), "cuMemAddressReserve");
  bytes_ = bytes;
  cuda::check(driver.mem_map(address_, bytes, 0, handle, 0), "cuMemMap");
  const cuda::AccessDesc access{{cuda::kLocationDevice, device}, cuda::kAccessReadWrite};
  cuda::check(driver.set_access(address_, bytes, &access, 1), "cuMemSetAccess");
}

DeviceMemory DeviceMemory::create(cuda::Device device, uint64_t bytes, OwnedFd* fd) {
  const cuda::Driver& driver = cuda::driver();
  const cuda::AllocationProp prop = properties(device);
  const uint64_t whole = rounded(device, bytes);
  cuda::AllocationHandle handle = 0;
  cuda::check(driver.mem_create(&handle, whole, &prop, 0), "cuMemCreate");
  DeviceMemory memory;
  int exported = -1;
  const cuda::Result result = driver.export_handle(&exported, handle, cuda::kHandlePosixFd, 0);
  fd->reset(exported);
  if (result == cuda::kSuccess) memory.map(device, handle, whole);
  driver.mem_release(handle);  // the mapping keeps the memory
  cuda::check(result, "cuMemExportToShareableHandle");
  return memory;
}

DeviceMemory DeviceMemory::attach(cuda::Device device, const OwnedFd& fd, uint64_t bytes) {
  const cuda::Driver& driver = cuda::driver();
  cuda::AllocationHandle handle = 0;
  cuda::check(
      driver.import_handle(&handle, reinterpret_cast<void*>(static_cast<intptr_t>(fd.get())), cuda::kHandlePosixFd),
      "cuMemImportFromShareableHandle");
  DeviceMemory memory;
  memory.map(device, handle, bytes);
  driver.mem_release(handle);
  return memory;
}

}  // namespace weft::nvlink
