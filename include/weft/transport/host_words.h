// What the host and a kernel say to each other, in host memory that the GPU maps. One writer a word.
#pragma once

#include "weft/config/base.h"
#include "weft/config/kernel.h"
#include "weft/layout/window.h"

namespace weft::transport {

struct HostWords {
  u64 abort = 0;              // host: leave every wait
  u64 timeout_ns = 0;         // host: of the next operation, counted from its start
  u64 finished_sequence = 0;  // kernel: last operation that ended
  u64 counted_sequence = 0;   // kernel: num_rows below belongs to this operation
  i64 num_rows = 0;
  ErrorRecord error = {};  // kernel: first reason (R9); its code is an ErrorCause
};

enum class ErrorCause : u32 { kNone = 0, kDeadline = 1, kAborted = 2, kMismatch = 3, kBadPeerWord = 4 };

// A window as a kernel sees it: plain pointers, by value. The owner is engine/nvlink/window.h.
struct WindowView {
  WindowLayout layout;
  i32 rank = 0;
  i32 num_ranks = 1;
  u32 active_mask = 0;
  u16 epoch = 0;
  u16 print = 0;                   // fingerprint of the operation
  u8* control[kMaxGpuRanks] = {};  // [rank] is this rank's own
  u8* heap[kMaxGpuRanks] = {};
  u64 heap_bytes[kMaxGpuRanks] = {};
  HostWords* host = nullptr;

  WEFT_HD ControlWords* words() const { return reinterpret_cast<ControlWords*>(control[rank]); }
  WEFT_HD bool is_active(i32 peer) const { return (active_mask >> peer & 1u) != 0; }
};

}  // namespace weft::transport
