#include "bootstrap/membership_record.h"

#include <span>

namespace weft {
namespace {

constexpr std::array<uint32_t, 256> crc_table() {  // CRC-32 (IEEE 802.3)
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < table.size(); ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (0xedb88320u & (0u - (crc & 1u)));
    table[byte] = crc;
  }
  return table;
}

uint32_t checksum_of(MembershipRecord record) noexcept {
  static constexpr std::array<uint32_t, 256> kTable = crc_table();
  record.checksum = 0;
  uint32_t crc = ~uint32_t{0};
  for (const std::byte byte : std::as_bytes(std::span<const MembershipRecord, 1>(&record, 1))) {
    crc = crc >> 8 ^ kTable[(crc ^ static_cast<uint32_t>(byte)) & 0xff];
  }
  return ~crc;
}

// The members are told by their nonces, so each slot comes once, in order, and belongs to the record.
bool has_right_members(const MembershipRecord& record) {
  const RankSet members = record.active | record.standby;
  for (uint32_t idx = 0; idx < record.num_new; ++idx) {
    const NewMember& member = record.new_members[idx];
    if (member.slot >= static_cast<uint32_t>(kMaxControlRanks) || member.nonce == 0) return false;
    if (!members.contains(static_cast<int>(member.slot))) return false;
    if (idx > 0 && member.slot <= record.new_members[idx - 1].slot) return false;
  }
  return true;
}

}  // namespace

void seal_record(MembershipRecord& record) noexcept { record.checksum = checksum_of(record); }

std::string record_problem(const MembershipRecord& record, const std::array<uint8_t, 16>& group, uint32_t epoch) {
  if (record.magic != kRecordMagic) return "it is no membership record (wrong magic number)";
  if (record.version != kRecordVersion) return "it is of version " + std::to_string(record.version);
  if (record.checksum != checksum_of(record)) return "its checksum is wrong";
  if (record.group != group) return "it is of another group";
  if (record.epoch != epoch) return "it is of epoch " + std::to_string(record.epoch);
  const bool is_planned = record.kind == ChangeKind::kPlanned;
  if (!is_planned && record.kind != ChangeKind::kRecovery) return "its kind is unknown";
  if (record.era > epoch || is_planned == (record.era == epoch)) return "its era is " + std::to_string(record.era);
  if (record.active.empty()) return "nobody is active in it";
  if (!(record.active & record.standby).empty()) return "a rank is active and on standby in it";
  if (record.num_new > record.new_members.size()) return "it has " + std::to_string(record.num_new) + " new members";
  return has_right_members(record) ? "" : "its new members are damaged";
}

}  // namespace weft
