// What the orders of additions other than "rank" need: the last pick of a rank, sums of domains, and rows that travel pick by pick.
#include <algorithm>
#include <cstring>

#include "engine/cpu/combine.h"

namespace weft::cpu {

// What each rank has for each other: rows of tokens, or kept picks.
void CombineCall::count_rows() {
  if (is_by_pick()) {
    for (i64 pick = 0; pick < a_.num_tokens * top_k_; ++pick) {
      if (send_.expert()[pick] >= 0 && send_.pick_row()[pick] >= 0)
        ++own_.contributors[experts_.rank_of(send_.expert()[pick])].num_rows;
    }
  }
  for_routes([&](Route& route) {
    for (int peer : op_.peers()) {
      if (!is_by_pick()) route.contributors[peer].num_rows = route.plan.num_rows_to()[peer];
    }
  });
  for (int peer : op_.others()) {
    Owner& owner = owners_[peer];
    const i64 first = recv_.source_offset()[peer], end = recv_.source_offset()[peer + 1];
    owner.next_pick = first * top_k_;
    if (!is_by_pick()) {
      owner.num_rows = end - first;
    } else {
      owner.num_rows =
          std::count_if(recv_.row() + first * top_k_, recv_.row() + end * top_k_, [](i32 row) { return row >= 0; });
    }
  }
}

// The last k of the token whose pick that rank kept.
i64 CombineCall::last_pick(const Route& route, i64 token, int contributor) const {
  for (i64 k = top_k_ - 1; k > 0; --k) {
    const i64 at = token * top_k_ + k;
    const i32 expert = route.plan.expert()[at];
    const bool is_kept = a_.layout == Layout::kRankMajor || route.plan.pick_row()[at] >= 0;
    if (expert >= 0 && is_kept && experts_.rank_of(expert) == contributor) return k;
  }
  return 0;
}

// Among the contributions to a token: domains ascending, in one of them as the order says.
i64 CombineCall::place_in_order(const Route& route, i64 token, int contributor) const {
  const i64 last = order_.reduction == Reduction::kByLastPick ? last_pick(route, token, contributor) : 0;
  return order_.domain_of(contributor) * kMaxTopk + last;
}

// `rows`: contributions in their order, and where each stands. In their stead the sums of domains, rounded as they would travel.
// How many there are.
i32 CombineCall::sum_domains(const i64* places, i32 num_rows, const void** rows) const {
  i32 num_domains = 0;
  for (i32 first = 0, end = 0; first < num_rows; first = end) {
    while (end < num_rows && places[end] / kMaxTopk == places[first] / kMaxTopk) ++end;
    RowSum sum;
    sum.rows = rows + first;
    sum.num_rows = end - first;
    sum.hidden = a_.hidden;
    sum.dtype = a_.dtype;
    sum.result_is_fp32 = order_.sum_is_fp8;
    u8* place = w_.scratch_.domains.data() + static_cast<u64>(num_domains) * sum_record_.bytes;
    sum_rows(sum, order_.sum_is_fp8 ? static_cast<void*>(w_.scratch_.sum.data()) : place);
    if (order_.sum_is_fp8)
      quantize_contribution(w_.scratch_.sum.data(), a_.hidden, place,
                            reinterpret_cast<float*>(place + sum_record_.scales));
    rows[num_domains++] = place;
  }
  return num_domains;
}

// The next kept pick of an owner: tokens in its order, then k. There is one: records are as many as kept picks.
void CombineCall::write_pick(Owner& owner, u8* record) const {
  while (recv_.row()[owner.next_pick] < 0) ++owner.next_pick;
  const i64 row = recv_.row()[owner.next_pick++];
  std::memcpy(record, memory_at<u8>(a_.y) + row * row_bytes_, static_cast<u64>(row_bytes_));
  float* meta = reinterpret_cast<float*>(record + record_.meta);
  meta[0] = a_.weights != 0 ? memory_at<float>(a_.weights)[row] : 1.0f;
  meta[1] = a_.has_side ? memory_at<float>(a_.side)[row] : 0.0f;
}

// Whether something can be added: the next kept pick of the token, or its end.
bool CombineCall::pick_is_here() const {
  for (i64 at = own_.next_token * top_k_ + next_k_; at < (own_.next_token + 1) * top_k_; ++at) {
    const i32 expert = send_.expert()[at];
    if (expert < 0 || send_.pick_row()[at] < 0) continue;
    const int rank = experts_.rank_of(expert);
    return rank == rank_ || sync::load_progress(op_.progress_from(rank, Channel::kLanded, rank_), op_.turn()) >
                                own_.contributors[rank].num_consumed;
  }
  return true;
}

// Goes on where it stopped. False: the next pick has not landed yet.
bool CombineCall::sum_picks(i64 token) {
  float* total = w_.scratch_.sum.data();
  if (next_k_ == 0) {
    std::fill_n(total, a_.hidden, 0.0f);
    if (const void* bias = bias_of(token))
      add_row(a_.bias_is_fp32 ? Dtype::kFp32 : a_.dtype, bias, nullptr, a_.hidden, total);
  }
  for (; next_k_ < top_k_; ++next_k_) {
    const i64 at = token * top_k_ + next_k_;
    const i32 expert = send_.expert()[at];
    const i64 row = send_.pick_row()[at];
    if (expert < 0 || row < 0) continue;
    const int rank = experts_.rank_of(expert);
    if (rank == rank_) {
      const float weight = a_.weights != 0 ? memory_at<float>(a_.weights)[row] : 1.0f;
      add_pick(at, memory_at<u8>(a_.y) + row * row_bytes_, weight, a_.has_side ? memory_at<float>(a_.side)[row] : 0.0f);
      continue;
    }
    Contributor& from = own_.contributors[rank];
    if (from.num_consumed == from.num_landed) return false;
    const u8* record = from.landing + (from.num_consumed % from.landing_records) * record_.bytes;
    const float* meta = reinterpret_cast<const float*>(record + record_.meta);
    add_pick(at, record, meta[0], meta[1]);
    ++from.num_consumed;
  }
  next_k_ = 0;
  round_row(a_.dtype, total, a_.hidden, memory_at<u8>(a_.out) + token * row_bytes_);
  return true;
}

// Whether its id is below 0 by now.
bool CombineCall::is_gone(i64 pick) const {
  if (a_.owner_ids == 0) return false;
  return a_.owner_ids_are_int64 ? memory_at<i64>(a_.owner_ids)[pick] < 0 : memory_at<i32>(a_.owner_ids)[pick] < 0;
}

void CombineCall::add_pick(i64 at, const void* row, float weight, float side) {
  if (a_.has_side) memory_at<float>(a_.side_out)[at] = 0.0f + side;
  if (is_gone(at)) return;
  if (a_.owner_weights != 0) weight = memory_at<float>(a_.owner_weights)[at];
  if (a_.owner_weights != 0 && weight == 0.0f) return;                 // absent: whatever the row holds
  add_row(a_.dtype, row, &weight, a_.hidden, w_.scratch_.sum.data());  // the owner may have no weights of its own rows
}

}  // namespace weft::cpu
