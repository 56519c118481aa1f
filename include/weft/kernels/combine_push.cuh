// The contributor's part of combine: rows, or sums of a token's rows, are stored into the landing of the token's owner.
//   plan   one warp reads the receive plan, a piece ahead
//   load   one warp loads rows
//   sum    groups of warps make what goes on the wire (not for rank-major rows in their own type)
//   store  warps take turns to store it, and one posts how far they have come
#pragma once

#include "weft/kernels/combine_block.cuh"
#include "weft/kernels/combine_numbers.cuh"
#include "weft/kernels/post.cuh"
#include "weft/ptx/fp8_scale.h"

namespace weft::kernels {

template <CombineKernelConfig kConfig>
class CombinePush {
 public:
  using Block = CombineBlock<kConfig>;
  static constexpr i32 kRanks = kConfig.num_ranks;
  static constexpr i32 kWidth = kConfig.plan_width();
  static constexpr bool kHasPartials = kConfig.has_partials();
  static constexpr i32 kGroups = kConfig.partial_groups();
  static constexpr i32 kReaders = kHasPartials ? kGroups : kPushWarps;  // of the ring
  static constexpr i32 kGroupThreads = kPartialWarps * 32;
  static_assert(kRingCells % kReaders == 0 && kReaders >= kPushWarps);
  static_assert(!kHasPartials || (kConfig.partial_slots % kGroups == 0 && kConfig.partial_slots % kPushWarps == 0));
  using Row = Numbers<kConfig.dtype>;
  static constexpr i32 kVector = Row::kVector;

  __device__ explicit CombinePush(const Block& block) : b_(block) {}

  // ---- plan

  __device__ void plan() const {
    const i32 num_pieces = this->num_pieces();
    for (i32 piece = 0; piece < num_pieces; ++piece) {
      const u32 parity = static_cast<u32>(piece / 2 + 1) & 1u;  // the first wait for each passes: both are empty
      if (!sync::wait_barrier(&b_.s.plan_empty[piece % 2], parity)) return b_.fail_copy();
      read_plan(piece);
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
      if (!b_.has_failed()) load_piece(writer, piece);
      __syncwarp();
      if (b_.lane == 0) ptx::mbarrier_arrive(&b_.s.plan_empty[piece % 2]);
    }
    writer.end(kReaders);
  }

  // ---- sum

  __device__ void sum(i32 group, i32 thread) const {
    RingReader reader(b_.s.push, group, kGroups);
    i32 slot = group;
    u32 parity = 1;  // the first wait passes: every slot is empty
    for (bool goes_on = true; goes_on;) {
      if (!reader.wait() || !sync::wait_barrier(&b_.s.partial_empty[slot], parity)) return b_.fail_copy();
      const RingItem item = reader.item();
      goes_on = item.count != kRingEnd;
      if (goes_on) sum_item(item, b_.weights(reader.cell()), b_.partial_slot(slot), thread);
      if (thread == 0) b_.s.partial_item[slot] = item;
      reader.release();
      // A bulk store reads the partial sums.
      ptx::fence_proxy_async_shared();
      __syncwarp();
      if (b_.lane == 0) ptx::mbarrier_arrive(&b_.s.partial_full[slot]);
      slot += kGroups;
      if (slot >= kConfig.partial_slots) {
        slot -= kConfig.partial_slots;
        parity ^= 1;
      }
    }
  }

  // ---- store

