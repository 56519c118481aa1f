// Dispatch, second part: rows on their way, each loaded once and stored to every rank that wants it
// (docs/protocols/nvlink-dispatch.md, steps 4 and 5). One warp loads, kStoreWarps store.
#pragma once

#include "weft/kernels/dispatch/count.cuh"
#include "weft/kernels/place_rows_arguments.h"
#include "weft/kernels/post.cuh"

namespace weft::kernels {

// By expert: longer rows of scales that suit a bulk copy are stored in bulk, and all that are made here, where threads have enough
// to do. Bulk stores of short ones take turns with the rows.
constexpr i32 kMostScalesByThreads = 512;

template <DispatchKernelConfig kConfig>
class DispatchSend : public DispatchState<kConfig> {
 public:
  using Base = DispatchState<kConfig>;
  using Base::a, Base::s, Base::flight, Base::warp, Base::lane, Base::rank;
  using Base::kRanks, Base::kTopk, Base::kExperts, Base::kLocal, Base::kPeriods, Base::kRowBytes, Base::kScaleBytes;
  using Id = typename IdType<kConfig.topk_is_int64>::Type;
  using typename Base::Place;
  static constexpr bool kByExpert = kConfig.is_by_expert();
  static constexpr bool kQuantized = kConfig.is_quantized();
  static constexpr bool kAlignedScales = kScaleBytes % 16 == 0;  // they suit a bulk copy
  static constexpr bool kBulkScales = kAlignedScales && (kQuantized || kScaleBytes > kMostScalesByThreads);
  static constexpr bool kStagedScales = kConfig.staged_scale_bytes() > 0;
  static constexpr i32 kSteps = (kTopk + 31) / 32;  // picks of a lane

  __device__ explicit DispatchSend(const Base& base) : Base(base) {}

  // ---- load: one lane, item after item, as stages become free. The first need nothing but x: they go before the counts.
  // Item n is for store warp n % kStoreWarps and, when quantised, for warp n % num_quantize_warps; all get an end mark.

  __device__ void load_rows(bool is_early) {
    while (min(num_even_ends_, num_odd_ends_) < kEnds) {
      if (is_early && n_ == (kByExpert ? num_first(block()) : kConfig.num_stages)) return;
      const i32 token = take_token();
      if (token < 0 && count_end() > kEnds) {
        if (n_ < kConfig.num_stages) s.token[n_] = -1;
        ++n_;  // nobody listens any more
        continue;
      }
      const i32 idx = n_ % kConfig.num_stages;
      if (n_ >= kConfig.num_stages && !this->wait_local(&s.empty[idx], (n_ / kConfig.num_stages - 1) & 1)) return;
      s.token[idx] = token;
      if (token < 0) {
        ptx::mbarrier_arrive(&s.full[idx]);
      } else {
        load_row(token, idx);
      }
      num_early_ = is_early ? n_ + 1 : num_early_;
      ++n_;
    }
  }
  static_assert(kStoreWarps == 2);

  // Loads in flight write into this block's memory: it must not end before them.
  __device__ void drain() {
    for (i32 idx = 0; idx < num_early_; ++idx) {
      if (s.token[idx] >= 0) sync::wait_barrier(&s.full[idx], 0);
    }
  }

  // ---- store

  __device__ void store_rows(i32 store_warp) {
    Item next;
    bool has_next = false;
    i32 num_stored = 0;
    for (i32 j = 0;; ++j) {
      const i32 idx = this->stage_of(store_warp, j);
      const bool is_loaded = this->wait_local(loaded(idx), this->parity_of(store_warp, j));
      if (__all_sync(0xffffffffu, is_loaded ? 1 : 0) == 0) break;
      const i32 token = s.token[idx];
      if (token < 0) break;
      if constexpr (kByExpert) {
        if (!has_next && !fetch(next, token)) break;
        const Item item = next;
        if constexpr (kConfig.has_fan()) {
          if (!remember(store_warp, j, token)) break;
        }
        store_picks(token, item, this->stage(idx));
      } else {
        store_to_ranks(lane < kRanks ? row_of(token, lane) : -1, this->stage(idx));
      }
      __syncwarp();
      ptx::bulk_commit();
      if constexpr (kByExpert) has_next = fetch_early(next, store_warp, j + 1);
      after_store(store_warp, j);
      num_stored = j + 1;
    }
    ptx::bulk_wait_read<0>();
    __syncwarp();
    if (lane == 0) {
      for (i32 j = max(num_stored - kReading, 0); j < num_stored; ++j) free_stage(store_warp, j);
    }
    if constexpr (kConfig.has_fan()) {
      note_arrived<1>(store_warp, num_stored);
    }
    ptx::bulk_wait_all();
    ptx::fence_proxy_async_global();
    __syncwarp();
    if constexpr (kConfig.has_fan()) {
      const u32 arrived = s.has_failed == 0 ? static_cast<u32>(num_stored) | kAllArrived : kPostStops;
      if (lane == 0) ptx::st_release_cta(&s.num_arrived[store_warp], arrived);
    }
  }

