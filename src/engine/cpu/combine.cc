#include "engine/cpu/combine.h"

#include <algorithm>
#include <cstring>

#include "base/clock.h"

namespace weft::cpu {
namespace {

constexpr u32 kPushBatch = 64;  // records between two signals

OperationConfig config_of(const CombineArgs& args, u64 window_hash) {
  OperationConfig config;
  config.kind = OpKind::kCombine;
  config.layout = args.layout;
  config.dtype = args.dtype;
  config.quantize = args.wire_is_fp8 ? Quantize::kFp8 : Quantize::kNone;
  config.has_side = args.has_side ? (args.adds_side ? 2 : 1) : 0;
  config.is_cached = static_cast<u8>(args.order);
  config.alignment = static_cast<u32>(args.alignment);
  config.hidden = static_cast<u32>(args.hidden);
  config.capacity = args.capacity;
  config.max_tokens = args.max_tokens;
  config.row_bytes = args.hidden * dtype_bytes(args.dtype);
  config.window_hash = window_hash;
  config.object = args.object;
  config.handle = static_cast<u64>(memory_at<PlanHeader>(args.send_plan)->sequence);
  return config;
}

}  // namespace

CombineCall::CombineCall(Window& window, const CombineArgs& args, const Poll& poll)
    : w_(window),
      a_(args),
      experts_{window.shape_.num_ranks, window.shape_.num_local_experts()},
      rank_(window.comm_->rank()),
      num_ranks_(window.shape_.num_ranks),
      top_k_(window.shape_.top_k),
      row_bytes_(args.hidden * dtype_bytes(args.dtype)),
      op_(window, config_of(args, window.hash_), args.timeout_ns, poll),
      send_{memory_at<i32>(args.send_plan), args.num_tokens, top_k_, num_ranks_},
      recv_{memory_at<i32>(args.recv_plan), memory_at<PlanHeader>(args.recv_plan)->num_meta_rows, top_k_, num_ranks_},
      order_(order_of(args.order, args.sum_domain, window.shape_.num_ranks, args.wire_is_fp8)),
      is_fp8_(args.wire_is_fp8 && !order_.has_domains()) {
  u64 side_bytes = args.has_side ? static_cast<u64>(top_k_) * sizeof(float) : 0;
  if (is_by_pick()) side_bytes = 2 * sizeof(float);  // weight and side of the pick
  const auto record = [&](bool is_fp8, u64 meta_bytes) {
    const i64 data_bytes = is_fp8 ? args.hidden : row_bytes_;
    const i64 scale_row_bytes = is_fp8 ? scale_bytes(args.hidden, Quantize::kFp8) : 0;
    return RecordLayout::make(static_cast<u64>(data_bytes), static_cast<u64>(scale_row_bytes), meta_bytes);
  };
  record_ = record(is_fp8_, side_bytes);
  side_record_ = RecordLayout::make(0, 0, side_bytes);
  sum_record_ = record(args.wire_is_fp8, 0);
  rail_record_ = record(args.wire_is_fp8, side_bytes);
  own_.owner = rank_;
  own_.plan = send_;
  if (op_.has_rails()) find_routes();
  if (args.layout != Layout::kRankMajor || is_fp8_) return;
  const auto offset = window.heap_offset(memory_at<void>(args.y));
  pull_ = offset.has_value();
  pull_offset_ = offset.value_or(0);
}

void CombineCall::run() {
  const u64 start_ns = now_ns();
  WEFT_FAIL_POINT("combine.before_count");
  count_rows();
  prepare_landing();
  send_counts();
  WEFT_FAIL_POINT("combine.after_count");
  op_.wait_all(Phase::kCount);
  read_counts();
  w_.scratch_.row.resize(static_cast<size_t>(record_.bytes));
  if (a_.wire_is_fp8 || is_by_pick()) w_.scratch_.sum.resize(static_cast<size_t>(a_.hidden));
  if (order_.has_domains()) w_.scratch_.domains.resize(static_cast<size_t>(num_ranks_) * sum_record_.bytes);
  if (a_.has_side) std::fill_n(memory_at<float>(a_.side_out), a_.num_tokens * top_k_, 0.0f);
  const auto is_summed = [](const Route& route) { return route.next_token == route.plan.num_tokens; };
  const auto all_done = [&] {
    return is_summed(own_) && std::all_of(routes_.begin(), routes_.end(), is_summed) &&
           std::all_of(op_.others().begin(), op_.others().end(),
                       [&](int owner) { return owners_[owner].num_pushed == owners_[owner].num_records; });
  };
  while (!all_done()) {
    bool moved = false;
    for (int owner : op_.others()) moved = push_records(owner) || moved;
    moved = sum_tokens() || moved;
    if (moved) continue;
    const auto any_can_move = [&] {
      return can_sum() ||
             std::any_of(op_.others().begin(), op_.others().end(), [&](int owner) { return can_push(owner); });
    };
    op_.wait(Phase::kReduce, any_can_move, [&](int peer) { return owes(peer); });
  }
  WEFT_FAIL_POINT("combine.before_reduce");
  for (int peer : op_.peers()) op_.send(Phase::kReduce, peer, [] {});
  op_.wait_all(Phase::kReduce);
  op_.finish();
  WEFT_FAIL_POINT("combine.after_finish");
  ++w_.stats_.num_combines;
  w_.stats_.combine_ns += now_ns() - start_ns;
}

// ---- contributor ----------------------------------------------------------------------------------------------------

bool CombineCall::can_push(int owner_rank) const {
  const Owner& owner = owners_[owner_rank];
  if (owner.num_pushed == owner.num_records) return false;
  const int to = op_.forwarder(owner_rank);
  const u32 consumed = sync::load_progress(op_.progress_from(to, Channel::kConsumed, owner_rank), op_.turn());
  return owner.num_pushed - consumed < owner.landing_records;
}

bool CombineCall::push_records(int owner_rank) {
  if (!can_push(owner_rank)) return false;
  Owner& owner = owners_[owner_rank];
  const RecordLayout& record = pull_ ? side_record_ : record_;
  const int to = op_.forwarder(owner_rank);
  const u32 consumed = sync::load_progress(op_.progress_from(to, Channel::kConsumed, owner_rank), op_.turn());
  if (consumed > owner.num_pushed) op_.fail_internal(Phase::kReduce, to);
  const i64 first = recv_.source_offset()[owner_rank];
  while (owner.num_pushed < owner.num_records && owner.num_pushed - consumed < owner.landing_records) {
    u8* place = owner.landing + (owner.num_pushed % owner.landing_records) * record.bytes;
    if (is_by_pick()) {
      write_pick(owner, place);
    } else {
      write_record(first + owner.num_pushed, place);
    }
    ++owner.num_pushed;
    if (owner.num_pushed % kPushBatch == 0) op_.post(to, Channel::kLanded, owner_rank, owner.num_pushed);
    WEFT_FAIL_POINT("combine.mid_push");
  }
  op_.post(to, Channel::kLanded, owner_rank, owner.num_pushed);
  return true;
}

void CombineCall::write_record(i64 meta_row, u8* record) {
  if (!pull_) contribution(meta_row, record);
  if (a_.has_side) write_side(meta_row, reinterpret_cast<float*>(record + (pull_ ? side_record_ : record_).meta));
}

// What this rank adds to the token behind a rank-major row, in the wire type.
void CombineCall::contribution(i64 meta_row, u8* data) {
  if (!is_fp8_) {
    partial_sum(meta_row, data, false);
    return;
  }
  if (partial_sum(meta_row, w_.scratch_.sum.data(), true))
    quantize_contribution(w_.scratch_.sum.data(), a_.hidden, data, reinterpret_cast<float*>(data + record_.scales));
}

bool CombineCall::partial_sum(i64 meta_row, void* place, bool as_fp32) {
  const u8* y = memory_at<u8>(a_.y);
  const void* rows[kMaxTopk];
  float weights[kMaxTopk];
  RowSum sum;
  sum.result_is_fp32 = as_fp32;
  if (a_.layout == Layout::kRankMajor) {
    if (a_.capacity >= 0 && meta_row >= a_.capacity) return false;
    rows[sum.num_rows++] = y + meta_row * row_bytes_;
    if (!as_fp32) {
      std::memcpy(place, rows[0], static_cast<u64>(row_bytes_));
      return true;
    }
  }
  for (i64 k = 0; a_.layout != Layout::kRankMajor && k < top_k_; ++k) {
    const i32 row = recv_.row()[meta_row * top_k_ + k];
    if (row < 0) continue;
    weights[sum.num_rows] = a_.weights != 0 ? memory_at<float>(a_.weights)[row] : 0.0f;
    rows[sum.num_rows++] = y + static_cast<i64>(row) * row_bytes_;
  }
  if (sum.num_rows == 0) return false;
  sum.rows = rows;
  sum.weights = a_.weights != 0 ? weights : nullptr;
  sum.hidden = a_.hidden;
  sum.dtype = a_.dtype;
  sum_rows(sum, place);
  return true;
}

void CombineCall::write_side(i64 meta_row, float* values) const {
  for (i64 k = 0; k < top_k_; ++k) {
    const i64 at = meta_row * top_k_ + k;
    const bool is_rank_major = a_.layout == Layout::kRankMajor;
    const i64 row = is_rank_major ? (a_.capacity >= 0 && meta_row >= a_.capacity ? -1 : at) : recv_.row()[at];
    values[k] = (recv_.expert()[at] >= 0 || a_.adds_side) && row >= 0 ? memory_at<float>(a_.side)[row] : 0.0f;
  }
}

// ---- owner ----------------------------------------------------------------------------------------------------------

// Whether any pick of the token was kept on that rank.
bool CombineCall::has_row(const Route& route, i64 token, int contributor) const {
  const SendPlanView<const i32>& plan = route.plan;
  const i32 slot = plan.slot()[token * num_ranks_ + contributor];
  if (slot < 0) return false;
  if (a_.layout == Layout::kRankMajor) return a_.capacity < 0 || plan.row_start()[contributor] + slot < a_.capacity;
  for (i64 k = 0; k < top_k_; ++k) {
    const i32 expert = plan.expert()[token * top_k_ + k];
    if (expert >= 0 && experts_.rank_of(expert) == contributor && plan.pick_row()[token * top_k_ + k] >= 0) return true;
  }
  return false;
}

bool CombineCall::token_is_here(const Route& route, i64 token) const {
  for (int peer : op_.peers()) {
    const i32 slot = route.plan.slot()[token * num_ranks_ + peer];
    const Contributor& from = route.contributors[peer];
    if (slot < 0 || from.num_records == 0 || static_cast<u32>(slot) < from.num_landed) continue;
    const u64* landed = op_.progress_from(peer, Channel::kLanded, route.owner);
    if (static_cast<u32>(slot) >= sync::load_progress(landed, op_.turn())) return false;
  }
  return true;
}

bool CombineCall::can_sum(const Route& route) const {
  if (route.next_token == route.plan.num_tokens) return false;
  if (is_by_pick()) return pick_is_here();
  return token_is_here(route, route.next_token) && rails_are_ready(route, route.next_token);
}

bool CombineCall::can_sum() const {
  return can_sum(own_) ||
         std::any_of(routes_.begin(), routes_.end(), [&](const Route& route) { return can_sum(route); });
}

void CombineCall::note_landed(Route& route) {
  for (int peer : op_.peers()) {
    Contributor& from = route.contributors[peer];
    from.num_landed = sync::load_progress(op_.progress_from(peer, Channel::kLanded, route.owner), op_.turn());
    if (from.num_landed > from.num_records) op_.fail_internal(Phase::kReduce, peer);
  }
}

bool CombineCall::sum_route(Route& route) {
  note_landed(route);
  const i64 before = route.next_token, before_k = next_k_;
  while (route.next_token < route.plan.num_tokens &&
         (is_by_pick() ? sum_picks(route.next_token) : sum_token(route, route.next_token))) {
    ++route.next_token;
    WEFT_FAIL_POINT("combine.mid_sum");
  }
  for (int peer : op_.peers()) post_consumed(route, peer);
  return route.next_token > before || next_k_ > before_k;
}

bool CombineCall::sum_tokens() {
  bool moved = false;
  for_routes([&](Route& route) { moved = sum_route(route) || moved; });
  return moved;
}

// Tells the contributor of the room in its landing area; not needed where everything fits at once.
void CombineCall::post_consumed(Route& route, int peer) {
  Contributor& from = route.contributors[peer];
  if (from.num_records <= from.landing_records || from.num_consumed == from.num_posted) return;
  const bool is_due = from.num_consumed - from.num_posted >= std::max(1u, from.landing_records / 4);
  const bool runs_dry = from.num_consumed == from.num_landed;
  if (!is_due && !runs_dry && route.next_token < route.plan.num_tokens) return;
  from.num_posted = from.num_consumed;
  op_.post(peer, Channel::kConsumed, route.owner, from.num_posted);
}

// This rank's own rows need no wire, but the same rounding.
const void* CombineCall::own_row(i64 meta_row) {
  if (a_.layout == Layout::kRankMajor && !is_fp8_) return memory_at<u8>(a_.y) + meta_row * row_bytes_;
  contribution(meta_row, w_.scratch_.row.data());
  return w_.scratch_.row.data();
}

void CombineCall::read_side(const Route& route, i64 token, int contributor, const float* values, float* side) const {
  for (i64 k = 0; k < top_k_; ++k) {
    const i32 expert = route.plan.expert()[token * top_k_ + k];
    if (a_.adds_side) {
      side[k] += values[k];  // `side` is 0 before
    } else if (expert >= 0 && experts_.rank_of(expert) == contributor) {
      side[k] = 0.0f + values[k];  // a sum from +0: -0 becomes +0
    }
  }
}

const void* CombineCall::bias_of(i64 token) const {
  if (a_.bias == 0) return nullptr;
  const i64 bias_row_bytes = a_.hidden * (a_.bias_is_fp32 ? 4 : dtype_bytes(a_.dtype));
  return memory_at<u8>(a_.bias) + (a_.bias_is_2d ? token * bias_row_bytes : 0);
}

// The contributions of this node in their order, with domains their sums. Returns how many.
i32 CombineCall::gather_rows(Route& route, i64 token, const void** rows, float* side) {
  i32 num_rows = 0;
  std::array<i64, kMaxRanks> place;  // of the ranks behind `rows`
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const i32 slot = route.plan.slot()[token * num_ranks_ + rank];
    if (slot < 0 || !op_.map().are_mates(rank_, rank)) continue;
    Contributor& from = route.contributors[rank];
    const i64 row = route.plan.row_start()[rank] + slot;
    const bool counts = has_row(route, token, rank);
    if (counts) place[num_rows] = place_in_order(route, token, rank);
    if (rank == rank_) {
      float mine[kMaxTopk];
      const i64 meta_row = recv_.source_offset()[route.owner] + slot;
      if (counts) rows[num_rows++] = own_row(meta_row);
      if (a_.has_side) {
        write_side(meta_row, mine);
        read_side(route, token, rank, mine, side);
      }
      continue;
    }
    const RecordLayout& record = from.pulls ? side_record_ : record_;
    const u8* landed = from.landing + (static_cast<u32>(slot) % std::max(1u, from.landing_records)) * record.bytes;
    if (counts) rows[num_rows++] = from.pulls ? from.rows + row * row_bytes_ : landed;
    if (a_.has_side) read_side(route, token, rank, reinterpret_cast<const float*>(landed + record.meta), side);
    if (from.num_records != 0) from.num_consumed = static_cast<u32>(slot) + 1;
  }
  // Few, and most often in order.
  for (i32 end = 1; order_.reduction == Reduction::kByLastPick && end < num_rows; ++end) {
    for (i32 idx = end; idx > 0 && place[idx] < place[idx - 1]; --idx) {
      std::swap(place[idx], place[idx - 1]);
      std::swap(rows[idx], rows[idx - 1]);
    }
  }
  return order_.has_domains() ? sum_domains(place.data(), num_rows, rows) : num_rows;
}

