// Combine for small batches between GPUs that reach each other by load and store, in one launch or in two (staged use).
// docs/protocols/nvlink-small.md is the page to this file; in short:
//   send     each warp makes contributions and stores them into slots that the owners know without asking
//            block barrier; reduce header, "what block b sends is there", to block b of every peer
//   receive  wait for the count headers (what the peers call, R1) and the reduce headers; add, write
// Warps: kWorkers move rows, one has to do with headers, one has side values.
#pragma once

#include "weft/kernels/small_combine_push.cuh"
#include "weft/kernels/small_combine_reduce.cuh"
#include "weft/kernels/small_combine_side.cuh"

namespace weft::kernels {

template <SmallCombineKernelConfig kConfig>
class SmallCombine {
 public:
  using Block = SmallCombineBlock<kConfig>;
  static constexpr i32 kWorkers = kConfig.kWorkers;
  static constexpr i32 kHeaderWarp = kWorkers;
  static constexpr i32 kSideWarp = kWorkers + 1;
  static constexpr transport::FlightPart kPart = !kConfig.receives ? transport::FlightPart::kSend
                                                 : kConfig.sends   ? transport::FlightPart::kWhole
                                                                   : transport::FlightPart::kReceive;
  static_assert(kConfig.sends || kConfig.receives);

  __device__ explicit SmallCombine(const SmallCombineKernelArgs& args)
      : b_{args, static_cast<i32>(threadIdx.x % ptx::kWarpLanes)},
        warp_(static_cast<i32>(threadIdx.x / ptx::kWarpLanes)) {}

  __device__ void run() const {
    const transport::WindowView& view = b_.a.view;
    if constexpr (kConfig.sends) {
      SmallCombinePush<kConfig> push(b_, warp_);
      const transport::Flight flight = transport::begin_flight(view, b_.a.print, kPart);
      if (flight.is_dead) return;
      send(flight, push);
      if constexpr (kConfig.receives) receive(flight);
    } else {
      const transport::Flight flight = transport::begin_flight(view, b_.a.print, kPart);
      if (!flight.is_dead) receive(flight);
    }
  }

 private:
  static constexpr u32 kSendBarrier = 1;  // of all warps but that for headers
  static constexpr u32 kSenders = static_cast<u32>(kConfig.num_threads()) - ptx::kWarpLanes;

  __device__ bool has_peer(const transport::Flight& flight) const {
    return b_.lane < kConfig.num_ranks && b_.lane != b_.a.view.rank && flight.is_active(b_.lane);
  }

  // The warp for headers says what this rank calls, while the others work.
  __device__ void send(const transport::Flight& flight, SmallCombinePush<kConfig>& push) const {
    const transport::WindowView& view = b_.a.view;
    if (warp_ == kHeaderWarp) {
      if (blockIdx.x == 0 && has_peer(flight)) transport::notify(view, Phase::kCount, flight, b_.lane, 0);
      return;
    }
    if (warp_ < kWorkers) push.run(flight);
    if constexpr (kConfig.has_side) {
      if (warp_ == kSideWarp) SmallCombineSide<kConfig>(b_).send(flight);
    }
    ptx::bar_sync(kSendBarrier, kSenders);
    const i32 block = static_cast<i32>(blockIdx.x);
    if (warp_ == 0 && has_peer(flight)) transport::notify(view, Phase::kReduce, flight, b_.lane, block);
  }

  __device__ void receive(const transport::Flight& flight) const {
    SmallCombineReduce<kConfig> reduce(b_, warp_);
    const bool is_waiting = warp_ == kHeaderWarp && has_peer(flight);
    const transport::Verdict verdict = transport::worst_of(is_waiting ? wait(flight) : transport::Verdict::kOk);
    if (verdict == transport::Verdict::kBroken) return;
    if (warp_ == kHeaderWarp && b_.lane == 0) transport::end_flight_early(b_.a.view, flight);
    if (verdict == transport::Verdict::kOk) {
      if (warp_ < kWorkers) reduce.run(flight);
      if constexpr (kConfig.has_side) {
        if (warp_ == kSideWarp) SmallCombineSide<kConfig>(b_).gather(flight);
      }
    }
  }

  // For the peer `lane`. A peer that called something else sends no reduce header, but a count header.
  __device__ transport::Verdict wait(const transport::Flight& flight) const {
    const transport::WindowView& view = b_.a.view;
    const transport::Verdict verdict = transport::wait(view, Phase::kCount, flight, b_.lane, 0);
    if (verdict != transport::Verdict::kOk) return verdict;
    return transport::wait<sync::Looks::kAcquire>(view, Phase::kReduce, flight, b_.lane, static_cast<i32>(blockIdx.x));
  }

  const Block b_;
  const i32 warp_;
};

template <SmallCombineKernelConfig kConfig>
__device__ void small_combine(const SmallCombineKernelArgs& args) {
  SmallCombine<kConfig>(args).run();
}

}  // namespace weft::kernels
