// What every engine's windows are to the communicator they are on.
#pragma once

#include <optional>
#include <variant>
#include <vector>

#include "base/status.h"
#include "bootstrap/control_plane.h"
#include "bootstrap/rank_set.h"
#include "engine/call.h"
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
  virtual bool is_retired() const { return false; }
  virtual void retire() = 0;         // another rank has it no more: it is of no use
  virtual bool is_busy() const = 0;  // an operation is in flight
  // Fresh memory for the members of `epoch`, collective (R13, R14). The tags `tag` and `tag` + 1 are free for it.
  // For ranks that were not there when the window was made; any thread, while the window is on the communicator. Descriptors and
  // sizes, of this rank's memory and of theirs. Errors: kInvalidArgument (another shape), what the system refuses.
  virtual Parcel offer() const { throw_unsupported("this engine takes no newcomers in"); }
  virtual void take_in(int /*slot*/, Parcel&& /*offer*/) {}
  virtual bool has_taken_in(int /*slot*/) const { return false; }  // any thread
  // Of a newcomer: makes its heap as large as the largest of `members`. True: it has to be offered again.
  virtual bool match_heaps(const RankSet& /*members*/) { return false; }
  // A planned change, between two operations: pages and sequences stay. A window that a new rank has not mapped is of no use.
  struct Step {
    u32 epoch;
    RankSet added, removed;
    bool is_new;      // this rank: it begins where `members` are
    RankSet members;  // that were there before
    RankSet gone{};   // their memory may be unmapped already
  };
  virtual void change(const Step& /*step*/) { retire(); }
  // What a rank that is no member has shown here.
  virtual void unmap(int /*rank*/) {}
  virtual void renew(ControlPlane& plane, const std::vector<int>& ranks, u64 tag, u32 epoch, u64 deadline_ns,
                     const Poll& poll) = 0;
};

// Something that a window counts: a number, or microseconds or seconds.
struct Count {
  const char* name;
  std::variant<u64, double, std::vector<double>> value;
};

inline std::vector<double> microseconds(const std::vector<u64>& nanoseconds) {
  std::vector<double> numbers;
  for (const u64 each : nanoseconds) numbers.push_back(static_cast<double>(each) * 1e-3);
  return numbers;
}

// What the bindings ask of a window, whatever it is made of. Errors: kInvalidArgument before anything is sent, kInvalidState,
// kPeerLost, kPeerTimeout.
class CallWindow : public MemberWindow {
 public:
  virtual DispatchResult dispatch(const DispatchArgs& args, const Poll& poll) = 0;
  virtual void combine(const CombineArgs& args, const Poll& poll) = 0;
  virtual void gradients(const GradientArgs& args) = 0;        // local: nothing is sent
  virtual void barrier(u64 timeout_ns, const Poll& poll) = 0;  // waits on the host until every active rank is here
  // Memory of the heap, which kernels on `stream` may use from now on; nothing if there is no room. Under capture the block belongs
  // to the window for good, or there is none.
  enum class OnCapture { kForGood, kNothing };
  virtual std::optional<Block> reserve(u64 num_bytes, u64 stream, OnCapture on_capture) = 0;
  std::optional<Block> reserve(u64 num_bytes, u64 stream) { return reserve(num_bytes, stream, OnCapture::kForGood); }
  virtual std::vector<Count> counts() const = 0;
  virtual int gpu_index() const = 0;  // whose memory the heap is, -1: the host's
  virtual void close() = 0;           // local, may be called twice
};

}  // namespace weft
