// What dispatch and combine share: order among streams, the kernel's start, the counts that the host waits for.
#include <utility>

#include "engine/nvlink/dispatch_config.h"
#include "engine/nvlink/host_wait.h"
#include "engine/nvlink/window.h"
#include "weft/ptx/memory.h"

namespace weft::nvlink {
namespace {

constexpr u64 kMeetTag = u64{1} << 57;
constexpr u64 kQueueNs = 600'000'000'000;  // longest that a call may wait in its stream for work before it

constexpr int kLooksAQuestion = 16;  // for the counts, between two questions whether the kernel has ended

constexpr size_t kMostCalls = 256;  // remembered for error texts, whatever the object

}  // namespace

// Ranks that are threads of one process wait for each other.
void Window::meet(u64 deadline_ns, const Poll& poll) { comm_->exchange(kMeetTag | id_, {}, {}, deadline_ns, poll); }

const Kernel& Window::load(const std::string& source, const std::function<const Kernel&()>& prepare, u64 timeout_ns,
                           const Poll& poll) {
  const cuda::RelaxedCaptureScope relaxed;
  if (!comm_->is_local() || loaded_.count(source) != 0) return prepare();
  const u64 deadline_ns = deadline_after_s(static_cast<double>(timeout_ns) * 1e-9);
  meet(deadline_ns, poll);
  const Kernel& kernel = prepare();
  meet(deadline_ns, poll);
  loaded_.insert(source);
  return kernel;
}

Window::Turn Window::begin(OperationConfig config, u64 timeout_ns, u64 stream) {
  if (closed_) throw_invalid_state("the window is closed");
  if (is_retired_) {
    throw_invalid_state(
        "another rank closed this window before the last rebuild; make a new ExpertParallel on every rank");
  }
  raise_found();
  comm_->raise_if_unusable();
  config.window_hash = hash_;
  Turn turn;
  turn.print = fingerprint(config);
  const Capture capture = capture_of(stream);
  order_after_calls(stream, capture);
  turn.ticket = ++ticket_;
  if (calls_.size() >= kMostCalls) calls_.clear();
  calls_.insert_or_assign(turn.print, config);
  staged_ = StagedRows();
  if (timeout_ns != timeout_ns_) ptx::st_relaxed_sys(&host_->timeout_ns, timeout_ns_ = timeout_ns);
  return turn;
}

// Within a capture only what was recorded in it may be waited for; a graph is ordered by the stream that it is launched on.
void Window::order_after_calls(u64 stream, const Capture& capture) {
  capture_ = capture;
  const bool is_same_capture = capture.is_active && last_captured_ != nullptr && capture.id == last_capture_id_;
  if (capture.is_active && (!is_same_capture || stream == last_captured_stream_)) return;
  if (!capture.is_active && (last_event_ == nullptr || stream == last_stream_)) return;
  const std::shared_ptr<Event>& event = capture.is_active ? last_captured_ : last_event_;
  cuda::check(cuda::driver().stream_wait_event(stream_of(stream), event->handle(), 0), "cuStreamWaitEvent");
}

void Window::check_half(const CallSpec& spec) {
  if (has_half() != spec.sends) return;
  check();  // what broke the window comes first
  comm_->raise_if_unusable();
  if (spec.sends) {
    throw_invalid_state(
        "a staged call of this window has not been received; call its wait() first, or use two windows "
        "(num_windows=2)");
  }
  throw_invalid_state("wait() of a staged call that this window has ended already");
}

void Window::receive(u64 stream, const Poll& poll) {
  const auto other_half = [&](auto args) {
    args.sends = false;
    args.receives = true;
    args.stream = stream;
    return args;
  };
  CallSpec none;
  none.sends = false;
  if (!has_half()) check_half(none);
  if (const auto* sent = std::get_if<DispatchArgs>(&half_)) {
    dispatch(other_half(*sent), poll);
  } else {
    combine(other_half(std::get<CombineArgs>(half_)), poll);
  }
}

void Window::barrier(u64 timeout_ns, const Poll& poll) { comm_->meet(now_ns() + timeout_ns, poll); }

void Window::check_num_blocks(i32 num_blocks) const {
  const i32 num_sms = gpu_->kernels->num_multiprocessors();
  const i32 most = std::min(shape_.num_blocks, num_sms / std::max(num_sharing_, 1) - num_network_blocks());
  if (num_blocks >= 1 && num_blocks <= most) return;
  throw_invalid_argument("num_sms is " + std::to_string(num_blocks) + "; allowed: 1.." + std::to_string(most) + " (" +
                         std::to_string(num_sms) + " SMs for the " + std::to_string(std::max(num_sharing_, 1)) +
                         " ranks of this process on this GPU, and at most " + std::to_string(shape_.num_blocks) +
                         " in this window): all blocks of all ranks must run at once");
}

void Window::launch(const Kernel& kernel, i32 num_blocks, u64 stream, void* args) {
  check_num_blocks(num_blocks);
  start(kernel, num_blocks + num_network_blocks(), stream, args);
}

void Window::start(const Kernel& kernel, i32 num_blocks, u64 stream, void* args) {
  void* params[] = {args};
  cuda::LaunchAttribute early{cuda::kMayBeginEarly, 0, 1, {}};  // every kernel waits first for the one in front of it
  const cuda::LaunchConfig config{{static_cast<unsigned>(num_blocks), 1, 1},
                                  {kernel.num_threads, 1, 1},
                                  kernel.shared_bytes,
                                  stream_of(stream),
                                  &early,
                                  1};
  if (capture_.is_active) {
    const Capture now = capture_of(stream);
    if (!now.is_active || now.id != capture_.id) throw_invalid_state("the capture of its stream ended during the call");
    keep_for_graph(capture_);
  }
  const cuda::Result launched = cuda::driver().launch(&config, kernel.function, params, nullptr);
  // A capture that was spoilt has sent nothing: the others need not hear of it.
  if (launched != cuda::kSuccess && capture_.is_active) {
    throw Error(ErrorCode::kCudaError, "rank " + std::to_string(comm_->rank()) +
                                           ": cuLaunchKernelEx, under capture: " + cuda::error_name(launched));
  }
  if (launched != cuda::kSuccess) throw_gpu_failure("cuLaunchKernelEx: " + cuda::error_name(launched));
  ++num_launches_;
  note_work(stream);
}

void Window::note_work(u64 stream) {
  if (capture_.is_active) {
    gpu_->record(stream, last_captured_);
    last_captured_stream_ = stream;
    last_capture_id_ = capture_.id;
  } else {
    last_event_ = heap_->record(stream);
    last_stream_ = stream;
  }
}

void Window::shrink(Block& block, u64 keep_bytes) { heap_->shrink(block, keep_bytes, last_event_); }

std::pair<i64, std::vector<i32>> Window::wait_for_counts(const DispatchSpec& spec, u64 ticket, const Poll& poll) {
  std::vector<i32> counts(tells_counts(shape_, spec) ? static_cast<size_t>(shape_.num_local_experts()) : 0);
  size_t num_told = 0;
  const auto has_counts = [&] {
    for (const u64* told = transport::told_counts(host_); num_told < counts.size(); ++num_told) {
      const u64 word = ptx::ld_acquire_sys(told + num_told);
      counts[num_told] = static_cast<i32>(word & 0xffffffffu);
      if (word >> 32 != (ticket & 0xffffffffu)) return false;
    }
    return ptx::ld_acquire_sys(&host_->counted_ticket) == ticket;
  };
  // That a rank needs room is not all: others may need more, or an earlier call has said it (raise_own_need).
  const auto is_told = [&] { return has_counts() || (ptx::ld_acquire_sys(error_word()) != 0 && !has_need()); };
  // To ask the driver takes longer than to look at a word, and keeps other threads out of the driver; a kernel that ended has told.
  int num_looks = 0;
  const auto is_told_or_over = [&] {
    return is_told() || (++num_looks % kLooksAQuestion == 0 && last_event_->is_done());
  };
  bool is_in_time = false;
  WaitLog log(*comm_);
  const Poll look = [&] {
    if (poll) poll();
    if (comm_->is_aborted()) comm_->leave_broken();  // the kernel may not have begun: it does nothing then
    log.look(RankSet::of_mask(~u64{0}));
  };
  try {
    is_in_time = wait_on_host(is_told_or_over, now_ns() + timeout_ns_ + kQueueNs, look);
  } catch (const Error&) {
    throw;
  } catch (...) {  // Ctrl-C: nobody may wait for this rank
    AbortReason reason;
    reason.code = AbortCode::kInterrupted;
    reason.rank = reason.reporter = comm_->rank();
    reason.op_kind = static_cast<u32>(OpKind::kDispatch);
    comm_->give_up(reason);
    throw;
  }
  if (!has_need()) check();
  if (has_counts()) return {host_->num_rows, std::move(counts)};
  if (is_in_time && has_need()) raise_own_need();
  check();
  if (is_in_time) throw_gpu_failure("dispatch ended without counts");
  throw_gpu_failure("dispatch has not begun: work before it on its stream does not end");
}

}  // namespace weft::nvlink
