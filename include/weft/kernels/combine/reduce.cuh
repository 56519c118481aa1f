// The owner's part of combine: contributions to this rank's tokens are loaded, added in the order that is asked for, written.
// A contribution is a row in a peer's heap, or what the peer has pushed into this rank's landing; by pick: the row of a pick there.
#pragma once

#include "weft/kernels/combine/block.cuh"
#include "weft/kernels/combine/nodes.cuh"
#include "weft/kernels/domains.cuh"
#include "weft/kernels/numbers.cuh"

namespace weft::kernels {

template <CombineKernelConfig kConfig>
class CombineReduce {
 public:
  using Block = CombineBlock<kConfig>;
  static constexpr i32 kRanks = kConfig.num_ranks;
  static constexpr i32 kWarps = kConfig.reduce_warps();
  using Row = Numbers<kConfig.dtype>;
  // Elements that a lane adds at a time: 16 bytes of what is loaded.
  static constexpr i32 kVector = kConfig.wire_is_fp8 ? 16 : Row::kVector;
  using Codes = Fp8Numbers<kVector>;

  static constexpr i32 kRings = kConfig.reduce_rings;
  static constexpr i32 kReaders = kConfig.reduce_groups() / kRings;  // of a ring

  __device__ CombineReduce(const Block& block, i32 ring)
      : b_(block), ring_(kRings == 1 ? 0 : ring), num_items_(block.s.num_items[block.a.view.rank]) {}

  // One warp a ring, which gets every kRings-th token; lane r has to do with contributor r.
  __device__ void load() {
    RingWriter writer(b_.s.reduce[ring_]);
    i32 now = -1, next = read_plan(0);
    for (i32 turn = 0; index_of(turn) < num_items_; ++turn) {
      if (turn % kBatch == 0) {
        now = next;
        next = read_plan(turn + kBatch);
      }
      const i32 row = __shfl_sync(0xffffffffu, now, turn % kBatch * kPadded + b_.lane % kPadded);
      const i32 mine = b_.lane < kRanks ? row : -1;
      if constexpr (kConfig.is_by_pick()) {
        if (!load_picks(writer, index_of(turn), mine)) break;
      } else if (!load_token(writer, index_of(turn), mine)) {
        break;
      }
    }
    writer.end(kReaders);
  }

  // With nodes: an item of this rank's token, or of a token that it adds for another node. `row`, `record`: in the lane of a
  // contributor, its row, or what has come of its node.
  template <class Writer>
  __device__ bool load_item(Writer& writer, i32 index, i32 row, i32 owner, i32 token_index, const u8* record) {
    return load_token(writer, index, row, owner, token_index, record);
  }

  // One group of warps of those that the ring serves. An item is dealt out to them in parts; the next item begins with the warp
  // after the last that had one.
  __device__ void add(i32 group, i32 warp) const {
    constexpr i32 kPartElements = 32 * kVector;
    constexpr i32 kTurn = kWarps - (kConfig.part() + kPartElements - 1) / kPartElements % kWarps;
    RingReader reader(b_.s.reduce[ring_], group, kReaders);
    for (bool goes_on = true; goes_on;) {
      if (!reader.template wait<kConfig.filler_waits()>(&b_.a.view.host->timeout_ns)) return b_.fail_copy();
      const RingItem item = reader.item();
      goes_on = item.count != kRingEnd;
      if (goes_on) {
        const u8* own = nullptr;
        if constexpr (kConfig.adds_own_rows()) {
          if (own_place(item) != kNoOwn)
            own = own_row(b_.s.own_row[ring_][reader.cell()]) + item.chunk * kConfig.part() * Row::kBytes;
        }
        if constexpr (kConfig.is_by_pick()) {
          add_picks(item, b_.pick_weights(ring_, reader.cell()), warp);
        } else {
          add_item(item, own, warp);
        }
      }
      reader.release();
      warp = (warp + kTurn) % kWarps;
    }
  }

 private:
  static constexpr bool kHasDomains = kConfig.order.has_domains();
  static constexpr bool kByLastPick = kConfig.order.is_by_last_pick();
  static constexpr i32 kTopk = kConfig.top_k;
  static_assert(!kHasDomains || !kByLastPick);
  // In place of an item's owner stands which of its contributions is this rank's own row, added from where it is; or kNoOwn. With
  // domains the mask of its contributors, from which this follows.
  static constexpr u16 kNoOwn = 0xffff;
  static_assert(!kHasDomains || kRanks <= 16);
  __device__ i32 own_place(const RingItem& item) const {
    if constexpr (!kHasDomains) return item.owner;
    const u32 own_lane = 1u << b_.a.view.rank;
    return (item.owner & own_lane) != 0 ? __popc(item.owner & (own_lane - 1)) : kNoOwn;
  }
  __device__ const u8* own_row(i32 row) const { return b_.a.rows + static_cast<i64>(row) * kConfig.row_bytes(); }

