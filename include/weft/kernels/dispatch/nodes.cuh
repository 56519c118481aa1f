// Dispatch with nodes: items beyond tokens of this rank, and destinations beyond ranks of this node (docs/protocols/nodes.md). An item
// is dealt out by the lane that loads rows: a row of an arrived chunk first, since that frees a slot, then a token of this
// block's run if each of its rings has a place.
#pragma once

#include "weft/kernels/dispatch/block.cuh"
#include "weft/kernels/records.cuh"

namespace weft::kernels {

template <DispatchKernelConfig kConfig>
class DispatchNodes : public DispatchState<kConfig> {
 public:
  using Base = DispatchState<kConfig>;
  using Base::a, Base::s, Base::flight, Base::lane, Base::rank;
  using Base::kRanks, Base::kTopk, Base::kLocal, Base::kRowBytes, Base::kScaleBytes;
  static constexpr i32 kNodes = kConfig.num_nodes();
  static constexpr i32 kNodeRanks = kConfig.node_ranks;
  // A record of a chunk: a row, its scales, then the weights of a first dispatch.
  static constexpr i32 kScalesAt = (kRowBytes + 15) / 16 * 16;
  static constexpr i32 kWeightsAt = kScalesAt + (kScaleBytes + 15) / 16 * 16;
  static constexpr i32 kRecordBytes = kWeightsAt + (kConfig.is_cached ? 0 : (kTopk * 4 + 15) / 16 * 16);

  __device__ explicit DispatchNodes(const Base& base) : Base(base), nodes_(base.nodes()) {}

  // By all threads, before a barrier.
  __device__ void init() {
    const i32 thread = static_cast<i32>(threadIdx.x);
    if (thread < kNodes) {
      const i32 forwarder = thread == nodes_.node ? -1 : nodes_.forwarder_in(thread);
      s.forwarder[thread] = forwarder;
      s.first_put[thread] = forwarder >= 0 ? *nodes_.ring(forwarder).num_put() : 0;
      s.num_to[thread] = s.num_dealt[thread] = s.num_stored[thread] = 0;
    }
    if (thread < kRanks) {
      s.first_taken[thread] = nodes_.brings(thread) ? *nodes_.ring(thread).num_taken() : 0;
      s.num_from[thread] = s.num_loaded[thread] = s.num_done[thread] = 0;
      s.num_placed[thread] = 0;
    }
  }

  // By warps in turns, the first being `nth` of them: how many tokens of this block's run a handle sends to each node.
  __device__ void count_planned(i32 nth, i32 num_warps) {
    const i32 begin = this->queue_begin(block(), a.num_tokens), end = begin + this->queue_len(block(), a.num_tokens);
    for (i32 node = nth; node < kNodes; node += num_warps) {
      i32 num_here = 0;
      for (i32 token = begin + lane; token < end; token += 32) num_here += goes_to(node, token) ? 1 : 0;
      num_here = __reduce_add_sync(0xffffffffu, num_here);
      if (lane == 0) s.num_to[node] = num_here;
    }
  }

  // By a warp, when the message of the source is here: its rows before those of this block, and those of this block.
  __device__ void prepare(i32 source, i32 num_tokens) {
    if (!nodes_.brings(source)) return;
    const i32 begin = this->queue_begin(block(), num_tokens), end = begin + this->queue_len(block(), num_tokens);
    const u32* bits = tokens_from(source);
    i32 num_before = 0, num_here = 0;
    for (i32 group = lane; group * 32 < end; group += 32) {
      num_before += __popc(bits[group] & this->bits_between(group, 0, begin));
      num_here += __popc(bits[group] & this->bits_between(group, begin, end));
    }
    num_before = __reduce_add_sync(0xffffffffu, num_before);
    num_here = __reduce_add_sync(0xffffffffu, num_here);
    if (lane != 0) return;
    s.first_row[source] = num_before;
    s.num_from[source] = num_here;
    s.next_token[source] = begin;
  }

  // ---- by the lane that loads

