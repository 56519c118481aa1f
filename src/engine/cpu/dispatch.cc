#include "engine/cpu/dispatch.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/clock.h"
#include "engine/cpu/expert_table.h"
#include "engine/cpu/rows.h"

namespace weft::cpu {
namespace {

OperationConfig config_of(const DispatchArgs& args, u64 window_hash) {
  OperationConfig config;
  config.kind = OpKind::kDispatch;
  config.layout = args.layout;
  config.quantize = args.quantize;
  config.dtype = args.quantize == Quantize::kNone ? args.dtype : Dtype::kBytes;
  config.is_cached = args.cached ? 1 : 0;
  config.alignment = static_cast<u32>(args.alignment);
  config.hidden = static_cast<u32>(args.hidden);
  config.capacity = args.capacity;
  config.max_tokens = args.max_tokens;
  config.row_bytes = args.quantize == Quantize::kNone ? args.row_bytes : args.hidden;
  config.scale_row_bytes =
      args.quantize == Quantize::kNone ? args.scale_row_bytes : scale_bytes(args.hidden, args.quantize);
  config.window_hash = window_hash;
  config.object = args.object;
  if (args.cached) config.handle = static_cast<u64>(memory_at<PlanHeader>(args.send_plan)->sequence);
  if (!args.cached && args.experts != 0) config.handle = ExpertTable{memory_at<i32>(args.experts)}.digest();
  return config;
}

i32* local_counts(void* payload) {
  return reinterpret_cast<i32*>(static_cast<u8*>(payload) + WindowLayout::kPayloadFixedBytes);
}
const i32* local_counts(const void* payload) {
  return reinterpret_cast<const i32*>(static_cast<const u8*>(payload) + WindowLayout::kPayloadFixedBytes);
}

}  // namespace

DispatchCall::DispatchCall(Window& window, const DispatchArgs& args, const Poll& poll)
    : w_(window),
      a_(args),
      shape_(window.shape_),
      experts_{window.shape_.num_ranks, window.shape_.num_local_experts()},
      rank_(window.comm_->rank()),
      num_ranks_(window.shape_.num_ranks),
      num_local_(window.shape_.num_local_experts()),
      top_k_(window.shape_.top_k),
      wire_row_bytes_(config_of(args, 0).row_bytes),
      wire_scale_bytes_(config_of(args, 0).scale_row_bytes),
      op_(window, config_of(args, window.hash_), args.timeout_ns, poll),
      record_(
          RecordLayout::make(static_cast<u64>(wire_row_bytes_), static_cast<u64>(wire_scale_bytes_),
                             args.cached ? 0 : static_cast<u64>(2 * top_k_ + 1) * sizeof(i32))),  // ids, weights, token
      ring_records_(static_cast<u32>(
          std::min<u64>(window.layout_.ring_bytes / std::max<u64>(record_.bytes, 1), kMaxRowsPerPair))),
      send_{memory_at<i32>(args.send_plan), args.num_tokens, top_k_, num_ranks_},
      rail_record_(RecordLayout::make(static_cast<u64>(wire_row_bytes_), static_cast<u64>(wire_scale_bytes_),
                                      args.cached ? 0 : static_cast<u64>(top_k_) * sizeof(float))) {
  own_.source = rank_;
  own_.plan = send_;
  targets_[rank_].is_here = true;
  for (int peer : op_.peers()) targets_[peer].is_here = true;
}

DispatchResult DispatchCall::run() {
  const u64 start_ns = now_ns();
  const bool tells_need = a_.tells_need && !a_.cached;
  if (tells_need && a_.num_tokens > a_.max_tokens) {
    result_.needed_tokens = op_.wait_for_need(a_.num_tokens);
    return std::move(result_);
  }
  if (a_.cached) {
    read_handle();
  } else {
    build_send_plan();
  }
  if (op_.has_rails()) count_outflows();
  WEFT_FAIL_POINT("dispatch.before_count");
  if (a_.cached) {
    try {
      reserve_result();
    } catch (const std::bad_alloc&) {
      op_.refuse(Phase::kCount, ErrorCode::kCapacityExceeded, "no memory for the result of dispatch");
    }
  }
  send_counts();
  WEFT_FAIL_POINT("dispatch.after_count");
  if (tells_need) result_.needed_tokens = op_.wait_for_need(0);
  if (result_.needed_tokens > 0) return std::move(result_);
  op_.wait_all(Phase::kCount);
  if (!a_.cached) {
    read_counts();
    if (op_.has_rails()) read_messages();
    size_result();
    try {
      reserve_result();
    } catch (const std::bad_alloc&) {
      op_.refuse(Phase::kNotify, ErrorCode::kCapacityExceeded, "no memory for the result of dispatch");
    }
    build_forward_plans();
    send_placements();
    WEFT_FAIL_POINT("dispatch.after_notify");
    zero_holes();
    op_.wait_all(Phase::kNotify);
  } else {
    zero_holes();
  }
  read_placements();
  if (!a_.cached) {
    fill_pick_rows(rank_, send_);
    for (Route& route : routes_) fill_pick_rows(route.source, route.plan);
  }
  if (op_.has_rails()) {
    run_rails();
  } else {
    send_rows();
    run_staging();
  }
  WEFT_FAIL_POINT("dispatch.after_send");
  op_.wait_all(Phase::kSend);
  finish_result();
  op_.finish();
  WEFT_FAIL_POINT("dispatch.after_finish");
  ++w_.stats_.num_dispatches;
  w_.stats_.dispatch_ns += now_ns() - start_ns;
  w_.stats_.num_staged += staged_ ? 1 : 0;
  return std::move(result_);
}

// ---- what goes where ------------------------------------------------------------------------------------------------

void DispatchCall::read_handle() {
  recv_ = {memory_at<i32>(a_.recv_plan), 0, top_k_, num_ranks_};
  const auto& header = *memory_at<PlanHeader>(a_.recv_plan);
  recv_.num_meta_rows = num_meta_rows_ = header.num_meta_rows;
  num_rows_ = header.num_rows;
  result_rows_ = result_rows(header);
  for (i64 source = 0; source < num_ranks_; ++source) {
    sources_[source].first_meta_row = recv_.source_offset()[source];
    sources_[source].num_meta_rows = recv_.source_offset()[source + 1] - recv_.source_offset()[source];
    targets_[source].num_rows = send_.num_rows_to()[source];
  }
  if (op_.has_rails()) {
    const i64 length = recv_plan_len(num_meta_rows_, top_k_, num_ranks_, a_.layout);
    const ForwardPlans plans{recv_.base, length, a_.recv_plan_len};
    plans.for_each(top_k_, num_ranks_, [&](const SendPlanView<i32>& plan, i32 source) {
      routes_.emplace_back().source = source;
      routes_.back().plan = plan;
    });
  }
  if (a_.layout == Layout::kRankMajor) return;
  // Group sizes again, for the holes between the groups.
  w_.scratch_.counts_from.assign(static_cast<size_t>(num_ranks_ * num_local_), 0);
  w_.scratch_.starts.resize(static_cast<size_t>(num_ranks_ * num_local_));
  w_.scratch_.offsets.resize(static_cast<size_t>(num_local_ + 1));
  for (i64 pick = 0; pick < num_meta_rows_ * top_k_; ++pick) {
    if (recv_.expert()[pick] >= 0) ++w_.scratch_.counts_from[recv_.expert()[pick]];
  }
  place_by_expert(w_.scratch_.counts_from.data(), static_cast<i32>(num_ranks_), static_cast<i32>(num_local_), a_.layout,
                  a_.alignment, a_.capacity, w_.scratch_.starts.data(), w_.scratch_.offsets.data());
}

void DispatchCall::build_send_plan() {
  w_.scratch_.counts_to.assign(static_cast<size_t>(num_ranks_ * num_local_), 0);
  std::fill_n(send_.row_start(), 2 * num_ranks_, 0);
  i64 experts[kMaxTopk];
  for (i64 token = 0; token < a_.num_tokens; ++token) {
    for (i64 k = 0; k < top_k_; ++k) {
      const i64 at = token * top_k_ + k;
      experts[k] = a_.topk_is_int64 ? memory_at<i64>(a_.topk_idx)[at] : memory_at<i32>(a_.topk_idx)[at];
    }
    count_token(experts, token);
  }
  PlanHeader header;
  header.magic = kSendPlanMagic;
  header.epoch = static_cast<i32>(w_.comm_->epoch());
  header.layout = static_cast<i32>(a_.layout);
  header.num_ranks = static_cast<i32>(num_ranks_);
  header.num_local_experts = static_cast<i32>(num_local_);
  header.top_k = static_cast<i32>(top_k_);
  header.num_tokens = static_cast<i32>(a_.num_tokens);
  header.alignment = static_cast<i32>(a_.alignment);
  header.capacity = a_.capacity;
  header.window_hash = w_.hash_;
  header.sequence = static_cast<i32>(op_.turn().sequence);
  header.rank = rank_;
  std::memcpy(memory_at<void>(a_.send_plan), &header, sizeof(header));
  for (i64 rank = 0; rank < num_ranks_; ++rank) targets_[rank].num_rows = send_.num_rows_to()[rank];
}

void DispatchCall::count_token(const i64* experts, i64 token) {
  i32* slot = send_.slot() + token * num_ranks_;
  i32* expert = send_.expert() + token * top_k_;
  const ExpertTable logical{memory_at<i32>(a_.experts)};
  std::fill_n(slot, num_ranks_, -1);
  for (i64 k = 0; k < top_k_; ++k) {
    expert[k] = -1;
    const bool is_id = a_.experts == 0 ? experts_.contains(experts[k]) : logical.contains(experts[k]);
    if (!is_id) {
      if (experts[k] != -1 && result_.num_bad_ids++ == 0) {
        result_.first_bad_id = experts[k];
        result_.first_bad_at = token * top_k_ + k;
      }
      continue;
    }
    const i32 id = static_cast<i32>(a_.experts == 0 ? experts[k] : logical.replica_of(experts[k], token, rank_));
    if (id < 0) continue;
    const i32 destination = experts_.rank_of(id);
    if (!w_.comm_->is_active(destination)) continue;
    expert[k] = id;
    if (slot[destination] < 0) slot[destination] = send_.num_rows_to()[destination]++;
    ++w_.scratch_.counts_to[id];
  }
}

void DispatchCall::send_counts() {
  for (int peer : op_.peers()) {
    op_.send(Phase::kCount, peer, [&] {
      auto* payload = op_.payload_to<CountPayload>(Phase::kCount, peer);
      *payload = CountPayload{};
      payload->config = op_.config();
      payload->num_rows = targets_[peer].num_rows;
      if (a_.cached) {
        payload->placement = placement_for(peer);
      } else {
        std::copy_n(&w_.scratch_.counts_to[peer * num_local_], num_local_, local_counts(payload));
      }
    });
  }
  if (!op_.has_rails()) return;
  CountPayload payload;
  payload.config = op_.config();
  op_.send_messages(payload, [&](int node, RailMessage* message) { return write_message(node, message); });
}

void DispatchCall::read_counts() {
  w_.scratch_.counts_from.assign(static_cast<size_t>(num_ranks_ * num_local_), 0);
  i32* counts = w_.scratch_.counts_from.data();
  std::copy_n(&w_.scratch_.counts_to[rank_ * num_local_], num_local_, counts + rank_ * num_local_);
  sources_[rank_].num_meta_rows = targets_[rank_].num_rows;
  for (int peer : op_.others()) {
    const auto* payload = op_.payload_from<CountPayload>(Phase::kCount, peer);
    const i64 num_rows = clamp_count(payload->num_rows, a_.max_tokens);
    i64 num_picks = 0;
    for (i64 expert = 0; expert < num_local_; ++expert) {
      const i32 count = local_counts(payload)[expert];
      counts[peer * num_local_ + expert] = static_cast<i32>(clamp_count(count, num_rows * top_k_));
      num_picks += count;
    }
    const bool makes_sense = num_rows == payload->num_rows && num_picks >= num_rows && num_picks <= num_rows * top_k_;
    if (!makes_sense) op_.fail_internal(Phase::kCount, peer);
    sources_[peer].num_meta_rows = num_rows;
  }
}

Placement DispatchCall::placement_for(int source) const {
  Placement placement;
  placement.num_rows = result_rows_;
  placement.meta_start = sources_[source].first_meta_row;
  placement.num_meta_rows = num_meta_rows_;
  if (staged_) return placement;
  placement.in_heap = 1;
  placement.x = x_block_.offset;
  placement.scales = x_block_.offset + scales_offset_;
  if (a_.cached) return placement;
  placement.meta_idx = plan_block_.offset + static_cast<u64>(reinterpret_cast<u8*>(recv_.expert()) - plan_block_.data);
  placement.meta_weights =
      plan_block_.offset + static_cast<u64>(reinterpret_cast<u8*>(meta_weights_) - plan_block_.data);
  return placement;
}

void DispatchCall::send_placements() {
  for (int peer : op_.peers()) {
    op_.send(Phase::kNotify, peer, [&] {
      auto* payload = op_.payload_to<NotifyPayload>(Phase::kNotify, peer);
      payload->placement = placement_for(peer);
      i32* told = local_counts(payload);
      const i64 first = op_.has_rails() ? 0 : peer, num_sources = op_.has_rails() ? num_ranks_ : 1;
      for (i64 source = 0; op_.has_rails() && source < num_ranks_; ++source)
        *told++ = static_cast<i32>(sources_[source].first_meta_row);
      const i64* starts = &w_.scratch_.starts[first * num_local_];
      for (i64 idx = 0; idx < num_sources * num_local_; ++idx) told[idx] = static_cast<i32>(starts[idx]);
    });
  }
}

void DispatchCall::read_placements() {
  Target& own = targets_[rank_];
  own.placement = placement_for(rank_);
  own.x = x_block_.data;
  own.scales = x_block_.data + scales_offset_;
  own.meta_token = a_.cached ? nullptr : recv_.token();
  own.meta_idx = a_.cached ? nullptr : recv_.expert();
  own.meta_weights = meta_weights_;
  for (int peer : op_.peers()) {
    Target& target = targets_[peer];
    target.placement = a_.cached ? op_.payload_from<CountPayload>(Phase::kCount, peer)->placement
                                 : op_.payload_from<NotifyPayload>(Phase::kNotify, peer)->placement;
    check_placement(peer, target.num_rows, target.placement);
    target.staged = target.placement.in_heap == 0;
    if (target.staged) continue;
    u8* heap = w_.heap_of(peer);
    target.x = heap + target.placement.x;
    target.scales = heap + target.placement.scales;
    if (a_.cached) continue;
    target.meta_idx = reinterpret_cast<i32*>(heap + target.placement.meta_idx);
    target.meta_token = target.meta_idx - padded_ints(target.placement.num_meta_rows);
    target.meta_weights = reinterpret_cast<float*>(heap + target.placement.meta_weights);
  }
  if (a_.cached) return;
  for (i64 rank = 0; rank < num_ranks_; ++rank)
    send_.row_start()[rank] = static_cast<i32>(targets_[rank].placement.meta_start);
  for (Route& route : routes_) {
    route.plan.row_start()[rank_] = static_cast<i32>(sources_[route.source].first_meta_row);
    for (int peer : op_.peers()) {
      Placement placement = targets_[peer].placement;
      placement.meta_start = local_counts(op_.payload_from<NotifyPayload>(Phase::kNotify, peer))[route.source];
      check_placement(peer, route.plan.num_rows_to()[peer], placement);
      route.plan.row_start()[peer] = static_cast<i32>(placement.meta_start);
    }
  }
}

// Where the rows of a source begin in each group of a destination in this node.
const i32* DispatchCall::told_starts(int destination, int source) const {
  const i32* told = local_counts(op_.payload_from<NotifyPayload>(Phase::kNotify, destination));
  return op_.has_rails() ? told + num_ranks_ + source * num_local_ : told;
}

// R19: nothing that a peer says makes this rank write outside the peer's heap.
void DispatchCall::check_placement(int rank, i64 num_rows, const Placement& placement) const {
  const auto fits = [&](u64 offset, i64 rows, i64 row_bytes) {
    const CheckedSize end = CheckedSize(offset) + CheckedSize(static_cast<u64>(rows)) * static_cast<u64>(row_bytes);
    return rows >= 0 && end.ok && end.value <= w_.peers_[rank].heap.bytes();
  };
  const bool rows_fit = placement.meta_start >= 0 && placement.num_meta_rows >= 0 &&
                        placement.meta_start <= placement.num_meta_rows - num_rows;
  const bool has_tokens = rows_fit && placement.meta_idx / 4 >= static_cast<u64>(padded_ints(placement.num_meta_rows));
  const bool meta_fits = a_.cached || (has_tokens && fits(placement.meta_idx, placement.num_meta_rows, top_k_ * 4) &&
                                       fits(placement.meta_weights, placement.num_meta_rows, top_k_ * 4));
  const bool memory_fits =
      placement.in_heap == 0 || (fits(placement.x, placement.num_rows, wire_row_bytes_) &&
                                 fits(placement.scales, placement.num_rows, wire_scale_bytes_) && meta_fits);
  if (!rows_fit || !memory_fits) const_cast<Operation&>(op_).fail_internal(Phase::kNotify, rank);
}

// The row of every pick on its destination: tokens in order, then k, as the receiver counts them too.
void DispatchCall::fill_pick_rows(int source, const SendPlanView<i32>& plan) {
  if (a_.layout == Layout::kRankMajor) return;
  std::vector<i64>& next = w_.scratch_.rows_from;
  next.assign(static_cast<size_t>(num_ranks_ * num_local_), 0);
  std::copy_n(&w_.scratch_.starts[source * num_local_], num_local_, &next[rank_ * num_local_]);
  for (int peer : op_.peers()) {
    const i32* starts = told_starts(peer, source);
    for (i64 expert = 0; expert < num_local_; ++expert) next[peer * num_local_ + expert] = std::max(starts[expert], 0);
  }
  for (i64 pick = 0; pick < plan.num_tokens * top_k_; ++pick) {
    const i32 expert = plan.expert()[pick];
    plan.pick_row()[pick] = -1;
    if (expert < 0 || !targets_[experts_.rank_of(expert)].is_here) continue;
    const i64 row = next[expert]++;
    const bool is_masked = a_.layout == Layout::kMasked;
    const i64 limit = is_masked ? a_.capacity : targets_[experts_.rank_of(expert)].placement.num_rows;
    if (row < limit)
      plan.pick_row()[pick] = static_cast<i32>(is_masked ? experts_.local_id(expert) * a_.capacity + row : row);
  }
}

}  // namespace weft::cpu
