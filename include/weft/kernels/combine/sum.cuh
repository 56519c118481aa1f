// What a contributor makes of rows by expert and pushes: the sum of a token's picks, or the FP8 form of it, chunk by chunk. Warps
// take contributions as they come. A warp fetches the rows through a ring of stages of its own, each a unit of one row (32 lanes
// times some vectors), ahead of what it adds and on into its next contribution. The result goes into a slot, which a store warp
// sends (combine/push.cuh).
#pragma once

#include "weft/kernels/combine/items.cuh"
#include "weft/ptx/fetch.cuh"
#include "weft/ptx/fp8_scale.h"

namespace weft::kernels {

template <CombineKernelConfig kConfig>
class CombineSum : CombineItems<kConfig> {
  using Base = CombineItems<kConfig>;

 public:
  __device__ CombineSum(const CombineBlock<kConfig>& block, i32 warp, i32 num_pieces)
      : Base(block, warp, num_pieces),
        first_stage_(static_cast<i32>(block.sum_stages(warp) - block.dynamic) +
                     (kConfig.wire_is_fp8 ? 0 : block.lane * 16)) {}

  __device__ void run() {
    while (take_row(true)) {
#pragma unroll 1
      for (i32 ahead = 0; ahead < kStages; ++ahead) fetch(next_stage());
      while (is_ahead_) {
        leave_pieces(next_.piece);
        const Item item = next_;
        is_ahead_ = false;
        make(item);
      }
    }
    ptx::fetch_wait<0>();
    wait_slot();
    if (piece_ != kBroken) publish({});
  }

 private:
  using Base::b_, Base::warp_, Base::piece_, Base::next_, Base::is_ahead_, Base::kBroken;
  using Base::take, Base::leave_pieces, Base::contribution, Base::expect;
  using typename Base::Item, typename Base::Row;
  static constexpr i32 kVector = Row::kVector;
  static constexpr i32 kVectors = kConfig.sum_vectors();  // of a lane in a unit
  static constexpr i32 kUnit = kConfig.sum_unit();        // elements
  static constexpr i32 kStages = kConfig.fetch_stages();
  static constexpr i32 kSlots = kConfig.out_slots();
  static constexpr i32 kChunk = kConfig.sum_chunk();

  // Units of a row, none of which is in two chunks.
  static constexpr i32 kChunkUnits = (kChunk + kUnit - 1) / kUnit;
  static constexpr i32 kUnits = kConfig.hidden / kChunk * kChunkUnits + (kConfig.hidden % kChunk + kUnit - 1) / kUnit;
  static constexpr i32 kDry = kUnits + 1;  // as the next unit: nothing is fetched until the ring is empty
  static constexpr bool kHasEqualUnits = kConfig.hidden % kUnit == 0 && kChunk % kUnit == 0;
  __device__ static i32 begin_of(i32 unit) {
    return kChunk % kUnit == 0 ? unit * kUnit : unit / kChunkUnits * kChunk + unit % kChunkUnits * kUnit;
  }
  __device__ static i32 length_of(i32 unit) {
    if (kHasEqualUnits) return kUnit;
    if (kChunk % kUnit == 0) return min(kUnit, kConfig.hidden - begin_of(unit));
    return min(kUnit, min((unit / kChunkUnits + 1) * kChunk, kConfig.hidden) - begin_of(unit));
  }

  // Of a unit, the idx-th vector that the lane fetches, and adds; with FP8 it has neighbours instead, so that few lanes share a
  // group of 128 elements. Where a unit is of fewer lanes, the others do what the first do too.
  __device__ i32 fetched(i32 idx) const { return (idx * 32 + b_.lane) * kVector; }
  __device__ i32 element(i32 idx) const {
    return kConfig.wire_is_fp8 ? (worker() * kVectors + order(idx)) * kVector : fetched(idx);
  }
  __device__ static bool has(i32 element, i32 length) { return kHasEqualUnits || element < length; }
  __device__ bool fetches(i32 idx, i32 length) const {
    return (kHasEqualUnits && (idx + 1) * 32 * kVector <= kUnit) || fetched(idx) < length;
  }
  __device__ i32 worker() const {
    constexpr i32 kWorkers = kUnit / (kVectors * kVector);
    return kWorkers < 32 ? b_.lane % kWorkers : b_.lane;
  }

  // With FP8 lanes go through their vectors in turns of kTurn, 16 codes each, and begin with different ones; the vectors of a
  // turn change places in the stage. So neither fetches nor loads nor the codes have conflicts of banks.
  static constexpr i32 kCodes = 16;
  static constexpr i32 kTurn = kCodes / kVector;
  static constexpr i32 kSharers = 8 / kVectors;  // lanes whose vectors fill all banks once
  __device__ i32 order(i32 idx) const { return idx ^ (worker() / kSharers / kTurn * kTurn % kVectors); }
  __device__ i32 fetched_place() const {
    return kConfig.wire_is_fp8 ? (b_.lane ^ (b_.lane / 8 % kTurn)) * 16 : b_.lane * 16;
  }
  __device__ i32 place() const { return (worker() * kVectors + worker() / kSharers % kVectors) * 16; }
  // With FP8 a lane reads what other lanes have fetched, and the other way round.
  __device__ static void meet() {
    if (kConfig.wire_is_fp8) __syncwarp();
  }

