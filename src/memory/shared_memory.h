// Memory that other processes can map: a memfd, so nothing is named and nothing is left behind.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/fd.h"

namespace weft {

// Owns a mapping and the descriptor behind it. The address of a mapping never changes while the object lives.
class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  // Zeroed memory of at least `bytes` bytes (rounded up to pages), sealed: nobody can shrink or grow it, so no access
  // inside it can fault. Errors: kInvalidArgument (0 bytes), kUnsupported (memfd_create is denied), kCapacityExceeded (a
  // limit of the system), kInternalError.
  static SharedMemory create(uint64_t bytes);

  // Maps what another process created with the same `bytes`. kInvalidArgument if size or seals are not create()'s.
  static SharedMemory attach(OwnedFd fd, uint64_t bytes);

  // Puts `fresh` (of equal size) under this address, in one step; what was there is let go (R13).
  // Error kInvalidArgument if the sizes differ.
  void replace(SharedMemory&& fresh);

  // Closes the descriptor; the mapping stays. For memory that is never handed on.
  void drop_fd() noexcept { fd_.reset(); }

  std::byte* data() const noexcept { return data_; }
  uint64_t bytes() const noexcept { return bytes_; }  // of the mapping: whole pages
  int fd() const noexcept { return fd_.get(); }
  bool valid() const noexcept { return data_ != nullptr; }

 private:
  SharedMemory(OwnedFd fd, uint64_t bytes);
  void unmap() noexcept;

  OwnedFd fd_;
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace weft