  // ---- ids, weights, table and plan of rank_major. A block takes tokens one after the other, so that neighbouring threads
  // write to neighbouring places: over the wire each 16 bytes alone would cost as much as 64.

  __device__ void store_ids(i32 first_warp) {
    const i32 thread = (warp - first_warp) * 32 + lane;
    const i32 num_threads = (kConfig.num_warps() - first_warp) * 32;
    const i32 share = (a.num_tokens + kConfig.num_blocks - 1) / kConfig.num_blocks;
    const i32 begin = min(static_cast<i32>(blockIdx.x) * share, a.num_tokens);
    const i32 num_mine = min(share, a.num_tokens - begin);
    GpuSendPlan<i32> plan{a.send_plan, a.num_tokens, kRanks};
    for (i32 idx = thread; idx < num_mine; idx += num_threads) {
      const i32 token = begin + idx;
      GpuRankMask mask = GpuRankMask::none();
      for (i32 to = 0; to < kRanks; ++to) {
        const i32 row = row_of(token, to);
        plan.row()[static_cast<i64>(token) * kRanks + to] = row;
        if (flight.is_active(to)) this->peers().put_words(s.table[to].template at<i32>(token), row);
        mask |= row >= 0 ? GpuRankMask::only(to) : GpuRankMask::none();
      }
      plan.set_ranks(token, mask);
    }
    for (i32 idx = thread; idx < num_mine * kIdPieces; idx += num_threads) {
      store_id_piece(begin + idx / kIdPieces, idx % kIdPieces * kIdStep);
    }
    clear_tail(thread, num_threads);
  }

  // Rows of scales of rank_major that were given: neighbouring threads have neighbouring pieces. In bulk
  // they would take turns with the rows.
  __device__ void store_scales(i32 first_warp) {
    using Unit = Piece<piece_bytes(kScaleBytes)>;
    constexpr i32 kPieces = kScaleBytes / static_cast<i32>(sizeof(Unit));
    const i32 num_threads = (kConfig.num_warps() - first_warp) * 32;
    const i32 share = (a.num_tokens + kConfig.num_blocks - 1) / kConfig.num_blocks;
    const i32 begin = min(static_cast<i32>(blockIdx.x) * share, a.num_tokens);
    const i32 num_mine = min(share, a.num_tokens - begin) * kPieces;
    for (i32 idx = (warp - first_warp) * 32 + lane; idx < num_mine; idx += num_threads) {
      const i32 token = begin + idx / kPieces, piece = idx % kPieces;
      Unit unit;
      if constexpr (kScaleBytes % 4 == 0) {
        if (a.scale_stride > 0) unit = gather<Unit>(a.scales + i64{token} * 4, a.scale_stride, piece);
      }
      if (kScaleBytes % 4 != 0 || a.scale_stride == 0) {
        unit = reinterpret_cast<const Unit*>(a.scales + static_cast<i64>(token) * kScaleBytes)[piece];
      }
#pragma unroll
      for (i32 to = 0; to < kRanks; ++to) {
        const i32 row = row_of(token, to);
        if (row >= 0)
          this->peers().put_words((s.scales[to] + static_cast<i64>(row) * kScaleBytes).template at<Unit>(piece), unit);
      }
    }
  }

 private:
  // Stores of a warp that read shared memory at a time: the stages of the others are being filled.
  static constexpr i32 kReading = kConfig.num_stages > kStoreWarps ? 1 : 0;
  static constexpr i32 kEnds = kQuantized ? kConfig.num_quantize_warps / kStoreWarps : 1;  // marks for each store warp

