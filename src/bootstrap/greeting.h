// What two ranks say first on a new connection, and what one says that gives up. docs/protocols/bootstrap.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/sha256.h"
#include "base/status.h"
#include "bootstrap/endpoint.h"
#include "bootstrap/socket.h"

namespace weft {

inline constexpr uint32_t kHelloMagic = 0x4c484657;      // "WFHL"
inline constexpr uint32_t kChallengeMagic = 0x48434657;  // "WFCH"
inline constexpr uint16_t kHelloVersion = 2;

// What the members of a group have in common, from the endpoints of all: it travelled through the user's group.
struct GroupSecret {
  Digest id{};   // may be shown
  Digest key{};  // may not
};
// `secret`: what the user gave besides; empty: nothing.
GroupSecret group_secret(std::span<const Endpoint> endpoints, std::span<const std::byte> secret);

// Drawn for one connection, so that what was said on another one is no answer on it. Zeros on unix sockets, where the kernel
// tells who calls.
using Nonce = std::array<uint8_t, 16>;
struct Drawn {
  Nonce source{};
  Nonce target{};
};

// What a called rank says before anything else, to whoever calls. Plain bytes.
struct Challenge {
  uint32_t magic = kChallengeMagic;
  uint16_t version = kHelloVersion;
  uint16_t bytes = sizeof(Challenge);
  Nonce drawn{};
};

// One for unix sockets, for TCP and for doors. Plain bytes.
struct Hello {
  uint32_t magic = kHelloMagic;
  uint16_t version = kHelloVersion;
  uint16_t bytes = 0;  // of all of it
  int32_t source = -1;
  int32_t target = -1;
  int32_t num_ranks = 0;
  uint32_t reserved = 0;
  Digest group{};                          // GroupSecret::id
  std::array<uint8_t, 16> target_nonce{};  // of the target's endpoint; that of the source is in its own
  Nonce challenge{};                       // Drawn::source
  Nonce answer{};                          // Drawn::target
  Endpoint endpoint{};                     // of the source, its key left out
  Digest proof{};                          // HMAC of all before with GroupSecret::key

  bool operator==(const Hello&) const = default;
};
static_assert(std::is_trivially_copyable_v<Hello> && sizeof(Hello) == 392);

Hello make_hello(int source, int target, std::span<const Endpoint> endpoints, const GroupSecret& secret,
                 const Drawn& drawn = {}) noexcept;

// Who says so in `packet`: its rank; -1: it is no hello.
int source_of(const PacketHeader& header, std::span<const std::byte> payload) noexcept;
// What it has drawn for this connection; zeros: it is no hello.
Nonce challenge_of(const PacketHeader& header, std::span<const std::byte> payload) noexcept;

// What is wrong with the packet as a challenge; empty: nothing, and `drawn` is what it holds.
std::string challenge_problem(const PacketHeader& header, std::span<const std::byte> payload, Nonce* drawn);

// What is wrong with the packet as the hello `expected`; empty: nothing. Descriptors are the caller's to check.
std::string hello_problem(const PacketHeader& header, std::span<const std::byte> payload, const Hello& expected);

// A refusal, and the error that its receiver raises: `from` gave up. Whatever is in it, the text is a line of valid UTF-8, and
// the culprit is a rank of the group other than the receiver, or nobody.
std::vector<std::byte> pack_refusal(const Error& error);
Error read_refusal(std::span<const std::byte> payload, const std::string& from, int rank, int num_ranks);

}  // namespace weft
