// Combine between GPUs that reach each other by load and store, one launch a call.
// docs/protocols/nvlink-combine.md is the page to this file; in short:
//   count    block 0 tells every peer where its rows lie, or that it pushes
//   send     a rank that pushes stores rows, partial sums (combine/sum.cuh) or FP8 rows (combine/quantize.cuh) into the owners'
//            landings (combine/push.cuh)
//   reduce   the owner of a token adds the contributions in the order of the ranks      (combine/reduce.cuh)
//   reduce   header: "I have read everything of yours, and what I push has arrived"; the call ends with every peer's (R20)
// Block b of every rank sees to the same tokens, so it waits only for the blocks b of its peers.
#pragma once

#include "weft/kernels/combine/load_nodes.cuh"
#include "weft/kernels/combine/push.cuh"
#include "weft/kernels/combine/quantize.cuh"
#include "weft/kernels/combine/reduce.cuh"
#include "weft/kernels/combine/side.cuh"
#include "weft/kernels/combine/sum.cuh"

namespace weft::kernels {

template <CombineKernelConfig kConfig>
class Combine {
 public:
  using Block = CombineBlock<kConfig>;
  static constexpr i32 kRanks = kConfig.num_ranks;

  __device__ Combine(const CombineKernelArgs& args, CombineShared<kConfig>& shared, u8* dynamic)
      : b_{args, shared, dynamic, transport::begin_flight(args.view, args.print, args.object, args.recv_plan),
           static_cast<i32>(threadIdx.x % ptx::kWarpLanes)} {}

  __device__ void run() {
    if (b_.flight.is_dead) return;
    const transport::WindowView& view = b_.a.view;
    init_shared();
    const i32 peer = static_cast<i32>(threadIdx.x);
    const bool is_other = peer < kRanks && peer != view.rank && b_.flight.is_active(peer);
    const bool has_peer = kConfig.has_nodes() ? is_other && is_near(peer) : is_other;
    if (blockIdx.x == 0 && has_peer) send_place(peer);
    transport::Verdict verdict;
    if constexpr (kConfig.has_nodes()) {
      verdict = b_.nodes().wait_calls(0, blockIdx.x == 0 ? exchange() : transport::Verdict::kOk);
      if (verdict == transport::Verdict::kOk && !holds_handle()) verdict = transport::Verdict::kGivenUp;
    } else {
      verdict = transport::wait_all(view, Phase::kCount, b_.flight, 0);
    }
    if (verdict == transport::Verdict::kGivenUp) end();
    if (verdict != transport::Verdict::kOk) return;
    if (peer < kRanks) read_place(peer);
    // The rows were written by other kernels and acquired by generic loads; bulk loads read them next.
    ptx::fence_proxy_async();
    // Said by all together: a warp that plays its role already may fail before another has come from the barrier.
    if (__syncthreads_or(b_.has_failed() ? 1 : 0) != 0) return;
    take_role(static_cast<i32>(threadIdx.x / ptx::kWarpLanes));
    __syncthreads();
    if (b_.has_failed()) return;
    if (has_peer) b_.peers().notify(Phase::kReduce, b_.flight, peer, static_cast<i32>(blockIdx.x));
    if constexpr (kConfig.has_nodes()) {
      verdict = transport::wait_all(view, Phase::kReduce, b_.nodes().among_mates(), static_cast<i32>(blockIdx.x));
    } else {
      verdict = transport::wait_all(view, Phase::kReduce, b_.flight, static_cast<i32>(blockIdx.x));
    }
    if (verdict == transport::Verdict::kOk) end();
  }

