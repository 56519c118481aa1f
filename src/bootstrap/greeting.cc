#include "bootstrap/greeting.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "base/text.h"

namespace weft {
namespace {

constexpr size_t kMaxRefusalText = 2000;

struct RefusalHead {
  int32_t code;
  int32_t culprit;  // -1: nobody in particular
};

}  // namespace

int source_of(const PacketHeader& header, std::span<const std::byte> payload) noexcept {
  Hello hello;
  if (header.type != PacketType::kHello || payload.size() != sizeof(hello)) return -1;
  std::memcpy(&hello, payload.data(), sizeof(hello));
  return hello.source;
}

std::string hello_problem(const PacketHeader& header, std::span<const std::byte> payload, const Hello& expected) {
  Hello hello;
  if (header.type != PacketType::kHello || payload.size() != sizeof(hello)) return "something else than a greeting";
  std::memcpy(&hello, payload.data(), sizeof(hello));
  if (hello.group != expected.group || hello.num_ranks != expected.num_ranks) {
    return "a greeting for another group: the ranks were given different lists of endpoints";
  }
  if (hello != expected) {
    return "a greeting from rank " + std::to_string(hello.source) + " to rank " + std::to_string(hello.target);
  }
  if (expected.source == 0) return header.num_fds == 2 ? "" : "a greeting without its life lock and the group's page";
  return header.num_fds == 1 ? "" : "a greeting without its life lock";
}

std::vector<std::byte> pack_refusal(const Error& error) {
  const RefusalHead head{static_cast<int32_t>(error.code), error.peers.empty() ? -1 : error.peers.front()};
  std::vector<std::byte> bytes(sizeof(head) + std::min(error.text.size(), kMaxRefusalText));
  std::memcpy(bytes.data(), &head, sizeof(head));
  std::memcpy(bytes.data() + sizeof(head), error.text.data(), bytes.size() - sizeof(head));
  return bytes;
}

Error read_refusal(std::span<const std::byte> payload, const std::string& from, int rank, int num_ranks) {
  RefusalHead head{};
  if (payload.size() < sizeof(head)) {
    return Error(ErrorCode::kInvalidArgument, from + " sent a damaged refusal", "connect", 0, {});
  }
  std::memcpy(&head, payload.data(), sizeof(head));
  const auto text = payload.subspan(sizeof(head));
  const std::string line = one_line({reinterpret_cast<const char*>(text.data()), text.size()}, kMaxRefusalText);
  const bool is_known = head.code >= static_cast<int>(ErrorCode::kInvalidArgument) &&
                        head.code <= static_cast<int>(ErrorCode::kInternalError);
  const bool names_peer = head.culprit >= 0 && head.culprit < num_ranks && head.culprit != rank;
  return Error(is_known ? static_cast<ErrorCode>(head.code) : ErrorCode::kInternalError,
               from + " gave up connecting: " + line, "connect", 0,
               names_peer ? std::vector<int>{head.culprit} : std::vector<int>{});
}

}  // namespace weft
