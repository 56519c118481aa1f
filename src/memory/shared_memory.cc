#include "memory/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <string>
#include <utility>

#include "base/status.h"

namespace weft {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

uint64_t whole_pages(uint64_t bytes) {
  const auto page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  constexpr auto kLargest = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  if (bytes == 0 || bytes > kLargest - page_bytes) {
    throw_invalid_argument("shared memory of " + std::to_string(bytes) + " bytes; allowed: 1.." +
                           std::to_string(kLargest - page_bytes));
  }
  return (bytes + page_bytes - 1) / page_bytes * page_bytes;
}

OwnedFd make_sealed(uint64_t mapped_bytes) {
  OwnedFd fd(memfd_create("weft", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) throw_system_error("making shared memory with memfd_create", errno);
  // Asked first: a larger file would also raise SIGXFSZ, which ends a process that does not ignore it.
  rlimit most{};
  if (getrlimit(RLIMIT_FSIZE, &most) == 0 && most.rlim_cur < mapped_bytes) {
    throw_system_error("giving shared memory " + std::to_string(mapped_bytes) + " bytes", EFBIG);
  }
  if (ftruncate(fd.get(), static_cast<off_t>(mapped_bytes)) != 0) {
    throw_system_error("giving shared memory " + std::to_string(mapped_bytes) + " bytes", errno);
  }
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) {
    if (errno == EINVAL) throw_unsupported("this kernel can't seal shared memory (F_ADD_SEALS of a memfd)");
    throw_system_error("sealing shared memory", errno);
  }
  return fd;
}

void check_sealed(int fd, uint64_t mapped_bytes) {
  struct stat facts{};
  if (fstat(fd, &facts) != 0) throw_system_error("fstat of a peer's shared memory", errno);
  if (!S_ISREG(facts.st_mode) || static_cast<uint64_t>(facts.st_size) != mapped_bytes) {
    throw_invalid_argument("a peer's shared memory has " + std::to_string(facts.st_size) + " bytes, expected " +
                           std::to_string(mapped_bytes));
  }
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    throw_invalid_argument("a peer's shared memory is not sealed against shrinking and growing");
  }
}

// Addresses without memory.
std::byte* reserve_addresses(uint64_t bytes, std::byte* fixed_address) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (fixed_address != nullptr ? MAP_FIXED : 0);
  void* address = mmap(fixed_address, bytes, PROT_NONE, flags, -1, 0);
  if (address == MAP_FAILED) throw_system_error("reserving " + std::to_string(bytes) + " bytes of addresses", errno);
  return static_cast<std::byte*>(address);
}

std::byte* map_shared(int fd, uint64_t bytes, std::byte* fixed_address) {
  const int flags = MAP_SHARED | (fixed_address != nullptr ? MAP_FIXED : 0);
  void* address = mmap(fixed_address, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (address == MAP_FAILED) throw_system_error("mapping " + std::to_string(bytes) + " bytes of shared memory", errno);
  return static_cast<std::byte*>(address);
}

}  // namespace

SharedMemory::SharedMemory(OwnedFd fd, uint64_t bytes, uint64_t most_bytes)
    : fd_(std::move(fd)), bytes_(bytes), reserved_bytes_(bytes) {
  if (most_bytes <= bytes) {
    data_ = map_shared(fd_.get(), bytes, nullptr);
    return;
  }
  std::byte* reserved = reserve_addresses(most_bytes, nullptr);
  try {
    data_ = map_shared(fd_.get(), bytes, reserved);
    reserved_bytes_ = most_bytes;
  } catch (...) {
    munmap(reserved, most_bytes);
    throw;
  }
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      reserved_bytes_(std::exchange(other.reserved_bytes_, 0)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  if (this != &other) {
    unmap();
    fd_ = std::move(other.fd_);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    reserved_bytes_ = std::exchange(other.reserved_bytes_, 0);
  }
  return *this;
}

SharedMemory::~SharedMemory() { unmap(); }

void SharedMemory::unmap() noexcept {
  if (data_ != nullptr) munmap(data_, reserved_bytes_);
  data_ = nullptr;
}

SharedMemory SharedMemory::create(uint64_t bytes, uint64_t most_bytes) {
  const uint64_t mapped_bytes = whole_pages(bytes);
  return SharedMemory(make_sealed(mapped_bytes), mapped_bytes, most_bytes > bytes ? whole_pages(most_bytes) : 0);
}

SharedMemory SharedMemory::attach(OwnedFd fd, uint64_t bytes, uint64_t most_bytes) {
  const uint64_t mapped_bytes = whole_pages(bytes);
  check_sealed(fd.get(), mapped_bytes);
  return SharedMemory(std::move(fd), mapped_bytes, most_bytes > bytes ? whole_pages(most_bytes) : 0);
}

uint64_t SharedMemory::piece_bytes(uint64_t have_bytes, uint64_t bytes) {
  const uint64_t wanted = whole_pages(bytes), have = whole_pages(have_bytes);
  return wanted > have ? wanted - have : 0;
}

OwnedFd SharedMemory::make_piece(uint64_t bytes) { return make_sealed(bytes); }

void SharedMemory::append(const OwnedFd& piece, uint64_t bytes) {
  if (!valid() || bytes > reserved_bytes_ - bytes_) {
    throw_invalid_argument("adding " + std::to_string(bytes) + " bytes to " + std::to_string(bytes_) +
                           " of shared memory; allowed are " + std::to_string(reserved_bytes_) + " in all");
  }
  check_sealed(piece.get(), bytes);
  map_shared(piece.get(), bytes, data_ + bytes_);
  bytes_ += bytes;
}

void SharedMemory::cut(uint64_t bytes) {
  if (bytes >= bytes_) return;
  reserve_addresses(bytes_ - bytes, data_ + bytes);
  bytes_ = bytes;
}

void SharedMemory::release(uint64_t begin) const {
  if (begin >= bytes_) return;
  const uint64_t first = begin == 0 ? 0 : whole_pages(begin);
  if (first < bytes_ && madvise(data_ + first, bytes_ - first, MADV_REMOVE) != 0) {
    throw_system_error("giving back " + std::to_string(bytes_ - first) + " bytes of shared memory", errno);
  }
}

void SharedMemory::replace(SharedMemory&& fresh) {
  if (!valid() || !fresh.valid() || bytes_ != fresh.bytes_) {
    throw_invalid_argument("replacing " + std::to_string(bytes_) + " bytes of shared memory by " +
                           std::to_string(fresh.bytes_) + "; the sizes must be equal and not 0");
  }
  if (!fresh.fd_.valid()) throw_invalid_argument("replacing shared memory by one whose descriptor was dropped");
  map_shared(fresh.fd_.get(), bytes_, data_);
  fd_ = std::move(fresh.fd_);
  fresh.unmap();
  fresh.bytes_ = fresh.reserved_bytes_ = 0;
}

}  // namespace weft
