// Combine with nodes: the rings of a block, and what is said when an item has been added (docs/protocols/nodes.md). An item is a
// token of this rank, or of a rank that this one forwards for: its sum is a record of the ring to that rank.
#pragma once

#include "weft/kernels/combine/block.cuh"
#include "weft/kernels/records.cuh"

namespace weft::kernels {

template <CombineKernelConfig kConfig>
class CombineNodes {
 public:
  using Block = CombineBlock<kConfig>;
  static constexpr i32 kRanks = kConfig.num_ranks;
  static constexpr i32 kNodes = kConfig.num_nodes();
  static constexpr i32 kTopk = kConfig.top_k;
  // A record: a sum, then with side values a float for each pick.
  static constexpr i32 kSideAt = (kConfig.node_bytes_of(kConfig.hidden) + 15) / 16 * 16;
  static constexpr i32 kRecordBytes = kSideAt + (kConfig.has_side ? (kTopk * 4 + 15) / 16 * 16 : 0);

  __device__ explicit CombineNodes(const Block& block) : b_(block), nodes_(block.nodes()) {}

  // By all threads, before a barrier.
  __device__ void init() const {
    auto& s = b_.s;
    const i32 thread = static_cast<i32>(threadIdx.x);
    if (thread < kRanks) {
      const bool is_active = nodes_.map.is_active(thread);
      const i32 at = is_active ? nodes_.map.forwarder(thread, nodes_.node) : nodes_.rank;
      s.land_at[thread] = at;
      s.land_part[thread] = is_active && !nodes_.is_mate(thread) ? 1 + nodes_.nth_brought_by(at, thread) : 0;
      s.first_put[thread] = nodes_.brings(thread) ? *nodes_.ring(thread).num_put() : 0;
      s.next_index[thread] = s.num_dealt[thread] = s.num_done[thread] = 0;
    }
    if (thread < kNodes) {
      const i32 forwarder = thread == nodes_.node ? -1 : nodes_.forwarder_in(thread);
      s.forwarder[thread] = forwarder;
      s.first_taken[thread] = forwarder >= 0 ? *nodes_.ring(forwarder).num_taken() : 0;
      s.num_read[thread] = s.num_added[thread] = 0;
    }
  }

  // ---- items whose index is negative

  __device__ static i32 index_of(i32 source, i32 record) { return -1 - (source << kRecordBits | record); }
  // Where the sum of an item goes, a part of a row.
  __device__ u8* out_of(const RingItem& item) const {
    const i32 before = item.chunk * kConfig.part();
    if (item.index >= 0) {
      return b_.a.out + b_.token_of(item.index) * static_cast<i64>(kConfig.row_bytes()) +
             before * dtype_bytes(kConfig.dtype);
    }
    const i32 code = -1 - item.index;
    return records_to(code >> kRecordBits).to(code & ((1 << kRecordBits) - 1)) + kConfig.node_bytes_of(before);
  }

  // ---- by the warp that loads

  // Whether there is a place for the next record to a rank.
  __device__ bool has_place(i32 source) const { return records_to(source).has_place(b_.s.num_dealt[source]); }
  // Whether the next record of a node is here.
  __device__ bool has_record(i32 node) const { return records_of(node).has_arrived(b_.s.num_read[node]); }
  __device__ const u8* next_record(i32 node) const { return records_of(node).from(b_.s.num_read[node]); }

  // ---- side values, by the whole warp that loads

