// Guards against a value of a store, or a decision of a peer, that crashes its reader, or is believed though its record is not.
#include <cstdlib>
#include <cstring>

#include "bootstrap/decision.h"

namespace {

constexpr std::array<uint8_t, 16> kGroup{7};

// A good decision with bytes of the input in it, so that more than the length is tried.
weft::Decision decision_from(const uint8_t* data, size_t size, bool is_sealed) {
  weft::Decision decision{.word = {.epoch = 2, .state = weft::RegisterState::kCommitted, .version = 1}};
  weft::MembershipRecord& record = decision.record.emplace();
  record.group = kGroup;
  record.epoch = record.era = 2;
  record.active.add(0);
  if (size > 0) std::memcpy(reinterpret_cast<uint8_t*>(&record), data, std::min(size, sizeof(record)));
  if (is_sealed) weft::seal_record(record);
  return decision;
}

void check(const weft::Decision& found) {
  if (found.record && !weft::record_problem(*found.record, kGroup, found.word.epoch).empty()) abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4) return 0;
  const auto bytes = std::as_bytes(std::span(data, size));
  if (const auto found = weft::read_decision(bytes, kGroup)) check(*found);
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  check(weft::read_value(text, kGroup, 2));
  const weft::Decision decision = decision_from(data + 3, size - 3, data[0] % 2 != 0);
  std::vector<std::byte> packed = weft::pack_decision(decision);
  packed[data[1] % sizeof(uint64_t)] ^= static_cast<std::byte>(data[2]);
  if (const auto found = weft::read_decision(packed, kGroup)) {
    check(*found);
    if (found->word.state != weft::RegisterState::kCommitted) abort();
  }
  std::string value = weft::write_value(decision);
  value[(data[1] | data[2] << 8) % value.size()] = static_cast<char>(data[0]);
  const weft::Decision found = weft::read_value(value, kGroup, 2);
  if (found.word.epoch != 2) abort();
  check(found);
  return 0;
}