  // Lanes of a token in read_plan: the next power of two.
  static constexpr i32 kPadded = kRanks <= 1 ? 1 : kRanks <= 2 ? 2 : kRanks <= 4 ? 4 : kRanks <= 8 ? 8 : 16;
  static constexpr i32 kBatch = 32 / kPadded;  // tokens whose entries are read at a time, while those before are used

  __device__ i32 index_of(i32 turn) const { return turn * kRings + ring_; }

  // Row of contributor lane % kPadded, or -1: it has none.
  __device__ i32 read_plan(i32 first_turn) const {
    const i32 index = index_of(first_turn + b_.lane / kPadded);
    const i32 rank = b_.lane % kPadded;
    if (index >= num_items_ || rank >= kRanks || !b_.flight.is_active(rank)) return -1;
    const GpuSendPlan<const i32> plan{b_.a.send_plan, b_.a.send_plan_tokens, kRanks};
    const i64 token = b_.token_of(index);
    if constexpr (kConfig.is_by_expert()) return static_cast<i32>(plan.ranks(token).bit(rank)) - 1;
    return plan.row()[token * kRanks + rank];
  }

  // Whether a row that is to be pulled lies in its tensor, and one that is pushed has arrived.
  __device__ bool is_there(i32 index, i32 row) {
    const Contributor& from = b_.s.contributor[b_.lane];
    if (!kConfig.has_partials() && from.is_pulled != 0) {
      if (row < from.num_rows) return true;
      b_.fail(transport::ErrorCause::kBadPeerWord, Phase::kReduce, b_.lane);
      return false;
    }
    const u32 target = static_cast<u32>(index + 1);
    if (num_arrived_ >= target) return true;
    const i32 block = static_cast<i32>(blockIdx.x);
    if (!transport::wait_progress(b_.a.view, b_.flight, b_.lane, block, kPushChannel, target)) return false;
    num_arrived_ = transport::progress(b_.a.view, b_.flight, b_.lane, block, kPushChannel);
    // What the peer's bulk stores have written is read by bulk loads of this thread.
    ptx::fence_proxy_async();
    return true;
  }

  // With nodes: `index` of the item, `token_index` in the owner's tokens; `record`: what has come of this lane's node.
  template <class Writer>
  __device__ bool load_token(Writer& writer, i32 index, i32 row, [[maybe_unused]] i32 owner = 0,
                             [[maybe_unused]] i32 token_index = 0, [[maybe_unused]] const u8* record = nullptr) {
    const bool is_lost = kConfig.has_nodes() ? row >= 0 && record == nullptr && !is_there(token_index, row)
                                             : row >= 0 && !is_there(index, row);
    if (is_lost) b_.leave();
    if (__any_sync(0xffffffffu, is_lost || b_.has_failed())) return false;
    u32 loaded = __ballot_sync(0xffffffffu, row >= 0);  // whose rows come into slots
    const u16 contributors = static_cast<u16>(loaded);
    i32 own = -1;
    u16 place_of_own = kNoOwn;
    if constexpr (kConfig.adds_own_rows()) {
      const u32 own_lane = 1u << b_.a.view.rank;
      loaded &= ~own_lane;
      own = __shfl_sync(0xffffffffu, row, b_.a.view.rank);
      if (own >= 0) {
        place_of_own = static_cast<u16>(__popc(loaded & (own_lane - 1)));
        if constexpr (kByLastPick)
          place_of_own = static_cast<u16>(__shfl_sync(~0u, num_before(loaded, index), b_.a.view.rank));
        if (b_.lane == 0) ptx::bulk_prefetch(own_row(own), static_cast<u32>(kConfig.row_bytes()));
      }
    }
    const bool is_loaded = (loaded >> b_.lane & 1u) != 0;
    const i32 count = __popc(loaded);
    i32 place_by_last = 0;
    if constexpr (kByLastPick) place_by_last = num_before(loaded, index);
    const u8* source = nullptr;
    if (is_loaded) {
      const Contributor& from = b_.s.contributor[b_.lane];
      source = !kConfig.has_partials() && from.is_pulled != 0
                   ? from.rows + static_cast<i64>(row) * kConfig.row_bytes()
                   : b_.landing(kConfig.has_nodes() ? owner : b_.a.view.rank,
                                b_.token_of(kConfig.has_nodes() ? token_index : index), b_.lane)
                         .own();
      if constexpr (kConfig.has_nodes()) source = record != nullptr ? record : source;
    }
    for (i32 part = 0; part < kConfig.num_parts(); ++part) {
      if (!writer.reserve(count)) {
        b_.fail_copy();
        return false;
      }
      const u32 num_bytes = static_cast<u32>(bytes_of(kConfig.part_elements(part), record));
      if constexpr (kConfig.adds_own_rows()) {
        if (b_.lane == 0) b_.s.own_row[ring_][writer.cell()] = own;
      }
      const u16 owner = kHasDomains ? contributors : place_of_own;
      writer.announce(
          {.count = count, .index = index, .chunk = static_cast<u16>(part), .owner = owner},
          kConfig.node_sum_is_fp8() ? sum_of_lanes(is_loaded ? num_bytes : 0) : static_cast<u32>(count) * num_bytes);
      if (is_loaded) {
        const i32 place = kByLastPick ? place_by_last : __popc(loaded & ptx::lanes_below());
        ptx::bulk_load(b_.reduce_slot(ring_, writer.slot(place)),
                       source + static_cast<i64>(part) * bytes_of(kConfig.part(), record), num_bytes, writer.barrier());
      }
      writer.advance(count);
    }
    return true;
  }

