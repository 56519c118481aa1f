#include "engine/nvlink/small_combine.h"

#include <climits>
#include <string>
#include <utility>

#include "base/status.h"
#include "engine/nvlink/combine.h"

namespace weft::nvlink {

SmallCombineKernelConfig small_kernel(const GpuWindowShape& shape, const CombineSpec& spec) {
  SmallCombineKernelConfig config;
  config.num_ranks = shape.num_ranks;
  config.top_k = shape.top_k;
  config.hidden = static_cast<i32>(spec.hidden);
  config.dtype = spec.dtype;
  config.layout = spec.layout == Layout::kRankMajor ? Layout::kRankMajor : Layout::kExpertMajor;  // one kernel for both
  config.order = order_of(spec.order, spec.sum_domain, shape.num_ranks, spec.wire_is_fp8);
  config.wire_is_fp8 = contributions_are_fp8(shape, spec);
  config.has_side = spec.has_side;
  config.adds_side = spec.has_side && spec.adds_side;
  config.sends = spec.sends;
  config.receives = spec.receives;
  if (has_nodes(shape)) {
    config.route = route_of(shape);
    config.node_ranks = static_cast<i32>(shape.node_ranks);
  }
  return config;
}

SmallCombineCall::SmallCombineCall(Window& window, const CombineArgs& args, const Poll& poll)
    : w_(window), a_(args), poll_(poll), config_(small_kernel(window.shape_, args)) {}

void SmallCombineCall::run() {
  check();
  const Kernel& kernel = prepare();
  kernels::SmallCombineKernelArgs args = kernel_arguments();
  args.print = w_.begin(combine_operation(a_, config_.wire_row_bytes()), a_.timeout_ns, a_.stream).print;
  w_.launch(kernel, a_.num_blocks, a_.stream, &args);
  w_.note_half(a_);
  if (a_.receives) ++w_.stats_.num_combines;
}

void SmallCombineCall::check() const {
  if (a_.max_tokens > w_.shape_.small_tokens) {
    throw_invalid_argument("max_tokens is " + std::to_string(a_.max_tokens) + "; allowed in a small-batch call: 0.." +
                           std::to_string(w_.shape_.small_tokens) + ", or mode=\"throughput\"");
  }
  if (a_.num_rows < 0 || a_.num_rows > INT_MAX) {
    throw_invalid_argument("expert_output has " + std::to_string(a_.num_rows) + " rows; allowed: 0.." +
                           std::to_string(INT_MAX));
  }
  if (config_.is_by_pick() && a_.max_tokens * config_.top_k > w_.shape_.num_ranks * w_.shape_.small_tokens) {
    throw_invalid_argument("max_tokens is " + std::to_string(a_.max_tokens) +
                           "; allowed in a small-batch call with order 'pick', whose slots hold a row a pick: 0.." +
                           std::to_string(w_.shape_.num_ranks * w_.shape_.small_tokens / config_.top_k));
  }
  const u64 slot_bytes = static_cast<u64>(config_.wire_row_bytes());
  if (slot_bytes > w_.layout_.small_row_bytes) {
    throw_invalid_argument(
        "contributions of " + std::to_string(slot_bytes) +
        " bytes; allowed in a small-batch call of this window: " + std::to_string(w_.layout_.small_row_bytes));
  }
  if (has_nodes(w_.shape_)) check_rings();
}

// With nodes: blocks that send never wait for what they have sent themselves, and each contribution has a place of its own.
void SmallCombineCall::check_rings() const {
  const SmallSplit split = SmallSplit::make(config_, static_cast<i32>(a_.max_tokens), a_.num_blocks);
  const i32 tokens_each = static_cast<i32>((a_.max_tokens + a_.num_blocks - 1) / a_.num_blocks);
  const i64 each = split.num_units(static_cast<i32>(a_.max_tokens), 0, a_.num_blocks) +
                   config_.num_side_records(tokens_each, split.part);
  const i64 most = ring_records(w_.shape_, config_.record_bytes(split.part));
  const std::string what = "a sum of a small batch of " + std::to_string(a_.max_tokens) + " tokens";
  if (each > most) {
    refuse_small(what + " on " + std::to_string(a_.num_blocks) + " SMs, whose rings hold " + std::to_string(most) +
                 " parts of rows each");
  }
  const i64 places = landing_rows_a_token(w_.shape_, w_.active_) * a_.max_tokens;
  if (places > w_.shape_.num_ranks * w_.shape_.small_tokens) {
    refuse_small(what + " among these members, which takes places for " + std::to_string(places) + " rows of " +
                 std::to_string(w_.shape_.num_ranks * w_.shape_.small_tokens));
  }
}

// A kernel is loaded before the operation begins: loading may wait for kernels that run, such as a peer's that waits for this
// rank. So both halves come together; and ranks that are threads, which meet for each kernel, prepare what any may need.
const Kernel& SmallCombineCall::prepare() {
  const bool is_staged = !a_.sends || !a_.receives;
  SmallCombineKernelConfig part = config_;
  for (const auto& [sends, receives] : {std::pair{true, true}, {true, false}, {false, true}}) {
    part.sends = sends;
    part.receives = receives;
    const bool is_wanted = is_staged ? sends != receives : sends && receives;
    if (is_wanted || w_.comm_->is_local()) w_.prepare(part, a_.timeout_ns, poll_);
  }
  return w_.prepare(config_, a_.timeout_ns, poll_);
}

// The same for a whole call and for both halves: ranks may differ in that.
kernels::SmallCombineKernelArgs SmallCombineCall::kernel_arguments() const {
  kernels::SmallCombineKernelArgs args;
  args.view = w_.view_;
  args.object = a_.object;
  args.num_tokens = static_cast<i32>(a_.num_tokens);
  args.max_tokens = static_cast<i32>(a_.max_tokens);
  args.split = SmallSplit::make(config_, args.max_tokens, a_.num_blocks);
  args.rows = reinterpret_cast<const u8*>(a_.y);
  args.num_rows = a_.num_rows;
  args.weights = reinterpret_cast<const float*>(a_.weights);
  args.side = reinterpret_cast<const float*>(a_.side);
  args.send_plan = reinterpret_cast<const i32*>(a_.send_plan);
  args.recv_plan = reinterpret_cast<const i32*>(a_.recv_plan);
  args.recv_plan_tokens = w_.shape_.max_tokens;
  args.bias = reinterpret_cast<const u8*>(a_.bias);
  args.bias_is_fp32 = a_.bias_is_fp32;
  args.bias_row_bytes = a_.bias_is_2d ? a_.hidden * (a_.bias_is_fp32 ? 4 : dtype_bytes(a_.dtype)) : 0;
  args.out = reinterpret_cast<u8*>(a_.out);
  args.side_out = reinterpret_cast<float*>(a_.side_out);
  args.owner_weights = reinterpret_cast<const float*>(a_.owner_weights);
  args.owner_id_words = a_.owner_ids_are_int64 ? 2 : 1;
  if (a_.owner_ids != 0) args.owner_ids = reinterpret_cast<const i32*>(a_.owner_ids) + args.owner_id_words - 1;
  args.rail = w_.rail();
  if (args.rail != nullptr) {
    args.forward_plan =
        args.send_plan + gpu_send_plan_len(a_.num_tokens, w_.shape_.top_k, w_.shape_.num_ranks, a_.layout);
  }
  return args;
}

}  // namespace weft::nvlink
