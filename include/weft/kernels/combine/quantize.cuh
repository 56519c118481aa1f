// FP8 contributions of rank_major rows: warps take them as they come, quantise them unit by unit (a chunk on the wire) and store
// codes and scales into the owner's landing, each lane what it has made. The unit behind is on its way meanwhile, of this row or of
// the warp's next contribution, to a stage in shared memory that is the warp's own.
#pragma once

#include "weft/kernels/combine/items.cuh"
#include "weft/kernels/post.cuh"
#include "weft/ptx/fetch.cuh"
#include "weft/ptx/fp8_scale.h"

namespace weft::kernels {

template <CombineKernelConfig kConfig>
class CombineQuantize : CombineItems<kConfig> {
  using Base = CombineItems<kConfig>;

 public:
  using Base::Base;

  __device__ void run() {
    const auto tell_piece = [this] { tell(b_.has_failed() ? kPostStops : piece_ * kConfig.plan_tokens()); };
    while (take(true, tell_piece)) {
      fetch_first();
      while (is_ahead_) {
        leave_pieces(next_.piece);
        is_ahead_ = false;
        make(contribution(next_));
      }
    }
    ptx::fetch_wait<0>();
    tell(b_.has_failed() ? kPostStops : sync::kMaxProgress);
  }

 private:
  using Base::b_, Base::warp_, Base::num_pieces_, Base::piece_, Base::next_, Base::is_ahead_;
  using Base::take, Base::leave_pieces, Base::contribution;
  using typename Base::Row;

  static constexpr i32 kVector = Row::kVector;
  static constexpr i32 kStep = 32 * kVector;   // elements of a vector of each lane
  static constexpr i32 kUnit = kConfig.chunk;  // elements
  static constexpr i32 kUnits = kConfig.num_chunks();
  static constexpr i32 kVectors = (kUnit + kStep - 1) / kStep;  // of a lane in a unit
  static constexpr i32 kShortest = kConfig.chunk_elements(kUnits - 1);
  static_assert(kConfig.sum_unit() == kUnit);

  // Everything that this warp stores for tokens before `index` of the block is stored. After a failure rows are left out, so that
  // no number may be told.
  __device__ void tell(u32 index) {
    __syncwarp();
    if (b_.lane == 0 && index != told_) ptx::st_release_cta(&b_.s.num_pushed[warp_], index);
    told_ = index;
  }

  // ---- rows

  __device__ i32 element(i32 idx) const { return idx * kStep + b_.lane * kVector; }
  // Whether the lane has such a vector in a unit of that length.
  __device__ bool has(i32 idx, i32 length) const { return (idx + 1) * kStep <= kShortest || element(idx) < length; }

  // A lane reads what it has fetched itself.
  __device__ u8* stage() const { return b_.sum_stages(warp_) + b_.lane * 16; }

  template <i32 kIdx = 0>
  __device__ void fetch(i32 length) const {
    if constexpr (kIdx < kVectors) {
      if (has(kIdx, length)) ptx::fetch_vector<kIdx * 512>(stage(), from_);
      fetch<kIdx + 1>(length);
    } else {
      ptx::fetch_commit();
    }
  }

  __device__ i32 first_of_row() {
    const i32 row = b_.plan_rows(next_.piece % 2)[contribution(next_).first];
    from_ = b_.a.rows + static_cast<i64>(row) * kConfig.row_bytes() + b_.lane * 16;
    return kConfig.chunk_elements(0);
  }
  __device__ void fetch_first() { fetch(first_of_row()); }

  // What comes behind the unit, if there is anything yet.
  __device__ void fetch_behind(i32 unit) {
    i32 length = 0;
    if (unit + 1 < kUnits) {
      from_ += kUnit * Row::kBytes;
      length = kConfig.chunk_elements(unit + 1);
    } else if (take(false, [] {})) {
      length = first_of_row();
    }
    if (length > 0) fetch(length);
  }