  // Of what a lane loads: a record, or a row or contribution in its own type.
  __device__ static i32 bytes_of(i32 elements, [[maybe_unused]] const u8* record) {
    if constexpr (kConfig.node_sum_is_fp8()) {
      if (record != nullptr) return kConfig.node_bytes_of(elements);
    }
    return kConfig.wire_bytes_of(elements);
  }
  __device__ static u32 sum_of_lanes(u32 number) { return __reduce_add_sync(0xffffffffu, number); }

  // How many of the ranks in `others` are added before rank `lane`: those whose last pick of the token comes before its last.
  __device__ i32 num_before(u32 others, i32 index) const {
    const GpuSendPlan<const i32> plan{b_.a.send_plan, b_.a.send_plan_tokens, kConfig.is_by_expert() ? kTopk : kRanks};
    const i32* destination = plan.destination() + static_cast<i64>(b_.token_of(index)) * kTopk;
    i32 last = -1;
    for (i32 first = 0; first < kTopk; first += 32) {
      const i32 to = first + b_.lane < kTopk ? destination[first + b_.lane] : -1;
#pragma unroll 1
      for (i32 rank = 0; rank < kRanks; ++rank) {
        const u32 picks = __ballot_sync(0xffffffffu, to == rank);
        if (picks != 0 && b_.lane == rank) last = first + 31 - __clz(static_cast<i32>(picks));
      }
    }
    i32 num = 0;
#pragma unroll 1
    for (i32 rank = 0; rank < kRanks; ++rank) {
      const i32 other = __shfl_sync(0xffffffffu, last, rank);
      const bool is_before = other < last || (other == last && rank < b_.lane);
      num += (others >> rank & 1u) != 0 && is_before ? 1 : 0;
    }
    return num;
  }

