#include "base/fd.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "base/status.h"

namespace weft {

OwnedFd OwnedFd::duplicate(int fd) {
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);  // never a standard stream, should one be closed
  if (copy < 0) throw_system_error("duplicating file descriptor " + std::to_string(fd), errno);
  return OwnedFd(copy);
}

void OwnedFd::reset(int fd) noexcept {
  const int old = std::exchange(fd_, fd);
  if (old >= 0) ::close(old);
}

}  // namespace weft
