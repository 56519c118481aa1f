#include "engine/nvlink/need_room.h"

#include <algorithm>
#include <utility>

#include "engine/nvlink/window.h"
#include "weft/kernels/need_room_arguments.h"
#include "weft/layout/routing.h"

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

NeedOfRoom::NeedOfRoom(i64 num_tokens, std::string op, u64 sequence)
    : Error(ErrorCode::kInvalidArgument,
            "a rank has " + std::to_string(num_tokens) +
                " tokens; allowed are up to max_tokens, equal on all ranks. The call was given up on every rank",
            std::move(op), sequence),
      num_tokens(num_tokens) {}

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

// What ranks have said they need, once; 0: nothing. Nobody writes these words now: the kernels have ended.
i64 Window::take_need() {
  i64 most = 0;
  for (i32 rank = 0; rank < shape_.num_ranks; ++rank) {
    const i64 needed = transport::need_in(std::exchange(host_->seen_caller[rank], 0));
    most = std::max(most, clamp_count(needed, kMaxRowsPerPair));
  }
  return most;
}

}  // namespace weft::nvlink
