// What one collective call is: equal on every rank that takes part, told apart by a 16-bit fingerprint in its headers (R1).
#pragma once

#include "weft/config/base.h"

namespace weft {

enum class OpKind : u8 { kNone = 0, kDispatch = 1, kCombine = 2, kBarrier = 3 };
enum class Layout : u8 { kRankMajor = 0, kExpertMajor = 1, kMasked = 2 };
enum class Quantize : u8 { kNone = 0, kFp8 = 1, kFp8Ue8m0 = 2, kFp8Pow2 = 3 };
enum class Dtype : u8 { kBytes = 0, kBf16 = 1, kFp16 = 2, kFp32 = 3 };

constexpr i32 kNumOpKinds = 4;
constexpr i32 kQuantizeGroup = 128;  // elements that share one FP8 scale
constexpr i64 kNoCapacity = -1;

WEFT_HD constexpr bool scales_are_floats(Quantize format) {
  return format == Quantize::kFp8 || format == Quantize::kFp8Pow2;
}

WEFT_HD constexpr i32 dtype_bytes(Dtype dtype) { return dtype == Dtype::kBytes ? 1 : dtype == Dtype::kFp32 ? 4 : 2; }

// The structural identity of an operation. It travels in the payload of the first header, so that a mismatch can be
// told in words. Plain data of fixed size: compared and hashed byte by byte.
struct OperationConfig {
  OpKind kind = OpKind::kNone;
  Layout layout = Layout::kRankMajor;
  Quantize quantize = Quantize::kNone;
  Dtype dtype = Dtype::kBytes;  // of the rows on the wire
  u8 has_side = 0;              // combine: each row carries top_k floats; 2: adds_side
  u8 is_cached = 0;             // dispatch: the routing comes from a handle. combine: its SumOrder
  u8 mode = 0;
  u8 is_small =
      0;  // by the kernels for small batches; 2: dispatch in two launches, combine of rows brought to the landing
  u32 alignment = 1;
  u32 hidden = 0;
  i64 capacity = kNoCapacity;
  i64 max_tokens = 0;
  i64 row_bytes = 0;        // data bytes of one row on the wire
  i64 scale_row_bytes = 0;  // scale or side-data bytes of one row on the wire
  u64 window_hash = 0;      // of the WindowShape and the window's number
  u64 handle = 0;           // sequence of the dispatch whose routing is used; else the expert map's digest
  u64 object = 0;           // number of the ExpertParallel among those of its window; last, mixed in by itself
};
static_assert(sizeof(OperationConfig) == 72);

constexpr u16 kRefusalFingerprint = 0xffff;  // "I cannot take part"; the reason is in the payload (R3)

// FNV-1a (http://www.isthe.com/chongo/tech/comp/fnv/), 64 bits.
WEFT_HD inline u64 hash_bytes(const void* data, u64 num_bytes, u64 seed = 0xcbf29ce484222325ull) {
  const u8* bytes = static_cast<const u8*>(data);
  u64 hash = seed;
  for (u64 idx = 0; idx < num_bytes; ++idx) hash = (hash ^ bytes[idx]) * 0x100000001b3ull;
  return hash;
}

// The bits by which a fingerprint tells two objects apart. Steps of the golden section: objects of near numbers differ in high
// bits, which the low bits of near handles, mixed in too, cannot make up for.
WEFT_HD constexpr u16 object_bits(u64 object) { return static_cast<u16>(object * 40503u); }

// The fingerprint of an operation of one object, or with a handle: two make two. 1 to 0xfffe, too.
WEFT_HD constexpr u16 print_with(u16 print, u16 bits) {
  const u16 both = static_cast<u16>(print ^ bits);
  return both == 0 || both == kRefusalFingerprint ? print : both;
}

// 1 .. 0xfffe: zero is "nothing written yet", 0xffff a refusal.
WEFT_HD inline u16 fingerprint(const OperationConfig& config) {
  const u64 hash = hash_bytes(&config, sizeof(config) - sizeof(config.object));
  const u64 folded = hash ^ (hash >> 32);
  const u16 print = static_cast<u16>(1 + ((folded ^ (folded >> 16)) & 0xffffffffull) % 0xfffe);
  return print_with(print, object_bits(config.object));
}

}  // namespace weft