  // The next item: a token of the run, of which `token` is the next, or a row of `source`, or the end.
  __device__ i32 take_item(i32& token, i32& source) {
    const i32 end = this->queue_begin(block(), a.num_tokens) + this->queue_len(block(), a.num_tokens);
    i32 found = kEndOfItems;
    const auto look = [&] {
      if (has_failed()) return true;
      bool is_left = token < end;
      for (i32 from = 0; from < kRanks; ++from) {
        if (s.num_loaded[from] == s.num_from[from]) continue;
        is_left = true;
        if (!has_row(from)) continue;
        source = from;
        if (find_token(from)) found = kArrivedRow;
        return true;
      }
      if (token < end && node_without_place(token) < 0) {
        found = token++;
        return true;
      }
      return !is_left;
    };
    sync::LanePause pause(&a.view.host->abort, awaited(), &a.view.host->timeout_ns);
    const sync::WaitResult result = sync::wait_until(look, pause);
    if (!transport::settle(a.view, flight, result, Phase::kSend, late_peer(token), 0)) s.has_failed = 1;
    return found;
  }

  // The records of a token that is dealt out.
  __device__ void deal_records(i32 token, i32 idx) {
    for (i32 node = 0; node < kNodes; ++node) {
      s.record[idx][node] = goes_to(node, token) ? s.num_dealt[node]++ : -1;
    }
  }

  __device__ void load_arrived(i32 source, i32 idx, u8* stage) {
    const i32 record = s.num_loaded[source]++;
    const u8* from = records_of(source).from(record);
    s.source[idx] = source;
    s.record[idx][0] = record;
    s.source_token[idx] = s.next_token[source] - 1;
    constexpr i32 kScalesHere = (kScaleBytes + 15) / 16 * 16;
    ptx::fence_proxy_async_global();  // what another's network has written is loaded in bulk
    ptx::mbarrier_arrive_expect(&s.full[idx], kRowBytes + kScalesHere);
    ptx::bulk_load(stage, from, kRowBytes, &s.full[idx]);
    if constexpr (kScalesHere > 0) {
      ptx::bulk_load(stage + kConfig.scales_at(), from + kScalesAt, kScalesHere, &s.full[idx]);
    }
  }

  // ---- by a warp that stores

  // What the warp that tells must know of the item in a stage.
  __device__ i32 remembered(i32 token, i32 idx) const { return token == kArrivedRow ? token - s.source[idx] : token; }

  // Until the rows of the item at the mates are known. False: the GPU has gone wrong.
  __device__ bool wait_placed(i32 idx) {
    if constexpr (kConfig.is_cached) return true;
    const i32 source = s.source[idx];
    const i32 begin = this->queue_begin(block(), s.num_tokens[source]);
    const u32 target = static_cast<u32>(s.source_token[idx] - begin) + 1;
    if (sync::wait_any_lane([&] { return ptx::ld_acquire_cta(&s.num_placed[source]) >= target; })) {
      __syncwarp();
      return true;
    }
    this->fail(transport::ErrorCause::kDeadline, Phase::kSend, rank());
    return false;
  }

  // In lane r the row on rank r, -1: none.
  __device__ i32 arrived_row(i32 idx) const {
    if (lane >= kRanks || !nodes_.is_mate(lane)) return -1;
    const i32 row = planned_rows(idx)[lane - nodes_.first];
    if (kConfig.is_by_expert() && row >= 0 && this->is_staged(lane)) {
      return s.source[idx] * static_cast<i32>(a.view.layout.max_tokens) + s.source_token[idx];
    }
    const i64 num_places = i64{s.limit[lane]} * (kConfig.layout == Layout::kMasked ? kLocal : 1);
    return row < num_places ? max(row, -1) : -1;  // of a handle: another result may have less room
  }

