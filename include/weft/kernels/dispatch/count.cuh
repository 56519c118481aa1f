// Dispatch, first part: the exchange of counts, and from them the place of every row (docs/protocols/nvlink-dispatch.md, steps 2
// and 3).
#pragma once

#include "weft/kernels/dispatch/ids.cuh"
#include "weft/kernels/dispatch/nodes.cuh"
#include "weft/layout/routing.h"

namespace weft::kernels {

template <DispatchKernelConfig kConfig>
class DispatchCount : public DispatchIds<kConfig> {
 public:
  using Base = DispatchState<kConfig>;
  using Ids = DispatchIds<kConfig>;
  using Base::a, Base::s, Base::flight, Base::warp, Base::lane, Base::rank;
  using Base::kRanks, Base::kTopk, Base::kExperts, Base::kLocal, Base::kPeriods, Base::kPlacement;
  using Ids::kThreads, Ids::kWarps, Ids::kCountThreads;
  using typename Base::Place;
  using Id = typename Ids::Id;

  __device__ explicit DispatchCount(const Base& base) : Ids(base) {}

  // ---- exchange

  // By block 0 alone.
  __device__ void send_counts() {
    const auto peers = this->peers();
    for (i32 peer = 0; peer < kRanks; ++peer) {
      if (!this->is_peer(peer)) continue;
      const Place slot = peers.control(peer) + a.view.layout.payload(flight.turn.sequence, rank());
      const Place words = slot + sizeof(GpuCountPayload);
      if constexpr (!kConfig.is_cached) {
        for (i32 idx = thread(); idx < kExperts + kRanks; idx += kCountThreads) {
          const i32 count = idx < kExperts ? this->mine()[idx] : kConfig.is_by_expert() ? 0 : s.total[idx - kExperts];
          peers.put_words(words.template at<i32>(idx), count);
        }
      }
      if (thread() == 0) {
        peers.put_field(slot, &GpuCountPayload::placement, a.placement);
        peers.put_field(slot, &GpuCountPayload::num_tokens, static_cast<i64>(a.num_tokens));
      }
    }
    meet();
    const i32 peer = thread();
    if (this->is_peer(peer)) peers.notify_call(flight, peer);
  }

  // Where every row goes, from what all ranks have said. Every block computes it for itself.
  // False: this block has failed, a rank has no room, or the handle is of other members. All threads hear the same, since the first that go on may fail at once.
  __device__ bool find_places() {
    const i32 to = static_cast<i32>(threadIdx.x);
    GpuPlacement placement;  // asked for here, since each load on its own takes a good part of a microsecond
    i32 num_tokens = 0;
    if (to < kRanks) num_tokens = tokens_of(to);
    if constexpr (kConfig.has_nodes() && kConfig.is_cached) {
      if (!this->nodes().holds({a.forward_plan, a.view.layout.max_tokens, kConfig.node_ranks})) return false;
      // Both ends of a ring must know the runs of the source's blocks.
      if (to < kRanks && num_tokens != a.recv_plan[to]) s.bad_source = static_cast<u32>(to) + 1;
    }
    if (to < kRanks && flight.is_active(to) && this->is_near(to))
      placement = to == rank() ? a.placement : payload_from(to)->placement;
    if constexpr (kConfig.is_cached) {
      if (threadIdx.x < kRanks) s.needed[threadIdx.x] = 0;
    } else if constexpr (kConfig.is_by_expert()) {
      // With nodes there are no counts of others' experts.
      constexpr bool kAll = !kConfig.has_nodes();
      for (i32 expert = static_cast<i32>(threadIdx.x); expert < kExperts; expert += kThreads) {
        if (kAll || this->is_near(kPlacement.rank_of(expert))) sum_sources(expert);
      }
      __syncthreads();
      for (i32 other = warp; other < kRanks; other += kWarps) {
        if (kAll || this->is_near(other)) place_experts(other);
      }
    } else {
      if (to < kRanks && this->is_near(to)) place_ranks(to);
      if (blockIdx.x == 0) check_picks();
    }
    if constexpr (kConfig.has_nodes()) {
      for (i32 source = warp; source < kRanks; source += kWarps) {
        DispatchNodes<kConfig>(*this).prepare(source, tokens_of(source));
      }
    }
    __syncthreads();
    if (to < kRanks) s.num_tokens[to] = num_tokens;
    fail_if_bad();
    if (to < kRanks && flight.is_active(to) && this->is_near(to)) find_base(to, placement);
    if constexpr (kConfig.is_by_expert() && kConfig.is_cached) read_holes();
    return __syncthreads_or((s.has_failed | s.is_given_up) != 0 ? 1 : 0) == 0;
  }

