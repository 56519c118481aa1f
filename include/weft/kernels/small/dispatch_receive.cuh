// Small-batch dispatch, the receiving half: places from all picks, computed while rows are on their way, then rows from the slots
// to their places (docs/protocols/nvlink-small.md, "Dispatch", steps 3 and 4).
#pragma once

#include "weft/kernels/small/dispatch_picks.cuh"
#include "weft/layout/routing.h"

namespace weft::kernels {

template <SmallDispatchKernelConfig kConfig>
class SmallDispatchReceive : public SmallDispatchPicks<kConfig> {
 public:
  using Base = SmallDispatchState<kConfig>;
  using Picked = SmallDispatchPicks<kConfig>;
  using Base::a, Base::flight, Base::warp, Base::lane, Base::rank, Base::shared, Base::own_ids;
  using Base::kRanks, Base::kTopk, Base::kLocal, Base::kRowBytes, Base::kScaleBytes, Base::kWarps, Base::kAll;
  using Picked::begin_batch, Picked::read_own, Picked::read_batch;
  using Picked::first_of, Picked::number_of, Picked::first_part_of, Picked::local_expert, Picked::is_counting;
  using Picked::kWidth, Picked::kByExpert, Picked::kTogether, Picked::kNoToken;
  using typename Base::Id, typename Base::Scales, typename Picked::Batch;
  static constexpr i32 kGroups = kConfig.num_groups();  // experts, or one for all rows of rank_major
  static constexpr bool kIsMasked = kConfig.layout == Layout::kMasked;
  static constexpr bool kByColumn = kConfig.scale_word_bytes > 0;
  static constexpr i32 kWordBytes = kByColumn ? kConfig.scale_word_bytes : 4;
  using Words = WordRow<kByColumn ? kScaleBytes : 4, kWordBytes>;  // scales of a row, for column-major ones

  __device__ explicit SmallDispatchReceive(const Base& base) : Picked(base) {}

  // ---- places. Rows of a group follow the order of entries. Every block computes all places and keeps those of its own units.

  // Without waiting for count headers. Behind the caller's next barrier all places can be read, unless is_left is set: picks are
  // missing and will not come.
  __device__ void find_places() {
    begin_counts();
    const bool has_all = for_batches(batch_, [&](const Batch& batch, i32 idx) {
      if (batch.group[idx] >= 0) atomicAdd(&counts(warp)[batch.group[idx]], 1);
    });
    if (!has_all) shared_words().is_left = true;
    Base::meet();
    if (shared_words().is_left) return;
    if constexpr (kIsMasked) {
      for (i32 group = static_cast<i32>(threadIdx.x); group < kGroups; group += Base::kThreads) sum_warps(group);
    } else {
      if (warp == 0) place_groups();
    }
    Base::meet();
    const bool has_again = for_batches(batch_, [&](const Batch& batch, i32 idx) { place_entries(batch, idx); });
    if (!has_again) shared_words().is_left = true;
  }

  // How many tokens the source of this lane has, as it says, or within bounds the handle. By the warp that has waited for the count
  // headers.
  __device__ i64 told_tokens() const { return lane < kRanks ? told_tokens(lane) : 0; }
  __device__ bool is_sound(i64 num_tokens) const { return num_tokens >= 0 && num_tokens <= a.max_tokens; }  // R19
  // Before the barrier that tells of the headers.
  __device__ void note_tokens(i64 num_tokens) const {
    if (lane < kRanks) sums().num_tokens[lane] = static_cast<i32>(num_tokens);
  }
  __device__ static const i32* all_num_tokens() { return sums().num_tokens; }  // [kRanks], behind that barrier

  // Zeros before the first barrier.
  struct SharedWords {
    u32 has_heard;  // not 0: the count headers are there, or never will be
    bool is_left;   // the places can't be found
  };
  __device__ static SharedWords& shared_words() {
    __shared__ SharedWords words;
    return words;
  }

