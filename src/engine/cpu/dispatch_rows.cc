// The payload of a dispatch: rows to their final places, or through the staging rings of receivers without room.
#include <algorithm>
#include <cstring>

#include "engine/cpu/dispatch.h"
#include "engine/cpu/rows.h"

namespace weft::cpu {

// The row as it goes on the wire; quantised into scratch memory if asked for.
const void* DispatchCall::prepare_row(i64 token, const void** scales) {
  const u8* row = memory_at<u8>(a_.x) + token * a_.row_bytes;
  if (a_.quantize == Quantize::kNone) {
    *scales = memory_at<u8>(a_.scales) + token * a_.scale_row_bytes;
    return row;
  }
  auto& scratch = w_.scratch_;
  scratch.row.resize(static_cast<size_t>(wire_row_bytes_));
  scratch.scales.resize(static_cast<size_t>(wire_scale_bytes_) + sizeof(float));
  quantize_row(a_.dtype, row, a_.hidden, a_.quantize, scratch.row.data(), scratch.scales.data());
  *scales = scratch.scales.data();
  return scratch.row.data();
}

// Final places of a token on one destination: one row (rank_major), or one for each pick that has a row.
i32 DispatchCall::gather_places(const SendPlanView<i32>& plan, i64 idx, int destination, u8** x_places,
                                u8** scale_places) const {
  const Target& target = targets_[destination];
  const auto place = [&](i64 row, i32 number) {
    x_places[number] = target.x + row * wire_row_bytes_;
    scale_places[number] = target.scales + row * wire_scale_bytes_;
  };
  if (a_.layout == Layout::kRankMajor) {
    const i64 row = plan.row_start()[destination] + plan.slot()[idx * num_ranks_ + destination];
    if (row >= target.placement.num_rows) return 0;
    place(row, 0);
    return 1;
  }
  i32 num_places = 0;
  for (i64 k = 0; k < top_k_; ++k) {
    const i32 expert = plan.expert()[idx * top_k_ + k];
    const i64 row = plan.pick_row()[idx * top_k_ + k];
    if (expert >= 0 && row >= 0 && experts_.rank_of(expert) == destination) place(row, num_places++);
  }
  return num_places;
}

void DispatchCall::write_meta(const SendPlanView<i32>& plan, const Row& row, int destination, i32* ids,
                              float* weights) const {
  for (i64 k = 0; k < top_k_; ++k) {
    const i32 expert = plan.expert()[row.idx * top_k_ + k];
    const bool is_here = expert >= 0 && experts_.rank_of(expert) == destination;
    ids[k] = is_here ? experts_.local_id(expert) : -1;
    weights[k] = !is_here ? 0.0f : row.weights == nullptr ? 1.0f : row.weights[k];
  }
}

DispatchCall::Row DispatchCall::own_row(i64 token) const {
  return {token, static_cast<i32>(token),
          a_.topk_weights == 0 ? nullptr : memory_at<float>(a_.topk_weights) + token * top_k_};
}

// Its places on the ranks of this node that have room for it, where ids and weights are written, too.
i32 DispatchCall::place_row(const SendPlanView<i32>& plan, const Row& row, u8** x_places, u8** scale_places) {
  i32 num_places = 0;
  for (i64 step = 1; step <= num_ranks_; ++step) {
    const int destination = static_cast<int>((rank_ + step) % num_ranks_);
    const i32 slot = plan.slot()[row.idx * num_ranks_ + destination];
    Target& target = targets_[destination];
    if (slot < 0 || target.staged || !target.is_here) continue;
    num_places += gather_places(plan, row.idx, destination, x_places + num_places, scale_places + num_places);
    if (a_.cached) continue;
    const i64 meta = plan.row_start()[destination] + slot;
    target.meta_token[meta] = row.token;
    write_meta(plan, row, destination, target.meta_idx + meta * top_k_, target.meta_weights + meta * top_k_);
  }
  return num_places;
}

void DispatchCall::store_row(const void* x, const void* scales, u8* const* x_places, u8* const* scale_places,
                             i32 num_places) const {
#if defined(WEFT_FAIL_POINTS)
  copy_row(x, static_cast<u64>(wire_row_bytes_) / 32 * 16, x_places, num_places, streaming_);
  WEFT_FAIL_POINT("dispatch.mid_row");
#endif
  copy_row(x, static_cast<u64>(wire_row_bytes_), x_places, num_places, streaming_);
  if (wire_scale_bytes_ > 0) copy_row(scales, static_cast<u64>(wire_scale_bytes_), scale_places, num_places, false);
}

// Each row is read once and stored to all its places, beginning with the next higher rank.
void DispatchCall::send_token(i64 token) {
  u8* x_places[kMaxTopk];
  u8* scale_places[kMaxTopk];
  const i32 num_places = place_row(send_, own_row(token), x_places, scale_places);
  if (num_places == 0) return;
  const void* scales = nullptr;
  const void* x = prepare_row(token, &scales);
  store_row(x, scales, x_places, scale_places, num_places);
}

void DispatchCall::send_rows() {
  for (i64 token = 0; token < a_.num_tokens; ++token) send_token(token);
  finish_streaming();
  WEFT_FAIL_POINT("dispatch.before_send");
  for (int peer : op_.peers()) {
    if (!targets_[peer].staged) op_.send(Phase::kSend, peer, [] {});
  }
}

// ---- staging rings --------------------------------------------------------------------------------------------------

bool DispatchCall::can_push(int destination) const {
  const Target& target = targets_[destination];
  if (!target.staged || target.next_token == a_.num_tokens) return false;
  const u32 consumed = sync::load_progress(op_.progress_from(destination, Channel::kConsumed, rank_), op_.turn());
  return target.num_landed - consumed < ring_records_;
}

// Whether everything of that source is out of its ring; what this rank stores itself was never in one.
bool DispatchCall::is_drained(int source) const {
  const Source& from = sources_[source];
  return !staged_ || op_.forwarder(source) == rank_ || from.num_consumed == from.num_meta_rows;
}

bool DispatchCall::can_drain(int source) const {
  if (is_drained(source)) return false;
  const u64* landed = op_.progress_from(op_.forwarder(source), Channel::kLanded, source);
  return sync::load_progress(landed, op_.turn()) > sources_[source].num_consumed;
}

void DispatchCall::write_record(u8* record, const SendPlanView<i32>& plan, const Row& row, int destination,
                                const void* x, const void* scales) const {
  std::memcpy(record, x, static_cast<u64>(wire_row_bytes_));
  if (wire_scale_bytes_ > 0) std::memcpy(record + record_.scales, scales, static_cast<u64>(wire_scale_bytes_));
  if (a_.cached) return;
  i32* ids = reinterpret_cast<i32*>(record + record_.meta);
  write_meta(plan, row, destination, ids, reinterpret_cast<float*>(ids + top_k_));
  ids[2 * top_k_] = row.token;
}

bool DispatchCall::push_staged(int destination) {
  if (!can_push(destination)) return false;
  Target& target = targets_[destination];
  const u32 consumed = sync::load_progress(op_.progress_from(destination, Channel::kConsumed, rank_), op_.turn());
  if (consumed > target.num_landed) op_.fail_internal(Phase::kSend, destination);
  const u32 before = target.num_landed;
  u8* ring = w_.control_of(destination) + w_.layout_.ring(rank_);
  for (; target.next_token < a_.num_tokens && target.num_landed - consumed < ring_records_; ++target.next_token) {
    const i64 token = target.next_token;
    if (send_.slot()[token * num_ranks_ + destination] < 0) continue;
    u8* record = ring + (target.num_landed % ring_records_) * record_.bytes;
    const void* scales = nullptr;
    const void* x = prepare_row(token, &scales);
    write_record(record, send_, own_row(token), destination, x, scales);
    ++target.num_landed;
  }
  if (target.num_landed > before) op_.post(destination, Channel::kLanded, rank_, target.num_landed);
  WEFT_FAIL_POINT("dispatch.staged_push");
  if (target.next_token == a_.num_tokens) op_.send(Phase::kSend, destination, [] {});
  return true;
}

// Copies what has landed out to the ordinary result.
bool DispatchCall::drain_staged(int source) {
  if (!can_drain(source)) return false;
  Source& from = sources_[source];
  const int sender = op_.forwarder(source);
  const u32 landed = sync::load_progress(op_.progress_from(sender, Channel::kLanded, source), op_.turn());
  if (landed > from.num_meta_rows) op_.fail_internal(Phase::kSend, source);
  const u8* ring = w_.control_of(rank_) + w_.layout_.ring(source);
  for (; from.num_consumed < landed; ++from.num_consumed) {
    const u8* record = ring + (from.num_consumed % ring_records_) * record_.bytes;
    const i64 meta_row = from.first_meta_row + from.num_consumed;
    if (!a_.cached) {
      const i32* ids = reinterpret_cast<const i32*>(record + record_.meta);
      std::copy_n(ids, top_k_, recv_.expert() + meta_row * top_k_);
      std::copy_n(reinterpret_cast<const float*>(ids + top_k_), top_k_, meta_weights_ + meta_row * top_k_);
      recv_.token()[meta_row] = ids[2 * top_k_];
      place_meta_rows(source, from.num_consumed + 1);
    }
    for (i64 k = 0; k < (a_.layout == Layout::kRankMajor ? 1 : top_k_); ++k) {
      const i64 row = a_.layout == Layout::kRankMajor ? meta_row : recv_.row()[meta_row * top_k_ + k];
      if (row < 0 || row >= result_rows_) continue;
      std::memcpy(x_block_.data + row * wire_row_bytes_, record, static_cast<u64>(wire_row_bytes_));
      std::memcpy(x_block_.data + scales_offset_ + row * wire_scale_bytes_, record + record_.scales,
                  static_cast<u64>(wire_scale_bytes_));
    }
  }
  op_.post(sender, Channel::kConsumed, source, from.num_consumed);
  WEFT_FAIL_POINT("dispatch.staged_drain");
  return true;
}

bool DispatchCall::staging_done() const {
  for (int peer : op_.peers()) {
    if (targets_[peer].staged && targets_[peer].next_token < a_.num_tokens) return false;
    if (!is_drained(peer)) return false;
  }
  return true;
}

// A rank sends to and receives from everyone in turn, whatever can move first: no rank waits for one peer while another
// waits for it.
void DispatchCall::run_staging() {
  for (int peer : op_.peers()) {  // nothing to push: the header all the same (R3)
    if (targets_[peer].staged && a_.num_tokens == 0) op_.send(Phase::kSend, peer, [] {});
  }
  while (!staging_done()) {
    bool moved = false;
    for (int peer : op_.peers()) {
      moved = push_staged(peer) || moved;
      moved = drain_staged(peer) || moved;
    }
    if (moved) continue;
    const auto any_can_move = [&] {
      return std::any_of(op_.peers().begin(), op_.peers().end(),
                         [&](int peer) { return can_push(peer) || can_drain(peer); });
    };
    op_.wait(Phase::kSend, any_can_move, [&](int peer) {
      const bool owes_room = targets_[peer].staged && targets_[peer].next_token < a_.num_tokens;
      return owes_room || !is_drained(peer);
    });
  }
}

}  // namespace weft::cpu
