// Dispatch, second part: rows on their way, each loaded once and stored to every rank that wants it
// (docs/protocols/nvlink-dispatch.md, steps 4 and 5). One warp loads, kStoreWarps store.
#pragma once

#include "weft/kernels/dispatch_count.cuh"
#include "weft/kernels/post.cuh"

namespace weft::kernels {

template <DispatchKernelConfig kConfig>
class DispatchSend : public DispatchState<kConfig> {
 public:
  using Base = DispatchState<kConfig>;
  using Base::a, Base::s, Base::flight, Base::warp, Base::lane, Base::rank;
  using Base::kRanks, Base::kTopk, Base::kExperts, Base::kLocal, Base::kRowBytes, Base::kScaleBytes;
  using Id = typename IdType<kConfig.topk_is_int64>::Type;
  static constexpr bool kByExpert = kConfig.is_by_expert();
  static constexpr bool kQuantized = kConfig.is_quantized();
  static constexpr bool kBulkScales = kScaleBytes % 16 == 0;
  static constexpr bool kStagedScales = kConfig.staged_scale_bytes() > 0;
  static constexpr i32 kSteps = (kTopk + 31) / 32;  // picks of a lane

  __device__ explicit DispatchSend(const Base& base) : Base(base) {}

  // ---- load: one lane, item after item, as stages become free. The first need nothing but x: they go before the counts.
  // Item n is for store warp n % kStoreWarps and, when quantised, for warp n % num_quantize_warps; all get an end mark.

  __device__ void load_rows(bool is_early) {
    while (min(num_even_ends_, num_odd_ends_) < kEnds) {
      if (is_early && n_ == kConfig.num_stages) return;
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
    const i32 num_items = kByExpert ? this->num_items(store_warp, a.num_tokens) : 0;
    Item next;
    if constexpr (kByExpert) next = fetch(store_warp, 0, num_items);
    i32 num_stored = 0;
    for (i32 j = 0;; ++j) {
      const i32 idx = this->stage_of(store_warp, j);
      const Item item = next;
      Places places;
      if constexpr (kByExpert) {
        next = fetch(store_warp, j + 1, num_items);
        if (j < num_items) places = resolve(item, store_warp, j);
      }
      if (!this->wait_local(kQuantized ? &s.ready[idx] : &s.full[idx], this->parity_of(store_warp, j))) break;
      const i32 token = s.token[idx];
      if (token < 0) break;
      if constexpr (!kByExpert) places.row = lane < kRanks ? row_of(token, lane) : -1;
      store_row(token, places, this->stage(idx));
      if (lane == 0) ptx::bulk_commit();
      if constexpr (kByExpert) store_table(item, places);
      __syncwarp();  // all lanes have read the stage
      if (lane == 0) after_store(store_warp, j);
      num_stored = j + 1;
    }
    if (lane != 0) return;
    ptx::bulk_wait_read<0>();
    for (i32 j = max(num_stored - kReading, 0); j < num_stored; ++j) free_stage(store_warp, j);
    ptx::bulk_wait_all();
    ptx::fence_proxy_async();
    if constexpr (kByExpert) {
      ptx::st_release_cta(&s.num_arrived[store_warp], s.has_failed == 0 ? static_cast<u32>(num_items) : kPostStops);
    }
  }

  // ---- progress, by expert

  __device__ void post_progress() {
    const auto last = static_cast<u32>(this->num_items(lane / kPostLanes, a.num_tokens));
    post_arrivals(a.view, flight, kRanks, s.num_arrived, last, 0);
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
      u32 mask = 0;
      for (i32 to = 0; to < kRanks; ++to) {
        const i32 row = row_of(token, to);
        plan.row()[static_cast<i64>(token) * kRanks + to] = row;
        if (flight.is_active(to)) s.table[to][token] = row;
        mask |= row >= 0 ? 1u << to : 0u;
      }
      plan.mask()[token] = static_cast<i32>(mask);
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
      const Unit unit = reinterpret_cast<const Unit*>(a.scales + static_cast<i64>(token) * kScaleBytes)[piece];
#pragma unroll
      for (i32 to = 0; to < kRanks; ++to) {
        const i32 row = row_of(token, to);
        if (row >= 0) reinterpret_cast<Unit*>(s.scales[to] + static_cast<i64>(row) * kScaleBytes)[piece] = unit;
      }
    }
  }

