// A dispatch between nodes: what the messages say, rows into the rings of other nodes' forwarders, and as a forwarder rows out of rings
// to the ranks of this node. docs/protocols/rail.md is the page to this file.
#include <algorithm>
#include <bit>
#include <cstring>

#include "engine/cpu/dispatch.h"
#include "engine/cpu/rows.h"

namespace weft::cpu {
namespace {

template <class T>
T* part_of(RailMessage* message, u64 offset) {
  return reinterpret_cast<T*>(reinterpret_cast<u8*>(message) + offset);
}
template <class T>
const T* part_of(const RailMessage* message, u64 offset) {
  return reinterpret_cast<const T*>(reinterpret_cast<const u8*>(message) + offset);
}

constexpr i64 kTokensPerWord = 32;

i64 num_words(i64 num_tokens) { return (num_tokens + kTokensPerWord - 1) / kTokensPerWord; }

}  // namespace

// ---- messages -------------------------------------------------------------------------------------------------------

bool DispatchCall::goes_to(i64 token, int node) const {
  const i32* slots = send_.slot() + token * num_ranks_ + op_.map().first(node);
  return std::any_of(slots, slots + op_.map().size(node), [](i32 slot) { return slot >= 0; });
}

void DispatchCall::count_outflows() {
  const RailMap& map = op_.map();
  for (int node = 0; node < map.num_nodes(); ++node) {
    const int peer = map.forwarder(rank_, node);
    if (node == map.node(rank_) || peer < 0) continue;
    Outflow flow{node, peer};
    for (i64 token = 0; token < a_.num_tokens; ++token) flow.num_rows += goes_to(token, node) ? 1 : 0;
    outflows_.push_back(flow);
  }
}

// Behind the payload of `count`: returns the bytes of the whole message.
u64 DispatchCall::write_message(int node, RailMessage* message) const {
  if (a_.cached) return sizeof(RailMessage);
  const RailMap& map = op_.map();
  const RailLayout& layout = op_.rails().layout();
  const int first = map.first(node), size = map.size(node);
  for (int idx = 0; idx < size; ++idx) {
    i32* counts = part_of<i32>(message, layout.counts(idx));
    counts[0] = static_cast<i32>(targets_[first + idx].num_rows);
    std::copy_n(&w_.scratch_.counts_to[(first + idx) * num_local_], num_local_, counts + 1);
  }
  u32* tokens = part_of<u32>(message, layout.tokens());
  std::fill_n(tokens, num_words(a_.max_tokens), 0);
  u16* experts = part_of<u16>(message, layout.experts(a_.max_tokens));
  for (i64 token = 0; token < a_.num_tokens; ++token) {
    if (!goes_to(token, node)) continue;
    tokens[token / kTokensPerWord] |= u32{1} << (token % kTokensPerWord);
    for (i64 k = 0; k < top_k_; ++k) {
      const i64 in_node = send_.expert()[token * top_k_ + k] - first * num_local_;
      *experts++ = in_node >= 0 && in_node < size * num_local_ ? static_cast<u16>(in_node) : kNoRailExpert;
    }
  }
  return static_cast<u64>(reinterpret_cast<u8*>(experts) - reinterpret_cast<u8*>(message));
}

// How many rows will come of each rank that this one forwards for.
void DispatchCall::read_messages() {
  for (int source : op_.others()) {
    const RailMessage* message = op_.message_of(source);
    if (message == nullptr) continue;
    const u32* tokens = part_of<u32>(message, op_.rails().layout().tokens());
    i64 num_rows = 0;
    for (i64 word = 0; word < num_words(a_.max_tokens); ++word) num_rows += std::popcount(tokens[word]);
    if (num_rows > a_.max_tokens) op_.fail_internal(Phase::kCount, source);
    Route& route = routes_.emplace_back();
    route.source = source;
    route.plan = {nullptr, num_rows, top_k_, num_ranks_};
  }
}

i64 DispatchCall::forward_ints() const {
  if (!op_.has_rails()) return 0;
  const i64 length = recv_plan_len(num_meta_rows_, top_k_, num_ranks_, a_.layout);
  i64 num_ints = padded_ints(length) - length + 4;
  for (const Route& route : routes_) num_ints += ForwardPlans::ints_of(route.plan.num_tokens, top_k_, num_ranks_);
  return num_ints;
}

// R19: the ranks of this node were told counts; rows may not be more, or of other experts.
void DispatchCall::build_forward_plans() {
  if (!op_.has_rails()) return;
  const RailLayout& layout = op_.rails().layout();
  const int node = op_.map().node(rank_), first = op_.map().first(node), size = op_.map().size(node);
  const ForwardPlans plans{recv_.base, recv_plan_len(num_meta_rows_, top_k_, num_ranks_, a_.layout), 0};
  plans.count() = static_cast<i32>(routes_.size());
  i32* next = recv_.base + plans.first();
  std::vector<u32> left(static_cast<size_t>(size * num_local_));
  for (Route& route : routes_) {
    SendPlanView<i32>& plan = route.plan;
    plan.base = next;
    next += ForwardPlans::ints_of(plan.num_tokens, top_k_, num_ranks_);
    PlanHeader header = *memory_at<PlanHeader>(a_.send_plan);
    header.num_tokens = static_cast<i32>(plan.num_tokens);
    header.rank = route.source;
    std::memcpy(plan.base, &header, sizeof(header));
    std::fill_n(plan.row_start(), 2 * num_ranks_, 0);
    std::fill_n(plan.slot(), plan.num_tokens * num_ranks_, -1);
    const RailMessage* message = op_.message_of(route.source);
    const u16* experts = part_of<u16>(message, layout.experts(a_.max_tokens));
    for (int idx = 0; idx < size; ++idx)
      std::copy_n(part_of<i32>(message, layout.counts(idx)) + 1, num_local_,
                  &left[static_cast<size_t>(idx * num_local_)]);
    for (i64 pick = 0; pick < plan.num_tokens * top_k_; ++pick) {
      plan.expert()[pick] = -1;
      const u16 expert = experts[pick];
      if (expert == kNoRailExpert) continue;
      const int destination = first + expert / static_cast<int>(num_local_);
      if (expert >= size * num_local_ || !targets_[destination].is_here) op_.fail_internal(Phase::kCount, route.source);
      --left[expert];
      plan.expert()[pick] = static_cast<i32>(first * num_local_) + expert;
      i32& slot = plan.slot()[pick / top_k_ * num_ranks_ + destination];
      if (slot < 0) slot = plan.num_rows_to()[destination]++;
    }
    const bool are_all = std::all_of(left.begin(), left.end(), [](u32 count) { return count == 0; });
    for (int idx = 0; idx < size; ++idx) {
      if (!are_all || plan.num_rows_to()[first + idx] != part_of<i32>(message, layout.counts(idx))[0])
        op_.fail_internal(Phase::kCount, route.source);
    }
  }
}

// ---- rows -----------------------------------------------------------------------------------------------------------

// Whether each destination of the row that is next and that goes through a staging ring has room there.
bool DispatchCall::has_room(const Route& route) const {
  return std::all_of(op_.peers().begin(), op_.peers().end(), [&](int peer) {
    if (!targets_[peer].staged || route.plan.slot()[route.next * num_ranks_ + peer] < 0) return true;
    const u64* consumed = op_.progress_from(peer, Channel::kConsumed, route.source);
    return route.num_landed[peer] - sync::load_progress(consumed, op_.turn()) < ring_records_;
  });
}

// An own row is taken when each of its rings has a place.
bool DispatchCall::can_send_own() const {
  if (own_.next == a_.num_tokens || !has_room(own_)) return false;
  return std::all_of(outflows_.begin(), outflows_.end(), [&](const Outflow& flow) {
    return flow.in_chunk > 0 || !goes_to(own_.next, flow.node) || op_.rails().source(flow.peer).has_place();
  });
}

bool DispatchCall::can_forward(const Route& route) const {
  return route.next < route.plan.num_tokens && op_.rails().sink(route.source).has_arrived() && has_room(route);
}

void DispatchCall::push_records(Route& route, const Row& row, const void* x, const void* scales) {
  for (int peer : op_.peers()) {
    if (!targets_[peer].staged || route.plan.slot()[row.idx * num_ranks_ + peer] < 0) continue;
    u8* ring = w_.control_of(peer) + w_.layout_.ring(route.source);
    write_record(ring + route.num_landed[peer] % ring_records_ * record_.bytes, route.plan, row, peer, x, scales);
    op_.post(peer, Channel::kLanded, route.source, ++route.num_landed[peer]);
  }
}

i32 DispatchCall::place_in_rings(const Row& row, u8** x_places, u8** scale_places) {
  i32 num_places = 0;
  for (const Outflow& flow : outflows_) {
    if (!goes_to(row.idx, flow.node)) continue;
    u8* slot = op_.rails().send_slot(flow.peer, op_.rails().source(flow.peer).next());
    u8* record = slot + static_cast<u64>(flow.in_chunk) * rail_record_.bytes;
    x_places[num_places] = record;
    scale_places[num_places++] = record + rail_record_.scales;
    if (a_.cached) continue;
    float* weights = reinterpret_cast<float*>(record + rail_record_.meta);
    for (i64 k = 0; k < top_k_; ++k) weights[k] = row.weights == nullptr ? 1.0f : row.weights[k];
  }
  return num_places;
}

void DispatchCall::put_chunks(const Row& row) {
  for (Outflow& flow : outflows_) {
    if (!goes_to(row.idx, flow.node)) continue;
    ++flow.in_chunk;
    ++flow.num_put;
    if (flow.in_chunk < op_.rails().layout().chunk_rows && flow.num_put < flow.num_rows) continue;
    op_.rails().put(flow.peer, static_cast<u64>(flow.in_chunk) * rail_record_.bytes);
    flow.in_chunk = 0;
    WEFT_FAIL_POINT("dispatch.after_put");
  }
}

bool DispatchCall::send_own() {
  const i64 before = own_.next;
  for (; can_send_own(); ++own_.next) {
    const Row row = own_row(own_.next);
    u8* x_places[kMaxTopk + kMaxRanks];
    u8* scale_places[kMaxTopk + kMaxRanks];
    i32 num_places = place_row(send_, row, x_places, scale_places);
    num_places += place_in_rings(row, x_places + num_places, scale_places + num_places);
    const void* scales = nullptr;
    const void* x = prepare_row(own_.next, &scales);
    store_row(x, scales, x_places, scale_places, num_places);
    put_chunks(row);
    push_records(own_, row, x, scales);
  }
  return own_.next > before;
}

bool DispatchCall::forward(Route& route) {
  RailHost& rails = op_.rails();
  const sync::RailSink sink = rails.sink(route.source);
  const i64 chunk_rows = rails.layout().chunk_rows;
  const i64 before = route.next;
  const u32* tokens = a_.cached ? nullptr : part_of<u32>(op_.message_of(route.source), rails.layout().tokens());
  const auto read = [&](u64 n) {
    const u8* chunk = rails.receive_slot(route.source, n);
    const i64 end = std::min(route.plan.num_tokens, (route.next / chunk_rows + 1) * chunk_rows);
    for (; route.next < end; ++route.next) {
      if (!has_room(route)) return false;
      const u8* record = chunk + static_cast<u64>(route.next % chunk_rows) * rail_record_.bytes;
      Row row{route.next};
      if (!a_.cached) {
        row.weights = reinterpret_cast<const float*>(record + rail_record_.meta);
        do {
          if (++route.token >= a_.max_tokens) op_.fail_internal(Phase::kSend, route.source);
        } while ((tokens[route.token / kTokensPerWord] >> (route.token % kTokensPerWord) & 1) == 0);
        row.token = static_cast<i32>(route.token);
      }
      u8* x_places[kMaxTopk];
      u8* scale_places[kMaxTopk];
      const i32 num_places = place_row(route.plan, row, x_places, scale_places);
      store_row(record, record + rail_record_.scales, x_places, scale_places, num_places);
      push_records(route, row, record, record + rail_record_.scales);
      WEFT_FAIL_POINT("dispatch.mid_forward");
    }
    return true;
  };
  while (can_forward(route) && sink.take(read, [&] { rails.give_credit(route.source); })) {
  }
  return route.next > before;
}

// Whether this rank may wait for that one: for a chunk, a credit, or room in a staging ring.
bool DispatchCall::owes(int peer) const {
  const auto awaits_room = [&](const Route& route) {
    return route.next < route.plan.num_tokens && targets_[peer].staged && !has_room(route);
  };
  for (const Route& route : routes_) {
    if (awaits_room(route)) return true;
    if (route.source == peer && route.next < route.plan.num_tokens && !op_.rails().sink(peer).has_arrived())
      return true;
  }
  for (const Outflow& flow : outflows_) {
    if (flow.peer == peer && flow.num_put < flow.num_rows && !op_.rails().source(peer).has_place()) return true;
  }
  return awaits_room(own_) || !is_drained(peer);
}

// A rank takes chunks before rows of its own (R15), and whatever can move first.
void DispatchCall::run_rails() {
  const auto has_stored_all = [&] {
    return own_.next == a_.num_tokens && std::all_of(routes_.begin(), routes_.end(), [](const Route& route) {
             return route.next == route.plan.num_tokens;
           });
  };
  const auto has_drained_all = [&] {
    return std::all_of(op_.others().begin(), op_.others().end(), [&](int source) { return is_drained(source); });
  };
  bool has_told = false;
  while (!has_told || !has_drained_all()) {
    bool moved = false;
    for (Route& route : routes_) moved = forward(route) || moved;
    moved = send_own() || moved;
    for (int source : op_.others()) moved = drain_staged(source) || moved;
    if (!has_told && has_stored_all()) {
      finish_streaming();
      WEFT_FAIL_POINT("dispatch.before_send");
      for (int peer : op_.peers()) op_.send(Phase::kSend, peer, [] {});
      has_told = moved = true;
    }
    if (moved) continue;
    const auto any_can_move = [&] {
      return can_send_own() ||
             std::any_of(routes_.begin(), routes_.end(), [&](const Route& route) { return can_forward(route); }) ||
             std::any_of(op_.others().begin(), op_.others().end(), [&](int source) { return can_drain(source); });
    };
    op_.wait(Phase::kSend, any_can_move, [&](int peer) { return owes(peer); });
  }
}

}  // namespace weft::cpu