  // Ids and weights of an arrived row, and who keeps its picks; by expert weights alone, to where its ranks look for them.
  __device__ void store_picks(i32 idx) const {
    if constexpr (kConfig.is_cached) return;
    const i32 source = s.source[idx], record = s.record[idx][0];
    const u16* experts = experts_from(source) + (s.first_row[source] + i64{record}) * kTopk;
    const auto* weights = reinterpret_cast<const float*>(records_of(source).from(record) + kWeightsAt);
    const i32* rows = planned_rows(idx);
    if constexpr (kConfig.is_by_expert()) {
      const i64 first = (source * a.view.layout.max_tokens + s.source_token[idx]) * kTopk;
      for (i32 mate = 0; mate < nodes_.size; ++mate) {
        const i32 to = nodes_.first + mate;
        if (rows[mate] < 0 || !flight.is_active(to) || lane >= kTopk) continue;
        this->peers().put_words(s.weights[to].template at<float>(first + lane), weights[lane]);
      }
      return;
    }
    const i32 nth = nodes_.nth_brought(source);
    for (i32 k = lane; k < kTopk; k += 32) {
      const i32 expert = experts[k], keeper = expert / kLocal;
      const bool is_kept = keeper < nodes_.size && rows[keeper] >= 0;
      plan().set_pick(nth, s.source_token[idx], k, is_kept ? static_cast<u8>(keeper) : kNoMate);
      for (i32 mate = 0; mate < nodes_.size; ++mate) {
        const i32 row = rows[mate], to = nodes_.first + mate;
        if (row < 0 || !flight.is_active(to)) continue;
        const i32 local = expert - mate * kLocal;
        const bool is_here = local >= 0 && local < kLocal;
        const i64 place = i64{row} * kTopk + k;
        if (s.with_int64.has(to)) {
          this->peers().put_words(s.ids[to].template at<i64>(place), i64{is_here ? local : -1});
        } else {
          this->peers().put_words(s.ids[to].template at<i32>(place), is_here ? local : -1);
        }
        this->peers().put_words(s.weights[to].template at<float>(place), is_here ? weights[k] : 0.0f);
      }
    }
  }

  // A token of this rank to its records.
  __device__ void store_records(i32 token, i32 idx, const u8* stage) const {
    for (i32 node = 0; node < kNodes; ++node) {
      const i32 record = s.record[idx][node];
      if (record < 0) continue;
      u8* to = records_to(node).to(record);
      if (lane == 0) ptx::bulk_store(to, stage, kRowBytes);
      if constexpr (kScaleBytes > 0) {
        copy_short<kScaleBytes>(to + kScalesAt, stage + kConfig.scales_at(), lane);
      }
      for (i32 k = lane; k < kTopk && !kConfig.is_cached; k += 32) {
        reinterpret_cast<float*>(to + kWeightsAt)[k] =
            a.topk_weights == nullptr ? 1.0f : a.topk_weights[i64{token} * kTopk + k];
      }
    }
  }

  // ---- by a warp that plans

  // What a handle needs besides rows: the members, and tokens that came. A word of those belongs to the block that has its first.
  __device__ void keep_members() const {
    if (block() == 0 && lane == 0) plan().members() = static_cast<i32>(flight.active.word);
  }
  __device__ void keep_tokens(i32 source, i32 nth, i32 begin, i32 end) const {
    for (i32 group = (begin + 31) / 32 + lane; group * 32 < end; group += 32) {
      plan().come(nth)[group] = static_cast<i32>(tokens_from(source)[group]);
    }
  }

  // ---- by the lane that tells

  // A record of a ring is complete, which is the last of a chunk or of this call: the chunk goes.
  __device__ void tell_stored(i32 node) {
    const i32 num_stored = ++s.num_stored[node];
    const auto records = records_to(node);
    if (records.ends_chunk(num_stored) || num_stored == s.num_to[node]) records.put(num_stored);
  }
  // A row of a source is stored.
  __device__ void tell_done(i32 source) {
    const i32 num_done = ++s.num_done[source];
    const auto records = records_of(source);
    if (records.ends_chunk(num_done) || num_done == s.num_from[source]) records.take();
  }
  __device__ bool goes_to(i32 node, i32 token) const {
    if (s.forwarder[node] < 0) return false;
    if constexpr (kConfig.is_cached || kConfig.is_by_expert()) {
      const u32 of_node = GpuRankMask::first(nodes_.map.size(node)).word << nodes_.map.first(node);
      return (GpuSendPlan<const i32>{a.send_plan, a.num_tokens, kRanks}.ranks(token).word & of_node) != 0;
    }
    return (this->goers_to_node(nodes_, node, token / 32) >> (token % 32) & 1u) != 0;
  }