  // ---- what the caller gets besides rows: by some warps of block 0, the first being `first_warp`

  __device__ void write_counts(i32 first_warp) {
    const i32 thread = (warp - first_warp) * 32 + lane;
    if constexpr (kConfig.is_cached) {
      if (thread == 0 && a.overflow != nullptr) add_dropped(a.overflow, a.recv_plan[kGpuPlanDropped]);
      return;
    }
    if constexpr (kConfig.is_by_expert()) {
      if (warp == first_warp) write_groups();
    } else {
      for (i32 expert = thread; expert < kLocal; expert += (kWarps - first_warp) * 32) {
        i32 sum = 0;
        for (i32 source = 0; source < kRanks; ++source) sum += picks_of(source, kPlacement.expert_of(rank(), expert));
        write_count<kConfig>(a, expert, sum);
      }
      if (thread == 0) write_rank_offsets();
      if (thread == 0) recv_plan()[kGpuPlanDropped] = 0;  // as far as is known before all rows are here
    }
    if (thread < kRanks) recv_plan()[thread] = s.num_tokens[thread];
    if (thread == 0) recv_plan()[kGpuPlanMadeBy] = static_cast<i32>(flight.turn.sequence);
  }

  // The caller's result holds fewer rows than came: count again what was kept. By the last block, when all rows are here.
  __device__ void recount_kept() {
    if constexpr (kConfig.is_cached || kConfig.is_by_expert()) return;
    if (a.capacity < 0 || s.own_rows <= a.capacity) return;
    i32* kept = this->mine();
    for (i32 expert = static_cast<i32>(threadIdx.x); expert < kLocal; expert += kThreads) kept[expert] = 0;
    __syncthreads();
    const Id* ids = reinterpret_cast<const Id*>(s.ids[rank()].own());
    for (i64 pick = threadIdx.x; pick < a.capacity * kTopk; pick += kThreads) {
      const i64 id = ids[pick];
      if (id >= 0 && id < kLocal) atomicAdd(&kept[id], 1);
    }
    __syncthreads();
    i64 num_dropped = 0;
    for (i32 expert = static_cast<i32>(threadIdx.x); expert < kLocal; expert += kThreads) {
      num_dropped += a.counts[expert] - kept[expert];
      a.counts[expert] = kept[expert];
    }
    add_dropped(a.overflow, num_dropped);
    if (num_dropped > 0) atomicAdd(&recv_plan()[kGpuPlanDropped], static_cast<i32>(num_dropped));
  }

  // Where this rank's receive plan lies.
  __device__ i32* recv_plan() const {
    const u64 offset = this->is_staged(rank()) ? a.view.layout.landing_table : a.placement.table;
    return reinterpret_cast<i32*>(a.view.own_heap() + offset);
  }

 private:
  using Ids::thread, Ids::meet, Ids::inclusive_sum;

  __device__ const GpuCountPayload* payload_from(i32 source) const {
    return reinterpret_cast<const GpuCountPayload*>(a.view.own_control() +
                                                    a.view.layout.payload(flight.turn.sequence, source));
  }

  // What the source says of itself. R19: what makes no sense is used within `limit`, and find_places() fails.
  __device__ i32 within(i64 value, i64 limit, i32 source) {
    const i64 kept = clamp_count(value, limit);
    if (kept != value) s.bad_source = static_cast<u32>(source) + 1;
    return static_cast<i32>(kept);
  }
  __device__ void fail_if_bad() {
    if (s.bad_source != 0) {
      this->fail(transport::ErrorCause::kBadPeerWord, Phase::kCount, static_cast<i32>(s.bad_source) - 1);
    }
  }

  // How many tokens the source has: at most as many as the call may.
  __device__ i32 tokens_of(i32 source) {
    if (!flight.is_active(source)) return 0;
    if (source == rank()) return a.num_tokens;
    return within(payload_from(source)->num_tokens, a.max_tokens, source);
  }

  // Picks of the source for a global expert: at most all of its picks.
  __device__ i32 picks_of(i32 source, i32 expert) {
    if (!flight.is_active(source)) return 0;
    if (source == rank()) return this->mine()[expert];
    const i32* words = reinterpret_cast<const i32*>(payload_from(source) + 1);
    return within(words[expert], i64{a.max_tokens} * kTopk, source);
  }

  __device__ i32 rows_between(i32 source, i32 to) {
    if (!flight.is_active(source)) return 0;
    if (source == rank()) return s.total[to];
    const i32* words = reinterpret_cast<const i32*>(payload_from(source) + 1);
    return within(words[kExperts + to], a.max_tokens, source);
  }