 private:
  // Stores of a warp that read shared memory at a time: the stages of the others are being filled.
  static constexpr i32 kReading = kConfig.num_stages > kStoreWarps ? 1 : 0;
  static constexpr i32 kEnds = kQuantized ? kConfig.num_quantize_warps / kStoreWarps : 1;  // marks for each store warp

  // rank_major: first each block has its share of what the stages of all hold; then tokens are dealt out a few at a time, to
  // the block that comes for them: who gets more of the wire does more of the work.
  static constexpr i32 kChunkTokens = 4;

  __device__ i32 num_first() const {
    return min((a.num_tokens + kConfig.num_blocks - 1) / kConfig.num_blocks, kConfig.num_stages);
  }

  // The first token of a chunk that nobody has yet.
  __device__ i32 take_chunk() const {
    const i32 chunk = static_cast<i32>(ptx::atom_inc_gpu(&a.view.words()->next_chunk));
    return num_first() * kConfig.num_blocks + chunk * kChunkTokens;
  }

  // The token of item n_, -1: there is none any more.
  __device__ i32 take_token() {
    if constexpr (kByExpert) {
      const i32 store_warp = n_ % kStoreWarps, item = n_ / kStoreWarps;
      return item < this->num_items(store_warp, a.num_tokens) ? this->token_of(store_warp, item) : -1;
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

  // How many marks item n_'s warps have then. Two members, since an array indexed at run time would lie in local memory.
  __device__ i32 count_end() { return n_ % kStoreWarps == 0 ? ++num_even_ends_ : ++num_odd_ends_; }

  __device__ void load_row(i64 token, i32 idx) {
    constexpr i32 kScalesHere = kQuantized || !kBulkScales || !kStagedScales ? 0 : kScaleBytes;
    ptx::mbarrier_arrive_expect(&s.full[idx], kConfig.row_bytes + kScalesHere);
    ptx::bulk_load(this->stage(idx), a.x + token * kConfig.row_bytes, kConfig.row_bytes, &s.full[idx]);
    if constexpr (kScalesHere > 0) {
      ptx::bulk_load(this->stage(idx) + kConfig.scales_at(), a.scales + token * kScaleBytes, kScaleBytes, &s.full[idx]);
    }
  }

  __device__ void free_stage(i32 store_warp, i32 j) const {
    ptx::mbarrier_arrive(&s.empty[this->stage_of(store_warp, j)]);
  }

  // One lane, after item j was stored: frees the stage of an earlier one, notes what has arrived.
  __device__ void after_store(i32 store_warp, i32 j) {
    ptx::bulk_wait_read<kReading>();
    if (j >= kReading) free_stage(store_warp, j - kReading);
    if constexpr (kByExpert) {
      constexpr i32 kPending = 8, kEvery = 4;  // items under way, and between two notes
      if (j + 1 <= kPending || (j + 1) % kEvery != 0) return;
      ptx::bulk_wait<kPending>();
      ptx::st_release_cta(&s.num_arrived[store_warp], static_cast<u32>(j + 1 - kPending));
    }
  }

  struct Item {
    i32 token = 0;
    i32 expert[kSteps] = {};    // by expert: of pick `step * 32 + lane`, -1: none; cached: its rank
    i32 pick_row[kSteps] = {};  // cached
    float weight[kSteps] = {};
  };
  struct Places {
    i32 row = -1;
    i32 pick_row[kSteps];     // -1: not sent
    i32 destination[kSteps];  // -1: none
  };

  // The row of a token on a rank: how many came before it; -1: none.
  __device__ i32 row_of(i32 token, i32 to) const {
    if constexpr (kConfig.is_cached) {
      return GpuSendPlan<i32>{a.send_plan, a.num_tokens, kRanks}.row()[static_cast<i64>(token) * kRanks + to];
    }
    const u32 goers = this->goers(to, token / 32);
    const u32 bit = 1u << (token % 32);
    if ((goers & bit) == 0) return -1;
    const i32 row = s.start[to] + this->rows_before(to, token / 32) + __popc(goers & (bit - 1));
    return row < s.limit[to] ? row : -1;
  }

  // By expert: what is needed to know of an item, asked for while the one before it is stored.
  __device__ Item fetch(i32 store_warp, i32 j, i32 num_items) const {
    Item item;
    if (j >= num_items) return item;
    item.token = this->token_of(store_warp, j);
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) fetch_pick(item, step);
    return item;
  }

  __device__ void fetch_pick(Item& item, i32 step) const {
    const i32 k = step * 32 + lane;
    item.expert[step] = item.pick_row[step] = -1;
    if (k >= kTopk) return;
    const i64 pick = static_cast<i64>(item.token) * kTopk + k;
    if constexpr (kConfig.is_cached) {
      const GpuSendPlan<i32> plan{a.send_plan, a.num_tokens, kTopk};
      item.pick_row[step] = plan.row()[pick];
      item.expert[step] = plan.destination()[pick];
    } else {
      const i64 id = static_cast<const Id*>(a.topk_idx)[pick];
      const bool is_sent = id >= 0 && id < kExperts && flight.is_active(static_cast<i32>(id) / kLocal);
      item.expert[step] = is_sent ? static_cast<i32>(id) : -1;
      item.weight[step] = a.topk_weights == nullptr ? 1.0f : a.topk_weights[pick];
    }
  }

  // The rows of an item. By expert: items of a chunk come one after the other through one warp, so `before` counts on.
  __device__ Places resolve(const Item& item, i32 store_warp, i32 j) {
    Places places;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      if constexpr (kConfig.is_cached) {
        places.pick_row[step] = item.pick_row[step];
        places.destination[step] = item.pick_row[step] >= 0 ? item.expert[step] : -1;
      } else {
        place_pick(places, step, item.expert[step], this->before(this->period_of(store_warp, j)));
      }
    }
    return places;
  }

