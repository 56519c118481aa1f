// One dispatch on GPUs: memory for what may come, one kernel, and without a capacity the host's wait for the counts.
#include "engine/nvlink/dispatch.h"

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/address.h"
#include "engine/nvlink/dispatch_config.h"
#include "engine/nvlink/place_rows.h"
#include "engine/nvlink/small_dispatch.h"
#include "weft/kernels/place_rows_arguments.h"
#include "weft/layout/gpu_plan.h"

namespace weft::nvlink {

DispatchCall::DispatchCall(Window& window, const DispatchArgs& args, const Poll& poll)
    : w_(window),
      a_(args),
      poll_(poll),
      row_bytes_(wire_row_bytes(args)),
      scale_bytes_(wire_scale_bytes(args)),
      id_bytes_(args.topk_is_int64 ? 8 : 4),
      is_by_expert_(args.layout != Layout::kRankMajor),
      is_exact_(args.capacity < 0 && !args.cached),
      is_spread_(is_spread(window.shape_, args)) {}

DispatchResult DispatchCall::run() {
  const i64 most = most_rows(w_.shape_, a_);
  most_rows_ = a_.cached && a_.capacity < 0 ? a_.num_rows : most;
  const Kernel& kernel = prepare();
  const Kernel* place_kernel = is_spread_ ? &place_rows_kernel(*w_.gpu_) : nullptr;
  const u64 num_launches = w_.num_launches_;
  Window::Turn turn;
  try {
    reserve();
    if (a_.makes_send_plan() && !routing_) {
      DispatchResult result;
      result.has_begun = result.in_heap = false;
      return result;
    }
    turn = w_.begin(dispatch_operation(a_, is_spread_), a_.timeout_ns, a_.stream);
    kernels::DispatchKernelArgs kernel_args = kernel_arguments(turn);
    w_.launch_dispatch(kernel, a_, turn, &kernel_args, poll_);
  } catch (...) {
    if (w_.num_launches_ == num_launches) cancel();
    throw;
  }
  num_rows_ = most_rows_;
  std::vector<i32> counts;
  if (is_exact_) std::tie(num_rows_, counts) = w_.wait_for_counts(a_, turn.ticket, poll_);
  ++w_.stats_.num_dispatches;
  if (is_spread_ && !is_staged() && !needs_room(a_)) place_rows(*place_kernel);
  DispatchResult result = is_staged() ? staged_result() : heap_result();
  result.counts = std::move(counts);
  result.is_captured = w_.capture_.is_active;
  return result;
}

// Ranks on one GPU must not load a kernel while others wait, and each may have ids of another type.
const Kernel& DispatchCall::prepare() {
  if (a_.tells_need && !a_.cached) w_.need_room_kernel(a_.timeout_ns, poll_);
  DispatchKernelConfig config = kernel_config(w_.shape_, a_, w_.gpu_->kernels->shared_bytes());
  for (const bool is_int64 : {true, false}) {
    config.topk_is_int64 = is_int64;
    if (!a_.cached && w_.comm_->is_local()) w_.prepare(config, a_.timeout_ns, poll_);
  }
  config.topk_is_int64 = a_.topk_is_int64;
  return w_.prepare(config, a_.timeout_ns, poll_);
}

// Room for what may come. Without a capacity that is not known yet: as much as there is, and the rest is given back later.
// Whatever finds no room, the rows go to the landing, and nothing of this block is used.
void DispatchCall::reserve() {
  bool has_room = w_.hands_out();
  const bool is_capturing = has_room && capture_of(a_.stream).is_active;
  const auto fixed = [&](std::optional<Block>& block, i64 num_bytes) {
    block = w_.heap_->reserve(static_cast<u64>(std::max<i64>(num_bytes, 1)), a_.stream, is_capturing);
    return block.has_value();
  };
  const i64 top_k = w_.shape_.top_k;
  if (has_room && !a_.cached) {
    const auto part = [this](i64 num_bytes) {
      return std::exchange(at_.num_bytes, align_up(at_.num_bytes + static_cast<u64>(num_bytes), Heap::kAlignment));
    };
    at_.table = part(4 * recv_plan_len());
    at_.send_plan = part(a_.makes_send_plan() ? 4 * send_plan_len() : 0);
    at_.sizes = part(a_.makes_send_plan() ? 4 * sizes_len(w_.shape_, a_.layout) : 0);
    at_.weights = part(most_rows_ * 4 * (is_by_expert_ ? 1 : top_k));
    at_.ids = part(is_by_expert_ ? 0 : most_rows_ * top_k * id_bytes_);
    has_room = fixed(routing_, static_cast<i64>(at_.num_bytes));
  }
  has_room = has_room && (scale_bytes_ == 0 || fixed(scales_, most_rows_ * scale_bytes_));
  if (has_room && is_exact_) {
    const i64 num_bytes = std::max<i64>(most_rows_, 1) * row_bytes_;
    x_ = w_.heap_->reserve_up_to(static_cast<u64>(num_bytes), a_.stream, is_capturing);
    has_room = x_ && x_->num_bytes >= static_cast<u64>(row_bytes_);
  } else {
    has_room = has_room && fixed(x_, most_rows_ * row_bytes_);
  }
  if (!has_room) {
    cancel();
    room_ = 0;
    return;
  }
  room_ = is_exact_ ? std::min(most_rows_, static_cast<i64>(x_->num_bytes / static_cast<u64>(row_bytes_))) : most_rows_;
  room_ = std::max<i64>(room_, 1);
}

// No kernel uses the blocks: a stream that records a graph would keep them.
void DispatchCall::cancel() {
  for (std::optional<Block>* block : {&x_, &scales_, &routing_}) {
    if (*block) w_.heap_->cancel(std::move(**block));
    block->reset();
  }
}

kernels::DispatchKernelArgs DispatchCall::kernel_arguments(const Window::Turn& turn) const {
  const auto offset = [&](const std::optional<Block>& block) {
    return block ? w_.heap_offset(reinterpret_cast<u64>(block->data)) : 0;
  };
  const auto at = [&](u64 first) { return routing_ ? offset(routing_) + first : 0; };
  kernels::DispatchKernelArgs args;
  args.view = w_.view_;
  args.print = turn.print;
  args.object = a_.object;
  args.fits_landing = fits_landing();
  args.ticket = is_exact_ ? turn.ticket : 0;
  args.x = reinterpret_cast<const u8*>(a_.x);
  args.scales = reinterpret_cast<const u8*>(a_.scales);
  args.scale_stride = a_.scale_stride;
  args.topk_idx = reinterpret_cast<const void*>(a_.topk_idx);
  args.topk_weights = reinterpret_cast<const float*>(a_.topk_weights);
  args.num_tokens = static_cast<i32>(a_.num_tokens);
  args.max_tokens = static_cast<i32>(a_.max_tokens);
  args.alignment = static_cast<i32>(a_.alignment);
  args.zeroes_holes = a_.zeroes_holes;
  args.capacity = a_.capacity;
  args.placement = {offset(x_), offset(scales_), is_by_expert_ ? 0 : at(at_.ids), at(at_.weights), at(at_.table),
                    room_,      id_bytes_};
  args.send_plan = reinterpret_cast<i32*>(a_.send_plan);
  args.recv_plan = reinterpret_cast<i32*>(a_.recv_plan);
  u64 sizes = a_.sizes;
  if (a_.makes_send_plan()) {
    args.send_plan = reinterpret_cast<i32*>(routing_->data + at_.send_plan);
    sizes = address_of(routing_->data + at_.sizes);
  }
  std::tie(args.counts, args.offsets, args.num_rows) = parts_of_sizes(w_.shape_, a_.layout, sizes);
  args.overflow = reinterpret_cast<i64*>(a_.overflow);
  args.num_straight = is_spread_ ? num_straight(w_.shape_, a_) : 0;
  args.rail = w_.rail();
  if (args.rail != nullptr) args.forward_plan = args.send_plan + (send_plan_len() - forward_plan_len(w_.shape_));
  return args;
}

// Behind the kernel that has brought the rows, before anything of the call's memory is given away.
void DispatchCall::place_rows(const Kernel& kernel) {
  const kernels::DispatchKernelArgs sent = kernel_arguments({});
  const i64 num_groups = w_.shape_.num_local_experts();
  kernels::PlaceKernelArgs args;
  args.broken = &reinterpret_cast<const GpuControlWords*>(w_.control_.data())->broken;
  args.table = a_.cached ? sent.recv_plan : reinterpret_cast<const i32*>(routing_->data + at_.table);
  args.table_tokens = w_.shape_.max_tokens;
  args.max_tokens = sent.max_tokens;
  args.num_sources = w_.shape_.num_ranks;
  args.top_k = w_.shape_.top_k;
  args.rank = w_.comm_->rank();
  args.num_straight = sent.num_straight;
  args.num_rows = num_rows_;
  args.x = x_->data;
  args.scales = scales_ ? scales_->data : nullptr;
  args.row_bytes = row_bytes_;
  args.scale_row_bytes = scale_bytes_;
  if (!a_.cached) {
    args.landed_weights = reinterpret_cast<const float*>(w_.heap_->memory().data() + w_.layout_.landing_weights);
    args.weights = reinterpret_cast<float*>(routing_->data + at_.weights);
  }
  args.counts = sent.counts;
  args.offsets = sent.offsets;
  args.num_groups = static_cast<i32>(num_groups);
  args.is_masked = a_.layout == Layout::kMasked;
  args.capacity = a_.capacity;
  args.zeroes_rows = a_.layout == Layout::kExpertMajor && a_.zeroes_holes;
  const i32 num_sms = w_.gpu_->kernels->num_multiprocessors();
  w_.start(kernel, a_.spread_blocks > 0 ? std::min(a_.spread_blocks, num_sms) : num_sms, a_.stream, &args);
}

u64 DispatchCall::landing_scales() const {
  const u64 slots = static_cast<u64>(w_.shape_.num_ranks * w_.shape_.max_tokens);
  return align_up(w_.layout_.landing_rows + slots * static_cast<u64>(row_bytes_), 256);
}

bool DispatchCall::fits_landing() const {
  const u64 slots = static_cast<u64>(w_.shape_.num_ranks * w_.shape_.max_tokens);
  return landing_scales() + slots * static_cast<u64>(scale_bytes_) <= w_.layout_.landing_ids;
}

// The same decision as the kernels of all ranks make (dispatch_count.cuh).
bool DispatchCall::is_staged() const { return room_ == 0 || (!a_.cached && num_rows_ > room_); }

DispatchResult DispatchCall::staged_result() {
  DispatchResult result;
  result.in_heap = false;
  result.result_rows = num_rows_;
  StagedRows& staged = w_.staged_;
  staged = StagedRows{};
  staged.is_there = true;
  staged.is_cached = a_.cached;
  staged.recv_plan = a_.recv_plan;
  staged.layout = a_.layout;
  staged.zeroes_holes = a_.zeroes_holes;
  staged.stream = a_.stream;
  staged.max_tokens = w_.shape_.max_tokens;
  staged.num_rows = num_rows_;
  staged.row_bytes = row_bytes_;
  staged.scale_row_bytes = scale_bytes_;
  staged.id_bytes = id_bytes_;
  staged.rows = w_.layout_.landing_rows;
  staged.row_stride = static_cast<u64>(row_bytes_);
  staged.scales = landing_scales();
  staged.scale_stride = static_cast<u64>(scale_bytes_);
  ++w_.stats_.num_staged;
  if (a_.makes_send_plan()) {
    w_.shrink(*routing_, at_.weights);
    result.send_plan = part(at_.send_plan, {send_plan_len()});
    result.sizes = part(at_.sizes, {sizes_len(w_.shape_, a_.layout)});
  }
  return result;
}

i64 DispatchCall::send_plan_len() const {
  return gpu_send_plan_len(a_.num_tokens, w_.shape_.top_k, w_.shape_.num_ranks, a_.layout) +
         forward_plan_len(w_.shape_);
}

i64 DispatchCall::recv_plan_len() const {
  return gpu_recv_plan_len(w_.shape_.max_tokens, w_.shape_.top_k, w_.shape_.num_ranks, a_.layout);
}

Array DispatchCall::rows(std::optional<Block>& block, Dtype dtype, i64 row_bytes) {
  Array made;
  if (is_exact_) w_.shrink(*block, static_cast<u64>(std::max<i64>(num_rows_ * row_bytes, 1)));
  made.block = std::move(*block);
  made.dtype = dtype;
  made.gpu = w_.gpu_->index;
  made.shape = {num_rows_, row_bytes / dtype_bytes(dtype)};
  if (a_.layout == Layout::kMasked) made.shape = {w_.shape_.num_local_experts(), a_.capacity, made.shape[1]};
  return made;
}

// int32 in the block of the routing.
Array DispatchCall::part(u64 first, std::vector<i64> shape) const {
  Array made;
  made.block = *routing_;
  made.block.data += first;
  made.gpu = w_.gpu_->index;
  made.is_integer = true;
  made.shape = std::move(shape);
  return made;
}

DispatchResult DispatchCall::heap_result() {
  const i64 top_k = w_.shape_.top_k;
  DispatchResult result;
  result.result_rows = num_rows_;
  result.x = rows(x_, a_.quantize == Quantize::kNone ? a_.dtype : Dtype::kBytes, row_bytes_);
  if (scale_bytes_ > 0) {
    const bool are_fp32 = a_.quantize == Quantize::kNone ? a_.scales_are_fp32 : scales_are_floats(a_.quantize);
    result.scales = rows(scales_, are_fp32 ? Dtype::kFp32 : Dtype::kBytes, scale_bytes_);
  }
  if (a_.cached) return result;
  if (is_exact_) {  // the last part is as long as there are rows
    w_.shrink(*routing_, is_by_expert_ ? at_.weights + static_cast<u64>(num_rows_ * 4)
                                       : at_.ids + static_cast<u64>(num_rows_ * top_k * id_bytes_));
  }
  std::vector<i64> lead = {num_rows_};
  if (a_.layout == Layout::kMasked) lead = {w_.shape_.num_local_experts(), a_.capacity};
  if (!is_by_expert_) lead.push_back(top_k);
  result.topk_weights = part(at_.weights, lead);
  result.topk_weights.is_integer = false;
  result.topk_weights.dtype = Dtype::kFp32;
  if (!is_by_expert_) {
    result.topk_idx = part(at_.ids, lead);
    result.topk_idx.is_int64 = a_.topk_is_int64;
  }
  result.recv_plan = part(at_.table, {recv_plan_len()});
  if (!a_.makes_send_plan()) return result;
  result.send_plan = part(at_.send_plan, {send_plan_len()});
  result.sizes = part(at_.sizes, {sizes_len(w_.shape_, a_.layout)});
  return result;
}

static void check_addresses(const DispatchArgs& args) {
  check_address("x", args.x, args.num_tokens * args.row_bytes);
  if (args.quantize == Quantize::kNone) check_address("scales", args.scales, args.num_tokens * args.scale_row_bytes);
  if (!args.makes_send_plan()) check_address("send plan", args.send_plan, args.num_tokens);
  if (args.cached || args.is_small) check_address("receive plan", args.recv_plan, 1);
  if (!args.cached) {
    check_address("topk_idx", args.topk_idx, args.num_tokens);
    check_address("overflow", args.overflow, 1);
  }
  if (!args.makes_send_plan() && (!args.cached || args.layout != Layout::kRankMajor)) {
    check_address("sizes", args.sizes, 1);
  }
  if (!args.is_small) return;
  check_address("rows of the result", args.out_x, args.num_rows * wire_row_bytes(args));
  check_address("scales of the result", args.out_scales, args.num_rows * wire_scale_bytes(args));
  if (!args.cached) check_address("weights of the result", args.out_weights, args.num_rows);
}

DispatchResult Window::dispatch(const DispatchArgs& args, const Poll& poll) {
  check_nodes(shape_, args);
  check_addresses(args);
  const cuda::ContextScope scope(gpu_->context);
  check_half(args);
  return watched([&] {
    try {
      return args.is_small ? SmallDispatchCall(*this, args, poll).run() : DispatchCall(*this, args, poll).run();
    } catch (const NeedOfRoom& need) {
      if (!need.is_own) throw;  // it was an earlier call's
      DispatchResult result;
      result.needed_tokens = need.num_tokens;
      return result;
    }
  });
}

}  // namespace weft::nvlink
