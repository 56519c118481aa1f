// What a register says of an epoch, together with the record that it names: the value in a store, and what ranks tell each other.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bootstrap/membership_record.h"
#include "bootstrap/register.h"

namespace weft {

struct Decision {
  RegisterWord word{};
  std::optional<MembershipRecord> record{};  // none: the word is open, or the record can't be believed
  bool is_forgotten = false;                 // of an epoch so long ago that nobody keeps it
};

std::vector<std::byte> pack_decision(const Decision& decision);
// Of a committed word with a record of `group` that can be believed; else nothing.
std::optional<Decision> read_decision(std::span<const std::byte> bytes, const std::array<uint8_t, 16>& group);

// The same as text, for stores that keep text. Empty: nobody has written it. What is no decision of `epoch` counts as committed with
// a record that can't be believed, so that nobody decides over it.
std::string write_value(const Decision& decision);
Decision read_value(std::string_view value, const std::array<uint8_t, 16>& group, uint32_t epoch);
inline constexpr std::string_view kForgottenValue = "forgotten";

}  // namespace weft