  // First each block has its share of what the stages of all hold; then tokens are dealt out a few at a time, to the block that
  // comes for them: who gets more of the wire does more of the work. By expert a block comes for its own first.
  static constexpr i32 kChunkTokens = 4;

  __device__ static i32 block() { return static_cast<i32>(blockIdx.x); }

  __device__ i32 num_first() const {
    return min((a.num_tokens + kConfig.num_blocks - 1) / kConfig.num_blocks, kConfig.num_stages);
  }
  // By expert: of a block's queue.
  __device__ i32 num_first(i32 of) const { return min(this->queue_len(of, a.num_tokens), kConfig.num_stages); }

  // The first token of a chunk that nobody has yet.
  __device__ i32 take_chunk() const {
    const i32 chunk = static_cast<i32>(ptx::atom_inc_gpu(&a.view.words()->next_chunk));
    return num_first() * kConfig.num_blocks + chunk * kChunkTokens;
  }

  // The token of item n_, -1: there is none any more.
  __device__ i32 take_token() {
    if constexpr (kByExpert) {
      if (n_ == 0) {
        token_ = 0;
        end_ = num_first(block());
      }
      if (token_ == end_ && owner_ >= 0) {
        if (next_owner_ < 0) take_items();
        owner_ = next_owner_;
        token_ = next_;
        end_ = owner_ >= 0 ? min(token_ + kChunkTokens, this->queue_len(owner_, a.num_tokens)) : 0;
        if (owner_ >= 0) take_items();  // known when they are needed
      }
      return owner_ >= 0 ? this->queue_begin(owner_, a.num_tokens) + token_++ : -1;
    } else {
      if (n_ == 0) {
        token_ = static_cast<i32>(blockIdx.x) * num_first();
        end_ = token_ + num_first();
        next_ = -1;
      }
      if (token_ == end_ && token_ < a.num_tokens) {
        token_ = next_ >= 0 ? next_ : take_chunk();
        end_ = token_ + kChunkTokens;
        next_ = take_chunk();  // known when it is needed
      }
      return token_ < a.num_tokens ? token_++ : -1;
    }
  }

  // By expert: the next items of the queue at hand, or when it is empty of the one with most left; next_owner_ -1: all are empty.
  __device__ void take_items() {
    next_owner_ = -1;
    while (queue_ >= 0) {
      const i32 first = num_first(queue_), end = this->queue_len(queue_, a.num_tokens);
      if (first < end) {
        const u32 num_taken = static_cast<u32>(ptx::atom_add_gpu(this->queue_word(queue_), 1));
        next_ = first + static_cast<i32>(num_taken) * kChunkTokens;
        if (next_ < end) {
          next_owner_ = queue_;
          return;
        }
      }
      queue_ = longest_queue();
    }
  }

  // Of those whose chunks are all planned: no block waits for another. -1: none has anything left.
  __device__ i32 longest_queue() const {
    i32 longest = -1, most = 0;
#pragma unroll 4
    for (i32 other = 0; other < kConfig.num_blocks; ++other) {
      const u64 word = ptx::ld_relaxed_sys(this->queue_word(other));
      const i32 num_taken = static_cast<i32>(word & 0xffffffffu) * kChunkTokens;
      const i32 num_left = this->queue_len(other, a.num_tokens) - num_first(other) - num_taken;
      if (num_left > most && (kConfig.is_cached || word / Base::kOnePlanned == kPeriods)) {
        longest = other;
        most = num_left;
      }
    }
    if (longest >= 0) static_cast<void>(ptx::ld_acquire_sys(this->queue_word(longest)));  // its plan can be read
    return longest;
  }

  // How many marks item n_'s warps have then. Two members, since an array indexed at run time would lie in local memory.
  __device__ i32 count_end() { return n_ % kStoreWarps == 0 ? ++num_even_ends_ : ++num_odd_ends_; }

