// Combine for small batches between GPUs that reach each other by load and store, in one launch or in two (staged use).
// docs/protocols/nvlink-small.md is the page to this file; in short:
//   send     each warp makes contributions and stores them into slots that the owners know without asking
//            block barrier; reduce header, "what block b sends is there", to block b of every peer
//   receive  wait for the count headers (what the peers call, R1) and the reduce headers; add, write
// Warps: kWorkers move rows; one sends headers, one waits for those of others; these two have side values as well.
#pragma once

#include "weft/kernels/small/combine_nodes.cuh"
#include "weft/kernels/small/combine_push.cuh"
#include "weft/kernels/small/combine_reduce.cuh"
#include "weft/kernels/small/combine_side.cuh"

namespace weft::kernels {

template <SmallCombineKernelConfig kConfig>
class SmallCombine {
 public:
  using Block = SmallCombineBlock<kConfig>;
  static constexpr i32 kWorkers = kConfig.kWorkers;
  static constexpr i32 kHearWarp = kWorkers;  // waits for the headers of others
  static constexpr i32 kSayWarp = kWorkers + 1;
  static constexpr transport::FlightPart kPart = !kConfig.receives ? transport::FlightPart::kSend
                                                 : kConfig.sends   ? transport::FlightPart::kWhole
                                                                   : transport::FlightPart::kReceive;
  static_assert(kConfig.sends || kConfig.receives);

  __device__ explicit SmallCombine(const SmallCombineKernelArgs& args)
      : b_{args, static_cast<i32>(threadIdx.x % ptx::kWarpLanes)},
        warp_(static_cast<i32>(threadIdx.x / ptx::kWarpLanes)) {}

  __device__ void run() const {
    if constexpr (kConfig.sends) {
      SmallCombinePush<kConfig> push(b_, warp_);
      const transport::Flight flight =
          transport::begin_flight(b_.a.view, b_.a.print, b_.a.object, b_.a.recv_plan, kPart);
      if (flight.is_dead) return;
      init(flight);
      if (warp_ < kWorkers) send(flight, push);
      if (warp_ == kSayWarp) say(flight);
      if constexpr (kConfig.has_nodes()) {
        if (warp_ == kHearWarp) hear_mates(flight);
      }
      if constexpr (kConfig.receives) receive(flight);
    } else {
      const transport::Flight flight =
          transport::begin_flight(b_.a.view, b_.a.print, b_.a.object, b_.a.recv_plan, kPart);
      if (flight.is_dead) return;
      init(flight);
      receive(flight);
    }
  }

 private:
  using Verdict = transport::Verdict;
  // Barriers of the workers with one of the other two warps; the last three with nodes: contributions of mates are here, sums for
  // others are made, own ones are added.
  static constexpr u32 kStored = 1, kHeard = 2, kMatesHeard = 3, kForwarded = 4, kAdded = 5;
  // Of those two warps, with nodes: side values of this rank are stored, which it reads itself where it adds for others.
  static constexpr u32 kSideStored = 6, kBoth = 2 * ptx::kWarpLanes;
  static constexpr u32 kWithOne = static_cast<u32>(kWorkers + 1) * ptx::kWarpLanes;

  // Of the waits for the early units, with nodes for mates, and for all; each has its word, for warps that are slow to read the first.
  __device__ static Verdict& verdict(bool is_early) {
    __shared__ Verdict verdicts[2];
    return verdicts[is_early ? 0 : 1];
  }

  using Sums = SmallCombineNodes<kConfig>;

  __device__ void init(const transport::Flight& flight) const {
    if constexpr (kConfig.has_nodes()) {
      Sums(b_, flight).init();
      __syncthreads();
    }
  }
  // Whom this rank sends headers.
  __device__ bool tells(const transport::Flight& flight) const {
    if constexpr (kConfig.has_nodes()) return has_peer(flight) && Sums(b_, flight).nodes().is_mate(b_.lane);
    return has_peer(flight);
  }
  __device__ bool has_peer(const transport::Flight& flight) const {
    return b_.lane < kConfig.num_ranks && b_.lane != b_.a.view.rank && flight.is_active(b_.lane);
  }

  // Work and one of the others are done with what they have stored.
  __device__ static void meet_stored() { ptx::bar_sync_apart(kStored, kWithOne); }
  __device__ static void meet_heard() { ptx::bar_sync_apart(kHeard, kWithOne); }