  __device__ void place_pick(Places& places, i32 step, i32 expert, i32* before) {
    const u32 same = ptx::match_any(expert);
    const i32 nth = (expert >= 0 ? before[expert] : 0) + __popc(same & ptx::lanes_below());
    __syncwarp();
    if (expert >= 0 && (same >> lane) == 1u) before[expert] = nth + 1;  // the last of its kind
    __syncwarp();
    const i32 to = expert >= 0 ? expert / kLocal : -1;
    const i32 row = expert >= 0 ? this->place()[expert] + nth : 0;
    const bool is_kept = expert >= 0 && row < s.limit[to];
    const i32 shift = kConfig.layout == Layout::kMasked ? (expert % kLocal) * static_cast<i32>(a.capacity) : 0;
    places.pick_row[step] = is_kept ? row + shift : -1;
    places.destination[step] = is_kept ? to : -1;
  }

  // The row goes to every rank that holds it, by expert to the place of its first pick there.
  __device__ void store_row(i32 token, const Places& places, const u8* stage) {
#pragma unroll
    for (i32 to = 0; to < kRanks; ++to) {
      const i32 row = row_at(token, places, to);
      if (row < 0) continue;
      if (lane == 0) ptx::bulk_store(s.x[to] + static_cast<i64>(row) * kRowBytes, stage, kRowBytes);
      if constexpr (kStagedScales) {
        u8* scales = s.scales[to] + static_cast<i64>(row) * kScaleBytes;
        const u8* staged = stage + kConfig.scales_at();
        if constexpr (kByExpert && kBulkScales) {
          if (lane == 0) ptx::bulk_store(scales, staged, kScaleBytes);
        } else {
          copy_short<kScaleBytes>(scales, kQuantized ? staged : a.scales + static_cast<i64>(token) * kScaleBytes, lane);
        }
      }
    }
  }

  // For the whole warp: the row there, -1: none.
  __device__ i32 row_at(i32 token, const Places& places, i32 to) const {
    if constexpr (kByExpert) {
#pragma unroll
      for (i32 step = 0; step < kSteps; ++step) {
        const u32 picks = __ballot_sync(0xffffffffu, places.destination[step] == to);
        if (picks == 0) continue;
        const i32 row = __shfl_sync(0xffffffffu, places.pick_row[step], __ffs(static_cast<i32>(picks)) - 1);
        return this->is_staged(to) ? rank() * static_cast<i32>(a.view.layout.max_tokens) + token : row;
      }
      return -1;
    } else {
      return __shfl_sync(0xffffffffu, places.row, to);
    }
  }