  // By the block that counts.
  __device__ void write_counts() {
    if (!is_counting()) return;
    const i32 thread = static_cast<i32>(threadIdx.x);
    if constexpr (kConfig.is_cached) {  // the routing of a handle drops again what it dropped
      if (thread == 0 && a.overflow != nullptr) add_dropped(a.overflow, a.recv_plan[kGpuPlanDropped]);
      return;
    }
    if (thread < kRanks) a.recv_plan[thread] = sums().num_tokens[thread];
    if (thread == 0) a.recv_plan[kGpuPlanMadeBy] = static_cast<i32>(flight.turn.sequence);
    if constexpr (kByExpert) {
      for (i32 group = thread; group < kGroups; group += Base::kThreads) {
        a.offsets[group] = kIsMasked ? group * static_cast<i32>(a.capacity) : min(begins()[group], limit());
        write_count<kConfig>(a, group, kept_of(group));
      }
    } else {
      for (i32 expert = thread; expert < kLocal; expert += Base::kThreads)
        write_count<kConfig>(a, expert, kept()[expert]);
    }
    if (warp == 0) write_sums();
  }

  // ---- rows

  // When the headers of all sources are there; all warps of the block have stored this rank's own rows before that barrier.
  __device__ void copy_rows() {
    this->share(kRanks, [&](i32 source, i32 nth, i32 first, i32 stride) {
      const i32 token = this->token_of(this->unit(nth));
      if (token >= sums().num_tokens[source]) return;
      if constexpr (kConfig.is_cached) {
        copy_row(source, token, plan().row(source, token), first, stride);
      } else {
        copy_row(source, token, &places()[(source * this->num_units() + nth) * kWidth], first, stride);
      }
    });
  }

  // What holds no row, and needs none to be zeroed.
  __device__ void zero() {
    if constexpr (kConfig.is_cached) {
      zero_gaps();
    } else {
      zero_holes();
    }
  }

 private:
  // Entries of the receive plan that are no rows. The owner of the token does not know what a capacity has dropped and waits for
  // a sum: combine sends it zeros.
  static constexpr i32 kNowhere = -1, kDropped = kGpuDroppedRow;

  // Of all entries.
  struct Sums {
    i32 num_tokens[kRanks];
    i32 num_rows[kRanks];  // rank_major, of the block that counts: rows of each source
    i32 num_picks;         // rank_major, of the same
  };
  __device__ static Sums& sums() {
    __shared__ Sums sums;
    return sums;
  }

  __device__ i32* counts(i32 of_warp) const { return shared + of_warp * kGroups; }  // then: entries of earlier warps
  __device__ i32* totals() const { return shared + kWarps * kGroups; }
  __device__ i32* begins() const { return totals() + kGroups; }
  __device__ i32* kept() const { return begins() + kGroups; }  // [kLocal], rank_major: picks in rows that fit
  __device__ i32* places() const { return kept() + kLocal; }   // [kRanks, units, kWidth]

  __device__ i32 limit() const {
    return a.capacity >= 0 ? static_cast<i32>(min(a.capacity, i64{0x7fffffff})) : 0x7fffffff;
  }

  __device__ GpuRecvPlan<i32> plan() const { return {a.recv_plan, a.view.layout.max_tokens, kWidth}; }

  __device__ float weight_of(i32 source, i32 token, i32 k) const {
    if (kConfig.sends && source == rank()) {
      return a.topk_weights == nullptr ? 1.0f : a.topk_weights[static_cast<i64>(token) * kTopk + k];
    }
    return this->slot_weights(rank(), source, token)[k];
  }

  // Each warp its own counts, thread by thread the rest, of which nobody asks before the next barrier.
  __device__ void begin_counts() const {
    for (i32 group = lane; group < kGroups; group += 32) counts(warp)[group] = 0;
    i32* rest = totals();
    for (i32 idx = static_cast<i32>(threadIdx.x); idx < 2 * kGroups + kLocal; idx += Base::kThreads) rest[idx] = 0;
    if (threadIdx.x < kRanks) sums().num_rows[threadIdx.x] = 0;
    if (threadIdx.x == 0) sums().num_picks = 0;
    __syncwarp();
  }