// False: something of the token has not come yet, or its sum has no place to go.
bool CombineCall::sum_token(Route& route, i64 token) {
  for (int peer : op_.peers()) {
    const i32 slot = route.plan.slot()[token * num_ranks_ + peer];
    const Contributor& from = route.contributors[peer];
    if (slot >= 0 && from.num_records != 0 && static_cast<u32>(slot) >= from.num_landed) return false;
  }
  if (!rails_are_ready(route, token)) return false;
  const void* rows[kMaxRanks];
  const float* scales[kMaxRanks];
  if (!is_own(route)) {
    float side[kMaxTopk] = {};
    const i32 num_rows = gather_rows(route, token, rows, side);
    put_sum(route, num_rows > 0 ? rows[0] : nullptr, side);
    return true;
  }
  RowSum sum;
  sum.num_rows =
      gather_rows(route, token, rows, a_.has_side ? memory_at<float>(a_.side_out) + token * top_k_ : nullptr);
  if (op_.has_rails()) sum.num_rows = add_inflows(token, sum.num_rows, rows);
  for (i32 idx = 0; a_.wire_is_fp8 && idx < sum.num_rows; ++idx)
    scales[idx] = reinterpret_cast<const float*>(static_cast<const u8*>(rows[idx]) + sum_record_.scales);
  sum.scales = a_.wire_is_fp8 ? scales : nullptr;
  sum.rows = rows;
  sum.hidden = a_.hidden;
  sum.dtype = a_.dtype;
  sum.bias_is_fp32 = a_.bias_is_fp32;
  sum.bias_is_first = order_.bias == Bias::kFirst;
  sum.bias = bias_of(token);
  sum_rows(sum, memory_at<u8>(a_.out) + token * row_bytes_);
  if (op_.has_rails()) pass_inflows(token);
  return true;
}

}  // namespace weft::cpu
