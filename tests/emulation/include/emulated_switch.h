// The network of the stand-in for NCCL (nccl_device.h): what was posted and not carried yet, and what a rank knows of the others.
#pragma once

#include <sched.h>

#include <cstring>

#include "weft/config/base.h"

struct EmulatedPost {
  weft::u64 to, from, num_bytes;  // addresses; no bytes: a signal alone
  weft::u64 signal;               // address
  weft::u64 counter;              // address; 0: none
  weft::u64 queue;                // of whom, in which context, to whom
};

// Of all ranks, zeroed.
struct EmulatedSwitch {
  static constexpr weft::u32 kMostPosts = 2048;
  weft::u32 lock;
  weft::u32 num_posts;
  weft::u64 gone;     // ranks whose memory is not there any more, a bit each
  weft::u64 is_held;  // nothing crosses, and who waits until it has makes a mistake
  EmulatedPost posts[kMostPosts];

  static weft::u64 queue(weft::i32 from, weft::i32 context, weft::i32 to) {
    return static_cast<weft::u64>((from * 64 + context) * 64 + to);
  }
  bool is_gone(weft::u64 queue) const { return ((gone >> queue / 4096 | gone >> queue % 64) & 1) != 0; }
  static void carry(const EmulatedPost& one) {
    memcpy(reinterpret_cast<void*>(one.to), reinterpret_cast<const void*>(one.from), one.num_bytes);
    __atomic_fetch_add(reinterpret_cast<weft::u64*>(one.signal), 1, __ATOMIC_RELEASE);
    if (one.counter != 0) __atomic_fetch_add(reinterpret_cast<weft::u64*>(one.counter), 1, __ATOMIC_RELEASE);
  }

  template <class Work>
  void locked(const Work& work) {
    while (__atomic_exchange_n(&lock, 1, __ATOMIC_ACQUIRE) != 0)
      sched_yield();  // other blocks, never fibers of this one
    work();
    __atomic_store_n(&lock, 0, __ATOMIC_RELEASE);
  }
};

struct ncclDevComm {
  static constexpr weft::i32 kMostRanks = 16;
  weft::i32 rank, num_ranks;
  weft::i32 node_ranks;  // 0: connections to all ranks, else along rails alone
  weft::i32 num_contexts;
  weft::u64 num_signals;      // of a context
  weft::u64 num_counters;     // of a context
  weft::u64 most_unanswered;  // of a context, to a peer
  weft::u64 window_bytes;
  weft::u64 network;              // address of the EmulatedSwitch
  weft::u64 memory[kMostRanks];   // address of each rank's window
  weft::u64 signals[kMostRanks];  // of each rank's signals, then its counters
};