  // By expert: what the receiver must know of a token's picks, and the send plan.
  __device__ void store_table(const Item& item, const Places& places) {
    if constexpr (kConfig.is_cached) return;
    const GpuSendPlan<i32> plan{a.send_plan, a.num_tokens, kTopk};
    const i64 first = static_cast<i64>(item.token) * kTopk;
    const i64 slot = (static_cast<i64>(rank()) * a.view.layout.max_tokens + item.token) * kTopk;
    u32 mask = 0;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      const i32 k = step * 32 + lane;
      const i32 destination = places.destination[step];
#pragma unroll
      for (i32 to = 0; to < kRanks; ++to) {
        if (__ballot_sync(0xffffffffu, destination == to) != 0) mask |= 1u << to;
        if (k >= kTopk || !flight.is_active(to)) continue;
        s.table[to][first + k] = destination == to ? places.pick_row[step] : -1;
        if (destination == to) reinterpret_cast<float*>(s.weights[to])[slot + k] = item.weight[step];
      }
      if (k >= kTopk) continue;
      plan.row()[first + k] = places.pick_row[step];
      plan.destination()[first + k] = destination;
    }
    if (lane == 0) plan.mask()[item.token] = static_cast<i32>(mask);
  }

  // ---- ids of rank_major

  static constexpr i32 kIdStep = kTopk % 4 == 0 ? 4 : 1;  // picks of a thread
  static constexpr i32 kIdPieces = kTopk / kIdStep;

  __device__ void store_id_piece(i32 token, i32 k) {
    struct alignas(kIdStep == 4 ? 16 : 4) Weights {
      float value[kIdStep];
    };
    struct alignas(kIdStep == 4 ? 16 : sizeof(Id)) Ids {
      Id value[kIdStep];
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
      Ids ids;
      Weights weights;
#pragma unroll
      for (i32 idx = 0; idx < kIdStep; ++idx) {
        const i32 local = id[idx] - to * kLocal;
        const bool is_here = id[idx] >= 0 && local >= 0 && local < kLocal;
        if (is_here) destination[idx] = to;
        ids.value[idx] = is_here ? local : -1;
        weights.value[idx] = is_here ? weight[idx] : 0.0f;
      }
      const i64 place = static_cast<i64>(row) * kTopk + k;
      *reinterpret_cast<Ids*>(reinterpret_cast<Id*>(s.ids[to]) + place) = ids;
      *reinterpret_cast<Weights*>(reinterpret_cast<float*>(s.weights[to]) + place) = weights;
    }
    const GpuSendPlan<i32> plan{a.send_plan, a.num_tokens, kRanks};
#pragma unroll
    for (i32 idx = 0; idx < kIdStep; ++idx) plan.destination()[first + idx] = destination[idx];
  }

  // With a capacity: rows that hold nothing have no ids and no weights.
  __device__ void clear_tail(i32 thread, i32 num_threads) {
    if (a.capacity < 0) return;
    const i64 num_rows =
        min(static_cast<i64>(this->is_staged(rank()) ? kRanks * a.view.layout.max_tokens : a.capacity), a.capacity);
    const i64 stride = static_cast<i64>(num_threads) * kConfig.num_blocks;
    const i64 first = s.own_rows * static_cast<i64>(kTopk) + static_cast<i64>(blockIdx.x) * num_threads + thread;
    for (i64 pick = first; pick < num_rows * kTopk; pick += stride) {
      reinterpret_cast<Id*>(s.ids[rank()])[pick] = -1;
      reinterpret_cast<float*>(s.weights[rank()])[pick] = 0.0f;
    }
  }

  // Of the lane that loads.
  i32 n_ = 0;  // next item
  i32 num_early_ = 0;
  i32 num_even_ends_ = 0, num_odd_ends_ = 0;
  i32 token_ = 0, end_ = 0, next_ = -1;  // rank_major: of the chunk at hand, and the chunk after it
};

}  // namespace weft::kernels
