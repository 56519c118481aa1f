// What warps that make contributions share: they take them as they come, piece by piece of the receive plan (combine/push.cuh).
#pragma once

#include "weft/kernels/combine/block.cuh"
#include "weft/kernels/numbers.cuh"

namespace weft::kernels {

template <CombineKernelConfig kConfig>
class CombineItems {
 public:
  using Block = CombineBlock<kConfig>;

  __device__ CombineItems(const Block& block, i32 warp, i32 num_pieces)
      : b_(block), warp_(warp), num_pieces_(static_cast<u32>(num_pieces)) {}

 protected:
  using Row = Numbers<kConfig.dtype>;
  static constexpr u32 kBroken = ~0u;  // as a piece

  // A contribution.
  struct Item {
    u32 piece = 0;  // of the plan
    u32 at = 0;     // among the contributions of the piece
  };
  __device__ const RingItem& contribution(const Item& item) const { return b_.plan_items(item.piece % 2)[item.at]; }

  // Of a wait by all lanes. False: the GPU has gone wrong; nothing more is taken or waited for.
  __device__ bool expect(bool is_over) {
    if (__all_sync(0xffffffffu, is_over) != 0) return true;
    piece_ = kBroken;
    is_open_ = false;
    b_.fail_copy();
    return false;
  }

  // Makes the next item next_. False: there is none, or none yet unless `waits`, or the GPU has gone wrong. `before_wait` is
  // called before each wait for a piece: of those in front of it nothing is left to this warp.
  template <class BeforeWait>
  __device__ bool take(bool waits, BeforeWait before_wait) {
    while (piece_ < num_pieces_) {
      if (!is_open_) {
        u64* full = &b_.s.plan_full[piece_ % 2];
        const u32 parity = piece_ / 2 & 1u;
        if (waits) {
          leave_pieces(piece_);
          before_wait();
          if (!expect(sync::wait_barrier(full, parity))) return false;
        } else if (__any_sync(0xffffffffu, !ptx::mbarrier_test_wait(full, parity)) != 0) {
          return false;
        }
        is_open_ = true;
      }
      if (take_here()) return true;
      is_open_ = false;
      ++piece_;
    }
    return false;
  }

  // The warp needs nothing more of the pieces before `piece`.
  __device__ void leave_pieces(u32 piece) {
    __syncwarp();
    for (; num_left_ < piece; ++num_left_) {
      if (b_.lane == 0) ptx::mbarrier_arrive(&b_.s.plan_empty[num_left_ % 2]);
    }
  }

  const Block& b_;
  const i32 warp_;
  const u32 num_pieces_;
  u32 piece_ = 0;          // from which the next item is taken
  Item next_;              // the last that was taken
  bool is_ahead_ = false;  // it is not yet being made

 private:
  __device__ bool take_here() {
    u32 at = b_.lane == 0 ? atomicAdd(&b_.s.num_taken[piece_ % 2], 1u) : 0;
    at = __shfl_sync(0xffffffffu, at, 0);
    if (at >= static_cast<u32>(b_.s.num_plan_items[piece_ % 2])) return false;
    next_ = {piece_, at};
    is_ahead_ = true;
    return true;
  }

  bool is_open_ = false;  // the piece is there
  u32 num_left_ = 0;      // pieces that the warp has left
};

}  // namespace weft::kernels
