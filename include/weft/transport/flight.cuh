// The begin and end of an operation, why it broke, and what its blocks tell each other. Knows of no link: transport/peers.cuh does.
#pragma once

#include "weft/layout/gpu_window.h"
#include "weft/sync/block_wait.cuh"
#include "weft/sync/header.h"
#include "weft/transport/view.h"

namespace weft::transport {

// One operation in flight, the same for all blocks.
struct Flight {
  sync::Turn turn;
  u16 print = 0;        // fingerprint of the operation
  u32 caller = 0;       // mixed into it: which object calls, with which handle
  bool is_dead = true;  // an earlier operation broke: do nothing
  GpuRankMask active = GpuRankMask::none();

  __device__ bool is_active(i32 rank) const { return active.has(rank); }
};

__device__ inline void record(const WindowView& view, const Flight& flight, ErrorCause cause, Phase phase, i32 peer,
                              u64 seen) {
  ErrorRecord* error = &view.host->error;
  // First come first served, until the host has read it.
  const u32 num_read = static_cast<u32>(ptx::ld_relaxed_sys(&view.host->num_errors_read));
  if (atomicCAS(&view.words()->num_errors, num_read, num_read + 1) != num_read) return;
  error->culprit = peer;
  error->epoch = flight.turn.epoch;
  error->sequence = flight.turn.sequence;
  error->expected = sync::pack_header(flight.turn, flight.print);
  view.host->error_caller = flight.caller;
  error->seen = seen;
  // code and phase are one aligned word; with them the record is complete.
  ptx::st_release_sys(reinterpret_cast<u64*>(&error->code), static_cast<u64>(cause) | static_cast<u64>(phase) << 32);
}

// An operation is one launch, or two: one that sends and one that receives, between which no kernel of the window runs.
enum class FlightPart : u32 { kWhole = 0, kSend = 1, kReceive = 2 };

// For the whole block; one thread reads. Words in host memory are not touched: 256 reads of them cost 12 us (measured).
// The owner word is taken by the launch that begins the operation and given back by end_flight in the one that ends it.
// `object`: number of the ExpertParallel. `recv_plan`: of the handle that the operation works with, null if it makes one.
__device__ inline const Flight& begin_flight(const WindowView& view, u16 print, u32 object, const i32* recv_plan,
                                             FlightPart part = FlightPart::kWhole) {
  __shared__ Flight flight;
  if (threadIdx.x == 0) {
    GpuControlWords* words = view.words();
    const u64 sequence = ptx::ld_relaxed_sys(&words->sequence);
    const u64 membership = ptx::ld_relaxed_sys(&words->membership);
    const u64 broken = ptx::ld_relaxed_sys(&words->broken);
    flight.turn = {epoch_in(membership), static_cast<u32>(sequence + 1)};
    const u16 handle = recv_plan == nullptr ? u16{0} : static_cast<u16>(recv_plan[kGpuPlanMadeBy]);
    flight.caller = pack_caller(object, handle);
    flight.print = print_with(print, caller_bits(flight.caller));
    const bool has_moved = words->heap_generation != view.heap_generation;
    flight.is_dead = broken != 0 || has_moved;
    flight.active = active_in(membership);
    // Said again: the reason may have found no place behind that of a call that was given up.
    if (blockIdx.x == 0 && broken != 0) record(view, flight, static_cast<ErrorCause>(broken), Phase::kCount, -1, 0);
    if (blockIdx.x == 0 && has_moved) record(view, flight, ErrorCause::kMoved, Phase::kCount, view.rank, 0);
    if (part == FlightPart::kReceive) {
      // Nothing was sent, or it has been received: nobody would answer. Every block sees it alike.
      const bool has_sent = ptx::ld_relaxed_sys(&words->owner) != 0;
      if (blockIdx.x == 0 && !flight.is_dead && !has_sent) {
        record(view, flight, ErrorCause::kBusy, Phase::kCount, view.rank, 0);
      }
      flight.is_dead = flight.is_dead || !has_sent;
    }
  }
  __syncthreads();
  // Nobody waits for the thread that takes the word.
  const bool takes = part != FlightPart::kReceive && blockIdx.x == 0 && threadIdx.x == blockDim.x - 1;
  if (takes && !flight.is_dead && ptx::atom_cas_acquire_sys(&view.words()->owner, 0, 1) != 0) {
    record(view, flight, ErrorCause::kBusy, Phase::kCount, view.rank, 0);
  }
  return flight;
}

enum class Verdict : u32 { kOk = 0, kGivenUp = 1, kBroken = 2 };

// One thread. Anything but kReady has left its reason in the host words.
__device__ inline bool settle(const WindowView& view, const Flight& flight, sync::WaitResult result, Phase phase,
                              i32 peer, u64 seen) {
  if (result == sync::WaitResult::kReady) return true;
  const ErrorCause cause = result == sync::WaitResult::kAborted ? ErrorCause::kAborted : ErrorCause::kDeadline;
  record(view, flight, cause, phase, peer, seen);
  ptx::st_relaxed_sys(&view.words()->broken, static_cast<u64>(cause));
  return false;
}

// By a whole warp: until `look`, at progress words of other blocks of this launch, is true in all lanes. False: leave, the reason
// is recorded. A block that begins when another has failed sees its window broken and says nothing, so that ends the wait too.
template <class Look>
__device__ inline bool wait_blocks(const WindowView& view, const Flight& flight, Look look) {
  struct Pause {
    const u64* broken;
    sync::LanePause lane;
    u32 num_turns = 0;
    __device__ sync::PauseResult turn() {
      constexpr u32 kTurnsOfBroken = 16;
      const sync::PauseResult verdict = lane.turn();
      if (verdict != sync::PauseResult::kLookAgain || ++num_turns % kTurnsOfBroken != 0) return verdict;
      return ptx::ld_relaxed_sys(broken) != 0 ? sync::PauseResult::kAbort : verdict;
    }
  };
  const u64* broken = &view.words()->broken;
  Pause pause{broken, {&view.host->abort, u64{1} << view.rank, &view.host->timeout_ns}};
  const sync::WaitResult result = sync::wait_all_lanes(look, pause);
  if (result == sync::WaitResult::kReady) return true;
  const bool is_first = threadIdx.x % ptx::kWarpLanes == 0 && ptx::ld_relaxed_sys(broken) == 0;
  if (is_first) settle(view, flight, result, Phase::kCount, view.rank, 0);
  return false;
}

__device__ inline void note_waited(const WindowView& view, i32 peer, u64 waited_ns) {
  if (waited_ns != 0) atomicAdd(&view.words()->waited_ns[peer], waited_ns);
}

// The worst of the block's threads, for all of them; a barrier.
__device__ inline Verdict worst_of(Verdict verdict) {
  if (__syncthreads_or(verdict != Verdict::kOk) == 0) return Verdict::kOk;
  return __syncthreads_or(verdict == Verdict::kBroken) != 0 ? Verdict::kBroken : Verdict::kGivenUp;
}

// For the whole block: whether all others of the operation's `num_blocks` have ended. No block waits for another.
__device__ inline bool is_last_block(const WindowView& view, u32 num_blocks) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = ptx::atom_inc_wrap_gpu(&view.words()->num_ended, num_blocks - 1) == num_blocks - 1;
  }
  __syncthreads();
  return is_last;
}

