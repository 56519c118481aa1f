#include "bootstrap/network.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <linux/tcp.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "base/status.h"

namespace weft {
namespace {

constexpr IpAddress kMapped{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 0, 0};
constexpr size_t kMappedBytes = 12;

bool is_mapped(const IpAddress& address) {
  return std::equal(kMapped.begin(), kMapped.begin() + kMappedBytes, address.begin());
}

bool is_loopback(const IpAddress& address) {
  constexpr IpAddress kLoopback{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  return is_mapped(address) ? address[kMappedBytes] == 127 : address == kLoopback;
}

bool is_link_local(const IpAddress& address) {
  if (is_mapped(address)) return address[12] == 169 && address[13] == 254;
  return address[0] == 0xfe && (address[1] & 0xc0) == 0x80;
}

// One of IPv4 is called by IPv4, so that it works where a kernel has no IPv6.
struct SocketName {
  sockaddr_storage storage{};
  socklen_t bytes = 0;

  SocketName(const IpAddress& address, uint16_t port) {
    if (is_mapped(address)) {
      sockaddr_in name{};
      name.sin_family = AF_INET;
      name.sin_port = htons(port);
      std::memcpy(&name.sin_addr, address.data() + kMappedBytes, sizeof(name.sin_addr));
      set(name);
    } else {
      sockaddr_in6 name{};
      name.sin6_family = AF_INET6;
      name.sin6_port = htons(port);
      std::memcpy(&name.sin6_addr, address.data(), address.size());
      set(name);
    }
  }
  template <class Name>
  void set(const Name& name) {
    std::memcpy(&storage, &name, sizeof(name));
    bytes = sizeof(name);
  }
  int family() const { return storage.ss_family; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

IpAddress address_of(const sockaddr* name) {
  IpAddress address{};
  if (name == nullptr) return address;
  if (name->sa_family == AF_INET) {
    sockaddr_in found{};
    std::memcpy(&found, name, sizeof(found));
    address = kMapped;
    std::memcpy(address.data() + kMappedBytes, &found.sin_addr, sizeof(found.sin_addr));
  } else if (name->sa_family == AF_INET6) {
    sockaddr_in6 found{};
    std::memcpy(&found, name, sizeof(found));
    std::memcpy(address.data(), &found.sin6_addr, address.size());
  }
  return address;
}

// Of interfaces that are up; without a name not those that lead nowhere else.
std::vector<IpAddress> find_addresses(const std::string& interface) {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) throw_system_error("reading the network interfaces", errno);
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(first, freeifaddrs);
  std::vector<IpAddress> found;  // IPv4 first
  size_t num_mapped = 0;
  for (const ifaddrs* each = first; each != nullptr; each = each->ifa_next) {
    const bool is_up = (each->ifa_flags & IFF_UP) != 0;
    const IpAddress address = address_of(each->ifa_addr);
    if (!is_up || address == IpAddress{}) continue;
    if (interface.empty() ? is_loopback(address) || is_link_local(address) : interface != each->ifa_name) continue;
    if (is_link_local(address) && !is_mapped(address)) continue;  // means nothing without an interface
    found.insert(is_mapped(address) ? found.begin() + static_cast<ptrdiff_t>(num_mapped++) : found.end(), address);
  }
  if (found.size() > kMaxAddresses) found.resize(kMaxAddresses);
  return found;
}

void set_option(int socket, int level, int option, int value) {
  setsockopt(socket, level, option, &value, sizeof(value));  // best effort: without it a lost machine is noticed later
}

void prepare(int socket) {
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(kUnreachableAfterMs));
}

// A machine that has gone silent is told from a rank that has nothing to say: the kernel asks it once a second. One end asks, the
// other counts the questions: those of two ends get lost (decision 0048).
void keep_asking(int socket) {
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, 3);
}

OwnedFd make_stream(int family) {
  OwnedFd fd(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP));
  if (!fd.valid()) throw_system_error("making a TCP socket", errno);
  return fd;
}

uint16_t port_of(int socket) {
  sockaddr_storage name{};
  socklen_t bytes = sizeof(name);
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&name), &bytes) != 0) throw_system_error("getsockname", errno);
  sockaddr_in6 found{};  // the port lies at the same place in both
  std::memcpy(&found, &name, sizeof(found));
  return ntohs(found.sin6_port);
}

}  // namespace

