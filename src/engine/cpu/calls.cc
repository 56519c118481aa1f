// The calls of a window: what can be checked here is checked before anything is sent; then the operation runs.
#include <algorithm>
#include <string>
#include <utility>

#include "engine/address.h"
#include "engine/cpu/combine.h"
#include "engine/cpu/dispatch.h"

namespace weft::cpu {
namespace {

std::string range_text(const std::string& name, i64 value, const std::string& allowed) {
  return name + ": " + std::to_string(value) + "; allowed: " + allowed;
}

void check_tokens(i64 num_tokens, i64 max_tokens, const WindowShape& shape, bool tells_need = false) {
  if (max_tokens < 0 || max_tokens > shape.max_tokens) {
    throw_invalid_argument(range_text("max_tokens", max_tokens, "0 to " + std::to_string(shape.max_tokens)));
  }
  if (num_tokens < 0 || num_tokens > (tells_need ? kMaxRowsPerPair : max_tokens)) {
    throw_invalid_argument(range_text("num_tokens", num_tokens, "0 to max_tokens = " + std::to_string(max_tokens)));
  }
}

void check_capacity(Layout layout, i64 capacity, i64 alignment) {
  if (capacity < kNoCapacity) throw_invalid_argument(range_text("capacity", capacity, "0 or more, or none"));
  if (layout == Layout::kMasked && capacity < 0) throw_invalid_argument("capacity: none; layout 'masked' needs one");
  if (alignment < 1 || alignment > (i64{1} << 20))
    throw_invalid_argument(range_text("alignment", alignment, "1 to 1048576"));
}

// `max_row_bytes` of a window counts data and scales together.
void check_row(i64 row_bytes, i64 scale_bytes, const WindowShape& shape) {
  if (row_bytes < 0 || row_bytes % 16 != 0)
    throw_invalid_argument(range_text("row bytes", row_bytes, "a multiple of 16"));
  if (scale_bytes < 0 || row_bytes + scale_bytes > shape.max_row_bytes) {
    throw_invalid_argument(range_text("bytes of a row with its scales", row_bytes + scale_bytes,
                                      "up to " + std::to_string(shape.max_row_bytes)));
  }
}

void check_addresses(const DispatchArgs& args) {
  check_address("x", args.x, args.num_tokens * args.row_bytes);
  if (args.quantize == Quantize::kNone) check_address("scales", args.scales, args.num_tokens * args.scale_row_bytes);
  check_address("send plan", args.send_plan, 1);
  if (args.cached) {
    check_address("receive plan", args.recv_plan, args.recv_plan_len);
    return;
  }
  check_address("topk_idx", args.topk_idx, args.num_tokens);
  check_address("sizes", args.sizes, 1);
  check_address("overflow", args.overflow, 1);
}

void check_addresses(const CombineArgs& args) {
  check_address("expert_output", args.y, args.num_rows * args.hidden);
  check_address("out", args.out, args.num_tokens * args.hidden);
  check_address("send plan", args.send_plan, 1);
  check_address("receive plan", args.recv_plan, 1);
  check_address("weights of the owner", args.owner_weights, args.owner_weights == 0 ? 0 : args.num_tokens);
  check_address("ids of the owner", args.owner_ids, args.owner_ids == 0 ? 0 : args.num_tokens);
  if (!args.has_side) return;
  check_address("side", args.side, args.num_rows);
  check_address("side of the result", args.side_out, args.num_tokens);
}

void check_order(const CombineArgs& args, const WindowShape& shape) {
  if (args.sum_domain < 0 || args.sum_domain > shape.num_ranks) {
    throw_invalid_argument(range_text("sum_domain", args.sum_domain, "0 to " + std::to_string(shape.num_ranks)));
  }
  if (shape.has_nodes() && args.order == SumOrder::kPick)
    throw_unsupported("order: 'pick'; between nodes sums of nodes travel, with order 'rank' or 'last_pick'");
  if (shape.has_nodes() && std::max(args.sum_domain, 1) != shape.node_ranks)
    throw_invalid_argument(
        range_text("sum_domain", args.sum_domain, std::to_string(shape.node_ranks) + ", the ranks of a node"));
  if (args.adds_side && shape.has_nodes())
    throw_unsupported("side values of all ranks between nodes; need: one node, or side_lanes='own'");
  if (args.adds_side && args.layout != Layout::kRankMajor)
    throw_invalid_argument("side values of all ranks; allowed: with layout 'rank_major'");
  if (args.order != SumOrder::kPick) {
    if (args.owner_weights != 0 || args.owner_ids != 0)
      throw_invalid_argument("weights: given; allowed with order 'pick' alone");
    return;
  }
  if (args.owner_ids != 0 && args.owner_weights == 0 && args.num_tokens > 0)
    throw_invalid_argument("ids of the owner: given; allowed beside its weights");
  if (args.layout == Layout::kRankMajor)
    throw_invalid_argument("order: 'pick'; rows of layout 'rank_major' are sums of picks already");
  if (args.wire_is_fp8)
    throw_invalid_argument("order: 'pick'; allowed with FP8 on the wire are 'rank' and 'last_pick'");
  if (args.max_tokens * shape.top_k > kMaxRowsPerPair) {
    throw_invalid_argument(range_text("picks of a rank with order 'pick'", args.max_tokens * shape.top_k,
                                      "up to " + std::to_string(kMaxRowsPerPair)));
  }
}

// In ordinary memory, which a handle keeps for as long as it likes.
Array new_integers(i64 length) {
  Array array;
  array.block = allocate_block(static_cast<u64>(length) * sizeof(i32));
  array.shape = {length};
  array.is_integer = true;
  return array;
}

}  // namespace

DispatchResult Window::dispatch(const DispatchArgs& given, const Poll& poll) {
  DispatchArgs args = given;
  check_tokens(args.num_tokens, args.max_tokens, shape_, args.tells_need && !args.cached);
  check_capacity(args.layout, args.capacity, args.alignment);
  if (args.quantize != Quantize::kNone) {
    if (args.dtype == Dtype::kBytes)
      throw_invalid_argument("dtype: bytes; only bf16, fp16 and fp32 rows can be quantised");
    if (args.row_bytes != args.hidden * dtype_bytes(args.dtype))
      throw_invalid_argument("row bytes do not fit hidden and dtype");
    check_row(args.hidden, scale_bytes(args.hidden, args.quantize), shape_);
  } else {
    check_row(args.row_bytes, args.scale_row_bytes, shape_);
  }
  Array send_plan, sizes;
  if (args.makes_send_plan()) {
    const i64 num_local = shape_.num_local_experts();
    const i64 num_groups = args.layout == Layout::kRankMajor ? shape_.num_ranks : num_local;
    send_plan = new_integers(send_plan_len(args.num_tokens, shape_.top_k, shape_.num_ranks));
    sizes = new_integers(num_local + num_groups + 2);
    args.send_plan = address_of(send_plan.block.data);
    args.sizes = address_of(sizes.block.data);
  }
  check_addresses(args);
  if (args.cached) {
    check_plans(memory_at<i32>(args.send_plan), memory_at<i32>(args.recv_plan), args.recv_plan_len, args.num_tokens,
                args.layout, args.capacity,
                {hash_, static_cast<i32>(comm_->epoch()), comm_->rank(), shape_.has_nodes()});
  }
  DispatchResult result = DispatchCall(*this, args, poll).run();
  result.send_plan = std::move(send_plan);
  result.sizes = std::move(sizes);
  return result;
}

void Window::combine(const CombineArgs& args, const Poll& poll) {
  check_tokens(args.num_tokens, args.max_tokens, shape_);
  check_capacity(args.layout, args.capacity, args.alignment);
  if (args.dtype == Dtype::kBytes) throw_invalid_argument("dtype: bytes; combine sums bf16, fp16 and fp32 rows");
  check_row(args.hidden * dtype_bytes(args.dtype), 0, shape_);
  if (args.wire_is_fp8 && args.hidden % 16 != 0)
    throw_invalid_argument(range_text("hidden", args.hidden, "multiples of 16 with FP8 on the wire"));
  check_order(args, shape_);
  check_addresses(args);
  check_plans(memory_at<i32>(args.send_plan), memory_at<i32>(args.recv_plan), args.recv_plan_len, args.num_tokens,
              args.layout, args.capacity, {hash_, static_cast<i32>(comm_->epoch()), comm_->rank(), shape_.has_nodes()});
  const i64 num_rows = result_rows(*memory_at<PlanHeader>(args.recv_plan));
  if (args.num_rows != num_rows) {
    throw_invalid_argument(
        range_text("rows of expert_output", args.num_rows, std::to_string(num_rows) + ", as dispatch gave them"));
  }
  CombineCall(*this, args, poll).run();
}

void Window::barrier(u64 timeout_ns, const Poll& poll) {
  OperationConfig config;
  config.kind = OpKind::kBarrier;
  config.window_hash = hash_;
  Operation op(*this, config, timeout_ns, poll);
  for (int peer : op.peers()) {
    op.send(Phase::kCount, peer, [&] {
      auto* payload = op.payload_to<CountPayload>(Phase::kCount, peer);
      *payload = CountPayload{};
      payload->config = config;
    });
  }
  CountPayload payload;
  payload.config = config;
  op.send_messages(payload);
  op.wait_all(Phase::kCount);
  op.finish();
}

}  // namespace weft::cpu
