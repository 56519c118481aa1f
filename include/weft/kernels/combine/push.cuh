// The contributor's part of combine: rows, or sums of a token's rows, are stored into the landing of the token's owner.
//   plan   one warp reads the receive plan, a piece ahead
//   load   one warp loads rows into slots: rank-major ones in their own type; else warps make what goes on the wire
//          (combine/sum.cuh, combine/quantize.cuh)
//   store  one warp stores rows, several store sums, FP8 rows go out from where they are made; one posts how far all have come
#pragma once

#include "weft/kernels/combine/block.cuh"
#include "weft/kernels/post.cuh"

namespace weft::kernels {

template <CombineKernelConfig kConfig>
class CombinePush {
 public:
  using Block = CombineBlock<kConfig>;
  static constexpr i32 kRanks = kConfig.num_ranks;
  static constexpr i32 kWidth = kConfig.plan_width();
  static constexpr bool kHasPartials = kConfig.has_partials();

  __device__ explicit CombinePush(const Block& block) : b_(block) {}

  // ---- plan

  __device__ i32 num_pieces() const {
    i32 num_items = 0;
#pragma unroll
    for (i32 rank = 0; rank < kRanks; ++rank) num_items = max(num_items, b_.s.num_items[rank]);
    return (num_items + kConfig.plan_tokens() - 1) / kConfig.plan_tokens();
  }

  __device__ void plan() const {
    const i32 num_pieces = this->num_pieces();
    for (i32 piece = 0; piece < num_pieces; ++piece) {
      const u32 parity = static_cast<u32>(piece / 2 + 1) & 1u;  // the first wait for each passes: both are empty
      if (!sync::wait_barrier(&b_.s.plan_empty[piece % 2], parity)) return b_.fail_copy();
      read_plan(piece);
      if constexpr (kHasPartials) list_items(piece);
      __syncwarp();
      if (b_.lane == 0) ptx::mbarrier_arrive(&b_.s.plan_full[piece % 2]);
    }
  }

  // ---- load

  __device__ void load() const {
    RingWriter writer(b_.s.push);
    const i32 num_pieces = this->num_pieces();
    for (i32 piece = 0; piece < num_pieces; ++piece) {
      if (!sync::wait_barrier(&b_.s.plan_full[piece % 2], static_cast<u32>(piece / 2) & 1u)) {
        b_.fail_copy();
        break;
      }
      // After a failure the plan is read to its end, but nothing more is loaded.
      if (__any_sync(0xffffffffu, b_.has_failed()) == 0) load_piece(writer, piece);
      __syncwarp();
      if (b_.lane == 0) ptx::mbarrier_arrive(&b_.s.plan_empty[piece % 2]);
    }
    writer.end(1);
  }

  // ---- store

  // By one lane: the others would wait for barriers that have gone on meanwhile.
  __device__ void store() const {
    if (b_.lane != 0) return;
    RingReader reader(b_.s.push, 0, 1);
    // Tokens before which all was stored when the turn before this one began, and when this one did; stores of this turn.
    i32 before = 0, reached = -1, num_since = 0;
    for (i32 num_stored = 0;; ++num_stored) {
      if (!reader.wait()) return b_.fail_copy();
      const RingItem item = reader.item();
      if (item.count == kRingEnd) break;
      if (reached < 0) reached = item.index;
      store_item(item, b_.push_slot(item.first));
      ptx::bulk_wait_read<kInFlight - 1>();
      if (num_stored >= kInFlight - 1) ptx::mbarrier_arrive(empty_barrier(num_stored - (kInFlight - 1)));
      if (++num_since == kTurn) {
        tell<2 * kTurn>(static_cast<u32>(before));
        before = reached;
        reached = -1;
        num_since = 0;
      }
      reader.advance();
    }
    tell<0>(b_.has_failed() ? kPostStops : sync::kMaxProgress);
  }

