// Rails without hardware: the verbs of transport/rail_gin.cuh, over a network that is one block more of each rank's grid than the
// configuration has. It carries what is posted in any order, and runs where there is no network card.
#pragma once

#include "weft/sync/rail.h"
#include "weft/transport/flight.cuh"
#include "weft/transport/rail_block.h"

namespace weft::transport {

// By one thread of a block. `n` counts chunks of the ring (peer, block), or messages of the peer; it only grows (R6).
class BlockRing {
 public:
  __device__ BlockRing(const BlockRail& rail, i32 rank, i32 peer, i32 block)
      : rail_(rail), own_(rail.memory[rank]), peer_(peer), block_(block) {}

  __device__ void put(u64 n, u32 num_bytes) const { post(n % static_cast<u64>(rail_.layout.num_slots), n, num_bytes); }
  __device__ bool has_arrived(u64 n) const {
    return read(rail_.layout.signal(peer_, block_, n)) >= sync::rail_fills(n, static_cast<u32>(rail_.layout.num_slots));
  }
  __device__ void give_credit() const {
    ptx::add_release_sys(&at<BlockCredits>(rail_.credits(peer_, block_))->num_given, 1);
  }
  // Chunks that the peer has read.
  __device__ u64 credits() const { return read(rail_.layout.credits(peer_, block_)); }

  // Of the ring of messages, `block` == num_blocks.
  __device__ void put_message(u64 n, u32 num_bytes) const { post(n % RailLayout::kNumMessages, n, num_bytes); }
  __device__ bool has_message(u64 n) const {
    return read(rail_.layout.message_signal(peer_, n)) >= sync::rail_fills(n, RailLayout::kNumMessages);
  }

  // ---- this rank's memory of the ring

  __device__ u8* send_slot(u64 n) const { return own_ + rail_.layout.send_slot(peer_, n, block_); }
  __device__ const u8* receive_slot(u64 n) const { return own_ + rail_.layout.receive_slot(peer_, n, block_); }
  __device__ u8* message_out(u64 n) const { return own_ + rail_.layout.message_out(peer_, n); }
  __device__ const u8* message_in(u64 n) const { return own_ + rail_.layout.message_in(peer_, n); }
  __device__ u64* num_put() const { return at<u64>(rail_.layout.num_put(peer_, block_)); }
  __device__ u64* num_taken() const { return at<u64>(rail_.layout.num_taken(peer_, block_)); }

 private:
  template <class T>
  __device__ T* at(u64 offset) const {
    return reinterpret_cast<T*>(own_ + offset);
  }
  __device__ u64 read(u64 offset) const { return ptx::ld_acquire_sys(at<u64>(offset)); }
  __device__ void post(u64 slot, u64 n, u32 num_bytes) const {
    auto* word = at<BlockPost>(rail_.post(peer_, block_, slot));
    word->num_bytes = num_bytes;
    ptx::st_release_sys(&word->number, n + 1);
  }

  const BlockRail& rail_;
  u8* own_;
  i32 peer_;
  i32 block_;
};

// The network of a rank, one thread.
class BlockNetwork {
 public:
  __device__ BlockNetwork(const WindowView& view, const BlockRail& rail)
      : view_(view), rail_(rail), own_(rail.memory[view.rank]), head_(reinterpret_cast<u64*>(own_ + rail.head())) {}

  // Carries what is posted until all blocks have ended and nothing is left. As other waits, that for something to carry counts anew.
  __device__ void run(u64 num_blocks) {
    const u64 all_ended = head_[1] + num_blocks;
    random_ = (all_ended * 64 + static_cast<u64>(view_.rank) + 1) * 0x9e3779b97f4a7c15ull;
    bool is_over = false;
    while (!is_over) {
      const auto look = [&] {
        has_carried_ = false;
        const bool has_ended = ptx::ld_acquire_sys(head_) >= all_ended;
        is_over = !carry_all() && has_ended;
        return is_over || has_carried_;
      };
      sync::LanePause pause(&view_.host->abort, ~u64{0}, &view_.host->timeout_ns);
      if (sync::wait_until(look, pause) != sync::WaitResult::kReady) break;
    }
    head_[1] = all_ended;
  }