  // ---- stages

  // Rows of the next item, in the order in which they are fetched.
  __device__ bool take_row(bool waits) {
    if (!take(waits, [] {})) return false;
    const RingItem from = contribution(next_);
    fetch_row_ = static_cast<i32>(next_.piece % 2) * kConfig.plan_entries() * 4 + from.first * 4;
    fetch_count_ = fetch_left_ = from.count;
    fetch_unit_ = 0;
    fetch_from_ = b_.a.rows + fetched(0) * Row::kBytes;
    read_row();
    return true;
  }

  // The stage that the warp comes to, without FP8 the lane's part of it, in bytes; then it comes to the one behind it.
  __device__ i32 next_stage() {
    const i32 stage = first_stage_ + stage_ * kConfig.stage_bytes();
    constexpr bool kIsPowerOf2 = (kStages & (kStages - 1)) == 0;
    stage_ = kIsPowerOf2 ? (stage_ + 1) & (kStages - 1) : stage_ + 1 == kStages ? 0 : stage_ + 1;
    return stage;
  }

  // The row of the next stage, well before it is used.
  __device__ void read_row() {
    fetch_id_ = *reinterpret_cast<const i32*>(reinterpret_cast<const u8*>(b_.plan_rows(0)) + fetch_row_);
  }

  template <i32 kIdx = 0>
  __device__ void fetch_unit(u8* to, const u8* from, i32 length) const {
    if constexpr (kIdx < kVectors) {
      if (fetches(kIdx, length)) ptx::fetch_vector<kIdx * 512>(to, from);
      fetch_unit<kIdx + 1>(to, from, length);
    }
  }

  // To a stage, of next_ or of an item behind it; nothing (an empty group) when there is none, until the ring is empty.
  __device__ void fetch(i32 stage) {
    meet();
    if (fetch_unit_ < kUnits) [[likely]] {
      fetch_next(stage);
    } else if (fetch_unit_ == kUnits) {
      if (!is_ahead_ && take_row(false)) {
        fetch_next(stage);
      } else {
        fetch_unit_ = kDry;
      }
    }
    ptx::fetch_commit();
  }

  __device__ void fetch_next(i32 stage) {
    u8* const to = b_.dynamic + stage + (kConfig.wire_is_fp8 ? fetched_place() : 0);
    fetch_unit(to, fetch_from_ + static_cast<i64>(fetch_id_) * kConfig.row_bytes(), length_of(fetch_unit_));
    fetch_row_ += 4;
    if (--fetch_left_ == 0) {
      fetch_left_ = fetch_count_;
      fetch_row_ -= fetch_count_ * 4;
      next_unit();
    }
    read_row();
  }
  __device__ void next_unit() {
    ++fetch_unit_;
    fetch_from_ += (kHasEqualUnits ? kUnit : begin_of(fetch_unit_) - begin_of(fetch_unit_ - 1)) * Row::kBytes;
  }

  // What stands in the stage is used before fetch() writes over it.
  __device__ i32 wait_stage() {
    ptx::fetch_wait<kStages - 1>();
    meet();
    return next_stage();
  }
  // What is changed in an address is within its alignment, so nothing but the sum need be kept.
  __device__ Packed load(i32 stage, i32 idx) const {
    if (!kConfig.wire_is_fp8) return *reinterpret_cast<const Packed*>(b_.dynamic + stage + idx * 512);
    const i32 at = stage + place();
    return *reinterpret_cast<const Packed*>(b_.dynamic + (at ^ idx * 16));
  }

  // ---- one item

  __device__ void make(const Item& of) {
    const RingItem item = contribution(of);
    // In bytes: what changes from row to row is one number.
    const i32 weights = (static_cast<i32>(of.piece % 2) * kConfig.plan_entries() + item.first) * 4;
    for (i32 unit = 0; unit < kUnits; ++unit) {
      if constexpr (!kConfig.wire_is_fp8) {
        float total[kVectors][kVector];
        add_rows(item.count, weights, total);
        wait_slot();
        write_sums(total, length_of(unit), slot());
        store(item, begin_of(unit) * Row::kBytes, length_of(unit) * Row::kBytes);
      } else {
        if (unit % kChunkUnits == 0) wait_slot();
        float total[kVectors][kVector];
        add_rows(item.count, weights, total);
        quantize_sums(total, unit, slot());
        if ((unit + 1) % kChunkUnits != 0 && unit + 1 != kUnits) continue;
        const i32 chunk = unit / kChunkUnits;
        store(item, chunk * kConfig.wire_bytes(kChunk), kConfig.wire_bytes(kConfig.chunk_elements(chunk)));
      }
    }
  }

  __device__ i32 slot_number() const { return warp_ * kSlots + slot_; }
  __device__ u8* slot() const {
    return b_.sum_stages(warp_) + kStages * kConfig.stage_bytes() + slot_ * kConfig.out_slot_bytes();
  }

