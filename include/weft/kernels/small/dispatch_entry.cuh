// Dispatch of a small batch between GPUs that reach each other by load and store. docs/protocols/nvlink-small.md is the page
// to this file; in short:
//   send     picks and weights to everyone, rows to slots that need no asking; one header a block and peer
//   receive  places from all picks while rows are on their way; rows from the slots to their places
// The routing of a handle is repeated by its plans: no ids, no places to find.
// A plain call is one launch that does both; staged use launches each half by itself.
// Warps: kWarps work; one sends headers, which takes until all that was stored has arrived; one waits for those of others.
// Before that, all of block 0 send ids and weights.
#pragma once

#include "weft/kernels/small/dispatch_receive.cuh"
#include "weft/kernels/small/dispatch_send.cuh"

namespace weft::kernels {

template <SmallDispatchKernelConfig kConfig>
class SmallDispatch {
 public:
  using State = SmallDispatchState<kConfig>;
  using Receive = SmallDispatchReceive<kConfig>;
  using Verdict = transport::Verdict;
  static constexpr i32 kNotifyWarp = kConfig.kWarps, kWaitWarp = kNotifyWarp + 1;

  __device__ explicit SmallDispatch(const State& state) : s_(state) {}

  __device__ void run() const {
    if constexpr (kConfig.sends && !kConfig.is_cached) {
      if (blockIdx.x == 0) {  // rows in front of it would hold up all blocks of all ranks
        SmallDispatchSend<kConfig> send(s_);
        send.send_routing();
        __syncthreads();
        if (threadIdx.x == 0) send.tell_bad_ids();
      }
    }
    if constexpr (kConfig.has_nodes() && kConfig.sends) {
      if (blockIdx.x == 0) {
        const SmallDispatchNodes<kConfig> nodes(s_);
        nodes.write_messages();
        __syncthreads();
        nodes.put_message(static_cast<i32>(threadIdx.x));
      }
    }
    if (s_.warp == kNotifyWarp) {
      if constexpr (kConfig.sends) notify();
      if constexpr (kConfig.has_nodes() && kConfig.receives) notify_forwarded();
    } else if (s_.warp == kWaitWarp) {
      if constexpr (kConfig.receives) wait();
    } else {
      if constexpr (kConfig.sends) send();
      if constexpr (kConfig.receives) receive();
    }
  }

 private:
  // With the warp that notifies: rows have been stored. With the one that waits: its verdict on the phase is there; the places are
  // known, or never will be.
  // With nodes kForwarded: the rows of others, with the warp that notifies.
  static constexpr u32 kStored = 2, kCountHeard = 3, kSendHeard = 4, kPlaced = 5, kForwarded = 6;
  static constexpr u32 kWithOne = static_cast<u32>(State::kThreads) + ptx::kWarpLanes;

  // Of the waits for count headers and for send headers; each has its word, for warps that are slow to read the first.
  __device__ static Verdict& verdict(Phase phase) {
    __shared__ Verdict verdicts[2];
    return verdicts[phase == Phase::kCount ? 0 : 1];
  }

  __device__ void send() const {
    SmallDispatchSend<kConfig> send(s_);
    if constexpr (kConfig.has_nodes()) {
      if (!SmallDispatchNodes<kConfig>(s_).has_moved()) send.send_rows();
    } else {
      send.send_rows();
    }
    ptx::bar_arrive(kStored, kWithOne);
  }

  // Whom this rank sends headers.
  __device__ bool tells(i32 other) const {
    if constexpr (kConfig.has_nodes()) return s_.is_peer(other) && SmallDispatchNodes<kConfig>(s_).mates().has(other);
    return s_.is_peer(other);
  }

  __device__ void notify() const {
    if (blockIdx.x == 0 && tells(s_.lane)) s_.peers().notify_call(s_.flight, s_.lane);
    __syncwarp();
    ptx::bar_sync(kStored, kWithOne);
    if constexpr (kConfig.has_nodes()) {
      SmallDispatchNodes<kConfig>(s_).tell();
      if (SmallDispatchNodes<kConfig>::has_failed()) return;
    }
    if (tells(s_.lane)) {
      s_.peers().notify(Phase::kSend, s_.flight, s_.lane, static_cast<i32>(blockIdx.x));
    }
  }

  // With nodes: what messages say, then that the rows of others are at the mates, and credits.
  __device__ void notify_forwarded() const {
    const SmallDispatchNodes<kConfig> nodes(s_);
    nodes.relay();
    ptx::bar_sync(kForwarded, kWithOne);
    if (verdict(Phase::kCount) == Verdict::kOk && !has_no_places()) nodes.tell_forwarded(Receive::all_num_tokens());
  }

  // A peer that called something else sends a count header and no other.
  __device__ void wait() const {
    if (wait(Phase::kCount, 0)) wait(Phase::kSend, static_cast<i32>(blockIdx.x));
    if constexpr (!kConfig.is_cached) {
      ptx::bar_sync(kPlaced, kWithOne);
      if (has_no_places()) return;
    }
    if constexpr (kConfig.has_nodes()) {  // what the rings hold of an operation that is given up nobody takes
      if (s_.lane == 0 && verdict(Phase::kSend) == Verdict::kGivenUp)
        SmallDispatchNodes<kConfig>(s_).nodes().break_window();
    }
    if (s_.lane == 0 && verdict(Phase::kSend) != Verdict::kBroken) {
      transport::end_flight_early(s_.a.view, s_.flight, transport::num_blocks<kConfig>());
    }
    // With nodes a block of the kernel is the network, which the next kernel's must not meet.
    if constexpr (!kConfig.has_nodes()) ptx::let_next_kernel_begin();
  }