// By the last block: the operation has ended, well or given up by all.
__device__ inline void end_flight(const WindowView& view, const Flight& flight) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  GpuControlWords* words = view.words();
  words->next_chunk = 0;
  ptx::st_relaxed_sys(&words->sequence, static_cast<u64>(flight.turn.sequence));
  ptx::st_release_sys(&words->owner, 0);
  // For people to read: what it says is ordered by the release above, and another would wait for that store.
  ptx::st_relaxed_sys(&view.host->finished_sequence, static_cast<u64>(flight.turn.sequence));
}

// In place of the two above: by one thread of each block when none of its waits is left, so that nothing can break any more;
// the others of the block go on with what concerns this rank alone. The last to come ends the operation. The next kernel of
// the window begins behind this one, so these words order nothing.
__device__ inline void end_flight_early(const WindowView& view, const Flight& flight, u32 num_blocks) {
  GpuControlWords* words = view.words();
  if (ptx::atom_inc_wrap_relaxed_gpu(&words->num_ended, num_blocks - 1) != num_blocks - 1) return;
  ptx::st_relaxed_sys(&words->sequence, static_cast<u64>(flight.turn.sequence));
  ptx::st_relaxed_sys(&words->owner, 0);
  ptx::st_relaxed_sys(&view.host->finished_sequence, static_cast<u64>(flight.turn.sequence));
}

}  // namespace weft::transport
