// What a contributor makes of its rows: the sum of a token's picks, or the FP8 form of it, chunk by chunk. Groups of warps take
// items (a chunk of a token) in turn; the warps of a group take turns in its units: 32 lanes times some vectors. Each lane loads
// the vectors of all rows into registers, some units ahead; the result goes into a slot, which a store warp sends
// (combine_push.cuh).
#pragma once

#include "weft/kernels/combine_block.cuh"
#include "weft/kernels/combine_numbers.cuh"
#include "weft/ptx/fp8_scale.h"
#include "weft/ptx/load_vector.cuh"

namespace weft::kernels {

template <CombineKernelConfig kConfig>
class CombineSum {
 public:
  using Block = CombineBlock<kConfig>;
  using Row = Numbers<kConfig.dtype>;
  static constexpr i32 kVector = Row::kVector;
  static constexpr i32 kGroups = kConfig.partial_groups();
  static constexpr i32 kWarps = kConfig.partial_warps();
  static constexpr i32 kVectors = kConfig.sum_vectors();  // of a lane in a unit
  static constexpr i32 kUnit = kConfig.sum_unit();        // elements
  static_assert(kConfig.partial_slots % kGroups == 0 && kConfig.partial_slots % kPushWarps == 0);
  static_assert(kGroups >= kPushWarps);

  __device__ CombineSum(const Block& block, i32 group, i32 warp)
      : b_(block), group_(group), warp_(warp), first_(lane_element(block.lane)), slot_(group) {}

  __device__ void run(i32 num_pieces) {
    constexpr i32 kChunks = kConfig.num_push_chunks();
    i32 at = group_;  // in chunks of items of the piece
    for (i32 piece = 0; piece < num_pieces; ++piece) {
      if (!sync::wait_barrier(&b_.s.plan_full[piece % 2], static_cast<u32>(piece / 2) & 1u)) return b_.fail_copy();
      const i32 num_here = b_.s.num_plan_items[piece % 2] * kChunks;
      for (; at < num_here; at += kGroups) {
        RingItem item = b_.plan_items(piece % 2)[at / kChunks];
        item.chunk = static_cast<u16>(at % kChunks);
        if (!make_item(item, piece)) return b_.fail_copy();
      }
      at -= num_here;
      __syncwarp();
      if (b_.lane == 0) ptx::mbarrier_arrive(&b_.s.plan_empty[piece % 2]);
    }
    if (at >= kPushWarps) return;
    // Behind the last item: what each store warp sees last. It frees no slot after that, so nobody else may wait for one.
    RingItem last;
    last.count = kRingEnd;
    if (!wait_slot()) return b_.fail_copy();
    publish(last);
  }

 private:
  static constexpr i32 kStep = kWarps * kUnit;  // from a unit of a warp to its next
  // Vectors of a lane under way: as many as registers hold.
  static constexpr i32 kLoads = kConfig.is_by_expert() && kConfig.wire_is_fp8 ? 4 : 8;

  // With FP8, lanes that share a group of 128 elements: their vectors lie kLanes vectors apart.
  static constexpr i32 kLanes = 8;
  static constexpr i32 kGroupVectors = kQuantizeGroup / kLanes / kVector;
  static constexpr i32 kLaneGroups = kConfig.wire_is_fp8 ? kVectors / kGroupVectors : 1;
  static_assert(kLaneGroups == 1 || kLaneGroups == 2);
  static_assert(kLaneGroups == 1 || !kConfig.is_by_expert());

  // Of a unit: where the lane's first vector begins, and its idx-th after that.
  __device__ static i32 lane_element(i32 lane) {
    if constexpr (!kConfig.wire_is_fp8) return lane * kVector;
    return lane / kLanes * kQuantizeGroup + lane % kLanes * kVector;
  }
  __device__ static constexpr i32 offset_of(i32 idx) {
    if constexpr (!kConfig.wire_is_fp8) return idx * 32 * kVector;
    return idx / kGroupVectors * (32 / kLanes) * kQuantizeGroup + idx % kGroupVectors * kLanes * kVector;
  }
  static constexpr bool kHasWholeUnits = kConfig.hidden % kUnit == 0 && kConfig.push_chunk() % kUnit == 0;
  // Of a unit that is there.
  __device__ static bool has(i32 element, i32 elements) { return kHasWholeUnits || element < elements; }