  __device__ i64 told_tokens(i32 source) const {
    if (!flight.is_active(source)) return 0;
    if (source == rank()) return a.num_tokens;
    if constexpr (kConfig.is_cached) return clamp_count(a.recv_plan[source], a.max_tokens);
    const u8* slot = a.view.own_control() + a.view.layout.payload(flight.turn.sequence, source);
    return reinterpret_cast<const GpuCountPayload*>(slot)->num_tokens;
  }

  // Calls `work(batch, idx)` for the run of this warp. A run of one batch is read once for both passes. False: picks are missing.
  template <class Work>
  __device__ bool for_batches(Batch& batch, const Work& work) const {
    const i32 end = first_of(warp + 1);
    for (i32 first = first_of(warp); first < end; first += 32 * kTogether) {
      if (first != batch.first) {
        begin_batch(first, batch);
        read_own(batch);
        if (!read_batch(batch, &shared_words().has_heard)) return false;
      }
#pragma unroll
      for (i32 idx = 0; idx < kTogether; ++idx) {
        if (first + idx * 32 < end) work(batch, idx);
      }
    }
    return true;
  }

  __device__ void sum_warps(i32 group) {
    i32 mine[kWarps], sum = 0;  // read together
#pragma unroll
    for (i32 each = 0; each < kWarps; ++each) mine[each] = counts(each)[group];
#pragma unroll
    for (i32 each = 0; each < kWarps; ++each) {
      counts(each)[group] = sum;
      sum += mine[each];
    }
    totals()[group] = sum;
  }

  // One warp: entries of each group, and where groups begin.
  __device__ void place_groups() {
    i32 carry = 0;
    for (i32 first = 0; first < kGroups; first += 32) {
      const i32 group = first + lane;
      if (group < kGroups) sum_warps(group);
      const i32 padded = group < kGroups ? static_cast<i32>(align_rows(totals()[group], a.alignment)) : 0;
      i32 sum = padded;
#pragma unroll
      for (i32 step = 1; step < 32; step *= 2) {
        const i32 other = __shfl_up_sync(kAll, sum, step);
        if (lane >= step) sum += other;
      }
      if (group < kGroups) begins()[group] = carry + sum - padded;
      carry += __shfl_sync(kAll, sum, 31);
    }
  }

  __device__ i32 kept_of(i32 group) const {
    return max(min(begins()[group] + totals()[group], limit()) - min(begins()[group], limit()), 0);
  }

  __device__ void place_entries(const Batch& batch, i32 idx) {
    const i32 group = batch.group[idx];
    i32* before = counts(warp);
    const bool is_wanted = (batch.wanted >> idx & 1u) != 0;
    if (__any_sync(kAll, is_wanted) == 0) {
      if (group >= 0) atomicAdd(&before[group], 1);
      __syncwarp();
      return;
    }
    const u32 same = ptx::match_any(group);
    const i32 nth = (group >= 0 ? before[group] : 0) + __popc(same & ptx::lanes_below());
    __syncwarp();
    if (group >= 0 && (same >> lane) == 1u) before[group] = nth + 1;  // the last of its kind
    __syncwarp();
    i32 row = kNowhere;
    if (group >= 0) {
      row = begins()[group] + nth;
      row = row < limit() ? row + (kIsMasked ? group * static_cast<i32>(a.capacity) : 0) : kDropped;
      if (row >= a.room) row = kDropped;
    }
    if (!is_wanted) return;
    const i32 source = batch.from[idx] >> 16, token = batch.from[idx] & kNoToken;
    if constexpr (!kByExpert) {
      if (group >= 0 && is_counting()) count_row(source, token, row >= 0);
    }
    for (i32 part = first_part_of(token); part < a.num_parts; part += kConfig.num_blocks) {
      const i32 index = source * this->num_units() + (token * a.num_parts + part) / kConfig.num_blocks;
      places()[index * kWidth + number_of(batch, idx) % kWidth] = row;
    }
  }

