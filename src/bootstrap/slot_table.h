// Who has which slot of an open group, and what each of them shows: behind the registers and records in the group's page.
// docs/protocols/joining.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>

#include "bootstrap/endpoint.h"
#include "bootstrap/membership.h"

namespace weft {

// How far a rank is in a collective change, which it has begun in `epoch` as its call `number` there.
struct ChangeStage {
  uint32_t epoch = 0;
  uint32_t number = 0;
  uint32_t stage = 0;   // 0: in none; 1: it wants nothing any more; 2: nobody does, and it stands still in
  uint32_t newest = 0;  // this epoch
};

// What a rank shows: it alone writes it.
struct SlotCell {
  MembershipCell membership{};
  uint32_t installed = 0;  // the last epoch whose planned change it has carried out
  uint32_t reserved = 0;
  uint64_t next_window_id = 0;
  std::array<ChangeStage, 2> changes{};  // the last one and the one before: nobody is further behind
};
static_assert(std::is_trivially_copyable_v<SlotCell> && sizeof(SlotCell) % sizeof(uint64_t) == 0);

// The name of its socket is 128 random bits of that process life.
uint64_t incarnation_of(const Endpoint& endpoint) noexcept;

class SlotTable {
 public:
  static uint64_t bytes_for(int num_slots) noexcept;

  // `memory`: bytes_for(num_slots), aligned to a cache line, zeroed before its first use.
  SlotTable(std::span<std::byte> memory, int num_slots) noexcept : memory_(memory), num_slots_(num_slots) {}

  int num_slots() const noexcept { return num_slots_; }

  uint64_t claimed(int slot) const noexcept;  // incarnation; 0: free
  // A free slot for the incarnation of `endpoint`, by the rank in slot `sponsor`, one thread of it at a time. True also if that
  // incarnation has the slot already: a sponsor before may have ended in the middle. False: another one has it.
  bool claim(int slot, const Endpoint& endpoint, int sponsor) noexcept;
  void free(int slot, uint64_t incarnation) noexcept;  // nothing if another one has it by now
  // Of the incarnation that has the slot, its key left out; none: it is free.
  std::optional<Endpoint> endpoint(int slot) const noexcept;

  void show(int slot, const SlotCell& cell) noexcept;  // by one thread at a time
  // None: its rank ended while it wrote.
  std::optional<SlotCell> look(int slot) const noexcept;

 private:
  struct Place;
  Place* place(int slot) const noexcept;

  std::span<std::byte> memory_;
  int num_slots_;
};

}  // namespace weft
