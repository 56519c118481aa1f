#include "base/env.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>

#include "base/status.h"

namespace weft {
namespace {

int parse_log_level(std::string_view value) {
  constexpr std::array<std::pair<std::string_view, int>, 5> kLevels{
      {{"debug", kLogDebug}, {"info", kLogInfo}, {"warning", kLogWarning}, {"error", kLogError}, {"off", kLogOff}}};
  const auto same = [](char a, char b) { return std::tolower(static_cast<unsigned char>(a)) == b; };
  for (const auto& [name, level] : kLevels) {
    if (std::equal(value.begin(), value.end(), name.begin(), name.end(), same)) return level;
  }
  throw_invalid_argument("WEFT_LOG_LEVEL is '" + std::string(value) + "'; allowed: debug, info, warning, error, off");
}

uint64_t parse_number(const char* variable, std::string_view value, uint64_t largest) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc{} || end != value.data() + value.size() || number > largest) {
    throw_invalid_argument(std::string(variable) + " is '" + std::string(value) + "'; allowed: 0.." +
                           std::to_string(largest));
  }
  return number;
}

Env read_env() {
  Env env;
  if (const char* value = std::getenv("WEFT_LOG_LEVEL")) env.log_level = parse_log_level(value);
  if (const char* value = std::getenv("WEFT_SPIN_US")) env.spin_us = parse_number("WEFT_SPIN_US", value, 1'000'000);
  return env;
}

}  // namespace

const Env& env() {
  static const Env env = read_env();
  return env;
}

}  // namespace weft