  __device__ bool wait(Phase phase, i32 block) const {
    Verdict mine = Verdict::kOk;
    if constexpr (kConfig.has_nodes()) {
      if (s_.is_peer(s_.lane)) {  // also of those that this rank forwards for: it tells itself
        mine = phase == Phase::kCount ? SmallDispatchNodes<kConfig>(s_).nodes().wait_call(s_.lane)
                                      : transport::wait(s_.a.view, phase, s_.flight, s_.lane, block);
      }
    } else {
      if (s_.is_peer(s_.lane)) mine = transport::wait(s_.a.view, phase, s_.flight, s_.lane, block);
    }
    i64 num_tokens = 0;
    if (phase == Phase::kCount && mine == Verdict::kOk) {
      num_tokens = Receive(s_).told_tokens();
      if (!Receive(s_).is_sound(num_tokens)) {
        break_window(s_.lane);
        mine = Verdict::kBroken;
      }
    }
    const bool is_broken = __any_sync(State::kAll, mine == Verdict::kBroken) != 0;
    const bool is_bad = __any_sync(State::kAll, mine != Verdict::kOk) != 0;
    const Verdict worst = is_broken ? Verdict::kBroken : is_bad ? Verdict::kGivenUp : Verdict::kOk;
    if (s_.lane == 0) verdict(phase) = worst;
    if (s_.lane == 0 && is_bad) verdict(Phase::kSend) = worst;
    if (phase == Phase::kCount) {
      __syncwarp();
      if (s_.lane == 0) ptx::st_release_cta(&Receive::shared_words().has_heard, 1);
      if (!is_bad) Receive(s_).note_tokens(num_tokens);
    }
    __syncwarp();
    ptx::bar_arrive(phase == Phase::kCount ? kCountHeard : kSendHeard, kWithOne);
    return !is_bad;
  }

  __device__ void receive() const {
    Receive receive(s_);
    if constexpr (!kConfig.is_cached) receive.find_places();
    ptx::bar_sync(kCountHeard, kWithOne);
    if constexpr (!kConfig.is_cached) ptx::bar_arrive(kPlaced, kWithOne);
    if (verdict(Phase::kCount) != Verdict::kOk) return end_forward();
    if (has_no_places()) {
      if (threadIdx.x == 0) break_window(s_.rank());
      return end_forward();
    }
    bool goes_on = true;
    if constexpr (kConfig.has_nodes()) goes_on = SmallDispatchNodes<kConfig>(s_).forward(Receive::all_num_tokens());
    end_forward();
    if (!goes_on) return;
    receive.write_counts();
    receive.zero();
    ptx::bar_sync(kSendHeard, kWithOne);
    if (verdict(Phase::kSend) == Verdict::kOk) receive.copy_rows();
  }

  __device__ static void end_forward() {
    if constexpr (kConfig.has_nodes()) ptx::bar_arrive(kForwarded, kWithOne);
  }

  // One thread. What `culprit` has said, or memory, is wrong.
  __device__ void break_window(i32 culprit) const {
    constexpr transport::ErrorCause kCause = transport::ErrorCause::kBadPeerWord;
    transport::record(s_.a.view, s_.flight, kCause, Phase::kCount, culprit, 0);
    ptx::st_relaxed_sys(&s_.a.view.words()->broken, static_cast<u64>(kCause));
  }

  // Behind a barrier since places were looked for: count headers came without the picks before them. The sender, or memory, has gone
  // wrong.
  __device__ static bool has_no_places() {
    return !kConfig.is_cached && verdict(Phase::kCount) == Verdict::kOk && Receive::shared_words().is_left;
  }

  const State& s_;
};

template <SmallDispatchKernelConfig kConfig>
__device__ void small_dispatch(const SmallDispatchKernelArgs& args) {
  extern __shared__ __align__(16) u8 dynamic[];
  constexpr transport::FlightPart kPart = kConfig.sends && kConfig.receives ? transport::FlightPart::kWhole
                                          : kConfig.sends                   ? transport::FlightPart::kSend
                                                                            : transport::FlightPart::kReceive;
  const auto work = [&] {
    if (threadIdx.x == 0) {  // behind it there is a barrier in begin_flight
      if constexpr (kConfig.has_nodes()) SmallDispatchNodes<kConfig>::failure() = 0;
      if constexpr (kConfig.sends && !kConfig.is_cached) SmallDispatchSend<kConfig>::bad_ids().clear();
      if constexpr (kConfig.receives) SmallDispatchReceive<kConfig>::shared_words() = {0, false};
    }
    const SmallDispatchState<kConfig> state{
        args, reinterpret_cast<i32*>(dynamic),
        transport::begin_flight(args.view, args.print, args.object, kConfig.is_cached ? args.recv_plan : nullptr,
                                kPart),
        static_cast<i32>(threadIdx.x / ptx::kWarpLanes), static_cast<i32>(threadIdx.x % ptx::kWarpLanes)};
    if (!state.flight.is_dead) SmallDispatch<kConfig>(state).run();
  };
  transport::with_route<kConfig.route>(args, work, !kConfig.receives);
}

}  // namespace weft::kernels
