// What a change of the membership says: written by one rank, named by a register. docs/protocols/membership.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "bootstrap/rank_set.h"

namespace weft {

inline constexpr size_t kRecordBytes = 4096;
inline constexpr uint32_t kRecordMagic = 0x43524d57;  // "WMRC"
inline constexpr uint16_t kRecordVersion = 1;

enum class ChangeKind : uint16_t { kPlanned = 1, kRecovery = 2 };

struct NewMember {
  uint64_t nonce = 0;  // of the incarnation; the claim of the slot has the rest
  uint32_t slot = 0;
  uint32_t reserved = 0;
};

// Plain bytes, of 4 KiB whatever the number of ranks. A reader copies it, looks whether the register still names
// it, and then calls record_problem().
struct MembershipRecord {
  uint32_t magic = kRecordMagic;
  uint16_t version = kRecordVersion;
  ChangeKind kind = ChangeKind::kRecovery;
  std::array<uint8_t, 16> group{};  // random
  uint32_t epoch = 0;
  uint32_t era = 0;       // the newest epoch with fresh pages: of a recovery its own
  uint64_t id = 0;        // of a planned change
  uint64_t boundary = 0;  // of a planned change: the step before which it takes effect
  uint64_t map_hash = 0;  // of the expert map
  RankSet active;
  RankSet standby;
  uint32_t num_new = 0;
  uint32_t checksum = 0;                     // of all other bytes
  std::array<NewMember, 236> new_members{};  // the first num_new
};
static_assert(sizeof(MembershipRecord) == kRecordBytes && std::is_trivially_copyable_v<MembershipRecord>);

void seal_record(MembershipRecord& record) noexcept;  // sets the checksum

// What speaks against it as the record of `epoch` in `group`; empty: nothing.
std::string record_problem(const MembershipRecord& record, const std::array<uint8_t, 16>& group, uint32_t epoch);

}  // namespace weft
