// Dispatch of a small batch between GPUs that reach each other by load and store. docs/protocols/nvlink-small.md is the page
// to this file; in short:
//   send     ids and weights to everyone, rows to slots that need no asking; one header a block and peer
//   receive  places from all ids while rows are on their way; rows from the slots to their places
// The routing of a handle is repeated by its plans: no ids, no places to find.
// A plain call is one launch that does both; staged use launches each half by itself.
#pragma once

#include "weft/kernels/small_dispatch_receive.cuh"
#include "weft/kernels/small_dispatch_send.cuh"

namespace weft::kernels {

// False: a peer did not come, or called something else.
template <SmallDispatchKernelConfig kConfig>
__device__ bool receive_small(const SmallDispatchState<kConfig>& state, transport::Verdict& verdict) {
  const SmallDispatchKernelArgs& a = state.a;
  SmallDispatchReceive<kConfig> receive(state);
  verdict = transport::wait_all(a.view, Phase::kCount, state.flight, 0);
  if (verdict != transport::Verdict::kOk) return false;
  if constexpr (!kConfig.is_cached) {
    receive.find_places();
    if (blockIdx.x == 0) receive.write_counts();
  } else {
    receive.read_tokens();
  }
  receive.zero();
  verdict = transport::wait_all(a.view, Phase::kSend, state.flight, static_cast<i32>(blockIdx.x));
  if (verdict != transport::Verdict::kOk) return false;
  receive.copy_rows();
  return true;
}

template <SmallDispatchKernelConfig kConfig>
__device__ void small_dispatch(const SmallDispatchKernelArgs& args) {
  extern __shared__ __align__(16) u8 dynamic[];
  constexpr transport::FlightPart kPart = kConfig.sends && kConfig.receives ? transport::FlightPart::kWhole
                                          : kConfig.sends                   ? transport::FlightPart::kSend
                                                                            : transport::FlightPart::kReceive;
  const SmallDispatchState<kConfig> state{
      args, reinterpret_cast<i32*>(dynamic), transport::begin_flight(args.view, args.print, kPart),
      static_cast<i32>(threadIdx.x / ptx::kWarpLanes), static_cast<i32>(threadIdx.x % ptx::kWarpLanes)};
  if (state.flight.is_dead) return;
  if constexpr (kConfig.sends) {
    SmallDispatchSend<kConfig> send(state);
    if (blockIdx.x == 0) send.begin();
    send.send_rows();
    __syncthreads();
    const i32 peer = static_cast<i32>(threadIdx.x);
    if (state.is_peer(peer)) {
      transport::notify(args.view, Phase::kSend, state.flight, peer, static_cast<i32>(blockIdx.x));
    }
  }
  if constexpr (kConfig.receives) {
    transport::Verdict verdict = transport::Verdict::kOk;
    receive_small(state, verdict);
    if (verdict == transport::Verdict::kBroken || !transport::is_last_block(args.view)) return;
    transport::end_flight(args.view, state.flight);
  }
}

}  // namespace weft::kernels
