// One combine of the CPU engine. The protocol is docs/protocols/cpu-combine.md; in short:
//   count   to every peer: my rows lie in my heap (pull them), or I push partial sums; and where pushed rows may land here
//           (FP8 on the wire is always pushed)
//   (data)  owners walk their tokens in order and add the ranks' rows, ascending or as the order of the call says: pulled from
//           the peer's heap, or landed. By pick every row travels by itself, with its weight, and is always pushed
//   reduce  to every peer: I have read everything of yours
// The call ends with the `reduce` header of every peer: nobody reads the caller's rows any more (R20).
#pragma once

#include "engine/cpu/operation.h"
#include "engine/cpu/plan.h"
#include "engine/cpu/rows.h"
#include "weft/config/order.h"

namespace weft::cpu {

class CombineCall {
 public:
  CombineCall(Window& window, const CombineArgs& args, const Poll& poll);
  void run();

 private:
  // A rank as contributor to the tokens of this rank.
  struct Contributor {
    bool pulls = false;        // its rows are read from its heap
    const u8* rows = nullptr;  // row 0 there
    u8* landing = nullptr;     // its records arrive here
    u32 landing_records = 0;
    i64 num_rows = 0;      // that it has for this rank: of tokens, by pick of kept picks
    u32 num_records = 0;   // that it will send
    u32 num_landed = 0;    // seen
    u32 num_consumed = 0;  // read
    u32 num_posted = 0;    // told to the contributor
  };
  // Tokens of an owner that this rank adds up: its own, or, with nodes, those that it forwards for. Then what is added are the
  // contributions of this node, and the sum goes into a ring.
  struct Route {
    int owner = 0;
    SendPlanView<const i32> plan{};
    i64 next_token = 0;
    i32 in_chunk = 0;                                   // sums in the chunk that is not put yet
    std::array<Contributor, kMaxRanks> contributors{};  // ranks of this node
  };
  // Sums of another node for this rank's tokens.
  struct Inflow {
    int node = 0;
    int peer = 0;
    i64 num_rows = 0;
    i64 next = 0;
  };
  // A rank as owner of tokens to which this rank contributes.
  struct Owner {
    u8* landing = nullptr;
    u32 landing_records = 0;
    i64 num_rows = 0;  // that this rank has for it
    u32 num_records = 0;
    u32 num_pushed = 0;
    i64 next_pick = 0;  // by pick: in the receive plan, where the search for the next kept one goes on
  };

  bool is_by_pick() const { return order_.contribution == Contribution::kOfPick; }
  bool pushes_records() const { return !pull_ || a_.has_side; }
  bool needs_records(const Contributor& from) const { return !from.pulls || a_.has_side; }
  bool is_own(const Route& route) const { return &route == &own_; }
  bool goes_to(i64 token, int node) const;
  // The route of each owner that this rank adds up for, ascending.
  template <class Visit>
  void for_routes(const Visit& visit) {
    for (Route& route : routes_) {
      if (route.owner > rank_) break;
      visit(route);
    }
    visit(own_);
    for (Route& route : routes_) {
      if (route.owner > rank_) visit(route);
    }
  }
  // What a peer adds up for: its own tokens, and with nodes those of others.
  template <class Visit>
  void for_owners_of(int peer, const Visit& visit) const {
    if (!op_.has_rails()) return visit(peer);
    for (int owner = 0; owner < num_ranks_; ++owner) {
      if (op_.map().is_active(owner) && op_.forwarder(owner) == peer) visit(owner);
    }
  }
  i64 num_owners_of(int peer) const {
    i64 count = 0;
    for_owners_of(peer, [&](int) { ++count; });
    return count;
  }

  void find_routes();
  void count_rows();
  void prepare_landing();
  void send_counts();
  void read_counts();
  void check_pull(Route& route, int peer, const CountPayload& payload);
  void check_landing(int peer, const CountPayload& payload);

  // As contributor.
  bool can_push(int owner) const;
  bool push_records(int owner);
  void write_record(i64 meta_row, u8* record);
  bool partial_sum(i64 meta_row, void* place, bool as_fp32);  // false: no pick of this row was kept
  void contribution(i64 meta_row, u8* data);                  // as it travels: data, then scales, as in a record
  void write_side(i64 meta_row, float* values) const;
  void write_pick(Owner& owner, u8* record) const;

  // As owner.
  bool can_sum() const;
  bool sum_tokens();
  bool can_sum(const Route& route) const;
  bool token_is_here(const Route& route, i64 token) const;
  void note_landed(Route& route);
  bool sum_route(Route& route);
  i32 gather_rows(Route& route, i64 token, const void** rows, float* side);
  bool sum_token(Route& route, i64 token);
  bool has_row(const Route& route, i64 token, int contributor) const;
  const void* own_row(i64 meta_row);
  void read_side(const Route& route, i64 token, int contributor, const float* values, float* side) const;
  const void* bias_of(i64 token) const;
  i64 last_pick(const Route& route, i64 token, int contributor) const;
  i64 place_in_order(const Route& route, i64 token, int contributor) const;

  // With nodes.
  bool rails_are_ready(const Route& route, i64 token) const;
  void put_sum(Route& route, const void* sum, const float* side);
  i32 add_inflows(i64 token, i32 num_rows, const void** rows);
  void pass_inflows(i64 token);
  bool owes(int peer) const;
  bool pick_is_here() const;
  bool sum_picks(i64 token);
  bool is_gone(i64 pick) const;
  void add_pick(i64 at, const void* row, float weight, float side);
  void post_consumed(Route& route, int contributor);
  i32 sum_domains(const i64* places, i32 num_rows, const void** rows) const;

  Window& w_;
  const CombineArgs& a_;
  const ExpertPlacement experts_;
  const int rank_;
  const i64 num_ranks_, top_k_;
  const i64 row_bytes_;
  Operation op_;
  const SendPlanView<const i32> send_;
  const RecvPlanView<const i32> recv_;
  const Order order_;
  const bool is_fp8_;  // contributions; the sums of domains are else
  bool pull_ = false;  // this rank's rows lie in its heap in the right order, and travel as they are
  u64 pull_offset_ = 0;
  RecordLayout record_;  // with data; a pulled row's record has only the side values
  RecordLayout side_record_;
  RecordLayout sum_record_;      // what the owner adds: a contribution, or the sum of a domain
  RecordLayout rail_record_;     // such a sum in a chunk, with the side values of its node
  Route own_;                    // on the stack: without nodes a call allocates nothing
  std::vector<Route> routes_;    // of other nodes' ranks, ascending
  std::vector<Inflow> inflows_;  // ascending nodes
  std::array<Owner, kMaxRanks> owners_{};
  Block landing_block_;
  i64 next_k_ = 0;  // by pick: of the token that is next
};

}  // namespace weft::cpu
