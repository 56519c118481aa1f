#include "bootstrap/build.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string_view>

#include "base/text.h"

namespace weft {

Build this_build() noexcept {
  Build build;
  constexpr std::string_view kVersion = WEFT_VERSION;
  std::copy_n(kVersion.begin(), std::min(kVersion.size(), build.version.size() - 1), build.version.begin());
  for (size_t at = 0; at < build.sources.size(); ++at) {
    const char* digits = kSourcesDigest + 2 * at;
    std::from_chars(digits, digits + 2, build.sources[at], 16);
  }
  return build;
}

std::string version_text(const Build& build) {
  return one_line({build.version.data(), strnlen(build.version.data(), build.version.size())}, build.version.size());
}

std::string sources_text(const Build& build) { return hex_text(build.sources); }

std::string hex_text(std::span<const uint8_t> bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace weft