  // By pick: lane k has to do with pick k. `row`: as load_token() has it, by rank.
  template <class Writer>
  __device__ bool load_picks(Writer& writer, i32 index, i32 row) {
    static_assert(!kConfig.is_by_pick() || kTopk <= 32);
    const bool is_lost = row >= 0 && !is_there(index, row);
    if (is_lost) b_.leave();
    if (__any_sync(0xffffffffu, is_lost || b_.has_failed())) return false;
    const i64 token = b_.token_of(index);
    const GpuSendPlan<const i32> plan{b_.a.send_plan, b_.a.send_plan_tokens, kTopk};
    const bool is_pick = b_.lane < kTopk;
    const i32 to = is_pick ? plan.destination()[token * kTopk + b_.lane] : -1;
    const bool has_weight = is_pick && b_.a.owner_weights != nullptr;
    const i64 pick = token * kTopk + b_.lane;
    const bool has_id = has_weight && b_.a.owner_ids != nullptr;
    const bool is_gone = has_id && b_.a.owner_ids[pick * b_.a.owner_id_words] < 0;
    const float weight = is_gone ? 0.0f : has_weight ? b_.a.owner_weights[pick] : 1.0f;
    const bool is_loaded = to >= 0 && to < kRanks && b_.flight.is_active(to) && weight != 0.0f;
    const u32 loaded = __ballot_sync(0xffffffffu, is_loaded);
    const i32 count = __popc(loaded), place = __popc(loaded & ptx::lanes_below());
    ptx::fence_proxy_async();  // what another lane has acquired is loaded in bulk by this one
    const u8* source = is_loaded ? b_.landing(b_.a.view.rank, token, b_.lane).own() : nullptr;
    for (i32 part = 0; part < kConfig.num_parts(); ++part) {
      if (!writer.reserve(count)) {
        b_.fail_copy();
        return false;
      }
      const u32 num_bytes = static_cast<u32>(kConfig.wire_bytes_of(kConfig.part_elements(part)));
      if (is_loaded) b_.pick_weights(ring_, writer.cell())[place] = weight;
      writer.announce({.count = count, .index = index, .chunk = static_cast<u16>(part), .owner = kNoOwn},
                      static_cast<u32>(count) * num_bytes);
      if (is_loaded) {
        ptx::bulk_load(b_.reduce_slot(ring_, writer.slot(place)),
                       source + static_cast<i64>(part) * kConfig.wire_bytes_of(kConfig.part()), num_bytes,
                       writer.barrier());
      }
      writer.advance(count);
    }
    return true;
  }

  // The bias, then each row times its weight.
  __device__ void add_picks(const RingItem& item, const float* weights, i32 warp) const {
    const i32 elements = kConfig.part_elements(item.chunk);
    const i32 column = item.chunk * kConfig.part();
    u8* out = b_.a.out + b_.token_of(item.index) * static_cast<i64>(kConfig.row_bytes()) + column * Row::kBytes;
    for (i32 first = warp * 32 * kVector; first < elements; first += kWarps * 32 * kVector) {
      const i32 element = min(first + b_.lane * kVector, elements - kVector);
      float total[kVector] = {};
      if (b_.a.bias != nullptr) add_bias(b_.token_of(item.index), column + element, total);
#pragma unroll 1
      for (i32 next = 0; next < item.count; ++next) {
        const i32 slot = item.first + next;
        float values[kVector];
        Row::unpack(
            Row::load(b_.reduce_slot(ring_, slot < kConfig.ring_slots() ? slot : slot - kConfig.ring_slots()), element),
            values);
#pragma unroll
        for (i32 at = 0; at < kVector; ++at) total[at] += weights[next] * values[at];
      }
      *reinterpret_cast<Packed*>(out + element * Row::kBytes) = Row::pack(total);
    }
  }

  static constexpr i32 kAtOnce = 4;  // contributions whose vectors are loaded together

  // Where the contributions first .. first + kAtOnce of an item are.
  __device__ void find_rows(const RingItem& item, const u8* own, i32 first, const u8* (&rows)[kAtOnce]) const {
#pragma unroll
    for (i32 idx = 0; idx < kAtOnce; ++idx) {
      const i32 at = first + idx;
      i32 slot = item.first + at - (kConfig.adds_own_rows() && at > own_place(item) ? 1 : 0);
      if (slot >= kConfig.ring_slots()) slot -= kConfig.ring_slots();
      rows[idx] = kConfig.adds_own_rows() && at == own_place(item) ? own : b_.reduce_slot(ring_, slot);
    }
  }
  __device__ i32 num_rows(const RingItem& item) const {
    return item.count + (kConfig.adds_own_rows() && own_place(item) != kNoOwn ? 1 : 0);
  }

  // By code that knows how many there are: nothing is asked between loads and additions. With a bias one by one, which saves
  // registers.
  __device__ void add_item(const RingItem& item, const u8* own, i32 warp) const {
    const bool is_node_sum = kConfig.has_nodes() && item.index < 0;
    if constexpr (kHasDomains) {
      if (!is_node_sum) return add_domains(item, own, warp);
    }
    if constexpr (kConfig.has_nodes() && kConfig.wire_is_fp8) {
      if (is_node_sum) return copy_item(item, warp);
    }
    const i32 count = num_rows(item);
    if (b_.a.bias != nullptr && !is_node_sum) return add_rows<1, true>(item, own, warp);
    if (count <= 1) return add_rows<1>(item, own, warp);
    if (count == 2) return add_rows<2>(item, own, warp);
    if (count == 3) return add_rows<3>(item, own, warp);
    add_rows<4>(item, own, warp);
  }

