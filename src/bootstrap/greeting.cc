#include "bootstrap/greeting.h"

#include <algorithm>
#include <cstddef>
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

GroupSecret group_secret(std::span<const Endpoint> endpoints, std::span<const std::byte> secret) {
  GroupSecret all;
  all.key = hmac_sha256(secret, std::as_bytes(endpoints));
  constexpr std::string_view kPurpose = "weft group id";
  all.id =
      hmac_sha256(std::as_bytes(endpoints), std::as_bytes(std::span(kPurpose)));  // tells nothing of the keys in it
  return all;
}

Hello make_hello(int source, int target, std::span<const Endpoint> endpoints, const GroupSecret& secret,
                 const Drawn& drawn) noexcept {
  Hello hello;
  hello.bytes = sizeof(hello);
  hello.source = source;
  hello.target = target;
  hello.num_ranks = static_cast<int32_t>(endpoints.size());
  hello.group = secret.id;
  hello.target_nonce = endpoints[static_cast<size_t>(target)].nonce;
  hello.challenge = drawn.source;
  hello.answer = drawn.target;
  hello.endpoint = endpoints[static_cast<size_t>(source)];
  hello.endpoint.key = {};
  const auto before = std::as_bytes(std::span<const Hello, 1>(&hello, 1)).first(offsetof(Hello, proof));
  hello.proof = hmac_sha256(std::as_bytes(std::span(secret.key)), before);
  return hello;
}

int source_of(const PacketHeader& header, std::span<const std::byte> payload) noexcept {
  Hello hello;
  if (header.type != PacketType::kHello || payload.size() != sizeof(hello)) return -1;
  std::memcpy(&hello, payload.data(), sizeof(hello));
  return hello.magic == kHelloMagic && hello.version == kHelloVersion ? hello.source : -1;
}

Nonce challenge_of(const PacketHeader& header, std::span<const std::byte> payload) noexcept {
  Hello hello;
  if (header.type == PacketType::kHello && payload.size() == sizeof(hello)) {
    std::memcpy(&hello, payload.data(), sizeof(hello));
  }
  return hello.challenge;
}

std::string challenge_problem(const PacketHeader& header, std::span<const std::byte> payload, Nonce* drawn) {
  Challenge challenge;
  if (header.type != PacketType::kChallenge) return "something else than a challenge";
  if (payload.size() != sizeof(challenge)) return "a challenge of " + std::to_string(payload.size()) + " bytes";
  std::memcpy(static_cast<void*>(&challenge), payload.data(), sizeof(challenge));
  if (challenge.magic != kChallengeMagic) return "a challenge with a wrong magic number";
  if (challenge.version != kHelloVersion || challenge.bytes != sizeof(challenge)) {
    return "a challenge of version " + std::to_string(challenge.version) + " that names " +
           std::to_string(challenge.bytes) + " bytes; this Weft speaks version " + std::to_string(kHelloVersion);
  }
  *drawn = challenge.drawn;
  return {};
}

std::string hello_problem(const PacketHeader& header, std::span<const std::byte> payload, const Hello& expected) {
  Hello hello;
  if (header.type != PacketType::kHello) return "something else than a greeting";
  if (payload.size() < offsetof(Hello, source)) return "a greeting of " + std::to_string(payload.size()) + " bytes";
  std::memcpy(static_cast<void*>(&hello), payload.data(), offsetof(Hello, source));
  if (hello.magic != kHelloMagic) return "a greeting with a wrong magic number";
  if (hello.version != kHelloVersion) {
    return "a greeting of version " + std::to_string(hello.version) + "; this Weft speaks version " +
           std::to_string(kHelloVersion);
  }
  if (payload.size() != sizeof(hello) || hello.bytes != sizeof(hello)) {
    return "a greeting of " + std::to_string(payload.size()) + " bytes that names " + std::to_string(hello.bytes) +
           "; one has " + std::to_string(sizeof(hello));
  }
  std::memcpy(&hello, payload.data(), sizeof(hello));
  if (hello.num_ranks != expected.num_ranks) {
    return "a greeting for a group of " + std::to_string(hello.num_ranks) + " ranks; this one has " +
           std::to_string(expected.num_ranks) + " (the ranks were given different lists of endpoints)";
  }
  if (hello.group != expected.group) {
    return "a greeting for another group: the ranks were given different lists of endpoints";
  }
  if (hello.source != expected.source || hello.target != expected.target) {
    return "a greeting from rank " + std::to_string(hello.source) + " to rank " + std::to_string(hello.target);
  }
  if (hello.answer != expected.answer) return "a greeting that does not answer the challenge of this connection";
  if (!equal_digests(hello.proof, expected.proof))
    return "a greeting without the proof that it knows the group's secret";
  return hello == expected ? "" : "a greeting that was changed on its way";
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
