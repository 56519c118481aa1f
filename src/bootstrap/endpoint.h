// How a rank is found and recognised: the only thing that travels through the user's process group.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/fd.h"
#include "base/status.h"
#include "bootstrap/network.h"

namespace weft {

inline constexpr size_t kEndpointBytes = 256;
inline constexpr uint32_t kEndpointMagic = 0x54464557;  // "WEFT"
inline constexpr uint16_t kEndpointVersion = 4;

// One incarnation of a rank. Plain bytes: it may be copied as kEndpointBytes bytes through any transport.
struct Endpoint {
  uint32_t magic = 0;
  uint16_t version = 0;
  uint16_t name_bytes = 0;            // length of name
  std::array<uint8_t, 16> boot_id{};  // of this boot of the machine: equal on all ranks of one machine
  int32_t pid = 0;
  uint32_t uid = 0;
  uint64_t start_time = 0;              // of the process in clock ticks since boot; tells a reused pid
  std::array<char, 40> name{};          // abstract unix socket name without its leading zero byte
  std::array<char, 24> weft_version{};  // as in Build, cut off
  uint64_t pid_namespace = 0;           // inode numbers: equal where pids, and abstract sockets, mean the same
  uint64_t network_namespace = 0;
  std::array<uint8_t, 16> nonce{};    // random: of this incarnation
  std::array<uint8_t, 32> key{};      // random; its share of the group's key, known to who saw the endpoint itself
  uint16_t num_addresses = 0;         // for ranks of other machines; 0: it can't be called by them
  uint16_t port = 0;                  // TCP
  std::array<uint8_t, 4> reserved{};  // zero
  std::array<IpAddress, kMaxAddresses> addresses{};
  std::array<uint8_t, 16> sources{};  // the first bytes of Build::sources

  bool operator==(const Endpoint&) const = default;
};
static_assert(sizeof(Endpoint) == kEndpointBytes && std::is_trivially_copyable_v<Endpoint>);

// Errors: kInvalidArgument if the bytes are no endpoint, kUnsupported if they are one of another version; `what` names them in the
// text ("the endpoint of rank 2").
Endpoint parse_endpoint(std::span<const std::byte> bytes, const std::string& what);

// Start time of a live process (field 22 of /proc/PID/stat), 0 if there is no such process.
uint64_t process_start_time(int pid);

// One machine is where ranks see each other's processes and abstract sockets: one boot, one pid and one network namespace.
bool on_one_machine(const Endpoint& a, const Endpoint& b) noexcept;

// Where a rank is called by those of its machine, and by those of others if it has a door: abstract, so nothing appears in
// the file system and nothing is left behind. Made before the endpoints are exchanged, so that a peer that knows an
// endpoint can always connect.
class Listener {
 public:
  // `door`: ranks of other machines may belong to the group. `machine`: for tests, ranks of another name count as those of
  // another machine. Errors: kCapacityExceeded (no descriptor left), kUnsupported (no sockets, or no /proc of this pid
  // namespace).
  explicit Listener(const DoorOptions* door = nullptr, std::string_view machine = {});

  const Endpoint& endpoint() const noexcept { return endpoint_; }
  int fd() const noexcept { return fd_.get(); }
  Door* door() noexcept { return door_ ? &*door_ : nullptr; }
  const std::optional<Error>& door_problem() const noexcept { return door_problem_; }  // why it has none, if it should

 private:
  void make_door(const DoorOptions& options);

  Endpoint endpoint_;
  OwnedFd fd_;
  std::optional<Door> door_;
  std::optional<Error> door_problem_;
};

}  // namespace weft