  // The first kCount contributions, then any others.
  template <i32 kCount, bool kHasBias = false>
  __device__ void add_rows(const RingItem& item, const u8* own, i32 warp) const {
    const i32 count = num_rows(item);
    const i32 elements = kConfig.part_elements(item.chunk);
    const i32 column = item.chunk * kConfig.part();
    u8* out = b_.a.out + b_.token_of(item.index) * static_cast<i64>(kConfig.row_bytes()) + column * Row::kBytes;
    if constexpr (kConfig.has_nodes()) out = CombineNodes<kConfig>(b_).out_of(item);
    const u8* rows[kAtOnce];
    find_rows(item, own, 0, rows);
    for (i32 first = warp * 32 * kVector; first < elements; first += kWarps * 32 * kVector) {
      // Lanes beyond the end do the last vector too: the whole warp goes through the loop.
      const i32 element = min(first + b_.lane * kVector, elements - kVector);
      float total[kVector] = {};
      const Place place = place_of(element, elements);
      constexpr bool kBiasFirst = kConfig.order.has_bias_first();
      if constexpr (kHasBias && kBiasFirst) add_bias(b_.token_of(item.index), column + element, total);
      if (count > 0) add_vectors<kCount>(rows, place, total);
      if constexpr (kHasBias || (kCount == kAtOnce && kRanks > kAtOnce)) {
#pragma unroll 1
        for (i32 next = kCount; next < count; ++next) {
          const u8* more[kAtOnce];
          find_rows(item, own, next, more);
          add_vectors<1>(more, place, total);
        }
      }
      if constexpr (kHasBias && !kBiasFirst) add_bias(b_.token_of(item.index), column + element, total);
      if constexpr (kConfig.node_sum_is_fp8()) {  // of a node: add_domains() has the owner's
        auto* scales = reinterpret_cast<float*>(out + kConfig.scales_at(elements));
        Domains<kConfig.order, kConfig.dtype>::store(total, out, element, scales, first + b_.lane * kVector < elements);
        continue;
      }
#pragma unroll
      for (i32 part = 0; part < kVector; part += Row::kVector) {
        *reinterpret_cast<Packed*>(out + (element + part) * Row::kBytes) = Row::pack(&total[part]);
      }
    }
  }

  // With nodes of one rank: the sum is its one contribution, or nothing.
  __device__ void copy_item(const RingItem& item, i32 warp) const {
    u8* out = CombineNodes<kConfig>(b_).out_of(item);
    const u8* row = b_.reduce_slot(ring_, item.first);
    const i32 num_bytes = kConfig.wire_bytes_of(kConfig.part_elements(item.chunk));
    for (i32 at = (warp * 32 + b_.lane) * 16; at < num_bytes; at += kWarps * 32 * 16) {
      *reinterpret_cast<Packed*>(out + at) = item.count > 0 ? *reinterpret_cast<const Packed*>(row + at) : Packed{};
    }
  }

  // Domain by domain, ranks ascending in each.
  __device__ void add_domains(const RingItem& item, const u8* own, i32 warp) const {
    using Sums = Domains<kConfig.order, kConfig.dtype>;
    constexpr i32 kMost = kConfig.order.sum_domain < kAtOnce ? kConfig.order.sum_domain : kAtOnce;
    const i32 elements = kConfig.part_elements(item.chunk);
    const i32 column = item.chunk * kConfig.part();
    u8* out = b_.a.out + b_.token_of(item.index) * static_cast<i64>(kConfig.row_bytes()) + column * Row::kBytes;
    [[maybe_unused]] u32 mates = 0;
    if constexpr (kConfig.node_sum_is_fp8()) {
      constexpr i32 kNode = kConfig.node_ranks;
      mates = ((1u << kNode) - 1u) << b_.a.view.rank / kNode * kNode;
    }
    for (i32 first = warp * 32 * kVector; first < elements; first += kWarps * 32 * kVector) {
      // The whole warp goes through the loop, but only lanes before the end know the scale of what they have.
      const i32 element = min(first + b_.lane * kVector, elements - kVector);
      const Place place = place_of(element, elements);
      float total[kVector] = {};
      i32 next = 0;
#pragma unroll 1
      for (u32 left = item.owner; left != 0;) {
        const u32 domain = Sums::first_of(left);
        left &= ~domain;
        if constexpr (kConfig.node_sum_is_fp8()) {
          if ((domain & mates) == 0) {  // has come as a sum
            const u8* rows[kAtOnce];
            find_rows(item, own, next++, rows);
            add_fp8(rows[0], element, elements, total);
            continue;
          }
        }
        float sum[kVector] = {};
#pragma unroll 1
        for (const i32 end = next + __popc(domain); next < end;) {
          const u8* rows[kAtOnce];
          find_rows(item, own, next, rows);
          const bool is_full = end - next >= kMost;
          if (is_full) {
            add_vectors<kMost>(rows, place, sum);
          } else {
            add_vectors<1>(rows, place, sum);
          }
          next += is_full ? kMost : 1;
        }
        Sums::add(sum, total);
      }
      if (b_.a.bias != nullptr) add_bias(b_.token_of(item.index), column + element, total);
      if (first + b_.lane * kVector < elements)
        *reinterpret_cast<Packed*>(out + element * Row::kBytes) = Row::pack(total);
    }
  }

