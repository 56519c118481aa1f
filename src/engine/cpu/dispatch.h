// One dispatch of the CPU engine. The protocol is docs/protocols/cpu-dispatch.md; in short:
//   count   to every peer: how many picks each of its experts gets from here (a handle: also where rows go)
//   notify  to every peer: where its rows go in this rank's heap, or that they go through the staging ring
//   send    rows straight to their final places, then "all my rows are in your memory"
// The call ends with the `send` header of every peer, which also makes the memory safe to reuse (R20).
#pragma once

#include "engine/cpu/operation.h"
#include "engine/cpu/plan.h"

namespace weft::cpu {

class DispatchCall {
 public:
  DispatchCall(Window& window, const DispatchArgs& args, const Poll& poll);
  DispatchResult run();

 private:
  // Where the rows of this source go on one destination.
  struct Target {
    Placement placement;
    u8* x = nullptr;
    u8* scales = nullptr;
    i32* meta_token = nullptr;
    i32* meta_idx = nullptr;
    float* meta_weights = nullptr;
    bool is_here = false;  // in this node
    bool staged = false;
    i64 num_rows = 0;    // (token, destination) pairs to send
    i64 next_token = 0;  // staged: first token not looked at yet
    u32 num_landed = 0;  // staged: records in the ring so far
  };
  // A rank of another node for which this one forwards, or this rank itself: rows that it stores to the ranks of its node.
  struct Route {
    int source = 0;
    SendPlanView<i32> plan{};
    i64 next = 0;                                // row that is stored next
    i64 token = -1;                              // of the row before
    std::array<u32, kMaxRanks> num_landed = {};  // staged: records in the ring of each destination so far
  };
  // To another node: this rank's ring to its forwarder there.
  struct Outflow {
    int node = 0;
    int peer = 0;
    i64 num_rows = 0;  // of this call
    i64 num_put = 0;   // rows in the ring so far, and of these in the chunk that is not put yet
    i32 in_chunk = 0;
  };
  // Of a row on its way to the ranks of this node.
  struct Row {
    i64 idx = 0;  // in its plan
    i32 token = 0;
    const float* weights = nullptr;  // [K]; null: all 1
  };
  // What comes from one source.
  struct Source {
    i64 first_meta_row = 0;
    i64 num_meta_rows = 0;
    i64 num_placed = 0;    // meta rows whose picks have their rows
    u32 num_consumed = 0;  // staged: records copied out
  };

  // What `sizes` has one after the other.
  i64 num_groups() const { return a_.layout == Layout::kRankMajor ? num_ranks_ : num_local_; }
  i32* counts() const { return memory_at<i32>(a_.sizes); }
  i32* offsets() const { return counts() + num_local_; }
  i32* num_rows() const { return offsets() + num_groups() + 1; }

  void read_handle();
  void build_send_plan();
  void count_token(const i64* experts, i64 token);
  void send_counts();
  u64 write_message(int node, RailMessage* message) const;
  void read_counts();
  void read_messages();
  void build_forward_plans();
  bool goes_to(i64 token, int node) const;
  void count_outflows();
  i64 forward_ints() const;
  const i32* told_starts(int destination, int source) const;
  void size_result();
  void reserve_result();
  Placement placement_for(int source) const;
  void send_placements();
  void read_placements();
  void check_placement(int rank, i64 num_rows, const Placement& placement) const;
  void fill_pick_rows(int source, const SendPlanView<i32>& plan);
  void zero_holes();

  void send_rows();
  void send_token(i64 token);
  Row own_row(i64 token) const;
  const void* prepare_row(i64 token, const void** scales);
  i32 place_row(const SendPlanView<i32>& plan, const Row& row, u8** x_places, u8** scale_places);
  i32 gather_places(const SendPlanView<i32>& plan, i64 row, int destination, u8** x_places, u8** scale_places) const;
  void write_meta(const SendPlanView<i32>& plan, const Row& row, int destination, i32* ids, float* weights) const;
  void write_record(u8* record, const SendPlanView<i32>& plan, const Row& row, int destination, const void* x,
                    const void* scales) const;
  void store_row(const void* x, const void* scales, u8* const* x_places, u8* const* scale_places, i32 num_places) const;

  // With nodes: everything moves in one loop.
  void run_rails();
  bool has_room(const Route& route) const;
  bool can_send_own() const;
  bool can_forward(const Route& route) const;
  bool send_own();
  bool forward(Route& route);
  void store_from(Route& route, const Row& row, const void* x, const void* scales);
  i32 place_in_rings(const Row& row, u8** x_places, u8** scale_places);
  void put_chunks(const Row& row);
  void push_records(Route& route, const Row& row, const void* x, const void* scales);
  bool owes(int peer) const;

  void run_staging();
  bool push_staged(int destination);
  bool drain_staged(int source);
  bool can_push(int destination) const;
  bool can_drain(int source) const;
  bool is_drained(int source) const;
  bool staging_done() const;

  void place_meta_rows(int source, i64 end);
  void finish_result();
  void write_outputs();
  i64 count_dropped() const;
  void write_topk();
  void write_weights();

  Window& w_;
  const DispatchArgs& a_;
  const WindowShape& shape_;
  const ExpertPlacement experts_;
  const int rank_;
  const i64 num_ranks_, num_local_, top_k_;
  const i64 wire_row_bytes_, wire_scale_bytes_;
  Operation op_;
  const RecordLayout record_;
  const u32 ring_records_;
  SendPlanView<i32> send_;
  RecvPlanView<i32> recv_{};

  std::array<Target, kMaxRanks> targets_{};  // on the stack: a call allocates nothing but its result
  std::array<Source, kMaxRanks> sources_{};
  Route own_;
  std::vector<Route> routes_;      // of other nodes' ranks
  std::vector<Outflow> outflows_;  // to other nodes
  RecordLayout rail_record_;       // a row in a chunk
  Block x_block_, plan_block_;
  u64 scales_offset_ = 0;
  float* meta_weights_ = nullptr;
  bool staged_ = false;  // the result is in ordinary memory
  bool streaming_ = false;
  i64 num_rows_ = 0;     // rows of the result that hold data
  i64 result_rows_ = 0;  // rows of the result tensor
  i64 num_meta_rows_ = 0;
  i64 num_dropped_ = 0;
  DispatchResult result_;
};

}  // namespace weft::cpu
