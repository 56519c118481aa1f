// Which Weft a process runs: who joins must run the same, since ranks read each other's memory by the layouts they were built with.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "base/sha256.h"

namespace weft {

// Plain bytes.
struct Build {
  std::array<char, 32> version{};  // text, zeros behind it
  Digest sources{};                // SHA-256 of kernels, layouts and protocols: of all C++ files

  bool operator==(const Build&) const = default;
};

extern const char kSourcesDigest[65];  // 64 digits; src/sources_digest.cmake writes its definition

Build this_build() noexcept;

std::string version_text(const Build& build);  // one line, whatever is in it
std::string sources_text(const Build& build);  // 64 digits
std::string hex_text(std::span<const uint8_t> bytes);

}  // namespace weft
