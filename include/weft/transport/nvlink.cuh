// Peers that are reached by load and store: the begin and end of an operation, and the two sides of every signal.
#pragma once

#include "weft/layout/gpu_window.h"
#include "weft/sync/block_wait.cuh"
#include "weft/sync/header.h"
#include "weft/transport/host_words.h"

namespace weft::transport {

// One operation in flight, the same for all blocks.
struct Flight {
  sync::Turn turn;
  u16 print = 0;        // fingerprint of the operation
  u32 caller = 0;       // mixed into it: which object calls, with which handle
  bool is_dead = true;  // an earlier operation broke: do nothing
  u32 active_mask = 0;

  __device__ bool is_active(i32 rank) const { return (active_mask >> rank & 1u) != 0; }
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
    flight.turn = {static_cast<u16>(membership >> 32), static_cast<u32>(sequence + 1)};
    const u16 handle = recv_plan == nullptr ? u16{0} : static_cast<u16>(recv_plan[kGpuPlanMadeBy]);
    flight.caller = pack_caller(object, handle);
    flight.print = print_with(print, caller_bits(flight.caller));
    const bool has_moved = words->heap_generation != view.heap_generation;
    flight.is_dead = broken != 0 || has_moved;
    flight.active_mask = static_cast<u32>(membership);
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

// Everything that the block has stored before its last barrier, and every completed bulk store of a thread that fenced
// before that barrier, is visible to the peer that waits for this header. One thread calls it for each peer.
__device__ inline void notify(const WindowView& view, Phase phase, const Flight& flight, i32 peer, i32 block) {
  u64* cell =
      reinterpret_cast<u64*>(view.control[peer] + view.layout.header(phase, flight.turn.sequence, view.rank, block));
  sync::send_header(cell, sync::pack_header(flight.turn, flight.print), [] {});
}

// The first header of an operation: the word behind it says who calls.
__device__ inline void notify_call(const WindowView& view, const Flight& flight, i32 peer) {
  u64* cell = reinterpret_cast<u64*>(view.control[peer] +
                                     view.layout.header(Phase::kCount, flight.turn.sequence, view.rank, 0));
  cell[kCallerWord] = flight.caller;
  sync::send_header(cell, sync::pack_header(flight.turn, flight.print), [] {});
}

// Everything that this thread has stored before (bulk stores: that have completed and were fenced) is visible to the peer
// that waits for progress n of this channel.
__device__ inline void post(const WindowView& view, const Flight& flight, i32 peer, i32 block, i32 channel, u32 n) {
  sync::post_progress(reinterpret_cast<u64*>(view.control[peer] + view.layout.progress_word(view.rank, block, channel)),
                      flight.turn, n);
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

// Waits for n >= target of the peer's channel. One thread; false: leave, the reason is recorded.
__device__ inline bool wait_progress(const WindowView& view, const Flight& flight, i32 peer, i32 block, i32 channel,
                                     u32 target) {
  u64* word = reinterpret_cast<u64*>(view.control[view.rank] + view.layout.progress_word(peer, block, channel));
  constexpr u32 kSleepNs = 200;
  sync::LanePause pause(&view.host->abort, u64{1} << peer, &view.host->timeout_ns, kSleepNs);
  const sync::WaitResult result = sync::wait_progress(word, flight.turn, target, pause);
  return settle(view, flight, result, Phase::kSend, peer, 0);
}

// Everything that came before a fence of this thread is visible to the peer that waits for this token.
__device__ inline void post_token(const WindowView& view, const Flight& flight, i32 peer, i32 token) {
  u64* word = reinterpret_cast<u64*>(view.control[peer] + view.layout.arrived_word(view.rank, token));
  ptx::st_relaxed_sys(word, sync::pack_progress(flight.turn, 1));
}

// Waits for a row of the peer. One thread a token; false: leave, the reason is recorded.
__device__ inline bool wait_token(const WindowView& view, const Flight& flight, i32 peer, i32 token) {
  u64* word = reinterpret_cast<u64*>(view.control[view.rank] + view.layout.arrived_word(peer, token));
  constexpr u32 kSleepNs = 200;
  sync::LanePause pause(&view.host->abort, u64{1} << peer, &view.host->timeout_ns, kSleepNs);
  return settle(view, flight, sync::wait_progress(word, flight.turn, 1, pause), Phase::kSend, peer, 0);
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

// How far the peer's channel has come by now.
__device__ inline u32 progress(const WindowView& view, const Flight& flight, i32 peer, i32 block, i32 channel) {
  const u8* word = view.control[view.rank] + view.layout.progress_word(peer, block, channel);
  return sync::load_progress(reinterpret_cast<const u64*>(word), flight.turn);
}

// What a header that has come says; anything but a match has left its reason in the host words.
__device__ inline Verdict judge(const WindowView& view, Phase phase, const Flight& flight, i32 peer, const u64* cell,
                                u64 seen) {
  if (sync::classify_header(seen, flight.turn, flight.print) == sync::HeaderState::kMatch) return Verdict::kOk;
  // Every block that sees it writes the same; before the record, whose last store makes it visible.
  if (phase == Phase::kCount) view.host->seen_caller[peer] = cell[kCallerWord];
  record(view, flight, ErrorCause::kMismatch, phase, peer, seen);
  return Verdict::kGivenUp;
}

// Waits for one peer's header. Block 0 notes how long.
__device__ inline Verdict wait(const WindowView& view, Phase phase, const Flight& flight, i32 peer, i32 block) {
  const u64* cell = reinterpret_cast<const u64*>(view.control[view.rank] +
                                                 view.layout.header(phase, flight.turn.sequence, peer, block));
  u64* waited_ns = blockIdx.x == 0 ? &view.words()->waited_ns[peer] : nullptr;
  sync::LanePause pause(&view.host->abort, u64{1} << peer, &view.host->timeout_ns, 0, waited_ns);
  u64 seen;
  const sync::WaitResult result = sync::wait_header(cell, flight.turn, pause, seen);
  if (!settle(view, flight, result, phase, peer, seen)) return Verdict::kBroken;
  return judge(view, phase, flight, peer, cell, seen);
}

// The same for a lane that waits for several headers: block 0 adds to `waited_ns` how long, and note_waited() follows.
__device__ inline Verdict wait(const WindowView& view, Phase phase, const Flight& flight, i32 peer, i32 block,
                               u64& waited_ns) {
  const u64* cell = reinterpret_cast<const u64*>(view.control[view.rank] +
                                                 view.layout.header(phase, flight.turn.sequence, peer, block));
  sync::NotingPause pause(&view.host->abort, u64{1} << peer, &view.host->timeout_ns, blockIdx.x == 0);
  u64 seen;
  const sync::WaitResult result = sync::wait_header(cell, flight.turn, pause, seen);
  waited_ns += pause.waited_ns();
  if (!settle(view, flight, result, phase, peer, seen)) return Verdict::kBroken;
  return judge(view, phase, flight, peer, cell, seen);
}

__device__ inline void note_waited(const WindowView& view, i32 peer, u64 waited_ns) {
  if (waited_ns != 0) atomicAdd(&view.words()->waited_ns[peer], waited_ns);
}

// The worst of the block's threads, for all of them; a barrier.
__device__ inline Verdict worst_of(Verdict verdict) {
  if (__syncthreads_or(verdict != Verdict::kOk) == 0) return Verdict::kOk;
  return __syncthreads_or(verdict == Verdict::kBroken) != 0 ? Verdict::kBroken : Verdict::kGivenUp;
}

// The headers of `phase` and `block` from every active peer: one thread a peer, the worst verdict for the whole block.
// `first_thread`: whose peer is rank 0, for a block whose first threads are busy. `so_far`: what this thread has come to before;
// it does not wait if that is bad.
__device__ inline Verdict wait_all(const WindowView& view, Phase phase, const Flight& flight, i32 block,
                                   i32 first_thread = 0, Verdict so_far = Verdict::kOk) {
  const i32 peer = static_cast<i32>(threadIdx.x) - first_thread;
  const bool is_peer = peer >= 0 && peer < view.num_ranks && peer != view.rank && flight.is_active(peer);
  return worst_of(is_peer && so_far == Verdict::kOk ? wait(view, phase, flight, peer, block) : so_far);
}

// For the whole block: whether all others have ended. No block waits for another.
__device__ inline bool is_last_block(const WindowView& view) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = ptx::atom_inc_wrap_gpu(&view.words()->num_ended, gridDim.x - 1) == gridDim.x - 1;
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
__device__ inline void end_flight_early(const WindowView& view, const Flight& flight) {
  GpuControlWords* words = view.words();
  if (ptx::atom_inc_wrap_relaxed_gpu(&words->num_ended, gridDim.x - 1) != gridDim.x - 1) return;
  ptx::st_relaxed_sys(&words->sequence, static_cast<u64>(flight.turn.sequence));
  ptx::st_relaxed_sys(&words->owner, 0);
  ptx::st_relaxed_sys(&view.host->finished_sequence, static_cast<u64>(flight.turn.sequence));
}

}  // namespace weft::transport