  // Whether those of all mates are here. `missing`: whose are not.
  __device__ bool side_has_come(u32& missing) const {
    const bool is_mate = b_.lane < kRanks && nodes_.is_mate(b_.lane);
    const i32 block = static_cast<i32>(blockIdx.x);
    const bool is_late = is_mate && transport::progress(b_.a.view, b_.flight, b_.lane, block, kSideChannel) == 0;
    missing = __ballot_sync(0xffffffffu, is_late ? 1 : 0);
    __syncwarp();  // each lane has acquired what one mate sent; all read it
    return missing == 0;
  }
  // Into the next record to a rank: of each pick that of the mate that keeps it.
  __device__ void write_side(i32 source, i64 token, const u8* keepers) const {
    auto* side = reinterpret_cast<float*>(records_to(source).to(b_.s.num_dealt[source]) + kSideAt);
    for (i32 k = b_.lane; k < kTopk; k += 32) {
      const i32 keeper = keepers[k];
      float value = 0.0f;
      if (keeper < nodes_.size) {
        const u8* landed = b_.side_landing(source, nodes_.first + keeper, token).own();
        value += reinterpret_cast<const float*>(landed)[k];
      }
      side[k] = value;
    }
    __syncwarp();
  }
  // Of an own token whose next records are those of `from`, a bit for each node: the results of the picks that went there.
  __device__ void read_side(i64 token, u32 from, const i32* destination) const {
    __syncwarp();  // what a lane has acquired all read
    for (i32 k = b_.lane; k < kTopk; k += 32) {
      const i32 to = destination[k];
      const i32 node = to >= 0 && to < kRanks ? nodes_.map.node(to) : nodes_.node;
      if (node == nodes_.node) continue;  // the side warp has it
      float value = 0.0f;
      if ((from >> node & 1u) != 0) value += reinterpret_cast<const float*>(next_record(node) + kSideAt)[k];
      b_.a.side_out[token * kTopk + k] = value;
    }
    __syncwarp();
  }

  // What there is to do when an item is done: of a token of another node's rank, or of this rank with records of these nodes.
  __device__ static u32 done_of(i32 source) { return static_cast<u32>(source) + 1; }
  __device__ static u32 done_own(u32 nodes) { return kIsOwn | nodes; }

  // By one lane.
  __device__ void tell(u32 done) const {
    if (done == 0 || b_.has_failed()) return;
    if ((done & kIsOwn) == 0) {
      const i32 source = static_cast<i32>(done) - 1, num_done = ++b_.s.num_done[source];
      const auto records = records_to(source);
      if (records.ends_chunk(num_done)) records.put(num_done);
      return;
    }
    for (i32 node = 0; node < kNodes; ++node) {
      if ((done >> node & 1u) == 0) continue;
      const auto records = records_of(node);
      if (records.ends_chunk(++b_.s.num_added[node])) records.take();
    }
  }
  // By one lane: all records to the rank have been dealt out. Whether all are done.
  __device__ bool finish(i32 source) const {
    if (b_.s.num_done[source] != b_.s.num_dealt[source]) return false;
    const i32 num_done = b_.s.num_done[source];
    const auto records = records_to(source);
    if (num_done > 0 && !records.is_put(num_done) && !b_.has_failed()) records.put(num_done);
    return true;
  }
  // By one lane, at the end: the last chunks of nodes.
  __device__ void finish_own() const {
    for (i32 node = 0; node < kNodes; ++node) {
      const i32 num_added = b_.s.num_added[node];
      if (num_added == 0) continue;  // also where nobody forwards
      const auto records = records_of(node);
      if (!records.ends_chunk(num_added) && !b_.has_failed()) records.take();
    }
  }

  // Who is named when nothing can go on: a mate whose side values are missing, whose record is, else who gives no credit.
  __device__ i32 late_peer(u32 missing_nodes, u32 missing_mates) const {
    if (missing_mates != 0) return __ffs(static_cast<i32>(missing_mates)) - 1;
    for (i32 node = 0; node < kNodes; ++node) {
      if ((missing_nodes >> node & 1u) != 0) return b_.s.forwarder[node];
    }
    for (i32 source = 0; source < kRanks; ++source) {
      if (nodes_.brings(source) && b_.s.next_index[source] < b_.s.num_items[source]) return source;
    }
    return nodes_.rank;
  }

  __device__ const Nodes<kConfig>& nodes() const { return nodes_; }

 private:
  static constexpr u32 kIsOwn = 1u << 31;
  static constexpr i32 kRecordBits = 24;
  static_assert(kMaxGpuRanks <= 1 << (30 - kRecordBits) && kNodes < 31);

  using Sums = Records<typename Nodes<kConfig>::Ring, kRecordBytes>;
  __device__ Sums records_to(i32 source) const {
    return {nodes_.layout(), nodes_.ring(source), b_.s.first_put[source]};
  }
  __device__ Sums records_of(i32 node) const {
    return {nodes_.layout(), nodes_.ring(b_.s.forwarder[node]), b_.s.first_taken[node]};
  }

  const Block& b_;
  const Nodes<kConfig> nodes_;
};

}  // namespace weft::kernels
