// Signals: the header word and the progress word, the one routine that sends a header and the one that waits for it.
// docs/protocols/headers.md is the page to this file.
//
//   header    epoch:16 | sequence:32 | fingerprint:16   written once an operation, waited for by equality of epoch and sequence
//   progress  epoch:16 | sequence:24 | n:24             n only grows within an operation, waited for by n >= target
#pragma once

#include "weft/config/base.h"
#include "weft/config/mutants.h"
#include "weft/config/operation.h"
#include "weft/ptx/memory.h"
#include "weft/sync/wait.h"

namespace weft::sync {

// Which operation of which membership.
struct Turn {
  u16 epoch = 0;
  u32 sequence = 0;
};

WEFT_HD constexpr u64 pack_header(Turn turn, u16 print) {
  return static_cast<u64>(turn.epoch) << 48 | static_cast<u64>(turn.sequence) << 16 | print;
}

enum class HeaderState : u32 { kNotYet, kMatch, kMismatch, kRefusal };

// What `word` says to an operation that waits for `turn` with fingerprint `print`.
WEFT_HD constexpr HeaderState classify_header(u64 word, Turn turn, u16 print) {
  const u64 expected = pack_header(turn, 0);
  const bool is_turn = mutants::kNoSequence ? word != 0 : (word >> 16) == (expected >> 16);
  if (!is_turn) return HeaderState::kNotYet;
  const u16 seen = static_cast<u16>(word & 0xffff);
  if (seen == kRefusalFingerprint) return HeaderState::kRefusal;
  return seen == print ? HeaderState::kMatch : HeaderState::kMismatch;
}

// Sends: everything that `write_payload` stores, and everything stored before, is visible to whoever acquires the header.
// The release here pairs with the acquire in load_header.
template <class WritePayload>
WEFT_HD void send_header(u64* cell, u64 header, const WritePayload& write_payload) {
  if constexpr (mutants::kHeaderFirst) ptx::st_release_sys(cell, header);
  write_payload();
  if constexpr (mutants::kRelaxedSend) {
    ptx::st_relaxed_sys(cell, header);
  } else if constexpr (!mutants::kHeaderFirst) {
    ptx::st_release_sys(cell, header);
  }
}

WEFT_HD inline u64 load_header(const u64* cell) {
  return mutants::kRelaxedWait ? ptx::ld_relaxed_sys(cell) : ptx::ld_acquire_sys(cell);
}

// Waits until the cell holds a header of `turn`, whatever its fingerprint. Looks are relaxed, since on a GPU each acquire
// throws away the first-level cache of the whole SM; the acquire comes once, when the header is there, and what it reads is
// `seen`. A pause that wants to know when that is has `void arrive()`.
template <class Pause>
WEFT_HD WaitResult wait_header(const u64* cell, Turn turn, Pause& pause, u64& seen) {
  const auto is_there = [&] {
    const bool has_come = classify_header(ptx::ld_relaxed_sys(cell), turn, 0) != HeaderState::kNotYet;
    if constexpr (requires { pause.arrive(); }) {
      if (has_come) pause.arrive();
    }
    return has_come;
  };
  const WaitResult result = wait_until(is_there, pause);
  seen = load_header(cell);
  return result;
}

template <class Pause>
WEFT_HD WaitResult wait_header(const u64* cell, Turn turn, Pause& pause) {
  u64 seen;  // NOLINT(cppcoreguidelines-init-variables): written there
  return wait_header(cell, turn, pause, seen);
}

constexpr u32 kProgressBits = 24;
constexpr u32 kMaxProgress = (1u << kProgressBits) - 1;

WEFT_HD constexpr u64 pack_progress(Turn turn, u32 n) {
  return static_cast<u64>(turn.epoch) << 48 | static_cast<u64>(turn.sequence & kMaxProgress) << kProgressBits | n;
}

// How far the writer of `word` has come in the operation of `turn`: 0 while the word still belongs to another operation.
WEFT_HD constexpr u32 progress_in(u64 word, Turn turn) {
  return (word >> kProgressBits) == (pack_progress(turn, 0) >> kProgressBits) ? static_cast<u32>(word & kMaxProgress)
                                                                              : 0;
}

// Everything stored before is visible to whoever acquires n.
WEFT_HD inline void post_progress(u64* word, Turn turn, u32 n) { ptx::st_release_sys(word, pack_progress(turn, n)); }

WEFT_HD inline u32 load_progress(const u64* word, Turn turn) { return progress_in(ptx::ld_acquire_sys(word), turn); }

// Waits for n >= target. Nothing is ever set back or subtracted (R6).
template <class Pause>
WEFT_HD WaitResult wait_progress(u64* word, Turn turn, u32 target, Pause& pause) {
  const WaitResult result = wait_until([&] { return progress_in(ptx::ld_relaxed_sys(word), turn) >= target; }, pause);
  static_cast<void>(ptx::ld_acquire_sys(word));  // as in wait_header
  if constexpr (mutants::kReset) ptx::st_relaxed_sys(word, pack_progress(turn, 0));
  return result;
}

}  // namespace weft::sync
