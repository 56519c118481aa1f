// The route over a loop-back network (transport/rail_loop.h): no kernel stores to a peer, messages go through rings. It shows what
// any network needs of the kernels, and runs where there is no hardware; it is slow. The grid has two blocks more than the
// configuration: one is the network, which carries messages in any order, one receives.
#pragma once

#include "weft/config/route.h"
#include "weft/ptx/bulk.cuh"
#include "weft/transport/flight.cuh"
#include "weft/transport/rail_loop.h"

namespace weft::transport {

template <Route kRoute>
class Peers;

enum class LoopKind : u32 { kBytes = 0, kSignal = 1, kCall = 2 };

// One ring, in the memory of either end.
class LoopRing {
 public:
  __device__ LoopRing(const LoopRail& rail, i32 owner, bool is_send, i32 peer, i32 block)
      : rail_(rail), base_(rail.memory[owner] + rail.ring(is_send, peer, block)) {}

  __device__ u64* head() const { return reinterpret_cast<u64*>(base_); }      // messages that were begun, or taken
  __device__ u64* read() const { return reinterpret_cast<u64*>(base_) + 1; }  // send ring: that the peer has read
  // n + 1 when message n is in the slot.
  __device__ u64* signal(i32 slot) const { return reinterpret_cast<u64*>(base_ + LoopRail::kHeadBytes) + slot; }
  // Send ring: what the network has carried of a slot.
  __device__ u64* carried(i32 slot) const { return signal(rail_.num_slots + slot); }
  __device__ u8* slot(i32 slot) const {
    return base_ + LoopRail::kHeadBytes + rail_.signals_bytes() + static_cast<u64>(slot) * rail_.slot_bytes;
  }
  __device__ i32 slot_of(u64 n) const { return static_cast<i32>(n % static_cast<u64>(rail_.num_slots)); }

 private:
  const LoopRail& rail_;
  u8* base_;
};

__device__ inline void copy_words(u8* to, const u8* from, u32 num_bytes) {
  for (u32 at = 0; at < num_bytes; at += sizeof(u32)) {
    *reinterpret_cast<u32*>(to + at) = *reinterpret_cast<const u32*>(from + at);
  }
}

template <>
class Peers<Route::kLoop> {
 public:
  using Rail = LoopRail;

  class Place {
   public:
    Place() = default;
    __device__ Place(i32 rank, bool is_control, u8* own)
        : rank_(rank), is_control_(is_control), own_(own), offset_(0) {}
    __device__ Place operator+(u64 num_bytes) const {
      Place place = *this;
      place.offset_ += num_bytes;
      return place;
    }
    template <class T, class Index>
    __device__ Place at(Index idx) const {
      return *this + static_cast<u64>(static_cast<i64>(idx) * static_cast<i64>(sizeof(T)));
    }
    // Of this rank's own memory.
    __device__ u8* own() const { return own_ + offset_; }
    // Nobody reads from a peer over a network; of this rank's own memory.
    __device__ u8* address() const { return own_ == nullptr ? nullptr : own(); }

   private:
    friend class Peers;
    i32 rank_;
    bool is_control_;
    u8* own_;  // null: another rank's
    u64 offset_;
  };

  __device__ Peers(const WindowView& view, const LoopRail& rail, const Flight& flight)
      : view_(view), rail_(rail), flight_(flight) {}

  __device__ Place heap(i32 rank) const { return {rank, false, rank == view_.rank ? view_.own_heap() : nullptr}; }
  __device__ Place control(i32 rank) const { return {rank, true, rank == view_.rank ? view_.own_control() : nullptr}; }

  __device__ void put(Place to, const u8* shared, u32 num_bytes) const {
    if (to.own_ != nullptr) return ptx::bulk_store(to.own(), shared, num_bytes);
    send_bytes(to, shared, num_bytes);
  }
  template <class Value>
  __device__ void put_words(Place to, Value value) const {
    if (to.own_ != nullptr) {
      *reinterpret_cast<Value*>(to.own()) = value;
    } else {
      send_bytes(to, reinterpret_cast<const u8*>(&value), sizeof(Value));
    }
  }
  template <class Struct, class Value>
  __device__ void put_field(Place to, Value Struct::* field, const Value& value) const {
    alignas(16) u8 there[sizeof(Struct)];
    const u8* at = reinterpret_cast<const u8*>(&(reinterpret_cast<Struct*>(there)->*field));
    put_words(to + static_cast<u64>(at - there), value);
  }