  __device__ void send(const transport::Flight& flight, SmallCombinePush<kConfig>& push) const {
    if constexpr (kConfig.has_nodes()) {
      if (Sums(b_, flight).has_moved()) {
        meet_stored();
      } else {
        push.run(flight, [] { meet_stored(); });
      }
      ptx::bar_sync_apart(kMatesHeard, kWithOne);
      if (verdict(true) == Verdict::kOk) SmallCombineNodeSums<kConfig>(b_, warp_, flight).forward();
      ptx::bar_sync_apart(kForwarded, kWithOne);
    } else {
      push.run(flight, [] { meet_stored(); });
    }
  }

  // With nodes: contributions of mates, which this rank adds for ranks of other nodes.
  __device__ void hear_mates(const transport::Flight& flight) const {
    const Sums sums(b_, flight);
    const i32 block = static_cast<i32>(blockIdx.x);
    u64 waited_ns = 0;
    Verdict mine = Verdict::kOk;
    if (tells(flight)) {
      // Behind an error the host launches no receiving half, which others wait for: that half says what does not match.
      constexpr bool kSays = kConfig.receives;
      mine = transport::wait(b_.a.view, Phase::kCount, flight, b_.lane, 0, waited_ns, kSays);
      if (mine == Verdict::kOk)
        mine = transport::wait(b_.a.view, Phase::kReduce, flight, b_.lane, block, waited_ns, kSays);
    }
    transport::note_waited(b_.a.view, b_.lane, waited_ns);
    Verdict worst = worst_lane(mine);
    if (worst == Verdict::kOk && sums.has_moved()) worst = Verdict::kGivenUp;
    if (worst == Verdict::kOk && !sums.find_places()) worst = Verdict::kBroken;
    if constexpr (kConfig.has_side) {
      ptx::bar_sync_apart(kSideStored, kBoth);
      if (worst == Verdict::kOk) sums.forward_side();
    }
    if (b_.lane == 0) verdict(true) = worst;
    ptx::bar_sync_apart(kMatesHeard, kWithOne);
  }

  // The headers of this rank, and side values. What it calls is said while the others work.
  __device__ void say(const transport::Flight& flight) const {
    const transport::DirectPeers peers(b_.a.view);
    const i32 block = static_cast<i32>(blockIdx.x);
    if (block == 0 && tells(flight)) peers.notify_call(flight, b_.lane);
    if constexpr (kConfig.has_nodes()) {
      if (block == 0) Sums(b_, flight).put_message(b_.lane);
    }
    if constexpr (kConfig.has_side && kConfig.has_nodes()) {
      if (!Sums(b_, flight).has_moved()) SmallCombineSide<kConfig>(b_).send(flight);
      __syncwarp();
      ptx::bar_arrive(kSideStored, kBoth);  // this warp has headers to send, for which those of mates wait
    } else if constexpr (kConfig.has_side) {
      SmallCombineSide<kConfig>(b_).send(flight);
    }
    if (b_.num_early() > 0) {
      meet_stored();
      if (has_peer(flight)) peers.notify(Phase::kSend, flight, b_.lane, block);
      __syncwarp();
    }
    meet_stored();
    if (tells(flight)) peers.notify(Phase::kReduce, flight, b_.lane, block);
    if constexpr (kConfig.has_nodes()) {
      __syncwarp();
      ptx::bar_sync_apart(kForwarded, kWithOne);
      if (verdict(true) == Verdict::kOk) Sums(b_, flight).put_all();
    }
  }

  __device__ void receive(const transport::Flight& flight) const {
    if (warp_ == kHearWarp) return hear(flight);
    if (warp_ >= kWorkers) return;
    if constexpr (kConfig.has_nodes()) {
      meet_heard();
      if (verdict(false) == Verdict::kOk) SmallCombineNodeSums<kConfig>(b_, warp_, flight).add_own();
      ptx::bar_sync_apart(kAdded, kWithOne);
    } else {
      SmallCombineReduce<kConfig> reduce(b_, warp_);
      reduce.run(flight, [](bool is_early) {
        meet_heard();
        return verdict(is_early) == Verdict::kOk;
      });
    }
  }

  // Waits, a lane a peer, and tells the workers. A peer that called something else sends a count header and no other of these.
  __device__ void hear(const transport::Flight& flight) const {
    if constexpr (kConfig.has_nodes()) return hear_nodes(flight);
    u64 waited_ns = 0;
    const bool is_ok = hear_all(flight, waited_ns);
    transport::note_waited(b_.a.view, b_.lane, waited_ns);
    if constexpr (kConfig.has_side) {
      if (is_ok) SmallCombineSide<kConfig>(b_).gather(flight);
    }
  }

