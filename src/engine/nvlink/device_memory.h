// GPU memory that other processes can map: CUDA virtual memory, handed on as POSIX file descriptors.
#pragma once

#include <utility>

#include "base/cuda_driver.h"
#include "base/fd.h"

namespace weft::nvlink {

// Owns a mapping. The physical memory lives as long as any process maps it.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory();

  // At least `bytes`, not zeroed, with a descriptor to hand on. Error kCudaError.
  static DeviceMemory create(cuda::Device device, uint64_t bytes, OwnedFd* fd);
  // What a peer created with the same `bytes`, readable and writable by `device`.
  static DeviceMemory attach(cuda::Device device, const OwnedFd& fd, uint64_t bytes);

  uint8_t* data() const noexcept { return reinterpret_cast<uint8_t*>(address_); }
  uint64_t bytes() const noexcept { return bytes_; }  // a multiple of the granularity
  cuda::DevicePtr address() const noexcept { return address_; }

 private:
  void map(cuda::Device device, cuda::AllocationHandle handle, uint64_t bytes);

  cuda::DevicePtr address_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace weft::nvlink
