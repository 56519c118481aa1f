// What a thread copies at a time, and types chosen at compile time.
#pragma once

#include "weft/config/base.h"
#include "weft/config/operation.h"
#include "weft/config/route.h"
#include "weft/ptx/convert.h"

namespace weft::kernels {

template <bool kIs64>
struct IdType {
  using Type = i32;
};
template <>
struct IdType<true> {
  using Type = i64;
};

template <i32 kBytes>
struct alignas(kBytes) Piece {
  u32 word[kBytes / 4];
};
template <>
struct Piece<2> {
  u16 word;
};
template <>
struct Piece<1> {
  u8 word;
};

constexpr __device__ i32 min_of(i32 left, i32 right) { return left < right ? left : right; }
constexpr __device__ i32 max_of(i32 left, i32 right) { return left > right ? left : right; }

// The widest piece that rows of this length divide into.
WEFT_HD constexpr i32 piece_bytes(i32 num_bytes) {
  return num_bytes % 16 == 0 ? 16 : num_bytes % 8 == 0 ? 8 : num_bytes % 4 == 0 ? 4 : num_bytes % 2 == 0 ? 2 : 1;
}

// One warp copies a short row whose length suits no bulk copy.
template <i32 kBytes>
__device__ inline void copy_short(u8* to, const u8* from, i32 lane) {
  constexpr i32 kPiece = piece_bytes(kBytes);
  using Unit = Piece<kPiece>;
  for (i32 idx = lane; idx < kBytes / kPiece; idx += 32) {
    reinterpret_cast<Unit*>(to)[idx] = reinterpret_cast<const Unit*>(from)[idx];
  }
}

// A piece of a row of 4-byte words, of which each lies in a column of its own. `from`: the row's first word.
template <class Unit>
__device__ inline Unit gather(const u8* from, i64 stride, i32 piece) {
  constexpr i32 kWords = static_cast<i32>(sizeof(Unit)) / 4;
  Unit unit;
#pragma unroll
  for (i32 idx = 0; idx < kWords; ++idx) {
    unit.word[idx] = *reinterpret_cast<const u32*>(from + (piece * kWords + idx) * stride);
  }
  return unit;
}

// A short row that one warp loads now and stores later, perhaps several times. Of one of more than 32 pieces the rest is copied.
// `stride`: as `gather`; 0: the row lies in one piece.
template <i32 kBytes>
class ShortRow {
 public:
  ShortRow() = default;
  __device__ ShortRow(const u8* from, i32 lane, bool is_wanted, i64 stride = 0)
      : from_(from), stride_(stride), lane_(lane) {
    if (is_wanted && lane < kUnits) held_ = unit(lane);
  }

  __device__ void store(u8* to) const {
    auto* units = reinterpret_cast<Unit*>(to);
    if (lane_ < kUnits) units[lane_] = held_;
    for (i32 idx = lane_ + 32; idx < kUnits; idx += 32) units[idx] = unit(idx);
  }

 private:
  using Unit = Piece<piece_bytes(kBytes)>;
  static constexpr i32 kUnits = kBytes / piece_bytes(kBytes);

  __device__ Unit unit(i32 idx) const {
    if constexpr (kBytes % 4 == 0) {
      if (stride_ > 0) return gather<Unit>(from_, stride_, idx);
    }
    return reinterpret_cast<const Unit*>(from_)[idx];
  }

  const u8* from_;
  i64 stride_;
  i32 lane_;
  Unit held_;
};

// By a whole warp: the row goes to the place of each lane, null: nowhere.
template <i32 kBytes>
__device__ inline void store_short(const ShortRow<kBytes>& row, u8* place) {
  for (u32 rest = __ballot_sync(0xffffffffu, place != nullptr); rest != 0; rest &= rest - 1) {
    const i32 other = __ffs(static_cast<i32>(rest)) - 1;
    row.store(reinterpret_cast<u8*>(__shfl_sync(0xffffffffu, reinterpret_cast<u64>(place), other)));
  }
}

// A short row that one warp loads now and stores later, perhaps several times, each word to a column of its own. Of more than 32
// words the rest is copied; the last is filled up with 0. All of it must be readable.
template <i32 kBytes, i32 kWordBytes>
class WordRow {
 public:
  static constexpr i32 kWords = (kBytes + kWordBytes - 1) / kWordBytes;

  __device__ WordRow(const u8* from, i32 lane, bool is_wanted)
      : from_(reinterpret_cast<const Word*>(from)), lane_(lane) {
    if (is_wanted && lane < kWords) held_ = word(lane);
  }

  // `to`: of word 0; `stride`: bytes from a column to the next.
  __device__ void store(u8* to, i64 stride) const {
    if (lane_ < kWords) *reinterpret_cast<Word*>(to + lane_ * stride) = held_;
    for (i32 idx = lane_ + 32; idx < kWords; idx += 32) *reinterpret_cast<Word*>(to + idx * stride) = word(idx);
  }

 private:
  using Word = Piece<kWordBytes>;
  static_assert(kBytes % kWordBytes == 0 || kWordBytes == 4);

  __device__ Word word(i32 idx) const {
    Word found = from_[idx];
    if constexpr (kBytes % kWordBytes != 0) {
      if (idx == kWords - 1) found.word[0] &= (1u << (kBytes % kWordBytes * 8)) - 1;
    }
    return found;
  }

  const Word* from_;
  i32 lane_;
  Word held_;
};

// Eight elements of a row, as floats.
template <Dtype kDtype>
__device__ inline void load_floats(const u8* from, float (&values)[8]) {
  if constexpr (kDtype == Dtype::kFp32) {
#pragma unroll
    for (i32 part = 0; part < 2; ++part) {
      const Piece<16> piece = reinterpret_cast<const Piece<16>*>(from)[part];
#pragma unroll
      for (i32 idx = 0; idx < 4; ++idx) values[part * 4 + idx] = ptx::bits_float(piece.word[idx]);
    }
  } else {
    const Piece<16> piece = *reinterpret_cast<const Piece<16>*>(from);
#pragma unroll
    for (i32 idx = 0; idx < 8; ++idx) {
      const u16 half = static_cast<u16>(piece.word[idx / 2] >> (idx % 2 * 16));
      values[idx] = kDtype == Dtype::kBf16 ? ptx::bf16_to_float(half) : ptx::fp16_to_float(half);
    }
  }
}

// By a whole warp: the ranks that are in the set of some lane.
__device__ inline GpuRankMask over_warp(GpuRankMask mask) { return {__reduce_or_sync(0xffffffffu, mask.word)}; }

// Picks without room, to the caller's counter; by one thread or several.
__device__ inline void add_dropped(i64* overflow, i64 num_dropped) {
  if (num_dropped > 0) atomicAdd(reinterpret_cast<u64*>(overflow), static_cast<u64>(num_dropped));
}

}  // namespace weft::kernels
