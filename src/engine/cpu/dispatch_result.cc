// The result of a dispatch: its size, its memory, and what the receiver writes into it beside the rows.
#include <algorithm>
#include <climits>
#include <cstring>
#include <new>

#include "engine/cpu/dispatch.h"

namespace weft::cpu {

void DispatchCall::size_result() {
  auto& scratch = w_.scratch_;
  scratch.rows_from.resize(static_cast<size_t>(num_ranks_));
  for (i64 source = 0; source < num_ranks_; ++source) {
    scratch.rows_from[source] = sources_[source].num_meta_rows;
    sources_[source].first_meta_row = num_meta_rows_;
    num_meta_rows_ += sources_[source].num_meta_rows;
  }
  scratch.offsets.assign(static_cast<size_t>(std::max(num_ranks_, num_local_) + 1), 0);
  scratch.starts.assign(static_cast<size_t>(num_ranks_ * num_local_), 0);
  i64 total = 0;
  if (a_.layout == Layout::kRankMajor) {
    total = place_by_rank(scratch.rows_from.data(), static_cast<i32>(num_ranks_), scratch.offsets.data());
  } else {
    total = place_by_expert(scratch.counts_from.data(), static_cast<i32>(num_ranks_), static_cast<i32>(num_local_),
                            a_.layout, a_.alignment, a_.capacity, scratch.starts.data(), scratch.offsets.data());
  }
  num_rows_ = total;
  if (a_.capacity >= 0 && a_.layout != Layout::kMasked) num_rows_ = std::min(total, a_.capacity);
  result_rows_ = a_.capacity >= 0 && a_.layout != Layout::kMasked ? a_.capacity : total;

  for (i64 idx = 0; idx <= num_groups(); ++idx)
    offsets()[idx] = static_cast<i32>(std::min(scratch.offsets[idx], result_rows_));
  i64 num_picks = 0, num_kept = 0;
  for (i64 expert = 0; expert < num_local_; ++expert) {
    i64 count = 0;
    for (i64 source = 0; source < num_ranks_; ++source) count += scratch.counts_from[source * num_local_ + expert];
    i64 kept = count;
    if (a_.layout == Layout::kMasked) kept = std::min(count, a_.capacity);
    if (a_.layout == Layout::kExpertMajor) kept = clamp_count(result_rows_ - scratch.offsets[expert], count);
    counts()[expert] = static_cast<i32>(kept);
    num_picks += count;
    num_kept += kept;
  }
  num_dropped_ = num_picks - num_kept;
  if (a_.layout == Layout::kMasked) num_rows_ = num_kept;
  scratch.next_row = scratch.starts;
}

void DispatchCall::reserve_result() {
  // Row counts are int32 in every output; more than that is no result that can be described.
  if (std::max(result_rows_, num_meta_rows_) > INT_MAX) throw std::bad_alloc();
  const u64 rows = static_cast<u64>(result_rows_), meta = static_cast<u64>(num_meta_rows_),
            top_k = static_cast<u64>(top_k_);
  const CheckedSize scales_at = (CheckedSize(rows) * static_cast<u64>(wire_row_bytes_)).aligned(Heap::kAlignment);
  const CheckedSize x_bytes = scales_at + CheckedSize(rows) * static_cast<u64>(wire_scale_bytes_);
  const CheckedSize plan_at =
      CheckedSize(static_cast<u64>(recv_plan_len(num_meta_rows_, top_k_, num_ranks_, a_.layout) + forward_ints()) * 4);
  const CheckedSize weights_at = plan_at.aligned(Heap::kAlignment);
  const CheckedSize outputs_at = (weights_at + CheckedSize(std::max(meta, rows)) * top_k * 4).aligned(Heap::kAlignment);
  const CheckedSize plan_bytes =
      outputs_at + (a_.layout == Layout::kRankMajor ? CheckedSize(rows) * top_k * (a_.topk_is_int64 ? 8 : 4)
                                                    : CheckedSize(rows) * 4);
  if (!x_bytes.ok || !plan_bytes.ok) throw std::bad_alloc();

  scales_offset_ = scales_at.value;
  x_block_ = w_.reserve_or_allocate(x_bytes.value);
  staged_ = !x_block_.in_heap;
  if (!a_.cached) {
    plan_block_ = w_.reserve_or_allocate(plan_bytes.value);
    staged_ = staged_ || !plan_block_.in_heap;
    recv_ = {reinterpret_cast<i32*>(plan_block_.data), num_meta_rows_, top_k_, num_ranks_};
    meta_weights_ = reinterpret_cast<float*>(plan_block_.data + weights_at.value);
    result_.topk_idx.block = plan_block_;
    result_.topk_idx.block.data = plan_block_.data + outputs_at.value;
  }
  streaming_ = x_bytes.value > (u64{1} << 20);
}

// expert_major: the rows between the end of a group and the start of the next. No peer writes them.
void DispatchCall::zero_holes() {
  if (a_.layout != Layout::kExpertMajor || !a_.zeroes_holes) return;
  const auto& scratch = w_.scratch_;
  for (i64 expert = 0; expert < num_local_; ++expert) {
    i64 first = scratch.offsets[expert];
    for (i64 source = 0; source < num_ranks_; ++source) first += scratch.counts_from[source * num_local_ + expert];
    if (a_.cached) first = scratch.offsets[expert] + scratch.counts_from[expert];
    const i64 end = std::min(scratch.offsets[expert + 1], result_rows_);
    if (first >= end) continue;
    std::memset(x_block_.data + first * wire_row_bytes_, 0, static_cast<u64>((end - first) * wire_row_bytes_));
    std::memset(x_block_.data + scales_offset_ + first * wire_scale_bytes_, 0,
                static_cast<u64>((end - first) * wire_scale_bytes_));
  }
}

// Gives the picks of a source's next rows their places: the same count, in the same order, as the source makes.
void DispatchCall::place_meta_rows(int source, i64 end) {
  Source& from = sources_[source];
  const bool is_masked = a_.layout == Layout::kMasked;
  for (; from.num_placed < end; ++from.num_placed) {
    const i64 first = (from.first_meta_row + from.num_placed) * top_k_;
    for (i64 k = 0; k < top_k_; ++k) {
      const i32 expert = recv_.expert()[first + k];
      if (expert < -1 || expert >= num_local_) op_.fail_internal(Phase::kSend, source);
      if (a_.layout == Layout::kRankMajor) continue;
      recv_.row()[first + k] = -1;
      if (expert < 0) continue;
      const i64 cell = source * num_local_ + expert;
      const i64 row = w_.scratch_.next_row[cell]++;
      if (row >= w_.scratch_.starts[cell] + w_.scratch_.counts_from[cell]) op_.fail_internal(Phase::kSend, source);
      if (row >= (is_masked ? a_.capacity : result_rows_)) continue;
      recv_.row()[first + k] = static_cast<i32>(is_masked ? expert * a_.capacity + row : row);
    }
  }
}

void DispatchCall::finish_result() {
  if (!a_.cached) {
    for (int source = 0; source < num_ranks_; ++source) place_meta_rows(source, sources_[source].num_meta_rows);
    PlanHeader header = *memory_at<PlanHeader>(a_.send_plan);
    header.magic = kRecvPlanMagic;
    header.num_meta_rows = static_cast<i32>(num_meta_rows_);
    header.num_rows = static_cast<i32>(num_rows_);
    for (i64 source = 0; source <= num_ranks_; ++source) {
      recv_.source_offset()[source] =
          static_cast<i32>(source < num_ranks_ ? sources_[source].first_meta_row : num_meta_rows_);
    }
    write_outputs();
    header.num_tokens = static_cast<i32>(num_dropped_);
    std::memcpy(recv_.base, &header, sizeof(header));
  } else if (a_.overflow != 0) {
    *memory_at<i64>(a_.overflow) += count_dropped();
  }
  result_.num_rows = num_rows_;
  result_.result_rows = a_.layout == Layout::kMasked ? num_local_ * a_.capacity : result_rows_;
  result_.in_heap = !staged_;
  const bool is_masked = a_.layout == Layout::kMasked;
  const auto shaped = [&](Array& array, Dtype dtype, i64 columns) {
    array.dtype = dtype;
    array.shape = is_masked ? std::vector<i64>{num_local_, a_.capacity} : std::vector<i64>{result_rows_};
    if (columns >= 0) array.shape.push_back(columns);
  };
  result_.x.block = x_block_;
  shaped(result_.x, op_.config().dtype, wire_row_bytes_ / dtype_bytes(op_.config().dtype));
  if (wire_scale_bytes_ > 0) {
    result_.scales.block = x_block_;
    result_.scales.block.data = x_block_.data + scales_offset_;
    const bool is_float = scales_are_floats(a_.quantize);
    shaped(result_.scales, is_float ? Dtype::kFp32 : Dtype::kBytes,
           is_float ? wire_scale_bytes_ / 4 : wire_scale_bytes_);
  }
  if (!a_.cached) shaped(result_.topk_weights, Dtype::kFp32, a_.layout == Layout::kRankMajor ? top_k_ : -1);
  for (int peer : op_.peers()) {
    result_.rows_sent += targets_[peer].num_rows;
    result_.bytes_sent +=
        targets_[peer].num_rows * static_cast<i64>(wire_row_bytes_ + wire_scale_bytes_ + (a_.cached ? 0 : top_k_ * 8));
  }
  for (const Outflow& flow : outflows_) {  // once a node
    result_.rows_sent += flow.num_rows;
    result_.bytes_sent +=
        flow.num_rows * static_cast<i64>(wire_row_bytes_ + wire_scale_bytes_ + (a_.cached ? 0 : top_k_ * 6));
  }
  w_.stats_.rows_sent += static_cast<u64>(result_.rows_sent);
  w_.stats_.bytes_sent += static_cast<u64>(result_.bytes_sent);
  w_.stats_.rows_received += static_cast<u64>(num_meta_rows_);
}

void DispatchCall::write_outputs() {
  if (a_.layout == Layout::kRankMajor) {
    write_topk();
  } else {
    write_weights();
  }
  result_.recv_plan.block = plan_block_;
  result_.recv_plan.shape = {recv_plan_len(num_meta_rows_, top_k_, num_ranks_, a_.layout) + forward_ints()};
  result_.recv_plan.is_integer = true;
  *num_rows() = static_cast<i32>(num_rows_);
  *memory_at<i64>(a_.overflow) += num_dropped_;
}

// Of a handle: its picks that found no room, as the first dispatch counted them.
i64 DispatchCall::count_dropped() const {
  i64 num_dropped = 0;
  for (i64 pick = 0; a_.capacity >= 0 && pick < num_meta_rows_ * top_k_; ++pick) {
    if (recv_.expert()[pick] < 0) continue;
    const bool is_kept = a_.layout == Layout::kRankMajor ? pick < num_rows_ * top_k_ : recv_.row()[pick] >= 0;
    num_dropped += is_kept ? 0 : 1;
  }
  return num_dropped;
}

void DispatchCall::write_topk() {
  const i64 num_kept = num_rows_ * top_k_;
  void* ids = result_.topk_idx.block.data;
  if (a_.topk_is_int64) {
    std::copy_n(recv_.expert(), num_kept, static_cast<i64*>(ids));
    std::fill(static_cast<i64*>(ids) + num_kept, static_cast<i64*>(ids) + result_rows_ * top_k_, -1);
  } else {
    std::copy_n(recv_.expert(), num_kept, static_cast<i32*>(ids));
    std::fill(static_cast<i32*>(ids) + num_kept, static_cast<i32*>(ids) + result_rows_ * top_k_, -1);
  }
  result_.topk_idx.shape = {result_rows_, top_k_};
  result_.topk_idx.is_integer = true;
  result_.topk_idx.is_int64 = a_.topk_is_int64;
  if (num_rows_ < num_meta_rows_) {  // rows were dropped: count what was kept
    std::fill_n(counts(), num_local_, 0);
    i64 num_picks = 0;
    for (i64 pick = 0; pick < num_meta_rows_ * top_k_; ++pick) {
      if (recv_.expert()[pick] < 0) continue;
      ++num_picks;
      if (pick < num_kept) ++counts()[recv_.expert()[pick]];
    }
    num_dropped_ = num_picks;
    for (i64 expert = 0; expert < num_local_; ++expert) num_dropped_ -= counts()[expert];
  }
  std::fill(meta_weights_ + num_kept, meta_weights_ + std::max(num_meta_rows_, result_rows_) * top_k_, 0.0f);
  result_.topk_weights.block = plan_block_;
  result_.topk_weights.block.data = reinterpret_cast<u8*>(meta_weights_);
}

void DispatchCall::write_weights() {
  float* weights = reinterpret_cast<float*>(result_.topk_idx.block.data);
  std::fill_n(weights, result_rows_, 0.0f);
  for (i64 pick = 0; pick < num_meta_rows_ * top_k_; ++pick) {
    if (recv_.row()[pick] >= 0) weights[recv_.row()[pick]] = meta_weights_[pick];
  }
  result_.topk_weights.block = result_.topk_idx.block;
  result_.topk_idx.block = Block{};
}

}  // namespace weft::cpu
