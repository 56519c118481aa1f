#include "bootstrap/decision.h"

#include <cstring>

namespace weft {
namespace {

constexpr size_t kDecisionBytes = sizeof(uint64_t) + sizeof(MembershipRecord);
constexpr std::string_view kPrefix = "weft-decision-1 ";

int digit_of(char digit) {
  if (digit >= '0' && digit <= '9') return digit - '0';
  return digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
}

// Word and record as they are, whatever is in them.
std::optional<Decision> unpack(std::span<const std::byte> bytes) {
  if (bytes.size() != kDecisionBytes) return std::nullopt;
  uint64_t word = 0;
  Decision decision;
  std::memcpy(&word, bytes.data(), sizeof(word));
  decision.word = RegisterWord::unpack(word);
  std::memcpy(&decision.record.emplace(), bytes.data() + sizeof(word), sizeof(MembershipRecord));
  return decision;
}

bool is_good(const Decision& decision, const std::array<uint8_t, 16>& group) {
  return record_problem(*decision.record, group, decision.word.epoch).empty() &&
         (decision.record->kind == ChangeKind::kPlanned) == decision.word.is_planned;
}

}  // namespace

std::vector<std::byte> pack_decision(const Decision& decision) {
  std::vector<std::byte> bytes(kDecisionBytes);
  const uint64_t word = decision.word.pack();
  std::memcpy(bytes.data(), &word, sizeof(word));
  if (decision.record) std::memcpy(bytes.data() + sizeof(word), &*decision.record, sizeof(MembershipRecord));
  return bytes;
}

std::optional<Decision> read_decision(std::span<const std::byte> bytes, const std::array<uint8_t, 16>& group) {
  std::optional<Decision> decision = unpack(bytes);
  if (!decision || decision->word.state != RegisterState::kCommitted || !is_good(*decision, group)) return std::nullopt;
  return decision;
}

std::string write_value(const Decision& decision) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string value(kPrefix);
  for (const std::byte byte : pack_decision(decision)) {
    value += kDigits[static_cast<size_t>(byte) >> 4];
    value += kDigits[static_cast<size_t>(byte) & 15];
  }
  return value;
}

Decision read_value(std::string_view value, const std::array<uint8_t, 16>& group, uint32_t epoch) {
  if (value.empty()) return {.word = {.epoch = epoch}};
  if (value == kForgottenValue) return {.word = {.epoch = epoch}, .is_forgotten = true};
  const Decision damaged{.word = {.epoch = epoch, .state = RegisterState::kCommitted}};
  if (value.size() != kPrefix.size() + 2 * kDecisionBytes || !value.starts_with(kPrefix)) return damaged;
  std::vector<std::byte> bytes;
  bytes.reserve(kDecisionBytes);
  for (size_t at = kPrefix.size(); at < value.size(); at += 2) {
    const int high = digit_of(value[at]);
    const int low = digit_of(value[at + 1]);
    if (high < 0 || low < 0) return damaged;
    bytes.push_back(static_cast<std::byte>(high << 4 | low));
  }
  std::optional<Decision> decision = unpack(bytes);
  if (decision->word.epoch != epoch || decision->word.state > RegisterState::kCommitted) return damaged;
  if (decision->word.state == RegisterState::kOpen) decision->record.reset();
  if (decision->record && !is_good(*decision, group)) return damaged;
  return *decision;
}

}  // namespace weft
