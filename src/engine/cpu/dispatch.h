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
    bool staged = false;
    i64 num_rows = 0;    // (token, destination) pairs to send
    i64 next_token = 0;  // staged: first token not looked at yet
    u32 num_landed = 0;  // staged: records in the ring so far
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
  void read_counts();
  void size_result();
  void reserve_result();
  Placement placement_for(int source) const;
  void send_placements();
  void read_placements();
  void check_placement(int rank, const Placement& placement) const;
  void fill_pick_rows();
  void zero_holes();

  void send_rows();
  void send_token(i64 token);
  const void* prepare_row(i64 token, const void** scales);
  i32 gather_places(i64 token, int destination, Target& target, u8** x_places, u8** scale_places) const;
  void write_meta(i64 token, int destination, i32* ids, float* weights) const;

  void run_staging();
  bool push_staged(int destination);
  bool drain_staged(int source);
  bool can_push(int destination) const;
  bool can_drain(int source) const;
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