std::string text_of(const IpAddress& address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (is_mapped(address)) {
    inet_ntop(AF_INET, address.data() + kMappedBytes, text.data(), text.size());
  } else {
    inet_ntop(AF_INET6, address.data(), text.data(), text.size());
  }
  return text.data();
}

bool is_private(const IpAddress& address) {
  if (is_loopback(address) || is_link_local(address)) return true;
  if (!is_mapped(address)) return (address[0] & 0xfe) == 0xfc;
  const uint8_t first = address[12];
  const uint8_t second = address[13];
  return first == 10 || (first == 172 && (second & 0xf0) == 16) || (first == 192 && second == 168) ||
         (first == 100 && (second & 0xc0) == 64);
}

Door::Door(const DoorOptions& options) : addresses_(find_addresses(options.interface)) {
  if (!options.interface.empty() && addresses_.empty()) {
    throw_invalid_argument("the network interface '" + options.interface +
                           "' has no address on this machine, or there is none of that name");
  }
  // On one interface: bound to its first address, so callers of the others find nothing.
  if (!options.interface.empty()) addresses_.resize(1);
  const bool has_ipv6 =
      std::any_of(addresses_.begin(), addresses_.end(), [](const IpAddress& each) { return !is_mapped(each); });
  const IpAddress any = options.interface.empty() ? (has_ipv6 ? IpAddress{} : kMapped) : addresses_.front();
  for (int turn = 0; turn < DoorOptions::kNumPorts; ++turn) {
    const int wanted = options.first_port == 0 ? 0 : options.first_port + turn;
    if (wanted > 0xffff) break;
    const SocketName name(any, static_cast<uint16_t>(wanted));
    socket_ = make_stream(name.family());
    if (name.family() == AF_INET6) set_option(socket_.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
    if (bind(socket_.get(), name.get(), name.bytes) == 0) {
      port_ = port_of(socket_.get());
      return;
    }
    if (errno != EADDRINUSE) throw_system_error("binding TCP port " + std::to_string(wanted), errno);
  }
  throw_invalid_argument("no TCP port of the " + std::to_string(DoorOptions::kNumPorts) + " from " +
                         std::to_string(options.first_port) + " on is free");
}

void Door::open() {
  if (listen(socket_.get(), SOMAXCONN) != 0) throw_system_error("listening on a TCP port", errno);
}

OwnedFd start_call(const IpAddress& address, uint16_t port) {
  const SocketName name(address, port);
  OwnedFd fd = make_stream(name.family());
  prepare(fd.get());
  keep_asking(fd.get());
  if (::connect(fd.get(), name.get(), name.bytes) == 0 || errno == EINPROGRESS) return fd;
  const int why = errno;
  fd.reset();
  errno = why;
  return fd;
}

int call_state(int socket) {
  pollfd waited{socket, POLLOUT, 0};
  if (::poll(&waited, 1, 0) <= 0) return EINPROGRESS;
  int error = 0;
  socklen_t bytes = sizeof(error);
  return getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &bytes) == 0 ? error : errno;
}

OwnedFd accept_caller(int door) {
  OwnedFd caller(accept4(door, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  const int why = errno;
  if (caller.valid()) {
    prepare(caller.get());
    if (num_heard(caller.get()) == 0) keep_asking(caller.get());
  }
  errno = why;
  return caller;
}

uint32_t num_heard(int socket) noexcept {
  tcp_info info{};
  socklen_t bytes = sizeof(info);
  return getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0 ? info.tcpi_segs_in : 0;
}

IpAddress caller_address(int socket) {
  sockaddr_storage name{};
  socklen_t bytes = sizeof(name);
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&name), &bytes) != 0) return {};
  return address_of(reinterpret_cast<const sockaddr*>(&name));
}

}  // namespace weft