  // Lane l stores for the warp that makes sums `warp` + l * push_warps(), whatever is there of each, in rounds. A lane's barrier
  // waits for it, and its groups of bulk stores are counted in rounds of all lanes.
  __device__ void store_sums(i32 warp) const {
    constexpr i32 kSlots = kConfig.out_slots(), kRounds = kSlots - 1;  // rounds that may still be reading
    constexpr u32 kSleepNs = 32;
    const i32 from = warp + b_.lane * kConfig.push_warps();
    const bool has_warp = from < kConfig.sum_warps;
    bool is_open = has_warp, is_there = false;
    i32 slot = has_warp ? from * kSlots : 0;
    i32 held[kRounds];  // slots that they read; -1: none
    for (i32& each : held) each = -1;
    u32 parity = 0;
    u32 told = 0;
    u32 stored[kLag + 1] = {};  // a token of the lane before which all is stored, as of so many rounds ago
    while (__any_sync(0xffffffffu, is_open)) {
      const bool is_right = sync::wait_any_lane(
          [&] {
            is_there = is_open && ptx::mbarrier_test_wait(&b_.s.sum_full[slot], parity);
            bool is_held = false;
            for (const i32 each : held) is_held = is_held || each >= 0;
            return is_there || is_held;
          },
          kSleepNs);
      if (!is_right) return b_.fail_copy();
      PushItem item;
      if (is_there) item = b_.s.sum_item[slot];
      if (is_there && item.index < 0) is_open = is_there = false;
      if (__any_sync(0xffffffffu, is_there) == 0) {
        ptx::bulk_wait_read<0>();
        for (i32& each : held) {
          if (each >= 0) ptx::mbarrier_arrive(&b_.s.sum_empty[each]);
          each = -1;
        }
        continue;
      }
      ptx::fence_proxy_async_shared();
      if (is_there) {
        b_.peers().put(b_.landing(item.owner, b_.token_of(item.index), b_.a.view.rank) + item.offset, b_.sum_slot(slot),
                       static_cast<u32>(item.num_bytes));
      }
      ptx::bulk_commit();
      ptx::bulk_wait_read<kRounds>();
      if (held[kRounds - 1] >= 0) ptx::mbarrier_arrive(&b_.s.sum_empty[held[kRounds - 1]]);
#pragma unroll
      for (i32 ago = kRounds - 1; ago > 0; --ago) held[ago] = held[ago - 1];
      held[0] = is_there ? slot : -1;
#pragma unroll
      for (i32 ago = kLag; ago > 0; --ago) stored[ago] = stored[ago - 1];
      if (is_there) stored[0] = static_cast<u32>(item.index);
      ptx::bulk_wait<kLag>();
      if (has_warp && told != stored[kLag]) ptx::st_release_cta(&b_.s.num_pushed[from], stored[kLag]);
      told = stored[kLag];
      if (is_there && ++slot == (from + 1) * kSlots) {
        slot -= kSlots;
        parity ^= 1;
      }
    }
    ptx::bulk_wait<0>();
    if (has_warp) ptx::st_release_cta(&b_.s.num_pushed[from], b_.has_failed() ? kPostStops : sync::kMaxProgress);
  }

  // ---- post

  // What has arrived of all warps whose rows or sums are stored, in one word. By a warp that has nothing else to do, since a
  // release waits for everything that is under way. All owners are told at once: one fence and one wait serve all of them.
  __device__ void post() const {
    constexpr i32 kPushers = CombineShared<kConfig>::kPushers;
    static_assert(kPushers <= 32);
    const u32* word = &b_.s.num_pushed[b_.lane < kPushers ? b_.lane : 0];
    bool has_peer = b_.lane < kRanks && b_.flight.is_active(b_.lane);
    if constexpr (kConfig.has_nodes()) has_peer = b_.lane < kRanks && b_.nodes().is_mate(b_.lane);
    u32 seen = 0, posted = 0;
    while (posted < sync::kMaxProgress) {
      const u32 now = sync::wait_any_change(word, seen);
      if (__any_sync(0xffffffffu, now != seen) == 0) return b_.fail_copy();
      if (__any_sync(0xffffffffu, now == kPostStops) != 0) return;
      seen = now;
      u32 least = now;
#pragma unroll
      for (i32 step = 1; step < 32; step *= 2) least = min(least, __shfl_xor_sync(0xffffffffu, least, step));
      if (least == posted) continue;
      __syncwarp();  // each lane tells an owner what all lanes have acquired
      // What bulk stores have written is released by another thread than the one that has seen them complete.
      if constexpr (kConfig.push_warps() > 0) ptx::fence_proxy_async();
      if (has_peer) b_.peers().post(b_.flight, b_.lane, static_cast<i32>(blockIdx.x), kPushChannel, least);
      posted = least;
      __syncwarp();
    }
  }