 private:
  // With nodes, by block 0: a message to each other node, and those of others to all here. Anything but kOk has left its reason.
  __device__ transport::Verdict exchange() const {
    const auto nodes = b_.nodes();
    const i32 node = static_cast<i32>(threadIdx.x);
    const i32 forwarder = node < kConfig.num_nodes() && node != nodes.node ? nodes.forwarder_in(node) : -1;
    if (forwarder >= 0) {
      nodes.begin_message(forwarder, {});
      nodes.put_message(forwarder, sizeof(RailMessage));
    }
    __syncwarp();
    const i32 warp = static_cast<i32>(threadIdx.x / ptx::kWarpLanes);
    const bool is_right = nodes.relay_calls(warp, kConfig.num_warps(), [](const auto&, const u8*, i32, i32) {});
    return is_right ? transport::Verdict::kOk : transport::Verdict::kBroken;
  }

  __device__ bool holds_handle() const {
    const auto& layout = b_.a.view.layout;
    const i64 places = static_cast<i64>(kConfig.node_ranks) * max(b_.a.end_token - b_.a.first_token, 1);  // of a part
    i64 most = static_cast<i64>(layout.landing_ids - layout.landing_rows) / (places * kConfig.wire_row_bytes());
    if constexpr (kConfig.has_side) most = min(most, static_cast<i64>(kConfig.num_ranks) * layout.max_tokens / places);
    const bool has_places = !b_.nodes().has_more_parts_than(most);
    return b_.nodes().holds({b_.a.forward_plan, layout.max_tokens, kConfig.node_ranks, kConfig.top_k}, has_places);
  }

  __device__ void end() const {
    if (transport::is_last_block(b_.a.view, transport::num_blocks<kConfig>()))
      transport::end_flight(b_.a.view, b_.flight);
  }

  // Barriers side by side: one thread would take a microsecond for all.
  __device__ void init_shared() const {
    const i32 thread = static_cast<i32>(threadIdx.x);
    if (thread == 0) b_.s.has_failed = 0;
    if constexpr (kConfig.has_nodes()) CombineNodes<kConfig>(b_).init();
    for (auto& ring : b_.s.reduce) ring.init(kConfig.reduce_warps());
    if constexpr (kConfig.has_push()) {
      constexpr i32 kPlanReaders = kConfig.has_partials() ? kConfig.sum_warps : 1;
      b_.s.push.init(1);
      if (kConfig.is_by_expert() && thread < CombineShared<kConfig>::kSumSlots) {
        ptx::mbarrier_init(&b_.s.sum_full[thread], 1);
        ptx::mbarrier_init(&b_.s.sum_empty[thread], 1);
      }
      if (thread < CombineShared<kConfig>::kPushers) b_.s.num_pushed[thread] = 0;
      if (thread < 2) {
        ptx::mbarrier_init(&b_.s.plan_full[thread], 1);
        ptx::mbarrier_init(&b_.s.plan_empty[thread], kPlanReaders);
      }
    }
    ptx::fence_mbarrier_init();
    __syncthreads();
  }

  __device__ void send_place(i32 peer) const {
    const auto peers = b_.peers();
    const auto slot = peers.control(peer) + b_.a.view.layout.payload(b_.flight.turn.sequence, b_.a.view.rank);
    peers.put_field(slot, &GpuCountPayload::rows_in_heap, u64{kConfig.has_push() ? 0 : 1});
    peers.put_field(slot, &GpuCountPayload::rows_offset, b_.a.rows_offset);
    peers.put_field(slot, &GpuCountPayload::num_rows, b_.a.num_rows);
    peers.notify_call(b_.flight, peer);
  }

  // Whose rows are read here.
  __device__ bool is_near(i32 rank) const {
    if constexpr (kConfig.has_nodes()) return b_.nodes().is_mate(rank);
    return true;
  }

