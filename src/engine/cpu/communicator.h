// A rank's membership: who takes part, in which epoch, and the one reason why it is broken if it is.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/status.h"
#include "bootstrap/control_plane.h"
#include "engine/cpu/pause.h"

namespace weft::cpu {

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
  virtual void renew(ControlPlane& plane, const std::vector<int>& ranks, u64 tag, u16 epoch, u64 deadline_ns,
                     const Poll& poll) = 0;
};

// "dispatch", "combine", "barrier"
const char* op_name(u32 op_kind);
const char* phase_name(u32 phase);
u64 mask_of(const std::vector<int>& ranks);

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // Takes a connected control plane. Every rank begins in epoch 1 with all ranks active.
  static std::shared_ptr<Communicator> create(std::unique_ptr<ControlPlane> plane);
  ~Communicator();

  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  u16 epoch() const { return epoch_; }
  const std::vector<int>& active_ranks() const { return active_; }
  bool is_local() const { return plane_->is_local(); }  // ranks are threads of one process
  bool is_active(int rank) const { return (active_mask_ >> rank & 1) != 0; }
  std::vector<Detection> detections() const { return plane_->detections(); }

  // Collective among the active ranks, in the same order: every rank's bytes (and descriptors), by rank.
  std::vector<Parcel> exchange(u64 tag, const std::vector<std::byte>& bytes, const std::vector<int>& fds,
                               u64 deadline_ns, const Poll& poll);

  // Collective among `ranks`, a subset of the active ones that holds this rank: a new epoch on fresh memory (R10, R13).
  // Works on a broken communicator and on a whole one. Errors: kInvalidArgument (a bad list, or lists that differ),
  // kInvalidState (closed, an operation in flight), kPeerLost (one of `ranks` is gone too: try again without it),
  // kPeerTimeout.
  void rebuild(std::vector<int> ranks, u64 deadline_ns, const Poll& poll);

  // Never communicates beyond a best-effort goodbye (R18). Result memory stays valid as long as it is held.
  void close();

  bool is_broken() const;  // not: a peer has closed, which ends no call that has all it needs
  bool is_closed() const;
  void raise_if_broken() const;    // not if a peer has merely closed
  void raise_if_unusable() const;  // kInvalidState if closed; the error it broke with if broken

  // The calls below are for windows.

  void add_window(MemberWindow* window);
  void remove_window(MemberWindow* window);
  u64 next_window_id() { return next_window_id_++; }

  // Ends an operation for everyone: the first reason is kept, published and thrown as a typed error (R9).
  [[noreturn]] void fail(const AbortReason& reason);
  // Throws the reason that is there already (a peer that closed, if there is no other), and lets the others know of it.
  [[noreturn]] void leave_broken();
  // As fail(), for a caller that has an exception of its own to throw (Ctrl-C).
  void give_up(const AbortReason& reason);

 private:
  explicit Communicator(std::unique_ptr<ControlPlane> plane);

  void on_abort(const AbortReason& reason);  // monitor thread
  void adopt(const AbortReason& reason);     // the first reason of this epoch wins; sets every window's abort word
  struct Agreement {
    u16 epoch;
    u64 next_window_id;
    std::vector<MemberWindow*> windows;  // that every member has, by id
  };
  void check_rebuild(const std::vector<int>& ranks) const;
  // False: a member has begun a later attempt.
  bool attempt_rebuild(const std::vector<int>& ranks, u64 deadline_ns, const Poll& poll);
  Agreement agree(const std::vector<int>& ranks, u64 tag, u64 deadline_ns, const Poll& poll);
  void enter_epoch(const std::vector<int>& ranks, u16 epoch);
  Error error_of(const AbortReason& reason) const;
  AbortReason reason() const;

  std::unique_ptr<ControlPlane> plane_;
  const int rank_;
  const int num_ranks_;
  u16 epoch_ = 1;
  u64 active_mask_ = 0;
  std::vector<int> active_;
  u64 next_window_id_ = 1;
  std::map<u64, u64> num_attempts_;  // of rebuild, by mask of members

  mutable std::mutex mutex_;  // guards what follows; never held while calling the control plane
  std::vector<MemberWindow*> windows_;
  u64 closed_ranks_ = 0;            // said goodbye; the next operation with them breaks
  AbortReason reason_;              // code kNone: not broken
  std::vector<AbortReason> early_;  // of an epoch this rank has not entered yet
  bool closed_ = false;
};

}  // namespace weft::cpu
