// What the ranks of a combine tell each other first: where rows are, where records may land, and the check of what peers say.
#include <algorithm>

#include "engine/cpu/combine.h"

namespace weft::cpu {

// Landing areas for whoever may push: room for everything in the heap, else the staging rings.
void CombineCall::prepare_landing() {
  u64 num_bytes = 0;
  for_routes([&](const Route& route) {
    for (int peer : op_.peers()) num_bytes += static_cast<u64>(route.contributors[peer].num_rows) * record_.bytes;
  });
  if (num_bytes > 0) {
    if (std::optional<Block> block = w_.reserve(num_bytes, 0)) landing_block_ = std::move(*block);
  }
  const auto ring_records = static_cast<u32>(std::min<u64>(w_.layout_.ring_bytes / record_.bytes, kMaxRowsPerPair));
  const u32 share = ring_records / static_cast<u32>(routes_.size() + 1);
  u8* next = landing_block_.data;
  for (int peer : op_.peers()) {
    u8* in_ring = w_.control_of(rank_) + w_.layout_.ring(peer);
    for_routes([&](Route& route) {
      Contributor& from = route.contributors[peer];
      from.landing_records = next == nullptr ? share : static_cast<u32>(from.num_rows);
      u8*& place = next == nullptr ? in_ring : next;
      from.landing = place;
      place += static_cast<u64>(from.landing_records) * record_.bytes;
    });
  }
}

void CombineCall::send_counts() {
  for (int peer : op_.peers()) {
    op_.send(Phase::kCount, peer, [&] {
      const bool in_heap = landing_block_.data != nullptr;
      const u8* landing = nullptr;
      i64 num_rows = 0, landing_rows = 0;
      for_owners_of(peer, [&](int owner) { num_rows += owners_[owner].num_rows; });
      for_routes([&](const Route& route) {
        const Contributor& from = route.contributors[peer];
        if (landing == nullptr) landing = from.landing;
        landing_rows += from.landing_records;
      });
      auto* payload = op_.payload_to<CountPayload>(Phase::kCount, peer);
      *payload = CountPayload{};
      payload->config = op_.config();
      payload->num_rows = num_rows;
      payload->rows_in_heap = pull_ ? 1 : 0;
      payload->rows_offset = pull_offset_;
      payload->landing_in_heap = in_heap ? 1 : 0;
      payload->landing_offset = in_heap ? landing_block_.offset + static_cast<u64>(landing - landing_block_.data) : 0;
      payload->landing_rows = static_cast<u64>(landing_rows);
    });
  }
  CountPayload payload;
  payload.config = op_.config();
  op_.send_messages(payload);
}

void CombineCall::read_counts() {
  for (int peer : op_.peers()) {
    const auto* payload = op_.payload_from<CountPayload>(Phase::kCount, peer);
    i64 num_rows = 0;
    for_routes([&](const Route& route) { num_rows += route.contributors[peer].num_rows; });
    if (payload->num_rows != num_rows) op_.fail_internal(Phase::kCount, peer);
    for_routes([&](Route& route) { check_pull(route, peer, *payload); });
    check_landing(peer, *payload);
  }
}

// R19: this rank reads only inside the peer's heap.
void CombineCall::check_pull(Route& route, int peer, const CountPayload& payload) {
  Contributor& from = route.contributors[peer];
  from.pulls = payload.rows_in_heap != 0;
  from.num_records = needs_records(from) ? static_cast<u32>(from.num_rows) : 0;
  if (!from.pulls) return;
  i64 last_row = route.plan.row_start()[peer] + route.plan.num_rows_to()[peer];
  if (a_.capacity >= 0) last_row = std::min(last_row, a_.capacity);
  const CheckedSize end =
      CheckedSize(payload.rows_offset) + CheckedSize(static_cast<u64>(last_row)) * static_cast<u64>(row_bytes_);
  const bool reads_nothing = route.plan.num_rows_to()[peer] == 0;
  if (!reads_nothing && (!end.ok || end.value > w_.peers_[peer].heap.bytes())) op_.fail_internal(Phase::kCount, peer);
  from.rows = w_.heap_of(peer) + payload.rows_offset;
}

// R19: this rank writes only inside the peer's heap or its own staging ring there.
void CombineCall::check_landing(int peer, const CountPayload& payload) {
  const bool in_heap = payload.landing_in_heap != 0;
  const CheckedSize end = CheckedSize(payload.landing_offset) + CheckedSize(payload.landing_rows) * record_.bytes;
  const u64 limit = in_heap ? w_.peers_[peer].heap.bytes() : w_.layout_.ring_bytes;
  const u64 num_owners = static_cast<u64>(num_owners_of(peer));
  u64 left = payload.landing_rows;
  u8* next = in_heap ? w_.heap_of(peer) + payload.landing_offset : w_.control_of(peer) + w_.layout_.ring(rank_);
  for_owners_of(peer, [&](int rank) {
    Owner& owner = owners_[rank];
    owner.num_records = pushes_records() ? static_cast<u32>(owner.num_rows) : 0;
    u64 room = payload.landing_rows;
    if (num_owners > 1) room = in_heap ? static_cast<u64>(owner.num_rows) : payload.landing_rows / num_owners;
    const bool has_room = owner.num_rows == 0 || room > 0;
    if (!end.ok || end.value > limit || !has_room || room > left) op_.fail_internal(Phase::kCount, peer);
    left -= room;
    owner.landing = next;
    owner.landing_records = static_cast<u32>(room);
    next += room * record_.bytes;
  });
}

}  // namespace weft::cpu
