// What the ranks of one machine decide with: the registers and everybody's records, in memory that all of them map and that
// lives as long as one of them does. docs/protocols/membership.md.
#pragma once

#include <memory>
#include <optional>

#include "base/fd.h"
#include "bootstrap/membership.h"
#include "bootstrap/membership_record.h"
#include "bootstrap/register.h"
#include "bootstrap/slot_table.h"
#include "memory/shared_memory.h"

namespace weft {

class GroupPage {
 public:
  // A new group of `num_ranks`, with an id of its own. Errors: those of SharedMemory::create.
  static std::shared_ptr<GroupPage> create(int num_ranks);
  // Another rank's. Error kInvalidArgument if that is no page of a group of this size.
  static std::shared_ptr<GroupPage> attach(OwnedFd fd, int num_ranks);

  // Memory that nobody touches costs nothing, so all slots lie there from the start.
  static uint64_t bytes_for(int num_ranks) noexcept;

  const GroupId& group() const noexcept;
  PageRegister& words() noexcept { return words_; }

  // Before a register names it. Of each rank's last 64 epochs both records are kept, that of a planned change and the other.
  void put(int rank, const MembershipRecord& record) noexcept;

  // The record that a committed or proposed word names; none: it can't be believed, or the proposal is over by now. Error
  // kInvalidState if it is forgotten meanwhile: its word, or its place, serves a later epoch.
  std::optional<MembershipRecord> find(const RegisterWord& word);

  // Who has which slot; of groups that newcomers may join.
  SlotTable slots() noexcept;

  int fd() const noexcept { return memory_.fd(); }
  void drop_fd() noexcept { memory_.drop_fd(); }  // when nobody joins any more

 private:
  GroupPage(SharedMemory&& memory, int num_ranks);
  MembershipRecord* slot(int rank, uint32_t epoch, bool is_planned) noexcept;

  SharedMemory memory_;
  int num_ranks_;
  PageRegister words_;
};

}  // namespace weft
