#include "engine/nvlink/small_dispatch.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include "base/status.h"
#include "engine/nvlink/dispatch_config.h"

namespace weft::nvlink {

SmallDispatchKernel small_kernel(const GpuWindowShape& shape, const DispatchSpec& spec, int shared_bytes) {
  SmallDispatchKernel kernel;
  SmallDispatchKernelConfig& config = kernel.config;
  describe_rows(config, shape, spec);
  config.is_cached = spec.cached;
  config.sends = spec.sends;
  config.receives = spec.receives;
  if (has_nodes(shape)) {
    config.route = route_of(shape);
    config.node_ranks = static_cast<i32>(shape.node_ranks);
  }
  config.scale_word_bytes = spec.receives ? spec.scale_word_bytes : 0;
  if (spec.cached) return kernel;
  const i64 units = std::max<i64>(shape.small_tokens, spec.num_blocks);
  const i64 units_each = (units + spec.num_blocks - 1) / spec.num_blocks;
  kernel.num_places = static_cast<i32>(shape.num_ranks * units_each * config.width());
  if (config.shared_bytes(kernel.num_places) > shared_bytes) {
    throw_unsupported("small batches of " + std::to_string(shape.small_tokens) + " tokens with " +
                      std::to_string(shape.num_experts) + " experts on " + std::to_string(spec.num_blocks) +
                      " SMs; need: mode=\"throughput\", more SMs or fewer tokens");
  }
  return kernel;
}

SmallDispatchCall::SmallDispatchCall(Window& window, const DispatchArgs& args, const Poll& poll)
    : w_(window), a_(args), poll_(poll) {}

DispatchResult SmallDispatchCall::run() {
  check();
  const Kernel& kernel = prepare();
  const Window::Turn turn = w_.begin(dispatch_operation(a_), a_.timeout_ns, a_.stream);
  kernels::SmallDispatchKernelArgs kernel_args = kernel_arguments(turn);
  w_.launch_dispatch(kernel, a_, turn, &kernel_args, poll_);
  w_.note_half(a_);
  if (a_.receives) ++w_.stats_.num_dispatches;
  DispatchResult result;
  result.in_heap = false;
  result.result_rows = -1;
  if (is_exact()) std::tie(result.result_rows, result.counts) = w_.wait_for_counts(a_, turn.ticket, poll_);
  return result;
}

// As SmallCombineCall::prepare. Ranks on one GPU may have ids of different types, too.
const Kernel& SmallDispatchCall::prepare() {
  if (a_.tells_need && !a_.cached) w_.need_room_kernel(a_.timeout_ns, poll_);
  const bool is_staged = !a_.sends || !a_.receives;
  SmallDispatchKernel part = small_kernel(w_.shape_, a_, w_.gpu_->kernels->shared_bytes());
  const SmallDispatchKernel wanted = part;
  for (const auto& [sends, receives] : {std::pair{true, true}, {true, false}, {false, true}}) {
    part.config.sends = sends;
    part.config.receives = receives;
    part.config.scale_word_bytes = receives ? a_.scale_word_bytes : 0;
    const bool is_needed = is_staged ? sends != receives : sends && receives;
    for (const bool is_int64 : {true, false}) {
      part.config.topk_is_int64 = is_int64;
      const bool is_own = is_int64 == a_.topk_is_int64;
      if ((is_needed && is_own) || (w_.comm_->is_local() && (is_own || !a_.cached))) {
        w_.prepare(part, a_.timeout_ns, poll_);
      }
    }
  }
  return w_.prepare(wanted, a_.timeout_ns, poll_);
}

void SmallDispatchCall::check() const {
  if (a_.max_tokens > w_.shape_.small_tokens) {
    throw_invalid_argument("max_tokens is " + std::to_string(a_.max_tokens) + "; allowed in a small-batch call: 0.." +
                           std::to_string(w_.shape_.small_tokens) + ", or mode=\"throughput\"");
  }
  most_rows(w_.shape_, a_);
  if (has_nodes(w_.shape_)) check_rings();
  const i64 slot_bytes = static_cast<i64>(align_up(static_cast<u64>(wire_row_bytes(a_)), 16)) + wire_scale_bytes(a_);
  if (slot_bytes > static_cast<i64>(w_.layout_.small_row_bytes)) {
    throw_invalid_argument("rows of " + std::to_string(slot_bytes) +
                           " bytes with their scales; allowed in a small-batch " +
                           "call of this window: " + std::to_string(w_.layout_.small_row_bytes));
  }
}

// With nodes: blocks that send never wait for what they have sent themselves.
void SmallDispatchCall::check_rings() const {
  const SmallDispatchKernel kernel = small_kernel(w_.shape_, a_, w_.gpu_->kernels->shared_bytes());
  const i64 each = (a_.max_tokens + a_.num_blocks - 1) / a_.num_blocks;
  const i64 most = ring_records(w_.shape_, kernel.config.record_bytes());
  if (each > most) {
    refuse_small("a small batch of " + std::to_string(a_.max_tokens) + " tokens on " + std::to_string(a_.num_blocks) +
                 " SMs, whose rings hold " + std::to_string(most) + " rows each");
  }
}

// Fewer tokens than blocks: each row is split among several. One that is quantised is not: the steps in which it is quantised
// and stored are not those in which bytes and scales are copied, and blocks wait for those of their own number only.
i32 SmallDispatchCall::num_parts() const {
  if (a_.quantize != Quantize::kNone || has_nodes(w_.shape_)) return 1;  // a row is one record of a ring
  return static_cast<i32>(std::max<i64>(a_.num_blocks / std::max<i64>(a_.max_tokens, 1), 1));
}

kernels::SmallDispatchKernelArgs SmallDispatchCall::kernel_arguments(const Window::Turn& turn) const {
  kernels::SmallDispatchKernelArgs args;
  args.view = w_.view_;
  args.print = turn.print;
  args.object = a_.object;
  args.ticket = is_exact() ? turn.ticket : 0;
  args.max_tokens = static_cast<i32>(a_.max_tokens);
  args.num_parts = num_parts();
  args.alignment = static_cast<i32>(a_.alignment);
  args.zeroes_holes = a_.zeroes_holes;
  args.capacity = a_.capacity;
  args.num_tokens = static_cast<i32>(a_.num_tokens);
  args.x = reinterpret_cast<const u8*>(a_.x);
  args.scales = reinterpret_cast<const u8*>(a_.scales);
  args.scale_stride = a_.scale_stride;
  args.topk_idx = reinterpret_cast<const void*>(a_.topk_idx);
  args.topk_weights = reinterpret_cast<const float*>(a_.topk_weights);
  args.send_plan = reinterpret_cast<i32*>(a_.send_plan);
  args.room = a_.num_rows;
  args.out_x = reinterpret_cast<u8*>(a_.out_x);
  args.out_scales = reinterpret_cast<u8*>(a_.out_scales);
  args.out_ids = reinterpret_cast<void*>(a_.out_ids);
  args.out_weights = reinterpret_cast<float*>(a_.out_weights);
  args.recv_plan = reinterpret_cast<i32*>(a_.recv_plan);
  std::tie(args.counts, args.offsets, args.num_rows) = parts_of_sizes(w_.shape_, a_.layout, a_.sizes);
  args.overflow = reinterpret_cast<i64*>(a_.overflow);
  args.rail = w_.rail();
  if (args.rail != nullptr) {
    args.forward_plan =
        args.send_plan + gpu_send_plan_len(a_.num_tokens, w_.shape_.top_k, w_.shape_.num_ranks, a_.layout);
  }
  return args;
}

}  // namespace weft::nvlink