  __device__ void load_row(i64 token, i32 idx) {
    constexpr i32 kScalesHere = kQuantized || !kAlignedScales || !kStagedScales ? 0 : kScaleBytes;
    ptx::mbarrier_arrive_expect(&s.full[idx], kConfig.row_bytes + kScalesHere);
    ptx::bulk_load(this->stage(idx), a.x + token * kConfig.row_bytes, kConfig.row_bytes, &s.full[idx]);
    if constexpr (kScalesHere > 0) {
      ptx::bulk_load(this->stage(idx) + kConfig.scales_at(), a.scales + token * kScaleBytes, kScaleBytes, &s.full[idx]);
    }
  }

  __device__ void free_stage(i32 store_warp, i32 j) const {
    ptx::mbarrier_arrive(&s.empty[this->stage_of(store_warp, j)]);
  }

  // After item j was stored, by lanes that each wait for what they have stored: frees the stage of an earlier one, notes what
  // has arrived.
  __device__ void after_store(i32 store_warp, i32 j) {
    ptx::bulk_wait_read<kReading>();
    __syncwarp();  // all lanes have read the stage
    if (lane == 0 && j >= kReading) free_stage(store_warp, j - kReading);
    if constexpr (kConfig.has_fan()) {
      constexpr i32 kPending = 2, kEvery = 2;  // items under way, and between two notes
      if ((j + 1) % kEvery == 0) note_arrived<kPending>(store_warp, j + 1);
    }
  }

  // All but the last kPending of the items stored are there.
  template <i32 kPending>
  __device__ void note_arrived(i32 store_warp, i32 num_stored) {
    if (num_stored <= kPending) return;
    ptx::bulk_wait<kPending>();
    __syncwarp();
    if (lane == 0) ptx::st_release_cta(&s.num_arrived[store_warp], static_cast<u32>(num_stored - kPending));
  }

  __device__ u64* loaded(i32 idx) const { return kQuantized ? &s.ready[idx] : &s.full[idx]; }

  // By expert, of pick `step * 32 + lane`: its row and the rank that holds it; -1: not sent.
  struct Item {
    i32 row[kSteps];
    i32 destination[kSteps];
  };

  // The row of a token on a rank: how many came before it; -1: none.
  __device__ i32 row_of(i32 token, i32 to) const {
    if constexpr (kConfig.is_cached) {
      if (!flight.is_active(to)) return -1;
      const i32 planned = GpuSendPlan<i32>{a.send_plan, a.num_tokens, kRanks}.row()[i64{token} * kRanks + to];
      return planned < s.limit[to] ? planned : -1;
    }
    const u32 goers = this->goers(to, token / 32);
    const u32 bit = 1u << (token % 32);
    if ((goers & bit) == 0) return -1;
    const i32 row = s.start[to] + this->rows_before(to, token / 32) + __popc(goers & (bit - 1));
    return row < s.limit[to] ? row : -1;
  }

  // R19, of a plan that was made before: a graph may be replayed when ranks have left.
  __device__ bool is_place(i32 row, i32 to) const {
    if (to < 0 || !flight.is_active(to)) return false;
    const i64 limit = kConfig.layout == Layout::kMasked ? i64{s.limit[to]} * kLocal : s.limit[to];
    return this->is_staged(to) || row < limit;
  }

  // By expert: what is needed to know of a token. False: the GPU has gone wrong.
  __device__ bool fetch(Item& item, i32 token) {
    if constexpr (!kConfig.is_cached) {
      const i32 at = token - this->queue_begin(block(), a.num_tokens), chunk = this->chunk_tokens();
      const bool is_own = at >= 0 && at < this->queue_len(block(), a.num_tokens);
      if (is_own && !wait_planned(at / chunk, at % chunk)) return false;
    }
    const GpuSendPlan<i32> plan{a.send_plan, a.num_tokens, kTopk};
    const i64 first = static_cast<i64>(token) * kTopk;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      const i32 k = step * 32 + lane;
      item.row[step] = k < kTopk ? plan.row()[first + k] : -1;
      item.destination[step] = k < kTopk ? plan.destination()[first + k] : -1;
      if (kConfig.is_cached && !is_place(item.row[step], item.destination[step])) item.destination[step] = -1;
    }
    return true;
  }

