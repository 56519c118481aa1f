// What a newcomer and the rank at whose door it calls say to each other, and the address by which it finds a door.
// docs/protocols/joining.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/status.h"
#include "bootstrap/build.h"
#include "bootstrap/greeting.h"
#include "bootstrap/membership.h"
#include "weft/config/base.h"

namespace weft {

inline constexpr uint32_t kJoinMagic = 0x4e4a4657;     // "WFJN"
inline constexpr uint32_t kWelcomeMagic = 0x43574657;  // "WFWC"
inline constexpr uint16_t kJoinVersion = 2;

// Where an open group's doors are. It holds no secret.
struct JoinAddress {
  std::array<uint8_t, 16> boot_id{};
  uint64_t pid_namespace = 0;
  uint64_t network_namespace = 0;
  GroupId group{};
  std::vector<std::string> doors;  // names of abstract sockets

  std::string text() const;
  // Errors: kInvalidArgument (no address), kUnsupported (of another version).
  static JoinAddress parse(std::string_view text);
};

// Plain bytes, both of them.
struct JoinRequest {
  uint32_t magic = kJoinMagic;
  uint16_t version = kJoinVersion;
  uint16_t bytes = sizeof(JoinRequest);
  int32_t slot = -1;  // that is wanted; -1: any
  uint32_t reserved = 0;
  Build build{};
  GroupId group{};
  Endpoint endpoint{};  // its key left out
};

struct JoinWelcome {
  uint32_t magic = kWelcomeMagic;
  uint16_t version = kJoinVersion;
  uint16_t bytes = sizeof(JoinWelcome);
  int32_t slot = -1;
  int32_t num_slots = 0;
  uint32_t epoch = 0;
  uint32_t era = 0;
  GroupSecret secret{};
  std::array<uint64_t, kMaxRanks> incarnations{};  // of the members, by slot
};
static_assert(std::is_trivially_copyable_v<JoinRequest> && std::is_trivially_copyable_v<JoinWelcome>);

bool is_join_request(const PacketHeader& header, std::span<const std::byte> payload) noexcept;
// Error kUnsupported naming both versions, kInvalidArgument if it makes no sense.
JoinRequest read_join_request(std::span<const std::byte> payload);
JoinWelcome read_welcome(const PacketHeader& header, std::span<const std::byte> payload);

// A refusal, as the newcomer raises it.
std::vector<std::byte> pack_denial(const Error& error);
Error read_denial(std::span<const std::byte> payload);

}  // namespace weft
