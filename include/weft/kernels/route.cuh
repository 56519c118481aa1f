// What an expert id says: where its pick goes, or that it is a mistake. Three places ask in signed numbers instead, since this
// form makes other machine code there: the plan of dispatch by expert, the ids that rank_major sends, and small batches.
#pragma once

#include "weft/config/route.h"
#include "weft/transport/flight.cuh"

namespace weft::kernels {

// Neither an expert nor -1.
template <ExpertPlacement kExperts>
__device__ inline bool is_bad_id(i64 id) {
  return static_cast<u64>(id) + 1 > static_cast<u64>(kExperts.num_experts());
}

template <ExpertPlacement kExperts>
__device__ inline bool is_expert(i64 id) {
  return static_cast<u64>(id) < static_cast<u64>(kExperts.num_experts());
}

// The rank of the expert takes part.
template <ExpertPlacement kExperts>
__device__ inline bool is_sent(const transport::Flight& flight, i64 id) {
  return is_expert<kExperts>(id) && flight.is_active(kExperts.rank_of(static_cast<i32>(id)));
}

// Bad ids of a call, counted by a block in shared memory, where it is cleared before.
struct BadIds {
  i32 count;
  i32 first_at;  // of all picks

  __device__ void clear() {
    count = 0;
    first_at = 0x7fffffff;
  }
  __device__ void note(i32 pick) {
    atomicAdd(&count, 1);
    atomicMin(&first_at, pick);
  }
  // By one thread, behind a barrier since the last note.
  template <class Id>
  __device__ void tell(transport::HostWords* host, const void* topk_idx) const {
    host->first_bad_id = static_cast<const Id*>(topk_idx)[first_at];
    ptx::st_release_sys(&host->bad_ids, transport::pack_bad_ids(count, first_at));
  }
};

// Picks that a local expert gets; with tells_counts the host hears it too, under the name of the call.
template <auto kConfig, class Args>
__device__ inline void write_count(const Args& a, i32 expert, i32 count) {
  a.counts[expert] = count;
  if constexpr (kConfig.tells_counts) {
    ptx::st_relaxed_sys(transport::told_counts(a.view.host) + expert, transport::pack_count(a.ticket, count));
  }
}

}  // namespace weft::kernels
