// Peers that are reached by load and store: where their windows are mapped, and the two sides of every signal.
#pragma once

#include "weft/layout/window.h"
#include "weft/sync/block_wait.cuh"
#include "weft/sync/header.h"
#include "weft/transport/host_words.h"

namespace weft::transport {

// One operation in flight, the same for all blocks.
struct Flight {
  sync::Turn turn;
  u64 deadline_ns;
};

// For the whole block. One thread reads: the host words are behind PCIe, where 256 reads a block cost 12 us (measured).
__device__ inline Flight begin_flight(const WindowView& view) {
  __shared__ Flight flight;
  if (threadIdx.x == 0) {
    const u32 sequence = static_cast<u32>(ptx::ld_relaxed_sys(&view.words()->sequence) + 1);
    flight = {{view.epoch, sequence}, ptx::globaltimer_ns() + ptx::ld_relaxed_sys(&view.host->timeout_ns)};
  }
  __syncthreads();
  return flight;
}

// Everything that the block has stored before its last barrier, and every completed bulk store of a thread that fenced
// before that barrier, is visible to the peer that waits for this header. One thread calls it for each peer.
__device__ inline void notify(const WindowView& view, Phase phase, const Flight& flight, i32 peer, i32 block) {
  u64* cell =
      reinterpret_cast<u64*>(view.control[peer] + view.layout.header(phase, flight.turn.sequence, view.rank, block));
  sync::send_header(cell, sync::pack_header(flight.turn, view.print), [] {});
}

__device__ inline void record(const WindowView& view, const Flight& flight, ErrorCause cause, Phase phase, i32 peer,
                              u64 seen) {
  ErrorRecord* error = &view.host->error;
  // First come first served within the GPU; the host reads it after the kernel has ended.
  if (atomicCAS_system(&error->code, 0u, static_cast<u32>(cause)) != 0) return;
  error->phase = static_cast<u32>(phase);
  error->culprit = peer;
  error->epoch = flight.turn.epoch;
  error->sequence = flight.turn.sequence;
  error->expected = sync::pack_header(flight.turn, view.print);
  error->seen = seen;
}

enum class Verdict : u32 { kOk = 0, kMismatch = 1, kBroken = 2 };

// Waits for one peer's header. Anything but kOk has left its reason in the host words.
__device__ inline Verdict wait(const WindowView& view, Phase phase, const Flight& flight, i32 peer, i32 block) {
  const u64* cell = reinterpret_cast<const u64*>(view.control[view.rank] +
                                                 view.layout.header(phase, flight.turn.sequence, peer, block));
  sync::LanePause pause(&view.host->abort, flight.deadline_ns);
  const sync::WaitResult result = sync::wait_header(cell, flight.turn, pause);
  const u64 seen = sync::load_header(cell);
  if (result != sync::WaitResult::kReady) {
    record(view, flight, result == sync::WaitResult::kAborted ? ErrorCause::kAborted : ErrorCause::kDeadline, phase,
           peer, seen);
    return Verdict::kBroken;
  }
  if (sync::classify_header(seen, flight.turn, view.print) == sync::HeaderState::kMatch) return Verdict::kOk;
  record(view, flight, ErrorCause::kMismatch, phase, peer, seen);
  return Verdict::kMismatch;
}

// The headers of `phase` and `block` from every active peer: one thread a peer, the worst verdict for the whole block.
__device__ inline Verdict wait_all(const WindowView& view, Phase phase, const Flight& flight, i32 block) {
  u32 verdict = 0;
  const i32 peer = static_cast<i32>(threadIdx.x);
  if (peer < view.num_ranks && peer != view.rank && view.is_active(peer)) {
    verdict = static_cast<u32>(wait(view, phase, flight, peer, block));
  }
  const bool is_broken = __syncthreads_or(verdict == static_cast<u32>(Verdict::kBroken)) != 0;
  const bool differs = __syncthreads_or(verdict == static_cast<u32>(Verdict::kMismatch)) != 0;
  return is_broken ? Verdict::kBroken : differs ? Verdict::kMismatch : Verdict::kOk;
}

// The last block to come here ends the operation. No block waits for another.
__device__ inline void end_flight(const WindowView& view, const Flight& flight, u32* num_ended) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (ptx::atom_inc_wrap_gpu(num_ended, gridDim.x - 1) != gridDim.x - 1) return;
  ptx::st_relaxed_sys(&view.words()->sequence, static_cast<u64>(flight.turn.sequence));
  ptx::st_release_sys(&view.host->finished_sequence, static_cast<u64>(flight.turn.sequence));
}

}  // namespace weft::transport
