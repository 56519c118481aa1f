// Beginning and ending an operation on the words of the own window (R4, R5, R9).
#pragma once

#include "weft/config/base.h"
#include "weft/layout/window.h"
#include "weft/ptx/memory.h"

namespace weft::sync {

enum class BeginResult : u32 { kOk = 0, kBusy = 1, kBroken = 2 };

// Takes the window for one operation. `owner_tag` is any non-zero value that names the caller.
WEFT_HD inline BeginResult begin_operation(ControlWords* words, u64 owner_tag) {
  if (ptx::atom_cas_acquire_sys(&words->owner, 0, owner_tag) != 0) return BeginResult::kBusy;
  if (words->error.code != 0) {
    ptx::st_release_sys(&words->owner, 0);
    return BeginResult::kBroken;
  }
  return BeginResult::kOk;
}

// Ends it: advanced = ended well, or refused or mismatched on every rank alike; not advanced = broken, or never sent.
WEFT_HD inline void end_operation(ControlWords* words, bool advance) {
  if (advance) ptx::st_relaxed_sys(&words->sequence, words->sequence + 1);
  ptx::st_release_sys(&words->owner, 0);
}

// The first reason stays (R9).
WEFT_HD inline void record_error(ControlWords* words, const ErrorRecord& reason) {
  if (words->error.code == 0) words->error = reason;
}

}  // namespace weft::sync