  // With nodes: what messages say, headers of all ranks, contributions of mates, and sums of other nodes.
  __device__ void hear_nodes(const transport::Flight& flight) const {
    const Sums sums(b_, flight);
    Verdict mine = sums.relay() ? Verdict::kOk : Verdict::kBroken;
    if (has_peer(flight) && mine == Verdict::kOk) mine = sums.nodes().wait_call(b_.lane);
    if (!kConfig.sends && tells(flight) && mine == Verdict::kOk) {
      mine = transport::wait(b_.a.view, Phase::kReduce, flight, b_.lane, static_cast<i32>(blockIdx.x));
    }
    if (kConfig.sends && verdict(true) == Verdict::kBroken) mine = Verdict::kBroken;
    const Verdict heard = worst_lane(mine);
    if (heard == Verdict::kOk && sums.has_moved()) {
      if (b_.lane == 0 && blockIdx.x == 0) {
        transport::record(b_.a.view, flight, transport::ErrorCause::kMoved, Phase::kCount, b_.a.view.rank, 0);
      }
      mine = Verdict::kGivenUp;
    } else if (heard == Verdict::kOk && !sums.wait_records()) {
      mine = Verdict::kBroken;
    }
    if (heard == Verdict::kGivenUp && b_.lane == 0) sums.nodes().break_window();
    const bool is_ok = tell(flight, false, mine) == Verdict::kOk;
    if constexpr (kConfig.has_side) {
      if (is_ok) sums.gather_side();
    }
    ptx::bar_sync_apart(kAdded, kWithOne);
    if (is_ok) sums.take_all();
  }

  __device__ bool hear_all(const transport::Flight& flight, u64& waited_ns) const {
    const i32 block = static_cast<i32>(blockIdx.x);
    Verdict mine = Verdict::kOk;
    if (has_peer(flight)) mine = transport::wait(b_.a.view, Phase::kCount, flight, b_.lane, 0, waited_ns);
    if (b_.num_early() > 0) {
      if (has_peer(flight) && mine == Verdict::kOk)
        mine = transport::wait(b_.a.view, Phase::kSend, flight, b_.lane, block, waited_ns);
      if (tell(flight, true, mine) != Verdict::kOk) return false;
    }
    if (has_peer(flight) && mine == Verdict::kOk)
      mine = transport::wait(b_.a.view, Phase::kReduce, flight, b_.lane, block, waited_ns);
    return tell(flight, false, mine) == Verdict::kOk;
  }

  // The worst of the lanes. If no wait is left, the operation ends here for this block.
  __device__ Verdict tell(const transport::Flight& flight, bool is_early, Verdict mine) const {
    const bool is_broken = __any_sync(0xffffffffu, mine == Verdict::kBroken) != 0;
    const bool is_bad = __any_sync(0xffffffffu, mine != Verdict::kOk) != 0;
    const Verdict worst = is_broken ? Verdict::kBroken : is_bad ? Verdict::kGivenUp : Verdict::kOk;
    if (b_.lane == 0) verdict(is_early) = worst;
    meet_heard();
    const bool is_over = !is_early || is_bad;
    if (b_.lane == 0 && is_over && !is_broken) {
      transport::end_flight_early(b_.a.view, flight, static_cast<u32>(Block::num_blocks()));
    }
    // With nodes a block of the kernel is the network, which the next kernel's must not meet.
    if (is_over && !kConfig.has_nodes()) ptx::let_next_kernel_begin();
    return worst;
  }

  __device__ static Verdict worst_lane(Verdict mine) {
    if (__any_sync(0xffffffffu, mine == Verdict::kBroken) != 0) return Verdict::kBroken;
    return __any_sync(0xffffffffu, mine != Verdict::kOk) != 0 ? Verdict::kGivenUp : Verdict::kOk;
  }

  const Block b_;
  const i32 warp_;
};

template <SmallCombineKernelConfig kConfig>
__device__ void small_combine(const SmallCombineKernelArgs& args) {
  transport::with_route<kConfig.route>(args, [&] { SmallCombine<kConfig>(args).run(); }, !kConfig.receives);
}

}  // namespace weft::kernels
