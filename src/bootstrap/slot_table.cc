#include "bootstrap/slot_table.h"

#include <atomic>
#include <cstring>

namespace weft {
namespace {

constexpr int kMostLooks = 10'000;  // at a cell that is being written: more, and its writer has ended

// Words that another process may write meanwhile: what was copied is believed only if the number beside it stayed.
template <class Plain>
void store_words(Plain* place, const Plain& value) noexcept {
  static_assert(sizeof(Plain) % sizeof(uint64_t) == 0 && alignof(Plain) >= alignof(uint64_t));
  const auto* from = reinterpret_cast<const std::byte*>(&value);
  for (size_t at = 0; at < sizeof(Plain); at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, from + at, sizeof(word));
    auto* to = reinterpret_cast<uint64_t*>(reinterpret_cast<std::byte*>(place) + at);
    std::atomic_ref<uint64_t>(*to).store(word, std::memory_order_relaxed);
  }
}

template <class Plain>
Plain load_words(const Plain* place) noexcept {
  Plain value;
  auto* to = reinterpret_cast<std::byte*>(&value);
  for (size_t at = 0; at < sizeof(Plain); at += sizeof(uint64_t)) {
    auto* from = reinterpret_cast<uint64_t*>(reinterpret_cast<std::byte*>(const_cast<Plain*>(place)) + at);
    const uint64_t word = std::atomic_ref<uint64_t>(*from).load(std::memory_order_relaxed);
    std::memcpy(to + at, &word, sizeof(word));
  }
  return value;
}

}  // namespace

namespace {

// Whoever reads it looks at the incarnation before and after: of one incarnation the words are always the same.
struct Described {
  std::atomic<uint64_t> incarnation;
  Endpoint endpoint;

  void write(uint64_t of, const Endpoint& from) noexcept {
    if (incarnation.load(std::memory_order_relaxed) == of) return;
    incarnation.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    store_words(&endpoint, from);
    incarnation.store(of, std::memory_order_release);
  }
  std::optional<Endpoint> read(uint64_t of) const noexcept {
    if (incarnation.load(std::memory_order_acquire) != of) return std::nullopt;
    const Endpoint found = load_words(&endpoint);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (incarnation.load(std::memory_order_relaxed) != of || incarnation_of(found) != of) return std::nullopt;
    return found;
  }
};

}  // namespace

struct alignas(64) SlotTable::Place {
  std::atomic<uint64_t> claim;                // incarnation
  Described owner;                            // who has claimed it
  alignas(64) Described newcomer;             // for whom the owner claims a slot: known before the claim is
  alignas(64) std::atomic<uint64_t> version;  // of the cell; odd: it is being written
  SlotCell cell;
};

uint64_t incarnation_of(const Endpoint& endpoint) noexcept {
  uint64_t nonce = 0xcbf29ce484222325u;  // FNV-1a
  for (size_t at = 0; at < endpoint.name_bytes && at < endpoint.name.size(); ++at) {
    nonce = (nonce ^ static_cast<uint8_t>(endpoint.name[at])) * 0x100000001b3u;
  }
  return nonce | 1;
}

uint64_t SlotTable::bytes_for(int num_slots) noexcept { return static_cast<uint64_t>(num_slots) * sizeof(Place); }

SlotTable::Place* SlotTable::place(int slot) const noexcept { return reinterpret_cast<Place*>(memory_.data()) + slot; }

uint64_t SlotTable::claimed(int slot) const noexcept { return place(slot)->claim.load(std::memory_order_seq_cst); }

bool SlotTable::claim(int slot, const Endpoint& endpoint, int sponsor) noexcept {
  Place* here = place(slot);
  const uint64_t incarnation = incarnation_of(endpoint);
  Endpoint shown = endpoint;
  shown.key = {};
  place(sponsor)->newcomer.write(incarnation,
                                 shown);  // a sponsor that ends behind the claim leaves none that is nobody's
  uint64_t found = 0;
  // Of two newcomers at least one sees the other: each claims first and looks afterwards.
  const bool is_new = here->claim.compare_exchange_strong(found, incarnation, std::memory_order_seq_cst);
  if (!is_new && found != incarnation) return false;
  here->owner.write(incarnation, shown);
  return true;
}

void SlotTable::free(int slot, uint64_t incarnation) noexcept {
  uint64_t expected = incarnation;
  if (incarnation != 0) place(slot)->claim.compare_exchange_strong(expected, 0, std::memory_order_seq_cst);
}

std::optional<Endpoint> SlotTable::endpoint(int slot) const noexcept {
  Place* here = place(slot);
  const uint64_t incarnation = claimed(slot);
  if (incarnation == 0) return std::nullopt;
  std::optional<Endpoint> found = here->owner.read(incarnation);
  for (int sponsor = 0; !found && sponsor < num_slots_; ++sponsor) {
    found = place(sponsor)->newcomer.read(incarnation);
  }
  return claimed(slot) == incarnation ? found : std::nullopt;
}

void SlotTable::show(int slot, const SlotCell& cell) noexcept {
  Place* here = place(slot);
  const uint64_t version = here->version.load(std::memory_order_relaxed) | 1;  // odd already: its writer has ended
  here->version.store(version, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  store_words(&here->cell, cell);
  here->version.store(version + 1, std::memory_order_release);
}

std::optional<SlotCell> SlotTable::look(int slot) const noexcept {
  Place* here = place(slot);
  for (int turn = 0; turn < kMostLooks; ++turn) {
    const uint64_t before = here->version.load(std::memory_order_acquire);
    if ((before & 1) != 0) continue;
    const SlotCell cell = load_words(&here->cell);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (here->version.load(std::memory_order_relaxed) == before) return cell;
  }
  return std::nullopt;
}

}  // namespace weft
