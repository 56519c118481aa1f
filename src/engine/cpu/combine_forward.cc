// A combine between nodes: as a forwarder this rank puts the sums of its node into the rings to the owners of tokens; as an owner it adds
// the sums of all nodes. docs/protocols/rail.md is the page to this file.
#include <algorithm>
#include <cstring>

#include "engine/cpu/combine.h"

namespace weft::cpu {

bool CombineCall::goes_to(i64 token, int node) const {
  const i32* slots = send_.slot() + token * num_ranks_ + op_.map().first(node);
  return std::any_of(slots, slots + op_.map().size(node), [](i32 slot) { return slot >= 0; });
}

void CombineCall::find_routes() {
  const auto& header = *memory_at<PlanHeader>(a_.recv_plan);
  const i64 length = recv_plan_len(header.num_meta_rows, top_k_, num_ranks_, a_.layout);
  const ForwardPlans plans{memory_at<i32>(a_.recv_plan), length, a_.recv_plan_len};
  plans.for_each(top_k_, num_ranks_, [&](const SendPlanView<i32>& plan, i32 owner) {
    Route& route = routes_.emplace_back();
    route.owner = owner;
    route.plan = {plan.base, plan.num_tokens, top_k_, num_ranks_};
  });
  std::sort(routes_.begin(), routes_.end(),
            [](const Route& one, const Route& other) { return one.owner < other.owner; });
  const RailMap& map = op_.map();
  for (int node = 0; node < map.num_nodes(); ++node) {
    const int peer = map.forwarder(rank_, node);
    if (node == map.node(rank_) || peer < 0) continue;
    Inflow flow{node, peer};
    for (i64 token = 0; token < a_.num_tokens; ++token) flow.num_rows += goes_to(token, node) ? 1 : 0;
    inflows_.push_back(flow);
  }
}

// Whether a forwarded sum has a place in its ring, or the sums of the other nodes have come.
bool CombineCall::rails_are_ready(const Route& route, i64 token) const {
  if (!is_own(route)) return route.in_chunk > 0 || op_.rails().source(route.owner).has_place();
  return std::all_of(inflows_.begin(), inflows_.end(), [&](const Inflow& flow) {
    return !goes_to(token, flow.node) || op_.rails().sink(flow.peer).has_arrived();
  });
}

// `sum`: as sum_record_ has it, null: nothing was kept in this node, which adds as little as zeros.
void CombineCall::put_sum(Route& route, const void* sum, const float* side) {
  RailHost& rails = op_.rails();
  u8* slot = rails.send_slot(route.owner, rails.source(route.owner).next());
  u8* record = slot + static_cast<u64>(route.in_chunk) * rail_record_.bytes;
  const u64 data_bytes = static_cast<u64>(a_.wire_is_fp8 ? a_.hidden : row_bytes_);
  const u64 scale_row_bytes = a_.wire_is_fp8 ? static_cast<u64>(scale_bytes(a_.hidden, Quantize::kFp8)) : 0;
  if (sum == nullptr) {
    std::memset(record, 0, rail_record_.meta);
  } else {
    std::memcpy(record, sum, data_bytes);
    std::memcpy(record + rail_record_.scales, static_cast<const u8*>(sum) + sum_record_.scales, scale_row_bytes);
  }
  if (a_.has_side) std::memcpy(record + rail_record_.meta, side, static_cast<u64>(top_k_) * sizeof(float));
  ++route.in_chunk;
  const bool is_last = route.next_token + 1 == route.plan.num_tokens;
  if (route.in_chunk < rails.layout().chunk_rows && !is_last) return;
  rails.put(route.owner, static_cast<u64>(route.in_chunk) * rail_record_.bytes);
  route.in_chunk = 0;
  WEFT_FAIL_POINT("combine.after_put");
}

// `rows`: the sum of this node, if it kept something. Among it the sums of the others, nodes ascending. How many there are.
i32 CombineCall::add_inflows(i64 token, i32 num_rows, const void** rows) {
  const void* mine = num_rows > 0 ? rows[0] : nullptr;
  i32 count = 0;
  const auto add_mine = [&] {
    if (mine != nullptr) rows[count++] = mine;
  };
  bool has_mine = false;
  for (const Inflow& flow : inflows_) {
    if (flow.node > op_.map().node(rank_) && !has_mine) {
      add_mine();
      has_mine = true;
    }
    if (!goes_to(token, flow.node)) continue;
    const RailHost& rails = op_.rails();
    const u8* record = rails.receive_slot(flow.peer, rails.sink(flow.peer).next()) +
                       static_cast<u64>(flow.next % rails.layout().chunk_rows) * rail_record_.bytes;
    rows[count++] = record;
    for (i64 k = 0; a_.has_side && k < top_k_; ++k) {
      const i32 expert = send_.expert()[token * top_k_ + k];
      const bool is_there = expert >= 0 && op_.map().node(experts_.rank_of(expert)) == flow.node;
      if (is_there)
        memory_at<float>(a_.side_out)[token * top_k_ + k] =
            reinterpret_cast<const float*>(record + rail_record_.meta)[k];
    }
  }
  if (!has_mine) add_mine();
  return count;
}

// The token is added: its sums have been read.
void CombineCall::pass_inflows(i64 token) {
  for (Inflow& flow : inflows_) {
    if (!goes_to(token, flow.node)) continue;
    ++flow.next;
    const bool is_read = flow.next % op_.rails().layout().chunk_rows == 0 || flow.next == flow.num_rows;
    op_.rails().sink(flow.peer).take([&](u64) { return is_read; }, [&] { op_.rails().give_credit(flow.peer); });
  }
}

// Whether this rank may wait for that one.
bool CombineCall::owes(int peer) const {
  const auto awaits_records = [&](const Route& route) {
    const Contributor& from = route.contributors[peer];
    return from.num_consumed < from.num_records;
  };
  if (awaits_records(own_)) return true;
  for (const Route& route : routes_) {
    if (awaits_records(route)) return true;
    const bool awaits_credit = route.in_chunk == 0 && !op_.rails().source(route.owner).has_place();
    if (route.owner == peer && route.next_token < route.plan.num_tokens && awaits_credit) return true;
  }
  for (const Inflow& flow : inflows_) {
    if (flow.peer == peer && flow.next < flow.num_rows && !op_.rails().sink(peer).has_arrived()) return true;
  }
  for (int owner : op_.others()) {
    if (op_.forwarder(owner) == peer && owners_[owner].num_pushed < owners_[owner].num_records) return true;
  }
  return false;
}

}  // namespace weft::cpu
