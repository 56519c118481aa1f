// What two ranks say first on a new connection, and what one says that gives up. docs/protocols/bootstrap.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/status.h"
#include "bootstrap/endpoint.h"
#include "bootstrap/socket.h"

namespace weft {

struct Hello {
  int32_t source = -1;
  int32_t target = -1;
  int32_t num_ranks = 0;
  uint32_t reserved = 0;
  uint64_t group = 0;  // hash of the list of endpoints
  Endpoint endpoint{};

  bool operator==(const Hello&) const = default;
};
static_assert(std::is_trivially_copyable_v<Hello>);

// Who says so in `packet`: its rank; -1: it is no hello.
int source_of(const PacketHeader& header, std::span<const std::byte> payload) noexcept;

// What is wrong with the packet as the hello `expected`; empty: nothing. Its descriptors: the life lock, of rank 0 the page too.
std::string hello_problem(const PacketHeader& header, std::span<const std::byte> payload, const Hello& expected);

// A refusal, and the error that its receiver raises: `from` gave up. Whatever is in it, the text is a line of valid UTF-8, and
// the culprit is a rank of the group other than the receiver, or nobody.
std::vector<std::byte> pack_refusal(const Error& error);
Error read_refusal(std::span<const std::byte> payload, const std::string& from, int rank, int num_ranks);

}  // namespace weft