  // ---- of a message, or of what a handle has kept of it

  __device__ GpuForwardPlan<i32> plan() const { return {a.forward_plan, a.view.layout.max_tokens, kNodeRanks, kTopk}; }
  // A bit for each that has come.
  __device__ const u32* tokens_from(i32 source) const {
    if constexpr (kConfig.is_cached) return reinterpret_cast<const u32*>(plan().come(nodes_.nth_brought(source)));
    return reinterpret_cast<const u32*>(nodes_.message_from(source) + nodes_.layout().tokens());
  }
  // Of its rows, by number in the node.
  __device__ const u16* experts_from(i32 source) const {
    return reinterpret_cast<const u16*>(nodes_.message_from(source) + nodes_.layout().experts(s.num_tokens[source]));
  }

 protected:
  const Nodes<kConfig> nodes_;

  __device__ static i32 block() { return static_cast<i32>(blockIdx.x); }
  __device__ bool has_failed() const { return *static_cast<volatile u32*>(&s.has_failed) != 0; }

 private:
  using Rows = Records<typename Nodes<kConfig>::Ring, kRecordBytes>;
  __device__ Rows records_to(i32 node) const {
    return {nodes_.layout(), nodes_.ring(s.forwarder[node]), s.first_put[node]};
  }
  __device__ Rows records_of(i32 source) const { return {nodes_.layout(), nodes_.ring(source), s.first_taken[source]}; }
  __device__ const i32* planned_rows(i32 idx) const {
    return plan().row(nodes_.nth_brought(s.source[idx]), s.source_token[idx]);
  }

  __device__ bool has_row(i32 source) const { return records_of(source).has_arrived(s.num_loaded[source]); }

  // A node in whose ring the token has no place; -1: none.
  __device__ i32 node_without_place(i32 token) const {
    for (i32 node = 0; node < kNodes; ++node) {
      if (goes_to(node, token) && !records_to(node).has_place(s.num_dealt[node])) return node;
    }
    return -1;
  }

  // The ranks whose death ends the wait for an item.
  __device__ u64 awaited() const {
    u64 mask = 0;
    for (i32 node = 0; node < kNodes; ++node) mask |= s.forwarder[node] >= 0 ? u64{1} << s.forwarder[node] : 0;
    for (i32 source = 0; source < kRanks; ++source) {
      if (s.num_loaded[source] < s.num_from[source]) mask |= u64{1} << source;
    }
    return mask;
  }

  // A source whose chunk is missing, else who gives no credit.
  __device__ i32 late_peer(i32 token) const {
    for (i32 source = 0; source < kRanks; ++source) {
      if (s.num_loaded[source] < s.num_from[source]) return source;
    }
    const bool is_own = token < this->queue_begin(block(), a.num_tokens) + this->queue_len(block(), a.num_tokens);
    const i32 node = is_own ? node_without_place(token) : -1;
    return node >= 0 ? s.forwarder[node] : rank();
  }

  // The token of the source's next row is the one before s.next_token. R19: the message may say less than when it was counted; false:
  // it has no token left in the run of this block.
  __device__ bool find_token(i32 source) {
    const i32 num_tokens = s.num_tokens[source], begin = s.next_token[source];
    const i32 end = this->queue_begin(block(), num_tokens) + this->queue_len(block(), num_tokens);
    const u32* bits = tokens_from(source);
    for (i32 group = begin / 32; group * 32 < end; ++group) {
      const u32 word = bits[group] & this->bits_between(group, begin, end);
      if (word == 0) continue;
      s.next_token[source] = group * 32 + __ffs(static_cast<i32>(word));
      return true;
    }
    this->fail(transport::ErrorCause::kBadPeerWord, Phase::kSend, source);
    return false;
  }
};

}  // namespace weft::kernels