  __device__ void store(i32 warp) const {
    RingReader reader(b_.s.push, warp, kPushWarps);
    i32 slot = warp;
    u32 parity = 0;
    i32 reached = -1, num_since = 0;  // a token before which all is stored, and stores since
    for (i32 num_stored = 0;; ++num_stored) {
      if (kHasPartials ? !sync::wait_barrier(&b_.s.partial_full[slot], parity) : !reader.wait()) return b_.fail_copy();
      const RingItem item = kHasPartials ? b_.s.partial_item[slot] : reader.item();
      if (item.count == kRingEnd) break;
      if (reached < 0) reached = item.index;
      if (b_.lane == 0) {
        store_item(item, kHasPartials ? b_.partial_slot(slot) : b_.push_slot(item.first));
        ptx::bulk_wait_read<kInFlight - 1>();
        if (num_stored >= kInFlight - 1) ptx::mbarrier_arrive(empty_barrier(warp, num_stored - (kInFlight - 1)));
      }
      if (++num_since == kLag) {
        if (b_.lane == 0) tell<kLag>(warp, static_cast<u32>(reached));
        reached = -1;
        num_since = 0;
      }
      reader.advance();
      slot += kPushWarps;
      if (slot >= kConfig.partial_slots) {
        slot -= kConfig.partial_slots;
        parity ^= 1;
      }
    }
    if (b_.lane == 0) tell<0>(warp, b_.has_failed() ? kPostStops : sync::kMaxProgress);
  }

  // ---- post

  __device__ void post() const {
    post_arrivals(b_.a.view, b_.flight, kRanks, b_.s.num_pushed, sync::kMaxProgress, kPushChannel);
  }

 private:
  // Stores of a warp that read shared memory at a time, at least one of its slots being left to the warps before it; and
  // stores that follow a token before it is told: by then it has arrived.
  static constexpr i32 kSlots = kHasPartials ? kConfig.partial_slots : kConfig.push_slots;
  static constexpr i32 kInFlight =
      min_of(max_of(kHasPartials ? kSlots / kPushWarps - 1 : kSlots / kPushWarps / 2, 1), 6);
  static constexpr i32 kLag = 4;

  // All but the last kPending stores of this thread have arrived.
  template <i32 kPending>
  __device__ void tell(i32 warp, u32 num_pushed) const {
    ptx::bulk_wait<kPending>();
    ptx::st_release_cta(&b_.s.num_pushed[warp], num_pushed);
  }

  __device__ void store_item(const RingItem& item, const u8* slot) const {
    u8* place = b_.landing(item.owner, b_.token_of(item.index), b_.a.view.rank);
    ptx::bulk_store(place + static_cast<i64>(item.chunk) * kConfig.wire_bytes(kConfig.chunk), slot,
                    static_cast<u32>(kConfig.wire_bytes(kConfig.chunk_elements(item.chunk))));
    ptx::bulk_commit();
  }

  // Of the item that the warp has stored as its `stored`th.
  __device__ u64* empty_barrier(i32 warp, i32 stored) const {
    const i32 item = warp + stored * kPushWarps;
    return kHasPartials ? &b_.s.partial_empty[item % CombineShared<kConfig>::kPartials]
                        : &b_.s.push.empty[item % kRingCells];
  }