 private:
  // Whether anything is left.
  __device__ bool carry_all() {
    bool is_left = false;
    for (i32 peer = 0; peer < view_.num_ranks; ++peer) {
      if (peer == view_.rank) continue;
      for (i32 block = 0; block < rail_.layout.num_blocks; ++block) {
        for_slots(rail_.layout.num_slots, [&](u64 slot) {
          is_left |=
              carry(peer, block, slot, rail_.layout.send_slot(peer, slot, block),
                    rail_.layout.receive_slot(view_.rank, slot, block), rail_.layout.signal(view_.rank, block, slot));
        });
        is_left |= carry_credits(peer, block);
      }
      for_slots(RailLayout::kNumMessages, [&](u64 slot) {
        is_left |= carry(peer, rail_.layout.num_blocks, slot, rail_.layout.message_out(peer, slot),
                         rail_.layout.message_in(view_.rank, slot), rail_.layout.message_signal(view_.rank, slot));
      });
    }
    return is_left;
  }

  // In an order of its own, which changes.
  template <class Work>
  __device__ void for_slots(i32 num_slots, const Work& work) {
    const u64 first = random();
    for (i32 idx = 0; idx < num_slots; ++idx) work((first + static_cast<u64>(idx)) % static_cast<u64>(num_slots));
  }

  // Half of what is there waits for another time.
  __device__ bool carry(i32 peer, i32 block, u64 slot, u64 from, u64 to, u64 signal) {
    auto* post = reinterpret_cast<BlockPost*>(own_ + rail_.post(peer, block, slot));
    const u64 number = ptx::ld_acquire_sys(&post->number);
    if (number == post->carried) return false;
    if (random() % 2 != 0) return true;
    u8* there = rail_.memory[peer];
    sync::settle_put(
        [&] {
          const auto* source = reinterpret_cast<const u64*>(own_ + from);
          auto* target = reinterpret_cast<u64*>(there + to);
          for (u64 at = 0; at < post->num_bytes / sizeof(u64); ++at) target[at] = source[at];
        },
        reinterpret_cast<u64*>(there + signal));
    post->carried = number;
    has_carried_ = true;
    return false;
  }

  __device__ bool carry_credits(i32 peer, i32 block) {
    auto* credits = reinterpret_cast<BlockCredits*>(own_ + rail_.credits(peer, block));
    const u64 num_given = ptx::ld_acquire_sys(&credits->num_given);
    if (num_given == credits->num_carried) return false;
    if (random() % 2 != 0) return true;
    ptx::add_release_sys(reinterpret_cast<u64*>(rail_.memory[peer] + rail_.layout.credits(view_.rank, block)), 1);
    has_carried_ = true;
    return ++credits->num_carried != num_given;
  }

  __device__ u64 random() {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return random_ >> 8;
  }

  const WindowView& view_;
  const BlockRail& rail_;
  u8* own_;
  u64* head_;
  u64 random_ = 1;
  bool has_carried_ = false;  // since the last look
};

// By all blocks, before anything else: whether this one is the network, and has carried everything.
__device__ inline bool serve_route(const WindowView& view, const BlockRail& rail) {
  if (blockIdx.x != gridDim.x - 1) return false;
  if (threadIdx.x == 0) BlockNetwork(view, rail).run(gridDim.x - 1);
  return true;
}

// By all threads of the other blocks, at their end.
__device__ inline void leave_route(const WindowView& view, const BlockRail& rail, bool) {
  __syncthreads();
  if (threadIdx.x == 0) ptx::add_release_sys(reinterpret_cast<u64*>(rail.memory[view.rank] + rail.head()), 1);
}

}  // namespace weft::transport