  // Until the places of this token of a chunk of this block are known, and of those before it.
  __device__ bool wait_planned(i32 period, i32 at) {
    const u32 num_picks = static_cast<u32>((at + 1) * kTopk);
    if (sync::wait_any_lane([&] { return ptx::ld_acquire_cta(&s.num_planned[period]) >= num_picks; })) {
      __syncwarp();  // all lanes see what one has acquired
      return true;
    }
    this->fail(transport::ErrorCause::kDeadline, Phase::kSend, rank());
    return false;
  }

  // The same of item j while the one before it is stored, if it is loaded by now.
  __device__ bool fetch_early(Item& item, i32 store_warp, i32 j) {
    const i32 idx = this->stage_of(store_warp, j);
    const bool is_loaded = ptx::mbarrier_test_wait(loaded(idx), this->parity_of(store_warp, j));
    if (__all_sync(0xffffffffu, is_loaded ? 1 : 0) == 0) return false;
    return s.token[idx] >= 0 && fetch(item, s.token[idx]);
  }

  // By expert: the token of item j, for the warp that tells. False: the GPU has gone wrong.
  __device__ bool remember(i32 store_warp, i32 j, i32 token) {
    const u32* num_told = &s.num_told[store_warp];
    const auto has_room = [&] { return ptx::ld_acquire_cta(num_told) + kRemembered > static_cast<u32>(j); };
    if (!sync::wait_any_lane(has_room)) {
      this->fail(transport::ErrorCause::kDeadline, Phase::kSend, rank());
      return false;
    }
    __syncwarp();
    if (lane == 0) s.sent[store_warp][j % kRemembered] = token;
    return true;
  }

  // rank_major: the row goes to every rank that holds it. `row`: in lane r, that on rank r.
  __device__ void store_to_ranks(i32 row, const u8* stage) {
#pragma unroll
    for (i32 to = 0; to < kRanks; ++to) {
      const i64 row_there = __shfl_sync(0xffffffffu, row, to);
      if (row_there < 0) continue;
      if (lane == 0) this->peers().put(s.x[to] + row_there * kRowBytes, stage, kRowBytes);
      if constexpr (kStagedScales) {
        copy_short<kScaleBytes>((s.scales[to] + row_there * kScaleBytes).address(), stage + kConfig.scales_at(), lane);
      }
    }
  }

