// TCP between machines: addresses of this one, a door for the ranks of others, and calls to theirs.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "base/fd.h"

namespace weft {

// Of IPv6; one of IPv4 is mapped into it (::ffff:a.b.c.d). Plain bytes.
using IpAddress = std::array<uint8_t, 16>;

inline constexpr size_t kMaxAddresses = 4;
inline constexpr uint64_t kUnreachableAfterMs = 3000;  // without an answer of the other machine

std::string text_of(const IpAddress& address);  // "10.0.0.7", "fd00::7"
bool is_private(const IpAddress& address);      // loopback, link-local, or of a network that is not routed in public

struct DoorOptions {
  std::string interface;    // listen on this one alone; empty: on all
  uint16_t first_port = 0;  // the first free one from here on, of kNumPorts; 0: any
  static constexpr int kNumPorts = 256;
};

// A port of this machine that refuses all callers until open().
class Door {
 public:
  // Errors: kInvalidArgument (no such interface, or it has no address; no free port), kCapacityExceeded, kUnsupported.
  explicit Door(const DoorOptions& options);

  const std::vector<IpAddress>& addresses() const noexcept { return addresses_; }  // at most kMaxAddresses
  uint16_t port() const noexcept { return port_; }
  int fd() const noexcept { return socket_.get(); }
  void open();

 private:
  OwnedFd socket_;
  std::vector<IpAddress> addresses_;
  uint16_t port_ = 0;
};

// A socket that connects, without waiting for it; invalid, with errno, if that can't be.
OwnedFd start_call(const IpAddress& address, uint16_t port);
// 0: connected; EINPROGRESS: not yet; else why it is not.
int call_state(int socket);

// The next caller, or invalid with errno; ready for packets.
OwnedFd accept_caller(int door);
// How many packets of TCP the kernel has heard there, the questions of the other machine's kernel among them; 0: it does not tell.
uint32_t num_heard(int socket) noexcept;
IpAddress caller_address(int socket);  // zeros if it has gone

}  // namespace weft