  __device__ void make(const RingItem item) {
    tell(static_cast<u32>(item.index));
    u8* out = b_.landing(item.owner, b_.token_of(item.index), b_.a.view.rank).address();
#pragma unroll 1
    for (i32 unit = 0; unit < kUnits; ++unit) {
      const i32 length = kConfig.chunk_elements(unit);
      Packed packed[kVectors];
      ptx::fetch_wait<0>();
#pragma unroll
      for (i32 idx = 0; idx < kVectors; ++idx) {
        if (has(idx, length)) packed[idx] = *reinterpret_cast<const Packed*>(stage() + idx * 512);
      }
      fetch_behind(unit);
      quantize(packed, length, out);
      out += kConfig.wire_bytes(kUnit);
    }
  }

  // ---- a unit

  static constexpr i32 kLanes = kQuantizeGroup / kVector;               // that share a group
  static constexpr i32 kAMost = kConfig.dtype == Dtype::kFp32 ? 1 : 2;  // vectors whose largest magnitudes are one word
  static constexpr i32 kPairs = (kVectors + kAMost - 1) / kAMost;
  static constexpr i32 kWords = kPairs <= 1 ? 1 : kPairs <= 2 ? 2 : kPairs <= 4 ? 4 : 8;
  static constexpr i32 kWordLanes = kLanes / kWords;  // lanes of a group that end with one word
  static_assert(kWordLanes >= kAMost);

  __device__ void quantize(const Packed (&packed)[kVectors], i32 length, u8* out) const {
    const ptx::Fp8WireScale wire = ptx::fp8_wire_scale(largest(packed, length));
    const u32 mine = Row::factor_word(wire.factor);
    // The lane's own: what largest() has found.
    const i32 own = b_.lane % kLanes / kWordLanes * kAMost + b_.lane % kAMost;
    const i32 group = own * kStep + b_.lane / kLanes * kQuantizeGroup;
    if (b_.lane % kWordLanes < kAMost && group < length) {
      *reinterpret_cast<float*>(out + kConfig.scales_at(length) + group / kQuantizeGroup * 4) = wire.scale;
    }
#pragma unroll
    for (i32 idx = 0; idx < kVectors; ++idx) {
      const i32 lane = idx / kAMost * kWordLanes + idx % kAMost;  // of its group
      const u32 factor = __shfl_sync(0xffffffffu, mine, lane, kLanes);
      float values[kVector];
      Row::unpack_scaled(packed[idx], factor, values);
      if (has(idx, length)) Fp8Numbers<kVector>::store(out, element(idx), values);
    }
  }

  // Bits of the largest magnitude of a group: of the lane's own.
  __device__ u32 largest(const Packed (&packed)[kVectors], i32 length) const {
    const auto word = [&](i32 idx) { return idx < kVectors && has(idx, length) ? Row::larger_of(packed[idx]) : 0u; };
    u32 words[kWords] = {};
#pragma unroll
    for (i32 idx = 0; idx < kVectors; idx += kAMost) {
      if constexpr (kAMost == 1) {
        words[idx] = word(idx);
      } else {
        // Pairs of two vectors become a pair of the largest of each.
        const u32 low = word(idx), high = word(idx + 1);
        words[idx / 2] = Row::larger((low & 0xffffu) | high << 16, low >> 16 | (high & 0xffff0000u));
      }
    }
    return Row::magnitude_bits(most_of_group<kLanes / 2>(words), b_.lane % kAMost);
  }

  // At each step a lane keeps the half of the words that its part of the lanes is to end with.
  template <i32 kStepLanes, i32 kNum>
  __device__ u32 most_of_group(const u32 (&words)[kNum]) const {
    if constexpr (kNum == 1) {
      u32 most = words[0];
#pragma unroll
      for (i32 step = kStepLanes; step > 0; step /= 2)
        most = Row::larger(most, __shfl_xor_sync(0xffffffffu, most, step));
      return most;
    } else {
      constexpr i32 kHalf = kNum / 2;
      const bool is_upper = (b_.lane & kStepLanes) != 0;
      u32 kept[kHalf];
#pragma unroll
      for (i32 at = 0; at < kHalf; ++at) {
        const u32 given = is_upper ? words[at] : words[at + kHalf];
        kept[at] = is_upper ? words[at + kHalf] : words[at];
        kept[at] = Row::larger(kept[at], __shfl_xor_sync(0xffffffffu, given, kStepLanes));
      }
      return most_of_group<kStepLanes / 2>(kept);
    }
  }

  const u8* from_ = nullptr;  // the lane's first vector of the unit that is fetched next
  u32 told_ = 0;
};

}  // namespace weft::kernels