 private:
  // Stores of rows that read shared memory at a time, at least half of the slots being left to the warp that loads.
  static constexpr i32 kInFlight = min_of(max_of(kConfig.push_slots / 2, 1), 6);
  // Stores of rows that are a turn. At its end a token is told 8 stores after it, all but those of this turn and the one before
  // having arrived: to wait for more keeps the warp from storing.
  static constexpr i32 kTurn = 4;
  // Rounds of stores of sums that follow one before it is told: by then it has arrived.
  static constexpr i32 kLag = 4;

  // All but the last kPending stores of this thread have arrived.
  template <i32 kPending>
  __device__ void tell(u32 num_pushed) const {
    ptx::bulk_wait<kPending>();
    ptx::st_release_cta(&b_.s.num_pushed[0], num_pushed);
  }

  // By pick an item's owner has the pick above the rank.
  static constexpr i32 kPickShift = 8;
  static_assert(kMaxGpuRanks <= 1 << kPickShift && kMaxTopk <= 1 << kPickShift);
  __device__ auto landing_of(const RingItem& item) const {
    if constexpr (!kConfig.is_by_pick())
      return b_.landing(item.owner, b_.token_of(item.index), b_.a.view.rank);
    else
      return b_.landing(item.owner & ((1 << kPickShift) - 1), b_.token_of(item.index), item.owner >> kPickShift);
  }

  __device__ void store_item(const RingItem& item, const u8* slot) const {
    const auto place = landing_of(item);
    b_.peers().put(place + static_cast<i64>(item.chunk) * kConfig.wire_bytes(kConfig.chunk), slot,
                   static_cast<u32>(kConfig.wire_bytes(kConfig.chunk_elements(item.chunk))));
    ptx::bulk_commit();
  }

  // Of the item that has been stored as the `stored`th.
  __device__ u64* empty_barrier(i32 stored) const { return &b_.s.push.empty[stored % kRingCells]; }

  // Rows (-1: none) and their weights of plan_tokens() tokens of every source, to shared memory.
  __device__ void read_plan(i32 piece) const {
    constexpr i32 kNum = kConfig.plan_entries();
    constexpr i32 kAtOnce = 4;  // entries of a lane whose loads are on their way together
    const GpuRecvPlan<const i32> plan{b_.a.recv_plan, b_.a.recv_plan_tokens, kWidth};
    for (i32 at = b_.lane; at < kNum; at += 32 * kAtOnce) {
      i32 row[kAtOnce];
#pragma unroll
      for (i32 step = 0; step < kAtOnce; ++step) {
        const i32 entry = at + step * 32;
        const i32 source = entry / kWidth % kRanks;
        const i32 index = piece * kConfig.plan_tokens() + entry / (kWidth * kRanks);
        row[step] = -1;
        if (entry >= kNum || index >= b_.s.num_items[source]) continue;
        if (kConfig.adds_own_rows() && source == b_.a.view.rank) continue;  // read where they are
        if constexpr (kConfig.has_nodes() && kConfig.adds_own_rows()) {
          if (b_.s.land_at[source] == b_.a.view.rank) continue;
        }
        row[step] = plan.row(source, b_.token_of(index))[entry % kWidth];
      }
#pragma unroll
      for (i32 step = 0; step < kAtOnce; ++step) {
        const i32 entry = at + step * 32;
        if (entry >= kNum) break;
        const bool is_row = row[step] >= 0 && row[step] < b_.a.num_rows;  // R19
        b_.plan_rows(piece % 2)[entry] = is_row ? row[step] : -1;
        if constexpr (kConfig.makes_sums()) {
          b_.plan_weights(piece % 2)[entry] = is_row && b_.a.weights != nullptr ? b_.a.weights[row[step]] : 1.0f;
        }
      }
    }
  }

