// Run-time arguments of the small-batch dispatch.
#pragma once

#include "weft/layout/gpu_plan.h"
#include "weft/layout/gpu_window.h"
#include "weft/transport/view.h"

namespace weft::kernels {

struct SmallDispatchKernelArgs {
  transport::WindowView view;
  u16 print = 0;       // fingerprint of the operation
  u32 object = 0;      // number of the ExpertParallel that calls
  u64 ticket = 0;      // more than 0: the host waits for the number of rows under this name
  i32 max_tokens = 0;  // of any rank in this call, at most the window's small_tokens
  i32 num_parts = 1;   // pieces that a row is split in, when there are fewer tokens than blocks
  i32 alignment = 1;
  bool zeroes_holes = true;  // expert_major: rows between the groups; their weights always
  i64 capacity = kNoCapacity;
  i32 num_tokens = 0;
  const u8* x = nullptr;
  const u8* scales = nullptr;
  i64 scale_stride = 0;  // bytes from a column of given scales to the next, words of 4; 0: they lie row by row
  const void* topk_idx = nullptr;
  const float* topk_weights = nullptr;  // null: 1
  i32* send_plan = nullptr;
  // The result, this rank's own memory. `room`: rows that x has; what does not fit is not written.
  i64 room = 0;
  u8* out_x = nullptr;
  u8* out_scales = nullptr;
  void* out_ids = nullptr;       // rank_major
  float* out_weights = nullptr;  // [N, K], or by expert [N]
  i32* recv_plan = nullptr;
  i32* counts = nullptr;
  i32* offsets = nullptr;
  i32* num_rows = nullptr;
  i64* overflow = nullptr;
  const void* rail = nullptr;   // with nodes: a BlockRail or GinRail
  i32* forward_plan = nullptr;  // with nodes: GpuForwardPlan
};

}  // namespace weft::kernels