  // Until the slot's last store has read it.
  __device__ void wait_slot() {
    u64* const empty = &b_.s.sum_empty[slot_number()];
    if (__all_sync(0xffffffffu, ptx::mbarrier_test_wait(empty, slot_parity_)) != 0) [[likely]]
      return;
    if (piece_ != kBroken) expect(sync::wait_barrier(empty, slot_parity_));
  }

  // What stands in the slot goes to `offset` of the row on the wire.
  __device__ void store(const RingItem& item, i32 offset, i32 num_bytes) {
    publish({item.index, item.owner, offset, num_bytes});
  }

  __device__ void publish(const PushItem& item) {
    __syncwarp();
    if (b_.lane == 0) {
      b_.s.sum_item[slot_number()] = item;
      ptx::mbarrier_arrive(&b_.s.sum_full[slot_number()]);
    }
    if (++slot_ == kSlots) {
      slot_ = 0;
      slot_parity_ ^= 1;
    }
  }

  // A sum that begins with the first product instead of +0 may be -0 where +0 would be: the owner, who begins with +0, gets the
  // same from both.
  __device__ void add_rows(i32 count, i32 weights, float (&total)[kVectors][kVector]) {
    static_assert(kConfig.order.has_contributions_by_pick());
    add_stage<true>(weights, total);
    for (const i32 end = weights + 4 * count; (weights += 4) < end;) add_stage<false>(weights, total);
  }

  template <bool kIsFirst>
  __device__ void add_stage(i32 weights, float (&total)[kVectors][kVector]) {
    const float weight = *reinterpret_cast<const float*>(reinterpret_cast<const u8*>(b_.plan_weights(0)) + weights);
    const i32 from = wait_stage();
    Packed packed[kVectors];
#pragma unroll
    for (i32 idx = 0; idx < kVectors; ++idx) packed[idx] = load(from, idx);
#pragma unroll
    for (i32 idx = 0; idx < kVectors; ++idx) {
      float values[kVector];
      Row::unpack(packed[idx], values);
#pragma unroll
      for (i32 at = 0; at < kVector; ++at) {
        const float product = weight * values[at];
        total[idx][at] = kIsFirst ? product : total[idx][at] + product;
      }
    }
    fetch(from);
  }

  __device__ void write_sums(const float (&total)[kVectors][kVector], i32 length, u8* out) const {
#pragma unroll
    for (i32 idx = 0; idx < kVectors; ++idx) {
      if (has(element(idx), length))
        *reinterpret_cast<Packed*>(out + element(idx) * Row::kBytes) = Row::pack(total[idx]);
    }
  }

  // `out`: the chunk.
  __device__ void quantize_sums(const float (&total)[kVectors][kVector], i32 unit, u8* out) const {
    float largest = 0.0f;
#pragma unroll
    for (i32 idx = 0; idx < kVectors; ++idx) {
      if (has(element(idx), length_of(unit))) largest = ptx::max_nan(largest, Row::magnitude(total[idx]));
    }
    constexpr i32 kLanes = kQuantizeGroup / (kVectors * kVector);  // that share a group
#pragma unroll
    for (i32 step = 1; step < kLanes; step *= 2) {
      largest = ptx::max_nan(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    }
    const ptx::Fp8WireScale wire = ptx::fp8_wire_scale(ptx::float_bits(largest));
    const i32 begin = unit % kChunkUnits * kUnit;  // in the chunk
#pragma unroll
    for (i32 first = 0; first < kVectors; first += kTurn) {
      float values[kCodes];
#pragma unroll
      for (i32 idx = 0; idx < kCodes; ++idx) values[idx] = total[first + idx / kVector][idx % kVector] * wire.factor;
      const i32 at = static_cast<i32>(out - b_.dynamic) + begin + element(0);
      if (has(element(first), length_of(unit))) Fp8Numbers<kCodes>::store(b_.dynamic, at ^ first * kVector, values);
    }
    const i32 first = worker() * kVectors * kVector;
    if (b_.lane % kLanes == 0 && has(first, length_of(unit))) {
      const i32 scale = static_cast<i32>(static_cast<u32>(begin + first) / kQuantizeGroup) * 4;
      const i32 scales = kConfig.scales_at(kConfig.chunk_elements(unit / kChunkUnits));
      *reinterpret_cast<float*>(out + scales + scale) = wire.scale;
    }
  }

  const i32 first_stage_;
  i32 fetch_row_ = 0;                     // of it, where the row of the next stage stands in the plan, in bytes
  i32 fetch_id_ = 0;                      // that row
  i32 fetch_count_ = 0, fetch_left_ = 0;  // rows of it, and those left in the unit
  const u8* fetch_from_ = nullptr;        // that unit of row 0
  i32 fetch_unit_ = 0;                    // of the next stage
  i32 stage_ = 0;                         // that the warp comes to
  i32 slot_ = 0;                          // that is filled next
  u32 slot_parity_ = 1;                   // of the wait for it: the first one passes, every slot is empty
};

}  // namespace weft::kernels