  __device__ bool wait_slot() const { return sync::wait_barrier(&b_.s.partial_empty[slot_], parity_); }

  // A bulk store reads the slot.
  __device__ void publish(const RingItem& item) {
    if (warp_ == 0 && b_.lane == 0) b_.s.partial_item[slot_] = item;
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (b_.lane == 0) ptx::mbarrier_arrive(&b_.s.partial_full[slot_]);
    slot_ += kGroups;
    if (slot_ >= kConfig.partial_slots) {
      slot_ -= kConfig.partial_slots;
      parity_ ^= 1;
    }
  }

  // The rows of an item, and the lane's place in them.
  struct Rows {
    const i32* row;
    const float* weight;
    i32 count;
    i32 elements;     // of the item
    const u8* begin;  // of the lane's first vector: by expert in row 0 of the tensor, else in this row
  };

  // By code that knows how many rows there are, or not if they are many. False: the GPU has gone wrong.
  __device__ bool make_item(const RingItem& item, i32 piece) {
    Rows rows;
    rows.row = b_.plan_rows(piece % 2) + item.first;
    rows.weight = b_.plan_weights(piece % 2) + item.first;
    rows.count = item.count;
    rows.elements = kConfig.push_elements(item.chunk);
    rows.begin = b_.a.rows + static_cast<i64>(item.chunk * kConfig.push_chunk() + warp_ * kUnit + first_) * Row::kBytes;
    bool is_right = true;
    if constexpr (!kConfig.is_by_expert()) {
      rows.begin += static_cast<i64>(rows.row[0]) * kConfig.row_bytes();
      is_right = make<1>(rows);
    } else {
      if (rows.count == 1) {
        is_right = make<1>(rows);
      } else if (rows.count == 2 && kMany > 2) {
        is_right = make<min_of(2, kMany)>(rows);
      } else if (rows.count == 3 && kMany > 3) {
        is_right = make<min_of(3, kMany)>(rows);
      } else if (rows.count == 4 && kMany > 4) {
        is_right = make<min_of(4, kMany)>(rows);
      } else {
        is_right = make<kMany>(rows);
      }
    }
    if (!is_right) return false;
    publish(item);
    if constexpr (kWarps > 1) warp_ = (warp_ + kTurn) % kWarps;
    return true;
  }
  // The next item begins with the warp after the last that had a unit of a whole one.
  static constexpr i32 kTurn = kWarps - (kConfig.push_chunk() + kUnit - 1) / kUnit % kWarps;

  // Rows that are under way together where there are as many or more.
  static constexpr i32 kMany = kLoads / kVectors;

  template <i32 kCount>
  __device__ bool make(const Rows& rows) {
    constexpr i32 kDepth = kLoads / (kCount * kVectors);  // units under way
    const u8* source = rows.begin;
    Packed packed[kDepth][kVectors][kCount] = {};  // else registers that are not loaded would count as in use before
    const i32 begin = warp_ * kUnit;
#pragma unroll
    for (i32 step = 0; step < kDepth; ++step) load_unit<kCount>(source, rows, begin, step, packed[step]);
    if (!wait_slot()) return false;
    u8* out = b_.partial_slot(slot_);
    for (i32 unit = begin; unit < rows.elements; unit += kDepth * kStep) {
      source += kDepth * kStep * Row::kBytes;
#pragma unroll
      for (i32 step = 0; step < kDepth; ++step) {
        if (unit + step * kStep >= rows.elements) break;
        const i32 element = unit + step * kStep + first_;
        float total[kVectors][kVector];
        if constexpr (kConfig.is_by_expert()) {
          add<kCount>(packed[step], rows, element, total);
          load_unit<kCount>(source, rows, unit + kDepth * kStep, step, packed[step]);
          if constexpr (kConfig.wire_is_fp8) {
            quantize_sums(total, element, rows.elements, out);
          } else {
            write_sums(total, element, rows.elements, out);
          }
        } else {
          quantize_rows(packed[step], element, rows.elements, out);
          load_unit<kCount>(source, rows, unit + kDepth * kStep, step, packed[step]);
        }
      }
    }
    return true;
  }