  // What write_counts() adds up while rows are on their way, when the host may have heard that all is well. By warps that place no
  // ranks.
  __device__ void check_picks() {
    static_assert(kRanks <= 32 && kThreads > 32);
    if (warp == 0) return;
    for (i32 at = static_cast<i32>(threadIdx.x) - 32; at < kRanks * kLocal; at += kThreads - 32) {
      picks_of(at / kLocal, kPlacement.expert_of(rank(), at % kLocal));
    }
  }

  __device__ void place_ranks(i32 to) {
    i32 rows[kRanks], sum = 0;
#pragma unroll
    for (i32 source = 0; source < kRanks; ++source) rows[source] = rows_between(source, to);
#pragma unroll
    for (i32 source = 0; source < kRanks; ++source) {
      if (source == rank()) s.start[to] = sum;
      if constexpr (kConfig.has_nodes()) s.start_of[source][to - this->nodes().first] = sum;
      sum += rows[source];
    }
    if constexpr (kConfig.has_nodes()) s.start_of[kRanks][to - this->nodes().first] = sum;
    s.needed[to] = a.capacity >= 0 ? a.capacity : sum;
    if (to == rank()) s.own_rows = sum;
  }

  __device__ void sum_sources(i32 expert) {
    i32 picks[kRanks], sum = 0;
#pragma unroll
    for (i32 source = 0; source < kRanks; ++source) picks[source] = picks_of(source, expert);
#pragma unroll
    for (i32 source = 0; source < kRanks; ++source) {
      if (source == rank()) this->place()[expert] = sum;
      sum += picks[source];
    }
    this->total_of()[expert] = sum;
  }

  // One warp: where the groups of a rank begin.
  __device__ void place_experts(i32 to) {
    i32 carry = 0;
    const bool is_masked = kConfig.layout == Layout::kMasked;
    const i32 limit = a.capacity >= 0 ? static_cast<i32>(a.capacity) : 0x7fffffff;
    for (i32 first = 0; first < kLocal; first += 32) {
      const i32 local = first + lane;
      const i32 total = local < kLocal ? this->total_of()[kPlacement.expert_of(to, local)] : 0;
      const i32 padded = static_cast<i32>(align_rows(total, a.alignment));
      const i32 sum = inclusive_sum(padded);
      const i32 begin = is_masked ? 0 : carry + sum - padded;
      if (local < kLocal) {
        this->place()[kPlacement.expert_of(to, local)] += begin;
        if (to == rank()) {
          this->hole_begin()[local] = min(begin + total, limit);
          this->hole_end()[local] = min(is_masked ? limit : begin + padded, limit);
        }
      }
      carry += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0) s.needed[to] = is_masked ? a.capacity * kLocal : a.capacity >= 0 ? a.capacity : carry;
  }

  // What the words of a handle say, but nothing outside of the result (R19).
  __device__ void read_holes() {
    const bool is_masked = kConfig.layout == Layout::kMasked;
    const i64 room = a.placement.num_rows;
    for (i32 local = static_cast<i32>(threadIdx.x); local < kLocal; local += kThreads) {
      const i64 begin = (is_masked ? i64{0} : i64{a.offsets[local]}) + a.counts[local];
      const i64 end = is_masked ? a.capacity : i64{a.offsets[local + 1]};
      this->hole_begin()[local] = static_cast<i32>(min(max(begin, i64{0}), room));
      this->hole_end()[local] = static_cast<i32>(min(end, room));
    }
  }

