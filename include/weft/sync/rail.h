// The two ends of a ring of a rail: who may fill a slot, when a chunk is there, and what is counted. docs/protocols/rail.md is the page
// to this file, layout/rail.h has the addresses. Of any two puts or credits nothing is assumed.
#pragma once

#include "weft/config/base.h"
#include "weft/ptx/memory.h"
#include "weft/sync/wait.h"

namespace weft::sync {

// What a rank waits for on a rail: for the errors that name it, with the peer.
enum class RailWait : u32 { kPlace = 0, kChunk = 1, kMessage = 2 };

struct RailLate {
  WaitResult result = WaitResult::kReady;
  RailWait what = RailWait::kPlace;
  i32 rank = -1;  // of whom it is awaited
  u64 n = 0;      // of the ring between the two
};

// How often the slot of chunk n has been filled when n is in it.
WEFT_HD constexpr u64 rail_fills(u64 n, u32 num_slots) { return n / num_slots + 1; }

// Whether the slot of chunk n may be filled: each credit says that the put of a chunk has settled, and that it was read.
WEFT_HD constexpr bool rail_has_place(u64 n, u64 credits, u32 num_slots) { return n < credits + num_slots; }

// The network's ending of a put: what `copy` stores is visible to whoever acquires the signal, or a word behind it.
template <class Copy>
WEFT_HD void settle_put(const Copy& copy, u64* signal) {
  copy();
  ptx::add_release_sys(signal, 1);
}

// The end that sends. `num_put`: a word of this end alone. `credits`: chunks that the other end has read.
class RailSource {
 public:
  WEFT_HD RailSource(u64* num_put, const u64* credits, u32 num_slots)
      : num_put_(num_put), credits_(credits), num_slots_(num_slots) {}

  WEFT_HD u64 next() const { return *num_put_; }
  // The acquire pairs with the release of the credit: the put of the slot's last chunk has settled, so the slot may be filled.
  WEFT_HD bool has_place() const { return rail_has_place(next(), ptx::ld_acquire_sys(credits_), num_slots_); }
  template <class Pause>
  WEFT_HD RailLate wait_place(i32 peer, Pause& pause) const {
    return {wait_until([&] { return has_place(); }, pause), RailWait::kPlace, peer, next()};
  }
  // The slot of next() is full. `put(n)` sends it, with the signal of the slot; it never waits.
  template <class Put>
  WEFT_HD void post(const Put& put) const {
    put(next());
    ++*num_put_;
  }

 private:
  u64* num_put_;
  const u64* credits_;
  u32 num_slots_;
};

// The end that receives. `num_taken`: a word of this end alone. `signals` [num_slots]: how often each slot was filled.
class RailSink {
 public:
  WEFT_HD RailSink(u64* num_taken, const u64* signals, u32 num_slots)
      : num_taken_(num_taken), signals_(signals), num_slots_(num_slots) {}

  WEFT_HD u64 next() const { return *num_taken_; }
  WEFT_HD bool has_arrived() const {
    return ptx::ld_acquire_sys(signals_ + next() % num_slots_) >= rail_fills(next(), num_slots_);
  }
  template <class Pause>
  WEFT_HD RailLate wait_chunk(i32 peer, Pause& pause, RailWait what = RailWait::kChunk) const {
    return {wait_until([&] { return has_arrived(); }, pause), what, peer, next()};
  }
  // Chunk next() is there. `read(n)`: false if it is not read to its end yet; else `give_credit()`, and the slot may be filled again.
  template <class Read, class GiveCredit>
  WEFT_HD bool take(const Read& read, const GiveCredit& give_credit) const {
    if (!read(next())) return false;
    ++*num_taken_;
    give_credit();
    return true;
  }

 private:
  u64* num_taken_;
  const u64* signals_;
  u32 num_slots_;
};

}  // namespace weft::sync
