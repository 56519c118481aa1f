// What calls along a plan are made of, whoever has the plan: the bindings of windows, or known calls.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "engine/window.h"

namespace weft::bindings {

// What a dispatch makes beside its rows: later calls take addresses, and what nobody asks for need not become a tensor.
struct Routing {
  Array sizes, send_plan, recv_plan, topk_weights, topk_idx;
  i64 num_bad_ids = 0, first_bad_id = 0, first_bad_at = 0;  // cpu, as in DispatchResult
  i64 rows_sent = 0, bytes_sent = 0;
  std::vector<i32> counts;  // nvlink, likewise
  bool is_captured = false;

  i64 recv_plan_len() const { return recv_plan.shape.empty() ? 0 : recv_plan.shape[0]; }
};

// What a Routing has, in its order, for small batches: shapes and dtypes, to lie in one block. Tensors of torch take longer to make.
struct Together {
  std::vector<Array> arrays;  // without memory
  std::vector<u64> begins;
  u64 num_bytes = 0;
};

inline u64 address_of(const Array& array) { return reinterpret_cast<u64>(array.block.data); }

// Both without Python's lock.
DispatchResult dispatch_unlocked(CallWindow& window, const DispatchArgs& args);
void combine_unlocked(CallWindow& window, const CombineArgs& args);

// What a first dispatch is given by its caller.
DispatchArgs first_args(const DispatchSpec& spec, u64 stream, i64 num_tokens, u64 x, u64 scales, u64 topk_idx,
                        u64 topk_weights, u64 overflow);
// Without room in the heap rows of GPUs wait for the caller's memory; the cpu engine finds other memory itself.
bool is_made(const CallWindow& window, const DispatchResult& result);
Routing routing_of(DispatchResult& made);
// As `dispatch_first` of a window gives it: None, needed_tokens, or what there is.
nanobind::object first_made(const CallWindow& window, DispatchResult& made, nanobind::handle from_dlpack);

// As `dispatch_small` gives it: None, needed_tokens, or rows and routing.
nanobind::object dispatch_small(CallWindow& window, const DispatchSpec& spec, const Together& wanted, u64 stream,
                                i64 num_tokens, u64 x, u64 scales, u64 topk_idx, u64 topk_weights, u64 overflow,
                                i64 room, u64 out_x, u64 out_scales);

}  // namespace weft::bindings
