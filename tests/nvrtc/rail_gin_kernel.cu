// Every verb of the rail over NCCL, for compilers alone: nothing runs this.
#include "weft/transport/rail_gin.cuh"

using namespace weft;

extern "C" __global__ void rail_gin(const transport::GinRail* rail, i32 rank, u64 n, u64 most_turns, u64* out) {
  const i32 peer = static_cast<i32>(threadIdx.x);
  const transport::GinRing ring(*rail, rank, peer, static_cast<i32>(blockIdx.x));
  const transport::GinRing messages(*rail, rank, peer, rail->layout.num_blocks);
  if (n < ring.credits() + static_cast<u64>(rail->layout.num_slots)) ring.put(n, 4096);
  messages.put_message(n, 256);
  for (u64 turn = 0; turn < most_turns && !(ring.has_arrived(n) && messages.has_message(n)); ++turn) {
  }
  ring.give_credit();
  out[peer] = ring.credits();
}
