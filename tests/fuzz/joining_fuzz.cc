// Guards against an address, a request to join, a welcome or a refusal that crashes its reader, or is taken for what it is not.
#include <cstdlib>
#include <cstring>

#include "bootstrap/joining.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < sizeof(weft::PacketHeader)) return 0;
  weft::PacketHeader header;
  std::memcpy(&header, data, sizeof(header));
  const auto payload = std::as_bytes(std::span(data, size)).subspan(sizeof(header));
  try {
    const weft::JoinRequest request = weft::read_join_request(payload);
    if (request.build != weft::this_build() || request.endpoint.magic != weft::kEndpointMagic) abort();
    if (payload.size() != sizeof(request) || std::memcmp(payload.data(), &request, sizeof(request)) != 0) abort();
  } catch (const weft::Error& error) {
    if (error.text.find('\n') != std::string::npos) abort();
  }
  if (weft::is_join_request(header, payload) && header.type != weft::PacketType::kHello) abort();
  try {
    const weft::JoinWelcome welcome = weft::read_welcome(header, payload);
    if (welcome.slot < 0 || welcome.slot >= welcome.num_slots || welcome.num_slots > weft::kMaxRanks) abort();
  } catch (const weft::Error&) {  // NOLINT(bugprone-empty-catch): refused
  }
  if (weft::read_denial(payload).text.find('\n') != std::string::npos) abort();
  try {
    const std::string text(reinterpret_cast<const char*>(data), size);
    const weft::JoinAddress address = weft::JoinAddress::parse(text);
    const weft::JoinAddress again = weft::JoinAddress::parse(address.text());
    if (again.group != address.group || again.doors != address.doors || again.boot_id != address.boot_id) abort();
  } catch (const weft::Error& error) {
    if (error.text.find('\n') != std::string::npos) abort();
  }
  return 0;
}
