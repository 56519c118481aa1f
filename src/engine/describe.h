// Calls in words, for errors and logs.
#pragma once

#include <string>

#include "weft/config/operation.h"

namespace weft {

// "dispatch", "combine", "barrier"
const char* op_name(u32 op_kind);
const char* phase_name(u32 phase);

// "dispatch(layout='rank_major', ...)": a call in words.
std::string describe(const OperationConfig& config);

// Who called what, of which object.
struct Caller {
  int rank = 0;
  std::string call;
  u64 object = 0;
};
std::string mismatch_text(const Caller& mine, const Caller& other);

}  // namespace weft