  // rank_major, the block that counts.
  __device__ void count_row(i32 source, i32 token, bool is_kept) {
    i32 num_picks = 0;
    for (i32 k = 0; k < kTopk; ++k) {
      const i32 expert = local_expert(source, token, k);
      num_picks += expert >= 0 ? 1 : 0;
      if (expert >= 0 && is_kept) atomicAdd(&kept()[expert], 1);
    }
    atomicAdd(&sums().num_picks, num_picks);
    atomicAdd(&sums().num_rows[source], 1);
  }

  // Places of a token: lane k has entries k, k + 32, ...
  static constexpr i32 kWords = (kWidth + 31) / 32;
  struct Rows {
    i32 row[kWords];
  };

  // Local experts and weights of a token's picks, in the lanes likewise.
  struct Picks {
    i32 expert[Base::kSteps];
    float weight[Base::kSteps];
  };

  __device__ void read_picks(i32 source, i32 token, Picks& picks) const {
#pragma unroll
    for (i32 step = 0; step < Base::kSteps; ++step) {
      const i32 k = step * 32 + lane;
      if (k >= kTopk) continue;
      picks.weight[step] = weight_of(source, token, k);
      if constexpr (!kByExpert) picks.expert[step] = local_expert(source, token, k);
    }
  }

  // The receive plan, ids and weights: by the warp that has the first step of the row.
  __device__ void write_picks(i32 source, i32 token, const Rows& to, const Picks& picks) {
#pragma unroll
    for (i32 word = 0; word < kWords; ++word) {
      const i32 k = word * 32 + lane;
      if (k < kWidth) plan().row(source, token)[k] = to.row[word];
    }
    const i64 only = __shfl_sync(kAll, to.row[0], 0);
#pragma unroll
    for (i32 step = 0; step < Base::kSteps; ++step) {
      const i32 k = step * 32 + lane;
      if (k >= kTopk) continue;
      if constexpr (kByExpert) {
        if (to.row[step] >= 0) a.out_weights[to.row[step]] = picks.weight[step];
      } else if (only >= 0) {
        static_cast<Id*>(a.out_ids)[only * kTopk + k] = picks.expert[step];
        a.out_weights[only * kTopk + k] = picks.expert[step] >= 0 ? picks.weight[step] : 0.0f;
      }
    }
  }

  // One warp: the last offset, num_rows, overflow, and the word for the host.
  __device__ void write_sums() {
    i32 num_kept = 0, num_picks = 0;
    if constexpr (kByExpert) {
      for (i32 group = lane; group < kGroups; group += 32) {
        num_kept += kept_of(group);
        num_picks += totals()[group];
      }
    } else {
      for (i32 expert = lane; expert < kLocal; expert += 32) num_kept += kept()[expert];
      num_picks = lane == 0 ? sums().num_picks : 0;
    }
    num_kept = static_cast<i32>(__reduce_add_sync(kAll, num_kept));
    num_picks = static_cast<i32>(__reduce_add_sync(kAll, num_picks));
    if (lane != 0) return;
    i64 end = 0;
    if constexpr (kByExpert) {
      end = kIsMasked ? kGroups * a.capacity : begins()[kGroups - 1] + align_rows(totals()[kGroups - 1], a.alignment);
      a.offsets[kGroups] = kIsMasked ? static_cast<i32>(end) : static_cast<i32>(min(end, static_cast<i64>(limit())));
    } else {
      for (i32 source = 0; source < kRanks; ++source) {
        a.offsets[source] = static_cast<i32>(min(end, static_cast<i64>(limit())));
        end += sums().num_rows[source];
      }
      a.offsets[kRanks] = static_cast<i32>(min(end, static_cast<i64>(limit())));
    }
    *a.num_rows = kIsMasked ? num_kept : static_cast<i32>(min(end, static_cast<i64>(limit())));
    add_dropped(a.overflow, a.recv_plan[kGpuPlanDropped] = num_picks - num_kept);
    if (a.ticket == 0) return;
    a.view.host->num_rows = kIsMasked ? num_kept : end;
    ptx::st_release_sys(&a.view.host->counted_ticket, a.ticket);
  }

