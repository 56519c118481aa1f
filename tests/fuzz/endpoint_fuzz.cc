// Guards against an endpoint that crashes whoever reads it, or is believed though it is damaged.
#include <cstdlib>
#include <cstring>

#include "base/status.h"
#include "bootstrap/endpoint.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const weft::Endpoint endpoint = weft::parse_endpoint(std::as_bytes(std::span(data, size)), "endpoints[1]");
    if (endpoint.magic != weft::kEndpointMagic || endpoint.name_bytes > endpoint.name.size() || endpoint.pid <= 0)
      abort();
    if (endpoint.num_addresses > weft::kMaxAddresses) abort();
    if (size != sizeof(endpoint) || std::memcmp(&endpoint, data, size) != 0) abort();
  } catch (const weft::Error& error) {
    if (error.code != weft::ErrorCode::kInvalidArgument && error.code != weft::ErrorCode::kUnsupported) abort();
  }
  return 0;
}
