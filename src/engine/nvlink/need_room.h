// A rank that has more tokens than its windows hold says so in place of its dispatch (docs/protocols/nvlink-dispatch.md).
#pragma once

#include <string>

#include "base/status.h"
#include "engine/call.h"

namespace weft::nvlink {

// What every rank of such a call raises. With exact sizes the dispatch itself catches it; else it is an error of a later call.
class NeedOfRoom : public Error {
 public:
  NeedOfRoom(i64 num_tokens, bool is_own, std::string op, u64 sequence);

  i64 num_tokens;  // the most of any rank; 0: a later refusal has taken the place of what was said
  bool is_own;     // of the call that raises it
};

// Whether this rank's call is a refusal.
bool needs_room(const DispatchArgs& args);

std::string render_need_room();

}  // namespace weft::nvlink