  // Where an element stands in a slot.
  struct Place {
    i32 element = 0;
    i32 scale = 0;  // in bytes
  };
  __device__ static Place place_of(i32 element, i32 elements) {
    if constexpr (!kConfig.wire_is_fp8) return {element, 0};
    const i32 chunk = kConfig.slot_chunks == 1 ? 0 : static_cast<i32>(static_cast<u32>(element) / kConfig.chunk);
    const i32 before = chunk * kConfig.chunk;
    const i32 length = kConfig.hidden % kConfig.chunk == 0 ? kConfig.chunk : min(elements - before, kConfig.chunk);
    const i32 begin = chunk * kConfig.wire_bytes(kConfig.chunk);
    const i32 group = static_cast<i32>(static_cast<u32>(element - before) / kQuantizeGroup);
    return {begin + element - before, begin + kConfig.scales_at(length) + group * 4};
  }

  template <i32 kCount>
  __device__ static void add_vectors(const u8* const (&rows)[kAtOnce], const Place& place, float (&total)[kVector]) {
    if constexpr (kConfig.wire_is_fp8) {
      typename Codes::Codes codes[kCount];
#pragma unroll
      for (i32 idx = 0; idx < kCount; ++idx) codes[idx] = Codes::load(rows[idx], place.element);
#pragma unroll
      for (i32 idx = 0; idx < kCount; ++idx) {
        const float scale = *reinterpret_cast<const float*>(rows[idx] + place.scale);
        float values[kVector];
        Codes::unpack(codes[idx], values);
#pragma unroll
        for (i32 at = 0; at < kVector; ++at) total[at] = ptx::add_exact_product(total[at], values[at], scale);
      }
    } else {
      Packed packed[kCount];
#pragma unroll
      for (i32 idx = 0; idx < kCount; ++idx) packed[idx] = Row::load(rows[idx], place.element);
#pragma unroll
      for (i32 idx = 0; idx < kCount; ++idx) {
        float values[kVector];
        Row::unpack(packed[idx], values);
#pragma unroll
        for (i32 at = 0; at < kVector; ++at) total[at] += values[at];
      }
    }
  }

  // Of a part in FP8: its codes, then its scales.
  __device__ static void add_fp8(const u8* row, i32 element, i32 elements, float (&total)[kVector]) {
    const float scale = reinterpret_cast<const float*>(row + kConfig.scales_at(elements))[element / kQuantizeGroup];
    float values[kVector];
    Codes::unpack(Codes::load(row, element), values);
#pragma unroll
    for (i32 at = 0; at < kVector; ++at) total[at] = ptx::add_exact_product(total[at], values[at], scale);
  }

  __device__ void add_bias(i64 token, i32 column, float (&total)[kVector]) const {
    const u8* bias = b_.a.bias + token * b_.a.bias_row_bytes;
#pragma unroll
    for (i32 part = 0; part < kVector; part += Row::kVector) {
      float values[Row::kVector];
      if (b_.a.bias_is_fp32) {
#pragma unroll
        for (i32 at = 0; at < Row::kVector; ++at) values[at] = reinterpret_cast<const float*>(bias)[column + part + at];
      } else {
        Row::unpack(Row::load(bias, column + part), values);
      }
#pragma unroll
      for (i32 at = 0; at < Row::kVector; ++at) total[part + at] += values[at];
    }
  }

  const Block& b_;
  const i32 ring_;
  const i32 num_items_;
  u32 num_arrived_ = 0;  // tokens whose rows of contributor `lane` have arrived
};

}  // namespace weft::kernels
