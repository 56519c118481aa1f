#include "engine/cpu/communicator.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/env.h"
#include "weft/layout/window.h"

namespace weft::cpu {
namespace {

std::vector<int> ranks_of(u64 mask) {
  std::vector<int> ranks;
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    if ((mask >> rank & 1) != 0) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace

u64 mask_of(const std::vector<int>& ranks) {
  u64 mask = 0;
  for (int rank : ranks) mask |= u64{1} << rank;
  return mask;
}

const char* op_name(u32 op_kind) {
  constexpr const char* kNames[kNumOpKinds] = {"communicator", "dispatch", "combine", "barrier"};
  return op_kind < kNumOpKinds ? kNames[op_kind] : "unknown operation";
}

const char* phase_name(u32 phase) {
  constexpr const char* kNames[kNumPhases] = {"count", "notify", "send", "reduce"};
  return phase < kNumPhases ? kNames[phase] : "unknown phase";
}

std::shared_ptr<Communicator> Communicator::create(std::unique_ptr<ControlPlane> plane) {
  static_cast<void>(env());  // a bad variable is refused here, not in the first wait
  std::shared_ptr<Communicator> comm(new Communicator(std::move(plane)));
  comm->plane_->set_abort_handler([raw = comm.get()](const AbortReason& reason) { raw->on_abort(reason); });
  return comm;
}

Communicator::Communicator(std::unique_ptr<ControlPlane> plane)
    : plane_(std::move(plane)), rank_(plane_->rank()), num_ranks_(plane_->num_ranks()) {
  for (int rank = 0; rank < num_ranks_; ++rank) active_.push_back(rank);
  active_mask_ = mask_of(active_);
}

Communicator::~Communicator() { close(); }

// Ranks that leave it at different points would never meet again, so an exchange that did not end well breaks the
// communicator on every rank, as an operation does; the epoch in the tag and rebuild() bring them together again.
std::vector<Parcel> Communicator::exchange(u64 tag, const std::vector<std::byte>& bytes, const std::vector<int>& fds,
                                           u64 deadline_ns, const Poll& poll) {
  raise_if_unusable();
  const Poll watch = [&] {
    if (poll) poll();
    if (is_broken()) throw error_of(reason());
  };
  AbortReason failure;
  failure.rank = failure.reporter = rank_;
  failure.epoch = epoch_;
  try {
    return plane_->exchange(active_, tag | u64{epoch_} << 40, bytes, fds, deadline_ns, watch);
  } catch (const Error& error) {
    if (error.code != ErrorCode::kPeerTimeout) throw;
    failure.code = AbortCode::kPeerTimeout;
    failure.rank = error.peers.empty() ? rank_ : error.peers.front();
    failure.peers = mask_of(error.peers);
    fail(failure);
  } catch (...) {
    failure.code = AbortCode::kInterrupted;
    give_up(failure);
    throw;
  }
}

void Communicator::add_window(MemberWindow* window) {
  const std::lock_guard lock(mutex_);
  windows_.push_back(window);
  if (closed_ranks_ != 0) window->notice_closed(closed_ranks_);
  if (reason_.code != AbortCode::kNone) window->leave_waits();
}

void Communicator::remove_window(MemberWindow* window) {
  const std::lock_guard lock(mutex_);
  std::erase(windows_, window);
}

bool Communicator::is_broken() const {
  const std::lock_guard lock(mutex_);
  return reason_.code != AbortCode::kNone;
}

bool Communicator::is_closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

void Communicator::raise_if_broken() const {
  if (is_closed() || is_broken()) raise_if_unusable();
}

void Communicator::raise_if_unusable() const {
  if (is_closed()) throw_invalid_state("the communicator is closed");
  const AbortReason first = reason();
  if (first.code != AbortCode::kNone) throw error_of(first);
}

Error Communicator::error_of(const AbortReason& reason) const {
  const std::string op = op_name(reason.op_kind);
  const std::string me = "rank " + std::to_string(rank_) + ": ";
  const std::string way_out = "; call rebuild(ranks) with the ranks that are left, or close()";
  const std::string culprit = "rank " + std::to_string(reason.rank);
  const std::string place = reason.op_kind == 0 ? "a constructor or rebuild"
                                                : op + " (sequence " + std::to_string(reason.sequence) + ", phase " +
                                                      phase_name(reason.phase) + ")";
  switch (reason.code) {
    case AbortCode::kPeerLost:
      return Error(ErrorCode::kPeerLost, me + culprit + " is gone: its process ended" + way_out, op, reason.sequence,
                   {reason.rank});
    case AbortCode::kPeerClosed:
      return Error(ErrorCode::kPeerLost, me + culprit + " has closed its communicator" + way_out, op, reason.sequence,
                   {reason.rank});
    case AbortCode::kInterrupted:
      return Error(ErrorCode::kPeerTimeout, me + culprit + " was interrupted in " + place + way_out, op,
                   reason.sequence, {reason.rank});
    case AbortCode::kPeerTimeout:
      if (reason.reporter >= 0 && (reason.peers >> reason.reporter & 1u) != 0) {
        return Error(ErrorCode::kPeerTimeout,
                     me + "the GPU of rank " + std::to_string(reason.reporter) +
                         " did not get through its own part of " + place +
                         " before the deadline: other work may hold SMs, and all blocks of a call must run at once" +
                         way_out,
                     op, reason.sequence, ranks_of(reason.peers));
      }
      return Error(ErrorCode::kPeerTimeout,
                   me + ranks_text(ranks_of(reason.peers)) + " did not answer rank " + std::to_string(reason.reporter) +
                       " in " + place + " before its deadline" + way_out,
                   op, reason.sequence, ranks_of(reason.peers));
    case AbortCode::kRefused:
      return Error(ErrorCode::kPeerLost,
                   me + culprit + " was cut off: it sent what is no message of this library" + way_out, op,
                   reason.sequence, {reason.rank});
    default: {
      const bool is_own = reason.rank == reason.reporter;
      const std::string what = is_own ? culprit + " reported an internal error in " + op
                                      : "rank " + std::to_string(reason.reporter) + " read words of " + culprit +
                                            " that make no sense in " + place;
      return Error(ErrorCode::kInternalError, me + what + way_out, op, reason.sequence, {reason.rank});
    }
  }
}

AbortReason Communicator::reason() const {
  const std::lock_guard lock(mutex_);
  if (reason_.code != AbortCode::kNone || (closed_ranks_ & active_mask_) == 0) return reason_;
  AbortReason closed;
  closed.code = AbortCode::kPeerClosed;
  closed.rank = __builtin_ctzll(closed_ranks_ & active_mask_);
  closed.reporter = rank_;
  return closed;
}

void Communicator::adopt(const AbortReason& reason) {
  const std::lock_guard lock(mutex_);
  if (reason_.code != AbortCode::kNone || closed_) return;
  reason_ = reason;
  for (MemberWindow* window : windows_) window->leave_waits();
}

void Communicator::on_abort(const AbortReason& reason) {
  {
    const std::lock_guard lock(mutex_);
    const bool from_plane = reason.epoch == 0;
    if (from_plane && !is_active(reason.rank)) return;
    if (from_plane && reason.code == AbortCode::kPeerClosed) {
      // It had sent all it owed before: only what still waits for it ends.
      closed_ranks_ |= u64{1} << reason.rank;
      for (MemberWindow* window : windows_) window->notice_closed(closed_ranks_);
      return;
    }
    if (!from_plane && reason.epoch < epoch_) return;
    if (!from_plane && reason.epoch > epoch_) {
      early_.push_back(reason);
      return;
    }
  }
  adopt(reason);
}

void Communicator::give_up(const AbortReason& reason) {
  adopt(reason);
  {
    const std::lock_guard lock(mutex_);
    for (MemberWindow* window : windows_) window->record_error(reason_);
  }
  plane_->publish_abort(reason);
}

void Communicator::fail(const AbortReason& reason) {
  give_up(reason);
  throw error_of(this->reason());
}

void Communicator::leave_broken() {
  if (is_closed()) throw_invalid_state("the communicator was closed while an operation waited");
  AbortReason first = reason();
  if (first.epoch == 0) first.epoch = epoch_;
  fail(first);
}

void Communicator::close() {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    for (MemberWindow* window : windows_) window->leave_waits();
  }
  plane_->close();
}

}  // namespace weft::cpu
