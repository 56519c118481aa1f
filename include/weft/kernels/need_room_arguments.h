// Run-time arguments of the kernel by which a rank says that its windows are too small: a plain struct that the host passes by value.
#pragma once

#include "weft/config/base.h"
#include "weft/transport/view.h"

namespace weft::kernels {

constexpr i32 kNeedThreads = 32;  // one a peer

struct NeedRoomArgs {
  transport::WindowView view;
  u16 print = 0;       // fingerprint of the dispatch
  u32 object = 0;      // number of the ExpertParallel that calls
  i64 num_tokens = 0;  // that the windows would have to hold
};

}  // namespace weft::kernels