  // What a handle says is not trusted with memory (R19).
  __device__ bool is_place(i32 row) const { return row >= 0 && (!kConfig.is_cached || row < a.room); }

  // From the slot to the places of its picks. `rows` [kWidth]. All that is loaded is under way together, as far as it fits.
  __device__ void copy_row(i32 source, i32 token, const i32* rows, i32 first, i32 stride) {
    Rows to;
#pragma unroll
    for (i32 word = 0; word < kWords; ++word) {
      const i32 k = word * 32 + lane;
      to.row[word] = k < kWidth ? rows[k] : kNowhere;
    }
    Picks picks;
    if (!kConfig.is_cached && first == 0) read_picks(source, token, picks);
    const u8* slot = this->slot_row(rank(), source, token);
    const auto scales = scales_of(slot, kScaleBytes > 0 && first == 0);
    copy_steps(slot, to, first, stride);
    if (first != 0) return;
    if constexpr (kByColumn) {
      const i64 column_bytes = num_column_rows() * kWordBytes;
      for_places(to, [&](i64 row) { scales.store(first_word(row), column_bytes); });
    } else if constexpr (kScaleBytes > 0) {
      for_places(to, [&](i64 row) { scales.store(a.out_scales + row * kScaleBytes); });
    }
    if constexpr (!kConfig.is_cached) write_picks(source, token, to, picks);
  }

  __device__ auto scales_of(const u8* slot, bool is_wanted) const {
    if constexpr (kByColumn) {
      return Words(slot + kConfig.scales_at(), lane, is_wanted);
    } else {
      return Scales(slot + kConfig.scales_at(), lane, is_wanted);
    }
  }

  // Column-major scales: rows from a column to the next, as many as there are, rounded up to 16 bytes.
  __device__ i64 num_column_rows() const {
    i64 num_rows = a.capacity >= 0 ? a.capacity : a.room;
    if constexpr (!kConfig.is_cached && !kIsMasked) {
      if (a.capacity < 0) num_rows = begins()[kGroups - 1] + align_rows(totals()[kGroups - 1], a.alignment);
    }
    return align_rows(num_rows, 16 / kWordBytes);
  }

  // Word 0 of a row; masked: each expert has columns of its own.
  __device__ u8* first_word(i64 row) const {
    const i64 group = kIsMasked ? static_cast<i32>(row) / static_cast<i32>(a.capacity) : 0;
    const i64 in_group = kIsMasked ? row - group * a.capacity : row;
    return a.out_scales + (group * Words::kWords * num_column_rows() + in_group) * kWordBytes;
  }

  __device__ void copy_steps(const u8* slot, const Rows& to, i32 first, i32 stride) {
    constexpr i32 kUnits = kRowBytes / 16, kSteps = (kUnits + 31) / 32, kMost = 8;
    constexpr i32 kHeld = kSteps < kMost ? kSteps : kMost;
    if (!has_place(to)) return;
    const auto* from = reinterpret_cast<const Piece<16>*>(slot);
    for (i32 step = first; step < kSteps; step += stride * kHeld) {
      Piece<16> held[kHeld];
#pragma unroll
      for (i32 idx = 0; idx < kHeld; ++idx) {
        const i32 unit = (step + idx * stride) * 32 + lane;
        if (unit < kUnits) held[idx] = from[unit];
      }
      for_places(to, [&](i64 row) {
        auto* units = reinterpret_cast<Piece<16>*>(a.out_x + row * kRowBytes);
#pragma unroll
        for (i32 idx = 0; idx < kHeld; ++idx) {
          const i32 unit = (step + idx * stride) * 32 + lane;
          if (unit < kUnits) units[unit] = held[idx];
        }
      });
    }
  }

  __device__ bool has_place(const Rows& to) const {
    bool is_any = false;
#pragma unroll
    for (i32 word = 0; word < kWords; ++word) is_any = is_any || is_place(to.row[word]);
    return __any_sync(kAll, is_any) != 0;
  }

