// What the host and a kernel say to each other, in host memory that the GPU maps. One writer a word; kernels load and store
// only: atomics on host memory need a bus that has them.
#pragma once

#include "weft/config/base.h"
#include "weft/config/kernel.h"
#include "weft/layout/gpu_window.h"

namespace weft::transport {

enum class ErrorCause : u32 {
  kNone = 0,
  kDeadline = 1,     // a peer is late
  kAborted = 2,      // the host said so
  kMismatch = 3,     // a peer called something else, or a rank needs more room; all give up this call and go on
  kBadPeerWord = 4,  // a count or a place that makes no sense (R19)
  kNoRoom = 5,       // a rank has neither heap nor landing for its rows; all give up this call and go on
  kBusy = 6,         // two operations of one window at once (R5)
  kMoved =
      7  // the kernel was captured before a rebuild that moved the heap or, with nodes, the handle's members were others
};

struct HostWords {
  u64 abort = 0;              // host: bit r: leave waits for rank r
  u64 timeout_ns = 0;         // host: most that a wait of the next operation may take
  u64 finished_sequence = 0;  // kernel: last operation that ended
  u64 counted_ticket = 0;     // kernel: num_rows below belongs to the call with this ticket
  i64 num_rows = 0;           // kernel: rows of the result, before any clipping
  u64 bad_ids = 0;  // kernel: pack_bad_ids() of the last call that had any; taken by an exchange, so none gets lost
  i64 first_bad_id = 0;     // kernel: in time before it
  u64 num_errors_read = 0;  // host: records that it has emptied
  u64 error_caller = 0;     // kernel: with the record: who calls, mixed into its expected fingerprint
  // Kernel: by rank, of a kMismatch in `count`: who calls there, or pack_need().
  u64 seen_caller[kMaxGpuRanks] = {};
  ErrorRecord error = {};  // kernel: first reason (R9); its code is an ErrorCause
};

// Behind these words in their page: how many picks each local expert gets, said to a host that asked for it. Each word has the
// low half of the call's ticket in its high half, so it needs no order with others.
constexpr u64 kHostPageBytes = 4096;
constexpr i32 kMostToldCounts = static_cast<i32>((kHostPageBytes - sizeof(HostWords)) / sizeof(u64));
WEFT_HD inline u64* told_counts(HostWords* host) { return reinterpret_cast<u64*>(host + 1); }
WEFT_HD constexpr u64 pack_count(u64 ticket, i32 count) { return ticket << 32 | static_cast<u32>(count); }

// Who calls: the number of the object and the handle that the operation works with, 0 if it makes one; the low bits of both.
WEFT_HD constexpr u32 pack_caller(u32 object, u16 handle) { return object << 16 | handle; }
WEFT_HD constexpr u16 caller_bits(u32 caller) {
  return static_cast<u16>(object_bits(caller >> 16) ^ (caller & 0xffffu));
}
// In the cell of a `count` header: place of the word that says who calls.
constexpr i32 kCallerWord = 1;
static_assert((kCallerWord + 1) * sizeof(u64) <= kCacheLine);
// Or, with the fingerprint of a refusal: for how many tokens the rank needs room in the operation `sequence`. Callers have 32 bits.
WEFT_HD constexpr u64 pack_need(u32 sequence, i64 num_tokens) {
  constexpr i64 kMost = 0x7fffffff;
  return u64{1} << 63 | static_cast<u64>(sequence) << 31 | static_cast<u64>(num_tokens < kMost ? num_tokens : kMost);
}
// 0: of another operation, or of no refusal.
WEFT_HD constexpr i64 need_in(u64 word, u32 sequence) {
  return word >> 31 == (u64{1} << 32 | sequence) ? static_cast<i64>(word & 0x7fffffff) : 0;
}

// How many ids are out of range (1 or more), and where the first of them is: a flat position in topk_idx.
WEFT_HD constexpr u64 pack_bad_ids(i32 count, i32 first_at) {
  return static_cast<u64>(count) << 32 | static_cast<u32>(first_at);
}

}  // namespace weft::transport
