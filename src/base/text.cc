#include "base/text.h"

#include <cstdint>

namespace weft {
namespace {

// Bytes of the character that begins at `at`, 0 if none does (RFC 3629).
size_t character_bytes(std::string_view text, size_t at) {
  const auto byte = [&](size_t idx) { return static_cast<uint8_t>(text[idx]); };
  const uint8_t first = byte(at);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xc2 && first <= 0xdf ? 2 : first >= 0xe0 && first <= 0xef ? 3 : 4;
  if (first < 0xc2 || first > 0xf4 || at + length > text.size()) return 0;
  for (size_t idx = at + 1; idx < at + length; ++idx) {
    if ((byte(idx) & 0xc0) != 0x80) return 0;
  }
  const uint8_t second = byte(at + 1);
  const bool is_too_long = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
  const bool is_no_character = (first == 0xed && second > 0x9f) || (first == 0xf4 && second > 0x8f);
  return is_too_long || is_no_character ? 0 : length;
}

}  // namespace

std::string one_line(std::string_view text, size_t most_bytes) {
  std::string line;
  for (size_t at = 0; at < text.size();) {
    const size_t length = character_bytes(text, at);
    if (line.size() + (length == 0 ? 1 : length) > most_bytes) break;
    const auto first = static_cast<uint8_t>(text[at]);
    if (length == 0) {
      line += '?';
    } else if (first < 0x20 || first == 0x7f) {
      line += ' ';
    } else {
      line += text.substr(at, length);
    }
    at += length == 0 ? 1 : length;
  }
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

}  // namespace weft
