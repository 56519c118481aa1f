// In place of a dispatch, by a rank that has more tokens than its windows hold: a refusal to every peer, with the number. One block.
// docs/protocols/nvlink-dispatch.md, "Too many tokens".
#pragma once

#include "weft/kernels/need_room_arguments.h"
#include "weft/transport/peers.cuh"

namespace weft::kernels {

__device__ inline void need_room(const NeedRoomArgs& args) {
  static_assert(kNeedThreads >= kMaxGpuRanks);
  const transport::WindowView& view = args.view;
  const transport::Flight& flight = transport::begin_flight(view, args.print, args.object, nullptr);
  if (flight.is_dead) return;
  const i32 peer = static_cast<i32>(threadIdx.x);
  const bool has_peer = peer < view.num_ranks && peer != view.rank && flight.is_active(peer);
  const u64 need = transport::pack_need(flight.turn.sequence, args.num_tokens);
  if (has_peer) transport::DirectPeers(view).refuse_call(flight, peer, need);
  // Others may need more, and who calls something else has given up too: what they say is noted, and everyone goes on.
  if (transport::wait_all(view, Phase::kCount, flight, 0) == transport::Verdict::kBroken) return;
  if (threadIdx.x == 0) {
    view.host->seen_caller[view.rank] = need;
    const u64 header = sync::pack_header(flight.turn, kRefusalFingerprint);
    transport::record(view, flight, transport::ErrorCause::kMismatch, Phase::kCount, view.rank, header);
  }
  transport::end_flight(view, flight);
}

}  // namespace weft::kernels