  // Behind everything that this block has sent to the peer, since messages of a ring are taken in order.
  __device__ void notify(Phase phase, const Flight& flight, i32 peer, i32 block) const {
    const u64 offset = view_.layout.header(phase, flight.turn.sequence, view_.rank, block);
    send(peer, {static_cast<u32>(LoopKind::kSignal), 0, 1, 0, offset, sync::pack_header(flight.turn, flight.print)},
         nullptr);
  }
  __device__ void notify_call(const Flight& flight, i32 peer) const {
    const u64 offset = view_.layout.header(Phase::kCount, flight.turn.sequence, view_.rank, 0);
    const u64 caller = flight.caller;
    send(
        peer,
        {static_cast<u32>(LoopKind::kCall), sizeof(caller), 1, 0, offset, sync::pack_header(flight.turn, flight.print)},
        reinterpret_cast<const u8*>(&caller));
  }
  __device__ void post(const Flight& flight, i32 peer, i32 block, i32 channel, u32 n) const {
    const u64 offset = view_.layout.progress_word(view_.rank, block, channel);
    const u64 word = sync::pack_progress(flight.turn, n);
    if (peer == view_.rank) {
      ptx::st_release_sys(reinterpret_cast<u64*>(view_.own_control() + offset), word);
    } else {
      send(peer, {static_cast<u32>(LoopKind::kSignal), 0, 1, 0, offset, word}, nullptr);
    }
  }

 private:
  __device__ void send_bytes(Place to, const u8* from, u32 num_bytes) const {
    const u32 most = static_cast<u32>(rail_.slot_bytes - sizeof(LoopMessage)) / 16 * 16;
    for (u32 at = 0; at < num_bytes; at += most) {
      const u32 length = min(num_bytes - at, most);
      send(to.rank_, {static_cast<u32>(LoopKind::kBytes), length, to.is_control_ ? 1u : 0u, 0, to.offset_ + at, 0},
           from + at);
    }
  }

  // Waits for a credit. Without one the reason is recorded, and nothing is sent any more (R9).
  __device__ void send(i32 peer, const LoopMessage& message, const u8* data) const {
    const LoopRing ring(rail_, view_.rank, true, peer, static_cast<i32>(blockIdx.x));
    const u64 n = atomicAdd(ring.head(), u64{1});
    const auto has_credit = [&] { return n < ptx::ld_acquire_sys(ring.read()) + static_cast<u64>(rail_.num_slots); };
    sync::LanePause pause(&view_.host->abort, u64{1} << peer, &view_.host->timeout_ns);
    const sync::WaitResult result = sync::wait_until(has_credit, pause);
    if (!settle(view_, flight_, result, Phase::kSend, peer, 0)) return;
    const i32 slot = ring.slot_of(n);
    *reinterpret_cast<LoopMessage*>(ring.slot(slot)) = message;
    copy_words(ring.slot(slot) + sizeof(message), data, message.num_bytes);
    ptx::st_release_sys(ring.signal(slot), n + 1);
  }

  const WindowView& view_;
  const LoopRail& rail_;
  const Flight& flight_;
};

// The network and the receiver of a rank, a thread each.
class LoopService {
 public:
  __device__ LoopService(const WindowView& view, const LoopRail& rail) : view_(view), rail_(rail) {}

  // Carries what is full until all blocks have ended and nothing is left. Slots in an order of its own: half of them wait.
  __device__ void carry() {
    u64* num_launches = &head()->num_carried;
    random_ = (*num_launches * 64 + static_cast<u64>(view_.rank) + 1) * 0x9e3779b97f4a7c15ull;
    run([&] {
      const bool has_ended = all_ended(*num_launches);
      bool is_left = false;
      for_rings([&](i32 peer, i32 block) { is_left |= carry_ring(peer, block); });
      return has_ended && !is_left;
    });
    ++*num_launches;
  }

  // Takes what has arrived until all blocks have ended.
  __device__ void receive() {
    u64* num_launches = &head()->num_received;
    run([&] {
      const bool has_ended = all_ended(*num_launches);
      for_rings([&](i32 peer, i32 block) { receive_ring(peer, block); });
      return has_ended;
    });
    ++*num_launches;
  }

