// Memory that other processes can map: a memfd, so nothing is named and nothing is left behind.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/fd.h"

namespace weft {

// Owns a mapping and the descriptor behind it. The address of a mapping never changes while the object lives. A mapping that may
// grow has addresses reserved behind it, and becomes longer by further memfds, pieces.
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
  // `most_bytes`: up to which it may grow; at most `bytes`: not at all.
  static SharedMemory create(uint64_t bytes, uint64_t most_bytes = 0);

  // Maps what another process created with the same `bytes`. kInvalidArgument if size or seals are not create()'s.
  static SharedMemory attach(OwnedFd fd, uint64_t bytes, uint64_t most_bytes = 0);

  // Of memory that has `have_bytes`: how many bytes a piece has with which it has at least `bytes`. 0: it needs none.
  static uint64_t piece_bytes(uint64_t have_bytes, uint64_t bytes);
  // A piece: zeroed and sealed. Errors as create().
  static OwnedFd make_piece(uint64_t bytes);
  // Maps a piece behind the rest. kInvalidArgument if size or seals are not make_piece()'s, or beyond most_bytes.
  void append(const OwnedFd& piece, uint64_t bytes);
  // Takes back what lies behind the first `bytes`, which must be what bytes() was before an append().
  void cut(uint64_t bytes);

  // Gives the physical memory of the whole pages from `begin` to the end back, in every process that maps it: they read as 0, and
  // take memory again when somebody writes. Errors as create().
  void release(uint64_t begin) const;

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
  SharedMemory(OwnedFd fd, uint64_t bytes, uint64_t most_bytes);
  void unmap() noexcept;

  OwnedFd fd_;
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
  uint64_t reserved_bytes_ = 0;  // addresses, those of bytes_ included
};

}  // namespace weft
