// For ThreadSanitizer only: within one process every mapping of a file gives the same address, so that all ranks as
// threads use the same words. It looks at addresses: memory mapped twice would be two memories to it, and every race
// between ranks invisible. Linked with -Wl,--wrap=mmap,--wrap=munmap.
#include <sys/mman.h>
#include <sys/stat.h>

#include <map>
#include <mutex>

extern "C" {
void* __real_mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset);
int __real_munmap(void* address, size_t bytes);
void* __wrap_mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset);
int __wrap_munmap(void* address, size_t bytes);
}

namespace {

struct Mapping {
  void* address;
  int num_users;
};

std::mutex& mutex() {
  static std::mutex guard;
  return guard;
}

std::map<ino_t, Mapping>& mappings() {
  static std::map<ino_t, Mapping> all;
  return all;
}

}  // namespace

void* __wrap_mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) {
  struct stat file{};
  if (fd < 0 || (flags & MAP_FIXED) != 0 || fstat(fd, &file) != 0) {
    return __real_mmap(address, bytes, protection, flags, fd, offset);
  }
  const std::lock_guard lock(mutex());
  Mapping& known = mappings()[file.st_ino];
  if (known.num_users == 0) known.address = __real_mmap(address, bytes, protection, flags, fd, offset);
  if (known.address != MAP_FAILED) ++known.num_users;
  return known.address;
}

int __wrap_munmap(void* address, size_t bytes) {
  const std::lock_guard lock(mutex());
  for (auto& [file, known] : mappings()) {
    if (known.num_users == 0 || known.address != address) continue;
    return --known.num_users == 0 ? __real_munmap(address, bytes) : 0;
  }
  return __real_munmap(address, bytes);
}
