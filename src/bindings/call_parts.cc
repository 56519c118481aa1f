#include "bindings/call_parts.h"

#include <optional>
#include <utility>

#include "bindings/arrays.h"
#include "bindings/calls.h"
#include "bindings/gil.h"
#include "memory/heap.h"

namespace nb = nanobind;

namespace weft::bindings {

DispatchResult dispatch_unlocked(CallWindow& window, const DispatchArgs& args) {
  const ReleasedGil release;
  return window.dispatch(args, signal_poll());
}

void combine_unlocked(CallWindow& window, const CombineArgs& args) {
  const ReleasedGil release;
  window.combine(args, signal_poll());
}

DispatchArgs first_args(const DispatchSpec& spec, u64 stream, i64 num_tokens, u64 x, u64 scales, u64 topk_idx,
                        u64 topk_weights, u64 overflow) {
  DispatchArgs args{spec, {}};
  args.stream = stream;
  args.num_tokens = num_tokens;
  args.x = x;
  args.scales = scales;
  args.topk_idx = topk_idx;
  args.topk_weights = topk_weights;
  args.overflow = overflow;
  return args;
}

bool is_made(const CallWindow& window, const DispatchResult& result) {
  return result.in_heap || window.gpu_index() < 0;
}

Routing routing_of(DispatchResult& made) {
  return {.sizes = std::move(made.sizes),
          .send_plan = std::move(made.send_plan),
          .recv_plan = std::move(made.recv_plan),
          .topk_weights = std::move(made.topk_weights),
          .topk_idx = std::move(made.topk_idx),
          .num_bad_ids = made.num_bad_ids,
          .first_bad_id = made.first_bad_id,
          .first_bad_at = made.first_bad_at,
          .rows_sent = made.rows_sent,
          .bytes_sent = made.bytes_sent,
          .counts = std::move(made.counts),
          .is_captured = made.is_captured};
}

nb::object first_made(const CallWindow& window, DispatchResult& made, nb::handle from_dlpack) {
  if (!made.has_begun) return nb::none();
  if (made.needed_tokens > 0) return nb::int_(made.needed_tokens);
  const auto tensor = [&](const Array& array) { return to_tensor(array, from_dlpack); };
  return nb::make_tuple(is_made(window, made), made.result_rows, tensor(made.x), tensor(made.scales), routing_of(made));
}

namespace {

// The arrays in memory of the heap; none without room, or while `stream` records a graph, whose blocks would be taken for good.
std::vector<Array> reserve_together(CallWindow& window, const Together& wanted, u64 stream) {
  const std::optional<Block> block = window.reserve(wanted.num_bytes, stream, CallWindow::OnCapture::kNothing);
  if (!block) return {};
  std::vector<Array> arrays = wanted.arrays;
  for (size_t idx = 0; idx < arrays.size(); ++idx) {
    arrays[idx].block = *block;
    arrays[idx].block.data += wanted.begins[idx];
  }
  return arrays;
}

}  // namespace

// A small batch -> number of rows (exact sizes; else -1), Routing, which is made here, of the most rows; rows and scales are the
// caller's. None: no room for it, or a graph is recorded; nothing has begun. An int: needed_tokens.
nb::object dispatch_small(CallWindow& window, const DispatchSpec& spec, const Together& wanted, u64 stream,
                          i64 num_tokens, u64 x, u64 scales, u64 topk_idx, u64 topk_weights, u64 overflow, i64 room,
                          u64 out_x, u64 out_scales) {
  std::vector<Array> made = reserve_together(window, wanted, stream);
  if (made.size() != 5) return nb::none();
  DispatchArgs args = first_args(spec, stream, num_tokens, x, scales, topk_idx, topk_weights, overflow);
  args.num_rows = room;
  args.out_x = out_x;
  args.out_scales = out_scales;
  args.sizes = address_of(made[0]);
  args.send_plan = address_of(made[1]);
  args.recv_plan = address_of(made[2]);
  args.out_weights = address_of(made[3]);
  args.out_ids = address_of(made[4]);
  DispatchResult result = dispatch_unlocked(window, args);
  if (result.needed_tokens > 0) return nb::int_(result.needed_tokens);
  const i64 num_rows = result.result_rows;
  if (num_rows >= 0) {
    made[3].shape[0] = num_rows;
    if (args.layout == Layout::kRankMajor) made[4].shape[0] = num_rows;
  }
  return nb::make_tuple(num_rows, Routing{.sizes = std::move(made[0]),
                                          .send_plan = std::move(made[1]),
                                          .recv_plan = std::move(made[2]),
                                          .topk_weights = std::move(made[3]),
                                          .topk_idx = std::move(made[4]),
                                          .counts = std::move(result.counts)});
}

}  // namespace weft::bindings