  // The vectors of the warp's unit `step` after that at `begin`; `source`: of unit `begin` in row 0,
  // or in the only row.
  template <i32 kCount>
  __device__ void load_unit(const u8* source, const Rows& rows, i32 begin, i32 step,
                            Packed (&packed)[kVectors][kCount]) const {
    const i32 unit = begin + step * kStep;
#pragma unroll
    for (i32 idx = 0; idx < kCount; ++idx) {
      const bool is_row = kCount < kMany || !kConfig.is_by_expert() || idx < rows.count;
      const u8* row = source;
      if constexpr (kConfig.is_by_expert()) row += static_cast<i64>(rows.row[is_row ? idx : 0]) * kConfig.row_bytes();
#pragma unroll
      for (i32 vector = 0; vector < kVectors; ++vector) {
        const bool is_there = (kHasWholeUnits ? unit : unit + first_ + offset_of(vector)) < rows.elements;
        const u8* place = row + (step * kStep + offset_of(vector)) * Row::kBytes;
        ptx::load_vector(packed[vector][idx].word, place, is_there && is_row);
      }
    }
  }

  // Picks in the order of k; each product is rounded, then added. A sum that begins with the first product instead of +0 may be
  // -0 where the contract has +0: the owner, who begins with +0, gets the same from both.
  template <i32 kCount>
  __device__ void add(const Packed (&packed)[kVectors][kCount], const Rows& rows, i32 element,
                      float (&total)[kVectors][kVector]) const {
#pragma unroll
    for (i32 vector = 0; vector < kVectors; ++vector) {
#pragma unroll
      for (i32 idx = 0; idx < kCount; ++idx) {
        if (kCount == kMany && kConfig.is_by_expert() && idx >= rows.count) break;
        add_vector(packed[vector][idx], rows.weight[idx], idx == 0, total[vector]);
      }
      if constexpr (kCount == kMany && kConfig.plan_width() > kMany) {
        const i32 at = element + offset_of(vector);
        for (i32 idx = kMany; idx < rows.count && has(at, rows.elements); ++idx) {
          const i64 offset = static_cast<i64>(rows.row[idx]) * kConfig.row_bytes();
          const u8* place = rows.begin + offset + (at - first_ - warp_ * kUnit) * Row::kBytes;
          add_vector(*reinterpret_cast<const Packed*>(place), rows.weight[idx], false, total[vector]);
        }
      }
    }
  }

  __device__ static void add_vector(const Packed& packed, float weight, bool is_first, float (&total)[kVector]) {
    float values[kVector];
    Row::unpack(packed, values);
#pragma unroll
    for (i32 at = 0; at < kVector; ++at) {
      const float product = weight * values[at];
      total[at] = is_first ? product : total[at] + product;
    }
  }

  __device__ static void write_sums(const float (&total)[kVectors][kVector], i32 element, i32 elements, u8* out) {
#pragma unroll
    for (i32 idx = 0; idx < kVectors; ++idx) {
      const i32 at = element + offset_of(idx);
      if (has(at, elements)) *reinterpret_cast<Packed*>(out + at * Row::kBytes) = Row::pack(total[idx]);
    }
  }

  __device__ void quantize_sums(float (&total)[kVectors][kVector], i32 element, i32 elements, u8* out) const {
    float largest[kLaneGroups] = {};
#pragma unroll
    for (i32 idx = 0; idx < kVectors; ++idx) {
      if (has(element + offset_of(idx), elements)) largest[0] = ptx::max_nan(largest[0], Row::magnitude(total[idx]));
    }
    quantize(largest, element, elements, out, [&](i32 idx, float (&values)[kVector]) {
#pragma unroll
      for (i32 at = 0; at < kVector; ++at) values[at] = total[idx][at];
    });
  }

