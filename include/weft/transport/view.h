// A window as a kernel sees it.
#pragma once

#include "weft/layout/gpu_window.h"
#include "weft/transport/host_words.h"

namespace weft::transport {

// A window as a kernel sees it: plain pointers, by value. The owner is engine/nvlink/window.h. Addresses never change in the
// life of a window, nor by a rebuild (R16), so captured graphs may hold them; who is a member is in the control words. The
// exception is the own heap while tensors of an old epoch are alive (docs/decisions/0015).
struct WindowView {
  GpuWindowLayout layout;
  i32 rank = 0;
  i32 num_ranks = 1;
  u8* control[kMaxGpuRanks] = {};  // [rank] is this rank's own
  u8* heap[kMaxGpuRanks] = {};
  u64 heap_bytes[kMaxGpuRanks] = {};
  u32 heap_generation = 0;  // of heap[rank]; the one address that a rebuild may change
  HostWords* host = nullptr;

  WEFT_HD GpuControlWords* words() const { return reinterpret_cast<GpuControlWords*>(control[rank]); }
  // This rank's own memory. That of peers is reached through transport/peers.cuh alone.
  WEFT_HD u8* own_control() const { return control[rank]; }
  WEFT_HD u8* own_heap() const { return heap[rank]; }
};

}  // namespace weft::transport
