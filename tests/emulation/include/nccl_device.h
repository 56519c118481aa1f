// Stands in for NCCL's device interface (GIN), as transport/rail_gin.cuh uses it: a network that carries what is posted in any
// order, some of it each time that somebody reads a signal. A put's bytes are read when it is carried, not when it is posted, and
// its signal is added to behind them: a weak one. What NCCL would not do is a mistake that is found.
#pragma once

#include "emulated_switch.h"

using ncclWindow_t = void*;
using ncclGinSignal_t = weft::u32;
using ncclGinCounter_t = weft::u32;

struct ncclTeam {
  weft::i32 num_ranks, rank, stride;
};
inline ncclTeam ncclTeamWorld(const ncclDevComm& comm) { return {comm.num_ranks, comm.rank, 1}; }
inline ncclTeam ncclTeamRail(const ncclDevComm& comm) {
  return {comm.num_ranks / comm.node_ranks, comm.rank / comm.node_ranks, comm.node_ranks};
}

struct ncclGin_WeakSignalAdd {
  ncclGinSignal_t signal;
  weft::u64 value;
};
struct ncclGin_WeakCounterInc {
  ncclGinCounter_t counter;
};
struct ncclGin_None {};
struct ncclCoopThread {};
namespace cuda {
enum memory_order { memory_order_acquire };
enum thread_scope { thread_scope_thread, thread_scope_system };
}  // namespace cuda

class ncclGin {
 public:
  const ncclDevComm& comm;

  ncclGin(const ncclDevComm& of, int context) : comm(of), context_(context) {
    if (context < 0 || context >= comm.num_contexts) emulation::fail("context %d of %d", context, comm.num_contexts);
  }

  void put(ncclTeam team, int peer, ncclWindow_t there, weft::u64 to, ncclWindow_t here, weft::u64 from,
           weft::u64 num_bytes, ncclGin_WeakSignalAdd signal, ncclGin_WeakCounterInc counter, ncclCoopThread,
           ncclGin_None, cuda::thread_scope, cuda::thread_scope) const {
    const auto own = reinterpret_cast<ncclWindow_t>(comm.memory[comm.rank]);
    if (there != own || here != own) emulation::fail("a put of another window");
    if (to + num_bytes > comm.window_bytes || from + num_bytes > comm.window_bytes)
      emulation::fail("a put beyond the window");
    post(team, peer, {to, from, num_bytes, 0, reinterpret_cast<weft::u64>(counter_word(counter.counter)), 0}, signal);
  }
  void signal(ncclTeam team, int peer, ncclGin_WeakSignalAdd signal) const { post(team, peer, {}, signal); }

  weft::u64 readSignal(ncclGinSignal_t signal, int, cuda::memory_order) const { return read(word(comm.rank, signal)); }
  weft::u64 readCounter(ncclGinCounter_t counter, int, cuda::memory_order) const {
    if (network().is_held != 0) emulation::fail("a wait for what is held in the network");
    return read(counter_word(counter));
  }

 private:
  weft::u64 read(const weft::u64* word) const {
    carry();
    const weft::u64 value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    emulation::maybe_sleep();
    return value;
  }
  weft::u64* counter_word(ncclGinCounter_t counter) const {
    if (counter >= comm.num_counters) emulation::fail("counter %u of %llu", counter, comm.num_counters);
    const auto context = static_cast<weft::u64>(context_), all = static_cast<weft::u64>(comm.num_contexts);
    return reinterpret_cast<weft::u64*>(comm.signals[comm.rank]) + all * comm.num_signals +
           context * comm.num_counters + counter;
  }
  weft::u64* word(int rank, ncclGinSignal_t signal) const {
    if (signal >= comm.num_signals) emulation::fail("signal %u of %llu", signal, comm.num_signals);
    return reinterpret_cast<weft::u64*>(comm.signals[rank]) + static_cast<weft::u64>(context_) * comm.num_signals +
           signal;
  }
  EmulatedSwitch& network() const { return *reinterpret_cast<EmulatedSwitch*>(comm.network); }

  // `one`: with places within windows.
  void post(ncclTeam team, int peer, EmulatedPost one, ncclGin_WeakSignalAdd signal) const {
    if (peer < 0 || peer >= team.num_ranks || peer == team.rank) emulation::fail("a put to rank %d of a team", peer);
    if (team.stride == 1 && comm.node_ranks > 0) emulation::fail("a put to a rank that is not connected");
    const int rank = comm.rank % team.stride + peer * team.stride;
    if (signal.value != 1) emulation::fail("a signal of another value than 1");
    const weft::u64 queue = EmulatedSwitch::queue(comm.rank, context_, rank);
    one.to += comm.memory[rank];
    one.from += comm.memory[comm.rank];
    one.signal = reinterpret_cast<weft::u64>(word(rank, signal.signal));
    one.queue = queue;
    weft::u64 num_unanswered = 0;
    bool is_full = false;
    EmulatedSwitch& all = network();
    all.locked([&] {
      for (weft::u32 idx = 0; idx < all.num_posts; ++idx) num_unanswered += all.posts[idx].queue == queue;
      is_full = all.num_posts == EmulatedSwitch::kMostPosts;
      if (!is_full) all.posts[all.num_posts++] = one;
    });
    // A GPU would wait here, perhaps for ever.
    if (is_full || num_unanswered >= comm.most_unanswered)
      emulation::fail("a post to a queue of %llu that nobody has answered", num_unanswered);
  }

  // Each that is there, in an order that changes, waits for another time as often as not.
  void carry() const {
    EmulatedSwitch& all = network();
    if (all.is_held != 0) return;
    all.locked([&] {
      for (weft::u32 left = all.num_posts; left > 0; --left) {
        if (emulation::random_below(2) == 0) continue;
        EmulatedPost& one = all.posts[emulation::random_below(all.num_posts)];
        if (!all.is_gone(one.queue)) all.carry(one);
        one = all.posts[--all.num_posts];
      }
    });
  }

  int context_;
};