  __device__ void quantize_rows(Packed (&packed)[kVectors][1], i32 element, i32 elements, u8* out) const {
    float largest[kLaneGroups];
#pragma unroll
    for (i32 group = 0; group < kLaneGroups; ++group) {
      Packed vectors[kGroupVectors];
#pragma unroll
      for (i32 vector = 0; vector < kGroupVectors; ++vector) {
        const i32 idx = group * kGroupVectors + vector;
        vectors[vector] = has(element + offset_of(idx), elements) ? packed[idx][0] : Packed{};
      }
      largest[group] = Row::magnitude(vectors);
    }
    quantize(largest, element, elements, out,
             [&](i32 idx, float (&values)[kVector]) { Row::unpack(packed[idx][0], values); });
  }

  // get(idx, values): the lane's idx-th vector of the unit. `largest`: magnitudes in what the lane has of each group.
  template <class Get>
  __device__ void quantize(const float (&largest)[kLaneGroups], i32 element, i32 elements, u8* out, Get get) const {
    // Half of the lanes go on with the one group, half with the other.
    constexpr i32 kHalf = kLanes / 2;
    const i32 lane = b_.lane % kLanes;
    const bool is_second = kLaneGroups == 2 && lane >= kHalf;
    float amax = is_second ? largest[kLaneGroups - 1] : largest[0];
    const float given = is_second || kLaneGroups == 1 ? largest[0] : largest[kLaneGroups - 1];
    amax = ptx::max_nan(amax, __shfl_xor_sync(0xffffffffu, given, kHalf));
#pragma unroll
    for (i32 step = 1; step < kHalf; step *= 2) {
      amax = ptx::max_nan(amax, __shfl_xor_sync(0xffffffffu, amax, step));
    }
    // ptx::fp8_scale, but that each lane divides once: for the scale (even lanes) or for the factor.
    amax = ptx::fp8_amax(ptx::float_bits(amax));
    const bool has_scale = lane % 2 == 0;
    const float quotient = (has_scale ? amax : ptx::kLargestE4m3) / (has_scale ? ptx::kLargestE4m3 : amax);
#pragma unroll
    for (i32 group = 0; group < kLaneGroups; ++group) {
      const i32 begin = element + offset_of(group * kGroupVectors) - lane * kVector;
      const float factor = __shfl_sync(0xffffffffu, quotient, b_.lane - lane + group * kHalf + 1);
      u8* place = out + shift_of(begin);
#pragma unroll
      for (i32 vector = 0; vector < kGroupVectors; ++vector) {
        const i32 idx = group * kGroupVectors + vector;
        const i32 at = element + offset_of(idx);
        float values[kVector];
        get(idx, values);
#pragma unroll
        for (i32 i = 0; i < kVector; ++i) values[i] *= factor;
        if (has(at, elements)) Fp8Numbers<kVector>::store(place, at, values);
      }
      if (lane == group * kHalf && has(begin, elements)) {
        *reinterpret_cast<float*>(out + scale_at(begin, elements)) = quotient;
      }
    }
  }

  // An item has two chunks at most. What is added to the place of an element of the second: the scales of the first.
  __device__ static i32 shift_of(i32 element) {
    if (kConfig.push_chunks == 1 || element < kConfig.chunk) return 0;
    return kConfig.wire_bytes(kConfig.chunk) - kConfig.chunk;
  }
  // Of the group that begins at `element`.
  __device__ static i32 scale_at(i32 element, i32 elements) {
    const bool is_second = kConfig.push_chunks == 2 && element >= kConfig.chunk;
    const i32 before = is_second ? kConfig.chunk : 0;
    const i32 length = kConfig.hidden % kConfig.chunk == 0 ? kConfig.chunk : min(kConfig.chunk, elements - before);
    return (is_second ? kConfig.wire_bytes(kConfig.chunk) : 0) + kConfig.scales_at(length) +
           static_cast<i32>(static_cast<u32>(element - before) / kQuantizeGroup) * 4;
  }

  const Block& b_;
  const i32 group_;
  i32 warp_;  // in the item at hand: its first unit
  const i32 first_;
  i32 slot_;
  u32 parity_ = 1;  // the first wait passes: every slot is empty
};

}  // namespace weft::kernels
