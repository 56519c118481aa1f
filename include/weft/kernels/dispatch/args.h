// Run-time arguments of the kernels: plain structs that the host fills and passes by value.
#pragma once

#include "weft/layout/gpu_plan.h"
#include "weft/layout/gpu_window.h"
#include "weft/transport/view.h"

namespace weft::kernels {

struct DispatchKernelArgs {
  transport::WindowView view;
  u16 print = 0;             // fingerprint of the operation
  bool fits_landing = true;  // a row and its scales fit a row of the landing
  u32 object = 0;            // number of the ExpertParallel that calls
  u64 ticket = 0;            // more than 0: the host waits for the number of rows under this name
  const u8* x = nullptr;
  const u8* scales = nullptr;
  i64 scale_stride = 0;  // bytes from a column of given scales to the next, words of 4; 0: they lie row by row
  const void* topk_idx = nullptr;
  const float* topk_weights = nullptr;  // null: 1
  i32 num_tokens = 0;
  i32 max_tokens = 0;  // of any rank in this call
  i32 alignment = 1;
  bool zeroes_holes = true;  // expert_major: rows between the groups; their weights always
  i64 capacity = kNoCapacity;
  GpuPlacement placement;  // of this rank's result
  i32* send_plan = nullptr;
  i32* recv_plan = nullptr;  // where the placement or the landing has it; read if cached
  // Written for this rank.
  i32* counts = nullptr;   // [L]
  i32* offsets = nullptr;  // [R + 1] or [L + 1]
  i32* num_rows = nullptr;
  i64* overflow = nullptr;     // added to
  const void* rail = nullptr;  // of the route: a LoopRail, a BlockRail
  i32 num_straight = 0;  // spread: of kStraightOf tokens, whose own rows go to all places here (place_rows_arguments.h)
  i32* forward_plan = nullptr;  // with nodes: GpuForwardPlan
};

}  // namespace weft::kernels
