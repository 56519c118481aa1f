// What every engine's windows are to the communicator they are on.
#pragma once

#include <vector>

#include "bootstrap/control_plane.h"
#include "engine/poll.h"

namespace weft {

// What a communicator asks of the windows on it, whatever they are made of.
class MemberWindow {
 public:
  virtual ~MemberWindow() = default;
  virtual void notice_closed(u64 ranks) = 0;                 // any thread: what waits for one of them ends
  virtual void leave_waits() = 0;                            // any thread: every wait that is not satisfied ends
  virtual void record_error(const AbortReason& reason) = 0;  // R9
  virtual u64 id() const = 0;                                // equal on all ranks that have it
  virtual void retire() = 0;                                 // another rank has it no more: it is of no use
  virtual bool is_busy() const = 0;                          // an operation is in flight
  // Fresh memory for the members of `epoch`, collective (R13, R14). The tags `tag` and `tag` + 1 are free for it.
  virtual void renew(ControlPlane& plane, const std::vector<int>& ranks, u64 tag, u32 epoch, u64 deadline_ns,
                     const Poll& poll) = 0;
};

}  // namespace weft
