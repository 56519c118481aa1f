// Guards against a membership record that crashes its reader, the machine that adopts it, or makes a word that means another.
#include <cstdlib>
#include <cstring>

#include "bootstrap/membership.h"

namespace {

constexpr weft::GroupId kGroup{7};

// Bytes lie where the record has them; what is not given is a good record, sealed, so that more than the checksum is tried.
weft::MembershipRecord record_from(const uint8_t* data, size_t size) {
  weft::MembershipRecord record;
  record.group = kGroup;
  record.epoch = record.era = 2;
  record.active = weft::RankSet::of({0, 1});
  if (size > 0) std::memcpy(reinterpret_cast<uint8_t*>(&record), data, std::min(size, sizeof(record)));
  return record;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 10) return 0;
  uint64_t bits = 0;
  std::memcpy(&bits, data, sizeof(bits));
  const weft::RegisterWord word = weft::RegisterWord::unpack(bits);
  if (word.pack() != bits) abort();
  const bool is_sealed = data[8] % 4 != 0;
  weft::MembershipRecord record = record_from(data + 9, size - 9);
  if (is_sealed) weft::seal_record(record);
  if (!weft::record_problem(record, kGroup, 2).empty()) return 0;
  if (record.num_new > record.new_members.size() || record.active.empty()) abort();
  weft::Membership machine(0, {11, 12, 13}, kGroup, 1);
  machine.step({.kind = weft::MembershipEvent::Kind::kLook});
  const bool is_planned = record.kind == weft::ChangeKind::kPlanned;
  const weft::RegisterState state = data[8] % 8 < 4 ? weft::RegisterState::kCommitted : weft::RegisterState::kProposed;
  machine.step({.kind = weft::MembershipEvent::Kind::kWord, .word = {2, state, 1, 1, is_planned}, .record = &record});
  machine.step({.kind = weft::MembershipEvent::Kind::kBoundary});
  machine.step({.kind = weft::MembershipEvent::Kind::kRecover});
  return 0;
}