  // By expert: the row goes to the place of its first pick on each rank; on this rank, to those of all its picks, unless another
  // kernel copies it there.
  __device__ void store_picks(i32 token, const Item& item, const u8* stage) {
    GpuRankMask mask = GpuRankMask::none();  // ranks that have it
    const bool goes_straight = !kConfig.is_spread || token % kStraightOf < a.num_straight;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      const i32 to = item.destination[step];
      const bool is_first = (ptx::match_any(to) & ptx::lanes_below()) == 0 && !mask.has_or_any(to);
      const bool is_staged = to >= 0 && this->is_staged(to);
      const bool is_stored = to >= 0 && (is_first || (to == rank() && !is_staged && goes_straight));
      const i32 landing_row = rank() * static_cast<i32>(a.view.layout.max_tokens) + token;
      store_row(token, !is_stored ? -1 : is_staged ? landing_row : item.row[step], to, stage);
      mask.word |= __reduce_or_sync(0xffffffffu, to >= 0 ? 1u << to : 0u);
    }
    if (!kConfig.is_cached && lane == 0) GpuSendPlan<i32>{a.send_plan, a.num_tokens, kTopk}.set_ranks(token, mask);
  }

  // By expert: each lane stores the row to its own place, -1: nowhere.
  __device__ void store_row(i32 token, i32 row, i32 to, const u8* stage) {
    const u8* staged_scales = stage + kConfig.scales_at();
    if (row >= 0) {
      this->peers().put(s.x[to] + static_cast<i64>(row) * kRowBytes, stage, kRowBytes);
      if constexpr (kScaleBytes > 0 && kBulkScales) {
        this->peers().put(s.scales[to] + static_cast<i64>(row) * kScaleBytes, staged_scales, kScaleBytes);
      }
    }
    if constexpr (kScaleBytes > 0 && !kBulkScales) {
      const u8* from = kQuantized || kAlignedScales ? staged_scales : a.scales + static_cast<i64>(token) * kScaleBytes;
      const bool is_wanted = __any_sync(0xffffffffu, row >= 0 ? 1 : 0) != 0;
      u8* place = row >= 0 ? (s.scales[to] + static_cast<i64>(row) * kScaleBytes).address() : nullptr;
      store_short<kScaleBytes>(ShortRow<kScaleBytes>(from, lane, is_wanted), place);
    }
  }

  // ---- ids of rank_major

  static constexpr i32 kIdStep = kTopk % 4 == 0 ? 4 : 1;  // picks of a thread
  static constexpr i32 kIdPieces = kTopk / kIdStep;

  __device__ void store_id_piece(i32 token, i32 k) {
    struct alignas(kIdStep == 4 ? 16 : 4) Weights {
      float value[kIdStep];
    };
    const i64 first = static_cast<i64>(token) * kTopk + k;
    i32 id[kIdStep], destination[kIdStep];
    float weight[kIdStep];
#pragma unroll
    for (i32 idx = 0; idx < kIdStep; ++idx) {
      destination[idx] = -1;
      const i64 given = static_cast<const Id*>(a.topk_idx)[first + idx];
      id[idx] = given >= 0 && given < kExperts ? static_cast<i32>(given) : -1;
      weight[idx] = a.topk_weights == nullptr ? 1.0f : a.topk_weights[first + idx];
    }
#pragma unroll 1
    for (i32 to = 0; to < kRanks; ++to) {
      const i32 row = row_of(token, to);
      if (row < 0) continue;
      i32 ids[kIdStep];
      Weights weights;
#pragma unroll
      for (i32 idx = 0; idx < kIdStep; ++idx) {
        const i32 local = id[idx] - Base::kPlacement.expert_of(to, 0);
        const bool is_here = id[idx] >= 0 && local >= 0 && local < kLocal;
        if (is_here) destination[idx] = to;
        ids[idx] = is_here ? local : -1;
        weights.value[idx] = is_here ? weight[idx] : 0.0f;
      }
      const i64 place = static_cast<i64>(row) * kTopk + k;
      if (s.with_int64.has(to)) {
        write_ids<i64>(s.ids[to], place, ids);
      } else {
        write_ids<i32>(s.ids[to], place, ids);
      }
      this->peers().put_words(s.weights[to].template at<float>(place), weights);
    }
    const GpuSendPlan<i32> plan{a.send_plan, a.num_tokens, kRanks};
#pragma unroll
    for (i32 idx = 0; idx < kIdStep; ++idx) plan.destination()[first + idx] = destination[idx];
  }

  template <class There>
  __device__ void write_ids(Place to, i64 place, const i32 (&ids)[kIdStep]) const {
    struct alignas(kIdStep == 4 ? 16 : sizeof(There)) Ids {
      There value[kIdStep];
    } wanted;
#pragma unroll
    for (i32 idx = 0; idx < kIdStep; ++idx) wanted.value[idx] = ids[idx];
    this->peers().put_words(to.template at<There>(place), wanted);
  }

  // With a capacity: rows that hold nothing have no ids and no weights.
  __device__ void clear_tail(i32 thread, i32 num_threads) {
    if (a.capacity < 0) return;
    const i64 num_rows =
        min(static_cast<i64>(this->is_staged(rank()) ? kRanks * a.view.layout.max_tokens : a.capacity), a.capacity);
    const i64 stride = static_cast<i64>(num_threads) * kConfig.num_blocks;
    const i64 first = s.own_rows * static_cast<i64>(kTopk) + static_cast<i64>(blockIdx.x) * num_threads + thread;
    for (i64 pick = first; pick < num_rows * kTopk; pick += stride) {
      reinterpret_cast<Id*>(s.ids[rank()].own())[pick] = -1;
      reinterpret_cast<float*>(s.weights[rank()].own())[pick] = 0.0f;
    }
  }

  // Of the lane that loads.
  i32 n_ = 0;  // next item
  i32 num_early_ = 0;
  i32 num_even_ends_ = 0, num_odd_ends_ = 0;
  i32 token_ = 0, end_ = 0, next_ = -1;  // of the chunk at hand, and the chunk after it; by expert: items of a queue
  i32 owner_ = static_cast<i32>(blockIdx.x), next_owner_ = -1;  // by expert: whose they are; -1: there are no more
  i32 queue_ = static_cast<i32>(blockIdx.x);                    // by expert: that items are taken from
};

}  // namespace weft::kernels
