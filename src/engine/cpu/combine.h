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
  bool needs_records(int contributor) const { return !contributors_[contributor].pulls || a_.has_side; }

  void count_rows();
  void prepare_landing();
  void send_counts();
  void read_counts();
  void check_pull(int peer, const CountPayload& payload);
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
  bool token_is_here(i64 token) const;
  bool sum_token(i64 token);
  bool has_row(i64 token, int contributor) const;
  const void* own_row(i64 meta_row);
  void read_side(i64 token, int contributor, const float* values);
  const void* bias_of(i64 token) const;
  i64 last_pick(i64 token, int contributor) const;
  i64 place_in_order(i64 token, int contributor) const;
  bool pick_is_here() const;
  bool sum_picks(i64 token);
  void add_pick(i64 at, const void* row, float weight, float side);
  void post_consumed(int contributor, bool at_end);
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
  RecordLayout sum_record_;                            // what the owner adds: a contribution, or the sum of a domain
  std::array<Contributor, kMaxRanks> contributors_{};  // on the stack: a call allocates nothing
  std::array<Owner, kMaxRanks> owners_{};
  Block landing_block_;
  i64 next_token_ = 0;
  i64 next_k_ = 0;  // by pick: of that token
};

}  // namespace weft::cpu
