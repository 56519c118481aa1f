#include "engine/nvlink/need_room.h"

#include <algorithm>
#include <utility>

#include "base/cuda_driver.h"
#include "engine/describe.h"
#include "engine/nvlink/window.h"
#include "weft/kernels/need_room_arguments.h"
#include "weft/layout/routing.h"
#include "weft/ptx/memory.h"

namespace weft::nvlink {
namespace {

const char* const kNeedSource =
    "#include \"weft/kernels/need_room.cuh\"\n"
    "namespace weft {\n"
    "__global__ void __launch_bounds__(weft::kernels::kNeedThreads, 1)\n"
    "    need_room_kernel(const __grid_constant__ weft::kernels::NeedRoomArgs args) {\n"
    "  weft::ptx::wait_for_kernel_before();\n"
    "  weft::kernels::need_room(args);\n"
    "}\n"
    "}  // namespace weft\n";

}  // namespace

NeedOfRoom::NeedOfRoom(i64 num_tokens, bool is_own, std::string op, u64 sequence)
    : Error(ErrorCode::kInvalidArgument,
            "a rank has " + (num_tokens > 0 ? std::to_string(num_tokens) : "more") +
                " tokens; allowed are up to max_tokens, equal on all ranks. The call was given up on every rank",
            std::move(op), sequence),
      num_tokens(num_tokens),
      is_own(is_own) {}

bool needs_room(const DispatchArgs& args) {
  return args.tells_need && !args.cached && args.num_tokens > args.max_tokens;
}

std::string render_need_room() { return kNeedSource; }

// By all ranks at their first call that may need it: ranks on one GPU must not load a kernel while others wait.
const Kernel& Window::need_room_kernel(u64 timeout_ns, const Poll& poll) {
  if (need_room_kernel_ == nullptr) {
    const auto prepare = [&]() -> const Kernel& {
      return gpu_->kernels->prepare(kNeedSource, kernels::kNeedThreads, 0);
    };
    need_room_kernel_ = &load(kNeedSource, prepare, timeout_ns, poll);
  }
  return *need_room_kernel_;
}

void Window::launch_dispatch(const Kernel& kernel, const DispatchArgs& call, const Turn& turn, void* args,
                             const Poll& poll) {
  if (!needs_room(call)) return launch(kernel, call.num_blocks, call.stream, args);
  kernels::NeedRoomArgs need;
  need.view = view_;
  need.print = turn.print;
  need.object = call.object;
  need.num_tokens = call.num_tokens;
  start(need_room_kernel(call.timeout_ns, poll), 1, call.stream, &need);
}

bool Window::has_need() const {
  return ptx::ld_acquire_sys(error_word()) != 0 &&
         static_cast<transport::ErrorCause>(host_->error.code) == transport::ErrorCause::kMismatch &&
         static_cast<u16>(host_->error.seen) == kRefusalFingerprint;
}

// Others may still come that need more: until then nothing is known. A replayed graph is not asked: nobody notes when it ends.
bool Window::has_need_at_work() const {
  if (!has_need() || last_event_ == nullptr) return false;
  const u64 finished = ptx::ld_relaxed_sys(&host_->finished_sequence);
  return static_cast<i32>(static_cast<u32>(host_->error.sequence - finished)) > 0 && !last_event_->is_done();
}

// What ranks have said they need in an operation whose kernel has ended here: nobody writes these words now. 0: nothing.
i64 Window::need_of(u64 sequence) const {
  i64 most = 0;
  for (i32 rank = 0; rank < shape_.num_ranks; ++rank) {
    const i64 needed = transport::need_in(host_->seen_caller[rank], static_cast<u32>(sequence));
    most = std::max(most, clamp_count(needed, kMaxRowsPerPair));
  }
  return most;
}

// Behind the end of an exact call that has no counts, while the record is a need: of this call, or of one before, whose record
// left no place for what ended this one. A need of an earlier call stays, for a call that has not been launched.
void Window::raise_own_need() {
  u64 broken = 0;
  const cuda::RelaxedCaptureScope relaxed;
  cuda::check(cuda::driver().copy_to_host_async(&broken, control_.address() + offsetof(GpuControlWords, broken),
                                                sizeof(broken), gpu_->house_keeping),
              "cuMemcpyDtoHAsync");
  gpu_->settle();
  const u64 sequence = host_->finished_sequence;
  if (broken != 0) {  // somebody did not come
    host_->error.code = static_cast<u32>(broken);
    host_->error.culprit = -1;
    host_->error.sequence = sequence + 1;
    raise_error();
  }
  const i64 needed = need_of(sequence);
  if (needed == 0) return;
  if (host_->error.sequence == sequence) empty_record();
  throw NeedOfRoom(needed, true, op_name(static_cast<u32>(OpKind::kDispatch)), sequence);
}

}  // namespace weft::nvlink
