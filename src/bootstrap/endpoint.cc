#include "bootstrap/endpoint.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <string_view>

#include "base/random.h"
#include "base/status.h"
#include "bootstrap/build.h"
#include "bootstrap/socket.h"

namespace weft {
namespace {

// The whole of a small file of /proc, or nothing. Error kCapacityExceeded without a descriptor for it, which would look
// like a file that is not there.
std::string read_small_file(const char* path) {
  const OwnedFd fd(open(path, O_RDONLY | O_CLOEXEC));
  if (!fd.valid() && (errno == EMFILE || errno == ENFILE)) throw_system_error(std::string("reading ") + path, errno);
  if (!fd.valid()) return {};
  std::array<char, 4096> buffer{};
  const ssize_t num_bytes = read(fd.get(), buffer.data(), buffer.size());
  return num_bytes > 0 ? std::string(buffer.data(), static_cast<size_t>(num_bytes)) : std::string();
}

[[noreturn]] void throw_no_proc(const std::string& path) {
  throw_unsupported("Weft can't read " + path + "; mount /proc in this container or sandbox");
}

std::array<uint8_t, 16> this_boot_id() {
  std::array<uint8_t, 16> id{};
  size_t num_digits = 0;
  for (const char c : read_small_file("/proc/sys/kernel/random/boot_id")) {
    uint8_t digit = 0;
    if (std::from_chars(&c, &c + 1, digit, 16).ec != std::errc{} || num_digits == 32) continue;
    id[num_digits / 2] = static_cast<uint8_t>(id[num_digits / 2] << 4 | digit);
    ++num_digits;
  }
  if (num_digits != 32) throw_no_proc("/proc/sys/kernel/random/boot_id");
  return id;
}

// Number of a namespace of this process; 0 on a kernel without them.
uint64_t this_namespace(const char* path) {
  struct stat found{};
  return stat(path, &found) == 0 ? found.st_ino : 0;
}

// A container may see the /proc of its host: then every pid in there means somebody else.
void check_proc() {
  std::array<char, 32> self{};
  const ssize_t num_bytes = readlink("/proc/self", self.data(), self.size());
  if (num_bytes <= 0) throw_no_proc("/proc/self");
  const std::string pid(self.data(), static_cast<size_t>(num_bytes));
  if (pid == std::to_string(getpid())) return;
  throw_unsupported("/proc is that of another pid namespace (it calls this process " + pid + ", which is pid " +
                    std::to_string(getpid()) + "); mount a /proc of this one, as unshare --mount-proc does");
}

std::string random_name() {
  const auto random = random_bytes<16>();
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string name = "weft-";
  for (const uint8_t byte : random) {
    name += kDigits[byte >> 4];
    name += kDigits[byte & 15];
  }
  return name;
}

}  // namespace

uint64_t process_start_time(int pid) {
  const std::string stat = read_small_file(("/proc/" + std::to_string(pid) + "/stat").c_str());
  // The name of the program stands in parentheses and may hold anything, so count from the last one: field 3 follows.
  size_t at = stat.rfind(')');
  for (int field = 3; field <= 22 && at != std::string::npos; ++field) at = stat.find(' ', at + 1);
  uint64_t start_time = 0;
  if (at != std::string::npos) std::from_chars(stat.data() + at + 1, stat.data() + stat.size(), start_time);
  return start_time;
}

Endpoint parse_endpoint(std::span<const std::byte> bytes, const std::string& what) {
  if (bytes.size() != kEndpointBytes) {
    throw_invalid_argument(what + " has " + std::to_string(bytes.size()) + " bytes; an endpoint has " +
                           std::to_string(kEndpointBytes));
  }
  Endpoint endpoint;
  std::memcpy(&endpoint, bytes.data(), kEndpointBytes);
  if (endpoint.magic != kEndpointMagic) throw_invalid_argument(what + " is no endpoint of Weft (wrong magic number)");
  if (endpoint.version != kEndpointVersion) {
    throw_unsupported(what + " is of version " + std::to_string(endpoint.version) + ", those of this Weft (" +
                      version_text(this_build()) + ") of version " + std::to_string(kEndpointVersion) +
                      "; all ranks need the same Weft");
  }
  if (endpoint.name_bytes == 0 || endpoint.name_bytes > endpoint.name.size() || endpoint.pid <= 0) {
    throw_invalid_argument(what + " is damaged (name of " + std::to_string(endpoint.name_bytes) + " bytes, pid " +
                           std::to_string(endpoint.pid) + ")");
  }
  if (endpoint.num_addresses > kMaxAddresses || (endpoint.num_addresses != 0 && endpoint.port == 0)) {
    throw_invalid_argument(what + " is damaged (" + std::to_string(endpoint.num_addresses) + " addresses, port " +
                           std::to_string(endpoint.port) + ")");
  }
  return endpoint;
}

bool on_one_machine(const Endpoint& a, const Endpoint& b) noexcept {
  return a.boot_id == b.boot_id && a.pid_namespace == b.pid_namespace && a.network_namespace == b.network_namespace;
}

// A group on one machine needs no door, so what is in its way counts only when the endpoints show several.
void Listener::make_door(const DoorOptions& options) {
  try {
    door_.emplace(options);
  } catch (const Error& error) {
    door_problem_ = error;
    return;
  }
  endpoint_.port = door_->port();
  endpoint_.num_addresses = static_cast<uint16_t>(door_->addresses().size());
  std::copy(door_->addresses().begin(), door_->addresses().end(), endpoint_.addresses.begin());
}

Listener::Listener(const DoorOptions* door, std::string_view machine) {
  check_proc();
  endpoint_.magic = kEndpointMagic;
  endpoint_.version = kEndpointVersion;
  const Build build = this_build();
  std::copy_n(build.version.begin(), endpoint_.weft_version.size(), endpoint_.weft_version.begin());
  std::copy_n(build.sources.begin(), endpoint_.sources.size(), endpoint_.sources.begin());
  endpoint_.boot_id = this_boot_id();
  endpoint_.pid = getpid();
  endpoint_.uid = geteuid();
  endpoint_.start_time = process_start_time(endpoint_.pid);
  if (endpoint_.start_time == 0) throw_no_proc("/proc/PID/stat");
  endpoint_.pid_namespace = this_namespace("/proc/self/ns/pid");
  endpoint_.network_namespace = this_namespace("/proc/self/ns/net");
  endpoint_.nonce = random_bytes<16>();
  endpoint_.key = random_bytes<32>();
  for (size_t at = 0; at < machine.size(); ++at) {
    uint8_t& byte = endpoint_.boot_id[at % endpoint_.boot_id.size()];
    byte = static_cast<uint8_t>(byte ^ (static_cast<uint8_t>(machine[at]) + at / endpoint_.boot_id.size()));
  }
  if (door != nullptr) make_door(*door);
  const std::string name = random_name();
  endpoint_.name_bytes = static_cast<uint16_t>(name.size());
  std::copy(name.begin(), name.end(), endpoint_.name.begin());

  fd_ = make_socket();
  const SocketAddress address(name);
  if (bind(fd_.get(), address.get(), address.bytes()) != 0) throw_system_error("binding a unix socket", errno);
  if (listen(fd_.get(), SOMAXCONN) != 0) throw_system_error("listening on a unix socket", errno);
}

}  // namespace weft