  // Where the rows of `rank` are, and how many tokens it has. R19: only rows inside the peer's heap are read.
  __device__ void read_place(i32 rank) const {
    const transport::WindowView& view = b_.a.view;
    Contributor from;
    if (rank == view.rank) {
      from = {b_.a.rows, static_cast<i32>(b_.a.num_rows), kConfig.lands_own() ? 0u : 1u};
    } else if (kConfig.has_nodes() ? b_.flight.is_active(rank) && is_near(rank) : b_.flight.is_active(rank)) {
      const u8* slot = view.own_control() + view.layout.payload(b_.flight.turn.sequence, rank);
      const GpuCountPayload place = *reinterpret_cast<const GpuCountPayload*>(slot);
      const bool is_pulled = place.rows_in_heap != 0 && !kConfig.has_partials();
      const u64 room = place.rows_offset <= view.heap_bytes[rank] ? view.heap_bytes[rank] - place.rows_offset : 0;
      if (is_pulled && (place.num_rows < 0 || static_cast<u64>(place.num_rows) > room / kConfig.row_bytes())) {
        b_.fail(transport::ErrorCause::kBadPeerWord, Phase::kCount, rank);
      }
      from = {(b_.peers().heap(rank) + place.rows_offset).address(), static_cast<i32>(place.num_rows),
              is_pulled ? 1u : 0u};
    }
    b_.s.contributor[rank] = from;
    i64 end_token = rank == view.rank ? b_.a.num_tokens : 0;
    if constexpr (kConfig.has_push() || kConfig.has_side || kConfig.has_nodes()) {
      if (rank != view.rank && b_.flight.is_active(rank)) {
        end_token = clamp_count(GpuRecvPlan<const i32>{b_.a.recv_plan, 0, 0}.num_tokens()[rank], b_.a.recv_plan_tokens);
      }
    }
    b_.s.num_items[rank] = b_.num_items_below(min(static_cast<i32>(end_token), b_.a.end_token));
  }

  __device__ void take_role(i32 warp) const {
    constexpr i32 kReduceWarps = kConfig.reduce_groups() * kConfig.reduce_warps();
    if constexpr (kConfig.has_nodes()) {
      if (warp == 0) return CombineNodeLoad<kConfig>(b_).run(kConfig.reduce_groups());
    } else {
      if (warp < kConfig.reduce_rings) return CombineReduce<kConfig>(b_, warp).load();
    }
    warp -= kConfig.reduce_rings;
    if (warp < kReduceWarps) {
      constexpr i32 kWarps = kConfig.reduce_warps();
      const i32 group = warp / kWarps;
      return CombineReduce<kConfig>(b_, group % kConfig.reduce_rings).add(group / kConfig.reduce_rings, warp % kWarps);
    }
    warp -= kReduceWarps;
    if constexpr (kConfig.has_push()) {
      const CombinePush<kConfig> push(b_);
      constexpr i32 kMakers = kConfig.has_partials() ? kConfig.sum_warps : 1;
      if constexpr (kConfig.makes_sums()) {
        if (warp < kMakers) return CombineSum<kConfig>(b_, warp, push.num_pieces()).run();
        if (warp < kMakers + kConfig.push_warps()) return push.store_sums(warp - kMakers);
      } else if constexpr (kConfig.wire_is_fp8) {
        if (warp < kMakers) return CombineQuantize<kConfig>(b_, warp, push.num_pieces()).run();
      } else {
        if (warp == 0) return push.load();
        if (warp == 1) return push.store();
      }
      warp -= kMakers + kConfig.push_warps();
      if (warp == 0) return push.plan();
      if (warp == 1) return push.post();
      warp -= 2;
    }
    if constexpr (kConfig.has_side) CombineSide<kConfig>(b_).run();
  }

  static_assert(!kConfig.has_nodes() ||
                    (!kConfig.is_by_pick() && !kConfig.adds_side && !kConfig.order.is_by_last_pick() &&
                     (kConfig.node_ranks == 1 ||
                      (kConfig.order.sum_domain == kConfig.node_ranks && !kConfig.wire_is_fp8))),
                "docs/protocols/nodes.md");

  const Block b_;
};

template <CombineKernelConfig kConfig>
__device__ void combine(const CombineKernelArgs& args) {
  extern __shared__ __align__(128) u8 dynamic[];
  __shared__ CombineShared<kConfig> shared;
  transport::with_route<kConfig.route>(args,
                                       [&] { Combine<kConfig>(args, *ptx::kept(&shared), ptx::kept(dynamic)).run(); });
}

}  // namespace weft::kernels