 private:
  __device__ LoopHead* head() const { return reinterpret_cast<LoopHead*>(rail_.memory[view_.rank]); }
  __device__ bool all_ended(u64 num_launches) const {
    return ptx::ld_acquire_sys(&head()->num_ended) >= (num_launches + 1) * static_cast<u64>(rail_.num_blocks);
  }
  template <class IsOver>
  __device__ void run(const IsOver& is_over) const {
    sync::LanePause pause(&view_.host->abort, ~u64{0}, &view_.host->timeout_ns);
    static_cast<void>(sync::wait_until(is_over, pause));
  }
  template <class Work>
  __device__ void for_rings(const Work& work) const {
    for (i32 peer = 0; peer < rail_.num_ranks; ++peer) {
      for (i32 block = 0; peer != view_.rank && block < rail_.num_blocks; ++block) work(peer, block);
    }
  }
  __device__ u64 random() {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return random_;
  }

  // Whether a slot is left to be carried.
  __device__ bool carry_ring(i32 peer, i32 block) {
    const LoopRing from(rail_, view_.rank, true, peer, block);
    const LoopRing to(rail_, peer, false, view_.rank, block);
    bool is_left = false;
    const i32 first = static_cast<i32>(random() % static_cast<u64>(rail_.num_slots));
    for (i32 idx = 0; idx < rail_.num_slots; ++idx) {
      const i32 slot = (first + idx) % rail_.num_slots;
      const u64 signal = ptx::ld_acquire_sys(from.signal(slot));
      if (signal == *from.carried(slot)) continue;
      is_left = true;
      if (random() % 2 != 0) continue;
      const u32 num_bytes = reinterpret_cast<const LoopMessage*>(from.slot(slot))->num_bytes;
      copy_words(to.slot(slot), from.slot(slot), static_cast<u32>(sizeof(LoopMessage)) + num_bytes);
      ptx::st_release_sys(to.signal(slot), signal);
      *from.carried(slot) = signal;
    }
    return is_left;
  }

  __device__ void receive_ring(i32 peer, i32 block) const {
    const LoopRing ring(rail_, view_.rank, false, peer, block);
    const LoopRing of_peer(rail_, peer, true, view_.rank, block);
    for (u64 n = *ring.head();; ++n) {
      const i32 slot = ring.slot_of(n);
      if (ptx::ld_acquire_sys(ring.signal(slot)) != n + 1) return;
      if (!deliver(*reinterpret_cast<const LoopMessage*>(ring.slot(slot)), ring.slot(slot) + sizeof(LoopMessage)))
        return;
      *ring.head() = n + 1;
      ptx::st_release_sys(of_peer.read(), n + 1);
    }
  }

  // R19: nothing outside of this rank's memory. False: the peer has gone wrong, nothing more is taken from it.
  __device__ bool deliver(const LoopMessage& message, const u8* data) const {
    const bool is_control = message.is_control != 0;
    const u64 room = is_control ? view_.layout.control_bytes : view_.heap_bytes[view_.rank];
    const u64 length = message.kind == static_cast<u32>(LoopKind::kBytes) ? message.num_bytes : kCacheLine;
    if (message.offset > room || length > room - message.offset) return false;
    u8* to = (is_control ? view_.own_control() : view_.own_heap()) + message.offset;
    if (message.kind == static_cast<u32>(LoopKind::kBytes)) {
      copy_words(to, data, message.num_bytes);
      return true;
    }
    if (message.kind == static_cast<u32>(LoopKind::kCall))
      copy_words(to + kCallerWord * sizeof(u64), data, sizeof(u64));
    ptx::st_release_sys(reinterpret_cast<u64*>(to), message.word);
    return true;
  }

  const WindowView& view_;
  const LoopRail& rail_;
  u64 random_ = 1;
};

// By all blocks, before anything else: whether this one serves the route, and has done so.
__device__ inline bool serve_route(const WindowView& view, const LoopRail& rail) {
  const i32 service = static_cast<i32>(blockIdx.x) - rail.num_blocks;
  if (service < 0) return false;
  if (threadIdx.x == 0) {
    LoopService loop(view, rail);
    service == 0 ? loop.carry() : loop.receive();
  }
  return true;
}

// By all threads of the other blocks, at their end.
__device__ inline void leave_route(const WindowView& view, const LoopRail& rail, bool) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  ptx::add_release_sys(&reinterpret_cast<LoopHead*>(rail.memory[view.rank])->num_ended, 1);
}

}  // namespace weft::transport
