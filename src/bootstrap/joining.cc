#include "bootstrap/joining.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "base/text.h"

namespace weft {
namespace {

constexpr std::string_view kAddressKind = "weft-group";
constexpr std::string_view kAddressVersion = "1";
constexpr size_t kMostDoors = kMaxRanks;
constexpr size_t kMostDoorBytes = 64;
constexpr size_t kMostDenialBytes = 2000;

[[noreturn]] void refuse_address(std::string_view text) {
  throw_invalid_argument("address is '" + one_line(text, 80) +
                         "'; allowed is what comm.address says on a rank of the group");
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t end = text.find(separator); end != std::string_view::npos; end = text.find(separator)) {
    parts.push_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  parts.push_back(text);
  return parts;
}

bool read_hex(std::string_view text, std::array<uint8_t, 16>& bytes) {
  if (text.size() != bytes.size() * 2) return false;
  for (size_t at = 0; at < bytes.size(); ++at) {
    const char* first = text.data() + at * 2;
    const auto [end, problem] = std::from_chars(first, first + 2, bytes[at], 16);
    if (problem != std::errc{} || end != first + 2) return false;
  }
  return true;
}

bool read_number(std::string_view text, uint64_t& number) {
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), number);
  return problem == std::errc{} && end == text.data() + text.size();
}

// Weft's version says more to a user, so it comes first.
void check_build(const Build& theirs) {
  const Build ours = this_build();
  if (theirs == ours) return;
  const bool is_other_version = theirs.version != ours.version;
  const std::string theirs_text = is_other_version ? version_text(theirs) : sources_text(theirs);
  const std::string ours_text = is_other_version ? version_text(ours) : sources_text(ours);
  throw_unsupported(is_other_version
                        ? "the newcomer is Weft " + theirs_text + ", the group Weft " + ours_text +
                              "; all ranks need the same Weft"
                        : "the newcomer's Weft was built from sources with the SHA-256 " + theirs_text +
                              ", the group's from " + ours_text + "; all ranks need the same kernels and layouts");
}

}  // namespace

std::string JoinAddress::text() const {
  std::string all(kAddressKind);
  const auto add = [&all](std::string_view part) { all.append(1, ':').append(part); };
  add(kAddressVersion);
  add(hex_text(boot_id));
  add(std::to_string(pid_namespace));
  add(std::to_string(network_namespace));
  add(hex_text(group));
  for (const std::string& door : doors) add(door);
  return all;
}

JoinAddress JoinAddress::parse(std::string_view text) {
  const std::vector<std::string_view> parts = split(text, ':');
  if (parts.size() < 2 || parts[0] != kAddressKind) refuse_address(text);
  if (parts[1] != kAddressVersion) {
    throw_unsupported("the address is of version " + one_line(parts[1], 20) + ", this Weft speaks version " +
                      std::string(kAddressVersion) + "; all ranks need the same Weft");
  }
  JoinAddress address;
  if (parts.size() < 7 || parts.size() > 6 + kMostDoors) refuse_address(text);
  const bool is_whole = read_hex(parts[2], address.boot_id) && read_number(parts[3], address.pid_namespace) &&
                        read_number(parts[4], address.network_namespace) && read_hex(parts[5], address.group);
  if (!is_whole) refuse_address(text);
  for (size_t idx = 6; idx < parts.size(); ++idx) {
    if (parts[idx].empty() || parts[idx].size() > kMostDoorBytes) refuse_address(text);
    address.doors.emplace_back(parts[idx]);
  }
  return address;
}

bool is_join_request(const PacketHeader& header, std::span<const std::byte> payload) noexcept {
  uint32_t magic = 0;
  if (header.type != PacketType::kHello || payload.size() < sizeof(magic)) return false;
  std::memcpy(&magic, payload.data(), sizeof(magic));
  return magic == kJoinMagic;
}

JoinRequest read_join_request(std::span<const std::byte> payload) {
  JoinRequest request;
  std::memcpy(static_cast<void*>(&request), payload.data(), std::min(payload.size(), sizeof(request)));
  if (payload.size() >= offsetof(JoinRequest, slot) && request.version != kJoinVersion) {
    throw_unsupported("the newcomer speaks version " + std::to_string(request.version) +
                      " of joining, the group version " + std::to_string(kJoinVersion) +
                      "; all ranks need the same Weft");
  }
  if (payload.size() != sizeof(request) || request.bytes != sizeof(request)) {
    throw_invalid_argument("a request to join of " + std::to_string(payload.size()) + " bytes; one has " +
                           std::to_string(sizeof(request)));
  }
  check_build(request.build);
  if (request.endpoint.version != kEndpointVersion) {
    throw_unsupported("the endpoint of the newcomer is of version " + std::to_string(request.endpoint.version) +
                      ", those of the group of version " + std::to_string(kEndpointVersion) +
                      "; all ranks need the same Weft");
  }
  parse_endpoint(std::as_bytes(std::span<const Endpoint, 1>(&request.endpoint, 1)), "the endpoint of the newcomer");
  return request;
}

JoinWelcome read_welcome(const PacketHeader& header, std::span<const std::byte> payload) {
  JoinWelcome welcome;
  if (header.type != PacketType::kHello || payload.size() != sizeof(welcome)) {
    throw_invalid_argument("the address: who answers there is no rank of Weft's");
  }
  std::memcpy(static_cast<void*>(&welcome), payload.data(), sizeof(welcome));
  const bool makes_sense = welcome.magic == kWelcomeMagic && welcome.version == kJoinVersion &&
                           welcome.bytes == sizeof(welcome) && welcome.num_slots >= 1 &&
                           welcome.num_slots <= kMaxRanks && welcome.slot >= 0 && welcome.slot < welcome.num_slots;
  if (!makes_sense) throw_invalid_argument("the address: who answers there sent a welcome that makes no sense");
  return welcome;
}

std::vector<std::byte> pack_denial(const Error& error) {
  const auto code = static_cast<int32_t>(error.code);
  std::vector<std::byte> bytes(sizeof(code) + std::min(error.text.size(), kMostDenialBytes));
  std::memcpy(bytes.data(), &code, sizeof(code));
  std::memcpy(bytes.data() + sizeof(code), error.text.data(), bytes.size() - sizeof(code));
  return bytes;
}

Error read_denial(std::span<const std::byte> payload) {
  int32_t code = 0;
  if (payload.size() < sizeof(code)) return {ErrorCode::kInvalidArgument, "a damaged refusal", "join"};
  std::memcpy(&code, payload.data(), sizeof(code));
  const auto text = payload.subspan(sizeof(code));
  const bool is_known =
      code >= static_cast<int>(ErrorCode::kInvalidArgument) && code <= static_cast<int>(ErrorCode::kControlLost);
  return {is_known ? static_cast<ErrorCode>(code) : ErrorCode::kInternalError,
          one_line({reinterpret_cast<const char*>(text.data()), text.size()}, kMostDenialBytes), "join"};
}

}  // namespace weft
