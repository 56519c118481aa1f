// GPU memory that others can map: CUDA virtual memory, handed on as POSIX file descriptors, or as fabric handles between
// machines of one NVLink domain.
#pragma once

#include <utility>

#include "base/cuda_driver.h"
#include "base/fd.h"

namespace weft::nvlink {

struct MemoryOptions {
  bool spans_machines = false;  // a fabric handle is wanted
};

// Owns physical memory and, once mapped, a range of addresses. Physical memory lives as long as any process has it.
// Unmapping is for the owner to time: no kernel may be using the addresses any more (R14).
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory();

  // At least `bytes`, not zeroed, mapped at addresses of its own. Registrable with a network card where the GPU can do
  // that. Error kCudaError.
  static DeviceMemory create(cuda::Device device, uint64_t bytes, MemoryOptions options = {});
  // What a peer created, `bytes` as it says.
  static DeviceMemory attach(cuda::Device device, const OwnedFd& fd, uint64_t bytes);
  static DeviceMemory attach(cuda::Device device, const cuda::FabricHandle& fabric, uint64_t bytes);

  OwnedFd share() const;
  cuda::FabricHandle share_fabric() const;  // only of memory that spans machines

  // Maps the physical memory of `fresh` at the addresses of this one and lets its own go (R13, R16). Equal sizes; if this
  // is empty, it simply becomes `fresh`. Error kCudaError: then nothing is mapped here.
  void replace(DeviceMemory&& fresh);
  // Gives the physical memory back, keeps the addresses.
  void drop() noexcept;

  uint8_t* data() const noexcept { return reinterpret_cast<uint8_t*>(address_); }
  uint64_t bytes() const noexcept { return bytes_; }  // a multiple of the granularity
  cuda::DevicePtr address() const noexcept { return address_; }
  bool is_mapped() const noexcept { return is_mapped_; }

 private:
  DeviceMemory(cuda::Device device, cuda::AllocationHandle handle, uint64_t bytes)
      : device_(device), handle_(handle), bytes_(bytes) {}
  static DeviceMemory attach(cuda::Device device, void* shared, int kind, uint64_t bytes);
  void map();

  cuda::Device device_ = 0;
  cuda::AllocationHandle handle_ = 0;
  cuda::DevicePtr address_ = 0;
  uint64_t bytes_ = 0;
  bool is_mapped_ = false;
};

}  // namespace weft::nvlink