  __device__ i32 num_pieces() const {
    i32 num_items = 0;
#pragma unroll
    for (i32 rank = 0; rank < kRanks; ++rank) num_items = max(num_items, b_.s.num_items[rank]);
    return (num_items + kConfig.plan_tokens() - 1) / kConfig.plan_tokens();
  }

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
        if (!kHasPartials && source == b_.a.view.rank) continue;  // read where they are
        row[step] = plan.row(source, b_.token_of(index))[entry % kWidth];
      }
#pragma unroll
      for (i32 step = 0; step < kAtOnce; ++step) {
        const i32 entry = at + step * 32;
        if (entry >= kNum) break;
        const bool is_row = row[step] >= 0 && row[step] < b_.a.num_rows;  // R19
        b_.plan_rows(piece % 2)[entry] = is_row ? row[step] : -1;
        if constexpr (kConfig.is_by_expert()) {
          b_.plan_weights(piece % 2)[entry] = is_row && b_.a.weights != nullptr ? b_.a.weights[row[step]] : 1.0f;
        }
      }
    }
  }

  // Owners take turns, each rank beginning with another, so that all links are in use.
  template <class Writer>
  __device__ void load_piece(Writer& writer, i32 piece) const {
    for (i32 idx = 0; idx < kConfig.plan_tokens(); ++idx) {
      for (i32 turn = 0; turn < kRanks; ++turn) {
        const i32 owner = (b_.a.view.rank + 1 + turn + idx) % kRanks;
        const i32 entry = (idx * kRanks + owner) * kWidth;
        if (!load_rows(writer, {.index = piece * kConfig.plan_tokens() + idx, .owner = owner},
                       b_.plan_rows(piece % 2) + entry, b_.plan_weights(piece % 2) + entry))
          return b_.fail_copy();
      }
    }
  }

  // The rows of one token; false: the GPU has gone wrong.
  template <class Writer>
  __device__ bool load_rows(Writer& writer, RingItem item, const i32* rows, const float* weights) const {
    constexpr i32 kParts = (kWidth + 31) / 32;  // of 32 picks
    i32 row[kParts], slot[kParts];
    item.count = 0;
#pragma unroll
    for (i32 part = 0; part < kParts; ++part) {
      const i32 pick = part * 32 + b_.lane;
      row[part] = pick < kWidth ? rows[pick] : -1;
      const u32 present = __ballot_sync(0xffffffffu, row[part] >= 0);
      slot[part] = item.count + __popc(present & ptx::lanes_below());
      item.count += __popc(present);
    }
    if (item.count == 0) return true;
    for (item.chunk = 0; item.chunk < kConfig.num_chunks(); ++item.chunk) {
      if (!writer.reserve(item.count)) return false;
      const u32 num_bytes = static_cast<u32>(kConfig.chunk_elements(item.chunk) * Row::kBytes);
      if constexpr (kConfig.is_by_expert()) {
#pragma unroll
        for (i32 part = 0; part < kParts; ++part) {
          if (row[part] >= 0) b_.weights(writer.cell())[slot[part]] = weights[part * 32 + b_.lane];
        }
      }
      writer.announce(item, static_cast<u32>(item.count) * num_bytes);
#pragma unroll
      for (i32 part = 0; part < kParts; ++part) {
        if (row[part] < 0) continue;
        ptx::bulk_load(b_.push_slot(writer.slot(slot[part])),
                       b_.a.rows + static_cast<i64>(row[part]) * kConfig.row_bytes() +
                           static_cast<i64>(item.chunk) * kConfig.chunk_bytes(),
                       num_bytes, writer.barrier());
      }
      writer.advance(item.count);
    }
    return true;
  }

  // Rows whose vectors are loaded together, and their weights.
  static constexpr i32 kAtOnce = !kConfig.wire_is_fp8 ? 4 : kConfig.dtype == Dtype::kFp32 ? 1 : 2;
  struct Rows {
    const u8* row[kAtOnce];
    float weight[kAtOnce];
  };

  __device__ Rows find_rows(const RingItem& item, const float* weights, i32 first) const {
    Rows rows;
#pragma unroll
    for (i32 idx = 0; idx < kAtOnce; ++idx) {
      const i32 slot = item.first + first + idx;
      rows.row[idx] = b_.push_slot(slot < kConfig.push_slots ? slot : slot - kConfig.push_slots);
      rows.weight[idx] = kConfig.is_by_expert() && first + idx < item.count ? weights[first + idx] : 1.0f;
    }
    return rows;
  }

  __device__ void sum_item(const RingItem& item, const float* weights, u8* out, i32 thread) const {
    const i32 elements = kConfig.chunk_elements(item.chunk);
    const Rows rows = find_rows(item, weights, 0);
    if constexpr (kConfig.wire_is_fp8) {
      quantize_sums(item, weights, rows, out, thread);
    } else {
      for (i32 element = thread * kVector; element < elements; element += kGroupThreads * kVector) {
        float total[kVector];
        add_picks(item, weights, rows, element, total);
        *reinterpret_cast<Packed*>(out + element * Row::kBytes) = Row::pack(total);
      }
    }
  }

  // Picks in the order of k; `rows`: the first of them. A sum that begins with the first product instead of +0 may be -0
  // where the contract has +0: the owner, who begins with +0, gets the same from both.
  __device__ void add_picks(const RingItem& item, const float* weights, const Rows& rows, i32 element,
                            float (&total)[kVector]) const {
    add_rows<true>(rows, item.count, element, total);
    for (i32 first = kAtOnce; first < item.count; first += kAtOnce) {
      add_rows<false>(find_rows(item, weights, first), item.count - first, element, total);
    }
  }

  // Each product is rounded, then added.
  template <bool kIsFirst>
  __device__ static void add_rows(const Rows& rows, i32 count, i32 element, float (&total)[kVector]) {
    Packed packed[kAtOnce];
#pragma unroll
    for (i32 idx = 0; idx < kAtOnce; ++idx) {
      if (idx < count) packed[idx] = Row::load(rows.row[idx], element);
    }
#pragma unroll
    for (i32 idx = 0; idx < kAtOnce; ++idx) {
      if (idx >= count) break;
      float values[kVector];
      Row::unpack(packed[idx], values);
#pragma unroll
      for (i32 at = 0; at < kVector; ++at) {
        const float product = rows.weight[idx] * values[at];
        total[at] = kIsFirst && idx == 0 ? product : total[at] + product;
      }
    }
  }

  // Lanes that share a group of 128 elements; their vectors lie kLanes vectors apart.
  static constexpr i32 kLanes = kConfig.is_by_expert() || kConfig.dtype == Dtype::kFp32 ? 8 : 4;
  static constexpr i32 kVectors = kQuantizeGroup / kLanes / kVector;

  // What a lane has of a group: sums as float, rows as they came.
  struct Part {
    Packed packed[kConfig.is_by_expert() ? 1 : kVectors];
    float sum[kConfig.is_by_expert() ? kVectors : 1][kVector];
  };

  __device__ void quantize_sums(const RingItem& item, const float* weights, const Rows& rows, u8* out,
                                i32 thread) const {
    const i32 elements = kConfig.chunk_elements(item.chunk);
    const i32 lane = thread % kLanes;
    for (i32 group = thread / kLanes; group * kQuantizeGroup < elements; group += kGroupThreads / kLanes) {
      // Each of four groups begins with another of its vectors, so that the lanes of a warp meet in no bank.
      const auto element_of = [&](i32 idx) {
        return group * kQuantizeGroup + ((idx ^ (group & min_of(kVectors - 1, 3))) * kLanes + lane) * kVector;
      };
      Part part;
      float largest = 0.0f;
#pragma unroll
      for (i32 idx = 0; idx < kVectors; ++idx) {
        const bool is_there = element_of(idx) < elements;
        if constexpr (kConfig.is_by_expert()) {
          if (is_there) add_picks(item, weights, rows, element_of(idx), part.sum[idx]);
          if (is_there) largest = ptx::max_nan(largest, Row::magnitude(part.sum[idx]));
        } else {
          part.packed[idx] = is_there ? Row::load(rows.row[0], element_of(idx)) : Packed{};
        }
      }
      if constexpr (!kConfig.is_by_expert()) largest = Row::magnitude(part.packed);
      // The lanes of a group go through the loop together; those of other groups may have left it.
      const u32 members = ((1u << kLanes) - 1) << (b_.lane / kLanes * kLanes);
#pragma unroll
      for (i32 step = 1; step < kLanes; step *= 2) {
        largest = ptx::max_nan(largest, __shfl_xor_sync(members, largest, step));
      }
      const ptx::Fp8Scale scale = ptx::fp8_scale(ptx::float_bits(largest), Quantize::kFp8);
#pragma unroll
      for (i32 idx = 0; idx < kVectors; ++idx) {
        if (element_of(idx) >= elements) continue;
        if constexpr (!kConfig.is_by_expert()) Row::unpack(part.packed[idx], part.sum[0]);
        float (&values)[kVector] = part.sum[kConfig.is_by_expert() ? idx : 0];
#pragma unroll
        for (i32 at = 0; at < kVector; ++at) values[at] *= scale.factor;
        Fp8Numbers<kVector>::store(out, element_of(idx), values);
      }
      if (lane == 0) *reinterpret_cast<u32*>(out + kConfig.scales_at(elements) + group * 4) = scale.bits;
    }
  }

  const Block& b_;
};

}  // namespace weft::kernels
