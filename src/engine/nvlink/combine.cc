// One combine on GPUs: one kernel, or several over ranges of tokens where contributions are wider than the landing is.
#include "engine/nvlink/combine.h"

#include <algorithm>
#include <string>

#include "base/status.h"
#include "engine/address.h"
#include "engine/nvlink/combine_config.h"
#include "engine/nvlink/small_combine.h"
#include "engine/nvlink/stage_rows.h"
#include "weft/kernels/stage_rows_arguments.h"

namespace weft::nvlink {

CombineKernelConfig kernel_config(const GpuWindowShape& shape, const CombineSpec& spec, bool has_push,
                                  int shared_bytes) {
  CombineKernelConfig config;
  config.num_ranks = shape.num_ranks;
  config.num_blocks = spec.num_blocks;
  config.top_k = shape.top_k;
  config.hidden = static_cast<i32>(spec.hidden);
  config.dtype = spec.dtype;
  config.layout = spec.layout == Layout::kRankMajor ? Layout::kRankMajor : Layout::kExpertMajor;  // one kernel for both
  config.order = order_of(spec.order, spec.sum_domain, shape.num_ranks, spec.wire_is_fp8);
  config.wire_is_fp8 = contributions_are_fp8(shape, spec);
  config.has_side = spec.has_side;
  config.adds_side = spec.has_side && spec.adds_side;
  if (has_nodes(shape)) {
    config.route = route_of(shape);
    config.node_ranks = static_cast<i32>(shape.node_ranks);
  }
  if (config.is_by_pick() && config.top_k > 32) {
    throw_unsupported("order 'pick' with top_k " + std::to_string(config.top_k) +
                      " on GPUs; need: at most 32, or a small batch (mode=\"latency\")");
  }
  return with_slots(config, has_push, shared_bytes);
}

bool contributions_are_fp8(const GpuWindowShape& shape, const CombineSpec& spec) {
  return spec.wire_is_fp8 && !order_of(spec.order, spec.sum_domain, shape.num_ranks, spec.wire_is_fp8).has_domains();
}

CombineCall::CombineCall(Window& window, const CombineArgs& args, const Poll& poll)
    : w_(window),
      a_(args),
      poll_(poll),
      may_be_pulled_(args.layout == Layout::kRankMajor && !contributions_are_fp8(window.shape_, args)) {}

void CombineCall::run() {
  if (a_.num_rows < 0 || a_.num_rows > INT32_MAX) {
    throw_invalid_argument("expert_output has " + std::to_string(a_.num_rows) + " rows; allowed: at most 2147483647");
  }
  // Rows as they are are as wide in a push as in a pull.
  is_brought_ = is_brought(w_.shape_, a_) && tokens_in_landing(this->config(false)) >= a_.max_tokens;
  const CombineKernelConfig config = this->config(!is_pulled());
  const Kernel& kernel = prepare(config);
  const Kernel* stage_kernel = brings() ? &stage_rows_kernel(*w_.gpu_) : nullptr;
  const i64 pass_tokens = tokens_in_landing(config);
  if (pass_tokens < 1) {
    throw_unsupported("combine of rows of " + std::to_string(config.wire_row_bytes()) + " bytes in a window for " +
                      std::to_string(w_.shape_.max_tokens) + " tokens of " +
                      std::to_string(w_.shape_.landing_row_bytes) + " bytes; need: a larger max_tokens_per_rank");
  }
  kernels::CombineKernelArgs args = kernel_arguments();
  for (i64 first = 0; first == 0 || first < a_.max_tokens; first += pass_tokens) {
    const OperationConfig operation = combine_operation(a_, config.wire_row_bytes(), is_brought_);
    args.print = w_.begin(operation, a_.timeout_ns, a_.stream).print;
    if (stage_kernel != nullptr) bring(*stage_kernel);
    args.first_token = static_cast<i32>(first);
    args.end_token = static_cast<i32>(std::min(first + pass_tokens, a_.max_tokens));
    w_.launch(kernel, a_.num_blocks, a_.stream, &args);
  }
  ++w_.stats_.num_combines;
}

i64 CombineCall::tokens_in_landing(const CombineKernelConfig& config) const {
  if (!has_nodes(w_.shape_)) return nvlink::tokens_in_landing(config, w_.layout_, config.contributions());
  const i64 rows = landing_rows_a_token(w_.shape_, w_.active_);
  const i64 num_tokens = nvlink::tokens_in_landing(config, w_.layout_, rows);
  return a_.has_side ? std::min(num_tokens, w_.shape_.num_ranks * w_.shape_.max_tokens / rows) : num_tokens;
}

// A rank without rows has nothing to push.
bool CombineCall::is_pulled() const { return may_be_pulled_ && (is_brought_ || a_.num_rows == 0 || w_.owns(a_.y)); }

// Whether this rank's rows must be brought into the landing.
bool CombineCall::brings() const { return is_brought_ && a_.num_rows > 0 && !w_.owns(a_.y); }

// Rows that the landing has no room for are none: no more can have come.
i64 CombineCall::rows_in_landing() const { return std::min(a_.num_rows, w_.shape_.num_ranks * a_.max_tokens); }

// Behind the call before, which has ended on all ranks that read or write this landing, in front of the kernel that tells peers of it.
void CombineCall::bring(const Kernel& kernel) const {
  kernels::StageKernelArgs args;
  args.table = reinterpret_cast<const i32*>(a_.recv_plan);
  args.table_tokens = w_.shape_.max_tokens;
  args.max_tokens = static_cast<i32>(a_.max_tokens);
  args.num_sources = w_.shape_.num_ranks;
  args.rank = w_.comm_->rank();
  args.rows = reinterpret_cast<const u8*>(a_.y);
  args.landing = w_.heap_->memory().data() + w_.layout_.landing_rows;
  args.num_rows = rows_in_landing();
  args.row_bytes = a_.hidden * dtype_bytes(a_.dtype);
  const i32 num_sms = w_.gpu_->kernels->num_multiprocessors();
  w_.start(kernel, a_.stage_blocks > 0 ? std::min(a_.stage_blocks, num_sms) : num_sms, a_.stream, &args);
}

CombineKernelConfig CombineCall::config(bool has_push) const {
  return kernel_config(w_.shape_, a_, has_push, w_.gpu_->kernels->shared_bytes());
}

// Ranks that are threads meet for each kernel, so each prepares what any of them may need.
const Kernel& CombineCall::prepare(const CombineKernelConfig& config) {
  if (may_be_pulled_ && w_.comm_->is_local()) {
    for (const bool has_push : {false, true}) w_.prepare(this->config(has_push), a_.timeout_ns, poll_);
  }
  return w_.prepare(config, a_.timeout_ns, poll_);
}

OperationConfig combine_operation(const CombineSpec& spec, i64 wire_row_bytes, bool is_brought) {
  OperationConfig operation;
  operation.kind = OpKind::kCombine;
  operation.layout = spec.layout;
  operation.quantize = spec.wire_is_fp8 ? Quantize::kFp8 : Quantize::kNone;
  operation.dtype = spec.dtype;
  operation.has_side = spec.has_side ? (spec.adds_side ? 2 : 1) : 0;
  operation.is_cached = static_cast<u8>(spec.order);
  operation.mode = static_cast<u8>(spec.num_blocks);  // blocks of the same number meet, so there must be as many
  operation.is_small = spec.is_small ? 1 : is_brought ? 2 : 0;
  operation.alignment = static_cast<u32>(spec.alignment);
  operation.hidden = static_cast<u32>(spec.hidden);
  operation.capacity = spec.capacity;
  operation.max_tokens = spec.max_tokens;
  operation.row_bytes = wire_row_bytes;
  return operation;
}

kernels::CombineKernelArgs CombineCall::kernel_arguments() const {
  kernels::CombineKernelArgs args;
  args.view = w_.view_;
  args.object = a_.object;
  args.rows = reinterpret_cast<const u8*>(a_.y);
  args.rows_offset = brings() ? w_.layout_.landing_rows : is_pulled() && a_.num_rows > 0 ? w_.heap_offset(a_.y) : 0;
  args.num_rows = brings() ? rows_in_landing() : a_.num_rows;
  args.weights = reinterpret_cast<const float*>(a_.weights);
  args.side = reinterpret_cast<const float*>(a_.side);
  args.send_plan = reinterpret_cast<const i32*>(a_.send_plan);
  args.send_plan_tokens = a_.num_tokens;
  args.recv_plan = reinterpret_cast<const i32*>(a_.recv_plan);
  args.recv_plan_tokens = w_.shape_.max_tokens;
  args.num_tokens = static_cast<i32>(a_.num_tokens);
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

static void check_addresses(const CombineArgs& args) {
  check_address("expert_output", args.y, args.num_rows * args.hidden);
  check_address("out", args.out, args.num_tokens * args.hidden);
  check_address("send plan", args.send_plan, args.num_tokens);
  check_address("receive plan", args.recv_plan, 1);
  if (!args.has_side) return;
  check_address("side", args.side, args.num_rows);
  check_address("side of the result", args.side_out, args.num_tokens);
}

// Domains are added in the order of the ranks alone, and weights are multiplied by who adds: those received are with the rows. The
// weights of an owner without tokens have no address.
static void check_order(const CombineArgs& args) {
  const bool is_by_pick = args.order == SumOrder::kPick;
  if (args.order == SumOrder::kLastPick && args.sum_domain > 1) {
    throw_unsupported("order 'last_pick' with sum_domain on GPUs; need: order 'rank', or the cpu engine");
  }
  if (is_by_pick && args.weights != 0 && args.owner_weights == 0 && args.num_tokens > 0) {
    throw_unsupported("order 'pick' with the weights received on GPUs; need: weights= of the owner, or weighted=False");
  }
  if (is_by_pick && (args.layout == Layout::kRankMajor || args.wire_is_fp8)) {
    throw_invalid_argument(
        "order 'pick' with rank_major or FP8 on the wire; allowed: expert_major and masked, rows as they are");
  }
  if (!is_by_pick && args.owner_weights != 0)
    throw_invalid_argument("weights of the owner; allowed: with order 'pick'");
  if (args.owner_ids != 0 && args.owner_weights == 0 && args.num_tokens > 0)
    throw_invalid_argument("ids of the owner; allowed: beside its weights");
  if (args.adds_side && args.layout != Layout::kRankMajor)
    throw_invalid_argument("side values of all ranks; allowed: with layout 'rank_major'");
}

void Window::combine(const CombineArgs& args, const Poll& poll) {
  check_order(args);
  if (args.sum_domain < 0 || args.sum_domain > shape_.num_ranks) {
    throw_invalid_argument("sum_domain: " + std::to_string(args.sum_domain) + "; allowed: 0 to " +
                           std::to_string(shape_.num_ranks));
  }
  check_nodes(shape_, args);
  check_addresses(args);
  const cuda::ContextScope scope(gpu_->context);
  check_half(args);
  watched([&] { args.is_small ? SmallCombineCall(*this, args, poll).run() : CombineCall(*this, args, poll).run(); });
}

}  // namespace weft::nvlink