  // Where rows for a rank go: its heap, or its landing if they don't fit (R19: nothing outside either).
  __device__ void find_base(i32 to, const GpuPlacement& place) {
    const GpuWindowLayout& layout = a.view.layout;
    const i64 num_slots = kRanks * layout.max_tokens;
    const bool is_staged = place.num_rows == 0 || (!kConfig.is_cached && s.needed[to] > place.num_rows);
    const u64 scales_landing =
        align_up(layout.landing_rows + static_cast<u64>(num_slots) * kConfig.wire_row_bytes(), 256);
    const auto fits = [&](u64 offset, u64 row_bytes) {
      return place.num_rows >= 0 && offset <= a.view.heap_bytes[to] &&
             static_cast<u64>(place.num_rows) <= (a.view.heap_bytes[to] - offset) / max(row_bytes, u64{1});
    };
    const bool is_int64 = place.id_bytes == 8;
    const u64 table_bytes = static_cast<u64>(gpu_recv_plan_len(layout.max_tokens, kTopk, kRanks, kConfig.layout)) * 4;
    const bool has_ids = !kConfig.is_cached && !kConfig.is_by_expert();
    const bool is_sound =
        is_staged || (fits(place.x, kConfig.wire_row_bytes()) && fits(place.scales, kConfig.scale_row_bytes) &&
                      (!has_ids || (fits(place.ids, kTopk * (is_int64 ? 8 : 4)) && fits(place.weights, kTopk * 4))) &&
                      place.table <= a.view.heap_bytes[to] &&
                      (kConfig.is_cached || table_bytes <= a.view.heap_bytes[to] - place.table));
    if (!is_sound) this->fail(transport::ErrorCause::kBadPeerWord, Phase::kCount, to);
    if (is_staged && !a.fits_landing) {
      if constexpr (kConfig.has_nodes()) {
        this->fail(transport::ErrorCause::kNoRoom, Phase::kCount, to);  // other nodes don't hear of it
      } else {
        give_up(to);
      }
    }
    if (is_staged) add_rank(s.staged, to);
    if (has_ids && is_int64) add_rank(s.with_int64, to);
    const Place heap = this->peers().heap(to);
    s.x[to] = heap + (is_staged ? layout.landing_rows : place.x);
    s.scales[to] = heap + (is_staged ? scales_landing : place.scales);
    s.ids[to] = heap + (is_staged ? layout.landing_ids : place.ids);
    s.weights[to] = heap + (is_staged || kConfig.is_by_expert() ? layout.landing_weights : place.weights);
    const Place table = heap + (is_staged ? layout.landing_table : place.table);
    s.table[to] =
        table.template at<i32>(kGpuPlanHeader).template at<i32>(rank() * layout.max_tokens * Base::kTableWidth);
    const i64 room = !is_staged ? place.num_rows : kConfig.is_by_expert() ? 0x7fffffff : num_slots;
    s.limit[to] = static_cast<i32>(min(a.capacity >= 0 ? a.capacity : room, static_cast<i64>(0x7fffffff)));
  }

  // By any thread, to a set in shared memory.
  __device__ static void add_rank(GpuRankMask& mask, i32 to) { atomicOr(&mask.word, GpuRankMask::only(to).word); }

  __device__ void give_up(i32 to) {
    transport::record(a.view, flight, transport::ErrorCause::kNoRoom, Phase::kCount, to, 0);
    s.is_given_up = 1;
  }

  __device__ void tell_host(i64 num_rows) {
    transport::HostWords* host = a.view.host;
    if (s.bad_ids.count > 0) s.bad_ids.template tell<Id>(host, a.topk_idx);
    if (a.ticket == 0) return;
    host->num_rows = num_rows;
    ptx::st_release_sys(&host->counted_ticket, a.ticket);
  }

  // One thread.
  __device__ void write_rank_offsets() {
    const i64 limit = a.capacity >= 0 ? a.capacity : 0x7fffffff;
    i64 offset = 0;
    for (i32 source = 0; source < kRanks; ++source) {
      a.offsets[source] = static_cast<i32>(min(offset, limit));
      offset += rows_between(source, rank());
    }
    a.offsets[kRanks] = *a.num_rows = static_cast<i32>(min(offset, limit));
    tell_host(offset);
  }

  // One warp: offsets and counts by expert.
  __device__ void write_groups() {
    i64 num_kept = 0, num_dropped = 0;
    const bool is_masked = kConfig.layout == Layout::kMasked;
    const i32 limit = a.capacity >= 0 ? static_cast<i32>(a.capacity) : 0x7fffffff;
    for (i32 local = lane; local < kLocal; local += 32) {
      const i32 total = this->total_of()[kPlacement.expert_of(rank(), local)];
      const i32 end = this->hole_begin()[local];
      // The group begins where the one before it ends, holes included.
      const i32 begin = is_masked || local == 0 ? 0 : this->hole_end()[local - 1];
      a.offsets[local] = is_masked ? local * static_cast<i32>(a.capacity) : begin;
      write_count<kConfig>(a, local, end - begin);
      num_kept += end - begin;
      num_dropped += total - (end - begin);
    }
#pragma unroll
    for (i32 step = 16; step > 0; step /= 2) {
      num_kept += __shfl_xor_sync(0xffffffffu, num_kept, step);
      num_dropped += __shfl_xor_sync(0xffffffffu, num_dropped, step);
    }
    if (lane != 0) return;
    const i32 last = is_masked ? kLocal * limit : this->hole_end()[kLocal - 1];
    a.offsets[kLocal] = last;
    *a.num_rows = is_masked ? static_cast<i32>(num_kept) : last;
    recv_plan()[kGpuPlanDropped] = static_cast<i32>(num_dropped);
    add_dropped(a.overflow, num_dropped);
    tell_host(is_masked ? num_kept : last);
  }
};

}  // namespace weft::kernels