  // `work(row)` by the whole warp, for each place.
  template <class Work>
  __device__ void for_places(const Rows& to, const Work& work) const {
#pragma unroll
    for (i32 word = 0; word < kWords; ++word) {
      for (u32 left = __ballot_sync(kAll, is_place(to.row[word])); left != 0; left &= left - 1) {
        work(i64{__shfl_sync(kAll, to.row[word], __ffs(static_cast<i32>(left)) - 1)});
      }
    }
  }

  // Rows that hold nothing: weights 0 (rank_major: ids -1 too); expert_major: zeros between the groups.
  __device__ void zero_holes() {
    const i32 all_warps = kWarps * kConfig.num_blocks, mine = static_cast<i32>(blockIdx.x) * kWarps + warp;
    if constexpr (kByExpert) {
      for (i32 group = mine; group < kGroups; group += all_warps) {
        const i32 shift = kIsMasked ? group * static_cast<i32>(a.capacity) : 0;
        const i32 padded = static_cast<i32>(align_rows(totals()[group], a.alignment));
        const i64 begin = min(begins()[group] + totals()[group], limit()) + shift;
        const i64 end = (kIsMasked ? limit() : min(begins()[group] + padded, limit())) + shift;
        clear_weights(begin, end, lane, 32);
        if constexpr (!kIsMasked) clear_gap(begin, end);
      }
      if (kIsMasked || a.capacity < 0) return;
      const i32 last = begins()[kGroups - 1] + static_cast<i32>(align_rows(totals()[kGroups - 1], a.alignment));
      clear_weights(min(last, limit()), a.capacity, mine * 32 + lane, all_warps * 32);
    } else {
      if (a.capacity < 0) return;
      const i64 first = static_cast<i64>(min(totals()[0], limit())) * kTopk;
      for (i64 pick = first + mine * 32 + lane; pick < a.capacity * kTopk; pick += all_warps * 32) {
        static_cast<Id*>(a.out_ids)[pick] = -1;
        a.out_weights[pick] = 0.0f;
      }
    }
  }

  // A repeated expert_major: zeros between the groups, which the first dispatch has counted.
  __device__ void zero_gaps() {
    if constexpr (kConfig.layout == Layout::kExpertMajor) {
      const i32 all_warps = kWarps * kConfig.num_blocks;
      for (i32 group = static_cast<i32>(blockIdx.x) * kWarps + warp; group < kGroups; group += all_warps) {
        const i64 begin = i64{a.offsets[group]} + a.counts[group];
        clear_gap(max(begin, i64{0}), a.offsets[group + 1]);
      }
    }
  }

  __device__ void clear_weights(i64 begin, i64 end, i32 thread, i32 num_threads) {
    for (i64 row = begin + thread; row < min(end, a.room); row += num_threads) a.out_weights[row] = 0.0f;
  }

  // expert_major: rows between two groups.
  __device__ void clear_gap(i64 begin, i64 end) {
    if (!a.zeroes_holes) return;
    clear_rows<kRowBytes>(a.out_x, begin, end);
    if constexpr (kByColumn) {
      const i64 column_bytes = num_column_rows() * kWordBytes;
      for (i64 row = begin + lane; row < min(end, a.room); row += 32) {
        u8* to = first_word(row);
        for (i32 word = 0; word < Words::kWords; ++word) {
          *reinterpret_cast<Piece<kWordBytes>*>(to + word * column_bytes) = Piece<kWordBytes>{};
        }
      }
    } else if constexpr (kScaleBytes > 0) {
      clear_rows<kScaleBytes>(a.out_scales, begin, end);
    }
  }

  template <i32 kBytes>
  __device__ void clear_rows(u8* rows, i64 begin, i64 end) {
    using Unit = Piece<piece_bytes(kBytes)>;
    auto* units = reinterpret_cast<Unit*>(rows + begin * kBytes);
    const i64 num_units = (min(end, a.room) - begin) * (kBytes / static_cast<i32>(sizeof(Unit)));
    for (i64 idx = lane; idx < num_units; idx += 32) units[idx] = Unit{};
  }

  Batch batch_;
};

}  // namespace weft::kernels