  // Owners take turns, each rank beginning with another, so that all links are in use.
  __device__ i32 owner_at(i32 idx, i32 turn) const { return (b_.a.view.rank + 1 + turn + idx) % kRanks; }

  // Contributions of the piece in the order in which they are made; rows that there are move to the front of each. After a
  // failure there are none: the groups come to their end.
  __device__ void list_items(i32 piece) const {
    constexpr i32 kNum = kConfig.plan_tokens() * kRanks;
    i32 num_items = 0;
    __syncwarp();
    const bool has_failed = __any_sync(0xffffffffu, b_.has_failed());
    for (i32 first = 0; first < kNum && !has_failed; first += 32) {
      const i32 at = first + b_.lane, idx = at / kRanks;
      const i32 owner = owner_at(idx, at % kRanks);
      RingItem item{.first = (idx * kRanks + owner) * kWidth,
                    .index = piece * kConfig.plan_tokens() + idx,
                    .owner = static_cast<u16>(owner)};
      i32* rows = b_.plan_rows(piece % 2) + item.first;
      float* weights = b_.plan_weights(piece % 2) + item.first;
      for (i32 pick = 0; pick < kWidth && at < kNum; ++pick) {
        if (rows[pick] < 0) continue;
        rows[item.count] = rows[pick];
        if constexpr (kConfig.is_by_expert()) weights[item.count] = weights[pick];
        ++item.count;
      }
      const u32 present = __ballot_sync(0xffffffffu, item.count > 0);
      if (item.count > 0) b_.plan_items(piece % 2)[num_items + __popc(present & ptx::lanes_below())] = item;
      num_items += __popc(present);
    }
    if (b_.lane == 0) {
      b_.s.num_plan_items[piece % 2] = num_items;
      b_.s.num_taken[piece % 2] = 0;
    }
  }

  template <class Writer>
  __device__ void load_piece(Writer& writer, i32 piece) const {
    for (i32 idx = 0; idx < kConfig.plan_tokens(); ++idx) {
      for (i32 turn = 0; turn < kRanks; ++turn) {
        const i32 owner = owner_at(idx, turn);
        if constexpr (kConfig.is_by_pick()) {
          if (!load_picks(writer, piece, idx, owner)) return b_.fail_copy();
          continue;
        }
        const i32 row = b_.plan_rows(piece % 2)[idx * kRanks + owner];
        const RingItem item{.count = 1, .index = piece * kConfig.plan_tokens() + idx, .owner = static_cast<u16>(owner)};
        if (row >= 0 && !load_row(writer, item, row)) return b_.fail_copy();
      }
    }
  }

  // Every row of a token goes out as it is. False: the GPU has gone wrong.
  template <class Writer>
  __device__ bool load_picks(Writer& writer, i32 piece, i32 idx, i32 owner) const {
    for (i32 pick = 0; pick < kWidth; ++pick) {
      const i32 row = b_.plan_rows(piece % 2)[(idx * kRanks + owner) * kWidth + pick];
      const RingItem item{.count = 1,
                          .index = piece * kConfig.plan_tokens() + idx,
                          .owner = static_cast<u16>(pick << kPickShift | owner)};
      if (row >= 0 && !load_row(writer, item, row)) return false;
    }
    return true;
  }

  // False: the GPU has gone wrong.
  template <class Writer>
  __device__ bool load_row(Writer& writer, RingItem item, i32 row) const {
    for (item.chunk = 0; item.chunk < kConfig.num_chunks(); ++item.chunk) {
      if (!writer.reserve(1)) return false;
      const u32 num_bytes = static_cast<u32>(kConfig.chunk_elements(item.chunk) * dtype_bytes(kConfig.dtype));
      writer.announce(item, num_bytes);
      if (b_.lane == 0) {
        ptx::bulk_load(b_.push_slot(writer.slot(0)),
                       b_.a.rows + static_cast<i64>(row) * kConfig.row_bytes() +
                           static_cast<i64>(item.chunk) * kConfig.chunk * dtype_bytes(kConfig.dtype),
                       num_bytes, writer.barrier());
      }
      writer.advance(1);
    }
    return true;
  }

  const Block& b_;
};

}  // namespace weft::kernels
