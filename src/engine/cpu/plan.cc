#include "engine/cpu/plan.h"

#include <string>

#include "base/status.h"

namespace weft::cpu {

// NOLINTNEXTLINE(readability-function-size): a parameter for each thing that the call and its handle must agree on
void check_plans(const i32* send_plan, const i32* recv_plan, i64 recv_len, i64 num_tokens, Layout layout, i64 capacity,
                 const PlanIdentity& identity) {
  if (send_plan == nullptr || recv_plan == nullptr || recv_len < kPlanHeaderInts)
    throw_invalid_state("handle: it is empty");
  const auto& send = *reinterpret_cast<const PlanHeader*>(send_plan);
  const auto& recv = *reinterpret_cast<const PlanHeader*>(recv_plan);
  if (send.magic != kSendPlanMagic || recv.magic != kRecvPlanMagic) throw_invalid_state("handle: not made by dispatch");
  if (send.window_hash != identity.window_hash || recv.window_hash != identity.window_hash ||
      send.rank != identity.rank) {
    throw_invalid_state("handle: made by another ExpertParallel shape, window or rank");
  }
  if (send.epoch != identity.epoch || recv.epoch != identity.epoch) {
    throw_invalid_state("handle: of epoch " + std::to_string(send.epoch) + ", this is epoch " +
                        std::to_string(identity.epoch) + "; dispatch again after rebuild()");
  }
  if (send.sequence != recv.sequence) throw_invalid_state("handle: its two halves belong to different dispatches");
  if (send.num_tokens != num_tokens) {
    throw_invalid_argument("num_tokens: " + std::to_string(num_tokens) + "; the handle was made for " +
                           std::to_string(send.num_tokens) + " tokens");
  }
  if (static_cast<Layout>(send.layout) != layout || send.capacity != capacity) {
    throw_invalid_argument("layout and capacity must be those of the handle");
  }
  const i64 length = recv_plan_len(recv.num_meta_rows, recv.top_k, recv.num_ranks, layout);
  const ForwardPlans forward{const_cast<i32*>(recv_plan), length, recv_len};
  const bool fits =
      identity.has_nodes ? forward.for_each(recv.top_k, recv.num_ranks, [](const auto&, i32) {}) : recv_len == length;
  if (!fits) {
    throw_invalid_state("handle: damaged, its length does not fit its contents");
  }
}

}  // namespace weft::cpu
