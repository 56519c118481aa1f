#include "engine/communicator.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/env.h"
#include "base/log.h"
#include "engine/describe.h"
#include "engine/elastic.h"
#include "weft/layout/window.h"

namespace weft {
std::string text_of(const std::map<int, std::string>& refusals) {
  std::string all;
  for (const auto& [rank, text] : refusals) all += "; rank " + std::to_string(rank) + " refused its call: " + text;
  return all;
}

std::shared_ptr<Communicator> Communicator::create(std::unique_ptr<ControlPlane> plane, u32 first_epoch) {
  static_cast<void>(env());  // a bad variable is refused here, not in the first wait
  std::shared_ptr<Communicator> comm(new Communicator(std::move(plane), first_epoch));
  comm->plane_->set_abort_handler([raw = comm.get()](const AbortReason& reason) { raw->on_abort(reason); });
  if (comm->elastic_) comm->elastic_->start();
  return comm;
}

std::shared_ptr<Communicator> Communicator::join(Newcomer&& newcomer) {
  static_cast<void>(env());
  std::shared_ptr<Communicator> comm(
      new Communicator(std::move(newcomer.plane), kSoloEpoch, std::move(newcomer.welcome)));
  comm->plane_->set_abort_handler([raw = comm.get()](const AbortReason& reason) { raw->on_abort(reason); });
  comm->elastic_->start();
  return comm;
}

Communicator::Communicator(std::unique_ptr<ControlPlane> plane, u32 first_epoch,
                           std::optional<Membership::Welcome> welcome)
    : plane_(std::move(plane)),
      rank_(plane_->rank()),
      num_ranks_(plane_->num_ranks()),
      epoch_(first_epoch),
      membership_(welcome ? Membership(rank_, plane_->incarnations()[static_cast<size_t>(rank_)], *welcome,
                                       plane_->ledger().group())
                          : Membership(rank_, plane_->incarnations(), plane_->ledger().group(), first_epoch)),
      next_epoch_(membership_.newest() + 1) {
  active_ = welcome ? std::vector<int>{rank_} : membership_.active().ranks();
  active_set_ = RankSet::of(active_);
  if (OpenGroup* group = plane_->open_group()) elastic_ = std::make_unique<Elastic>(*this, *group);
}

Communicator::~Communicator() { close(); }

// Ranks that leave it at different points would never meet again, so an exchange that did not end well breaks the
// communicator on every rank, as an operation does; the epoch in the tag and rebuild() bring them together again.
std::vector<Parcel> Communicator::exchange(u64 tag, const std::vector<std::byte>& bytes, const std::vector<int>& fds,
                                           u64 deadline_ns, const Poll& poll) {
  raise_if_unusable();
  constexpr u64 kEpochBits = u64{0xffffffff} << kTagNumberBits;
  if ((tag & kEpochBits) != 0) throw_internal("the number of an exchange is too large");
  WaitLog log(*this);
  const Poll watch = [&] {
    if (poll) poll();
    if (is_broken()) throw error_of(reason());
    log.look(RankSet::of(plane_->silent_ranks()));
  };
  AbortReason failure;
  failure.rank = failure.reporter = rank_;
  try {
    return plane_->exchange(active_, tag | u64{epoch_} << kTagNumberBits, bytes, fds, deadline_ns, watch);
  } catch (const Error& error) {
    if (error.code != ErrorCode::kPeerTimeout) throw;
    failure.code = AbortCode::kPeerTimeout;
    failure.rank = error.peers.empty() ? rank_ : error.peers.front();
    failure.peers = RankSet::of(error.peers);
    fail(failure);
  } catch (...) {
    failure.code = AbortCode::kInterrupted;
    give_up(failure);
    throw;
  }
}

void Communicator::meet(u64 deadline_ns, const Poll& poll) {
  raise_if_broken();
  if (std::exchange(meeting_epoch_, epoch_) != epoch_) num_meetings_ = 0;
  exchange(kMeetingTag + ++num_meetings_, {}, {}, deadline_ns, poll);
}

void Communicator::add_window(MemberWindow* window) {
  std::unique_lock<std::mutex> turn;  // between a look at the windows and what is told of it
  if (elastic_) turn = std::unique_lock(elastic_->prepare_mutex);
  {
    const std::lock_guard lock(mutex_);
    windows_.push_back(window);
    if (!closed_ranks_.empty()) window->notice_closed(closed_ranks_.mask());
    if (reason_.code != AbortCode::kNone) window->leave_waits();
  }
  if (elastic_) unprepare_all(true);  // whoever is prepared has not mapped this one
}

u64 Communicator::incarnation(int rank) const {
  const u64 founder = plane_->incarnations().at(static_cast<size_t>(rank));
  return elastic_ ? elastic_->group.slots().claimed(rank) : founder;
}

// Newcomers that have mapped less of it have to offer their own anew: whoever has not is prepared for by nobody.
void Communicator::note_changed_window() {
  if (!elastic_ || elastic_->is_solo) return;
  for (const int slot : elastic_->newcomers()) unmap(slot);
  unprepare_all(false);
}

void Communicator::remove_window(MemberWindow* window) {
  {
    const std::lock_guard lock(mutex_);
    std::erase(windows_, window);
  }
  if (elastic_ && !window->is_retired()) elastic_->take_ready_back();
}

void Communicator::check_one_machine(const std::string& what) const {
  std::vector<int> far;
  for (const int rank : active_) {
    if (!is_near(rank)) far.push_back(rank);
  }
  if (far.empty()) return;
  throw_unsupported("rank " + std::to_string(rank_) + ": " + ranks_text(far) + (far.size() == 1 ? " runs" : " run") +
                    " on another machine; " + what +
                    " needs all active ranks on one, since rows do not cross machines yet. Containers of one machine "
                    "share it with one pid and one network namespace: shareProcessNamespace: true in the pod, or "
                    "--pid=host --network=host");
}

bool Communicator::is_broken() const {
  const std::lock_guard lock(mutex_);
  return reason_.code != AbortCode::kNone;
}

bool Communicator::is_aborted() const {
  const std::lock_guard lock(mutex_);
  return reason_.code == AbortCode::kAborted || reason_.code == AbortCode::kEvicted;
}

bool Communicator::is_closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

void Communicator::raise_if_broken() {
  if (!is_closed() && !is_broken()) return;
  if (elastic_) tell_loss();
  raise_if_unusable();
}

void Communicator::raise_if_unusable() {
  if (is_closed()) throw_invalid_state("the communicator is closed");
  if (has_left_) throw_invalid_state("this rank has left the group; close() the communicator");
  look();
  const AbortReason first = reason();
  if (first.code != AbortCode::kNone) throw error_of(first);
}

void Communicator::raise_if_evicted() {
  look();
  const AbortReason first = reason();
  if (first.code == AbortCode::kEvicted) throw error_of(first);
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
    case AbortCode::kUnreachable:
      return Error(ErrorCode::kPeerLost,
                   me + culprit + " is unreachable: its machine, or the network between, does not answer" + way_out, op,
                   reason.sequence, {reason.rank});
    case AbortCode::kPeerClosed:
      return Error(ErrorCode::kPeerLost, me + culprit + closed_text(reason) + way_out, op, reason.sequence,
                   {reason.rank});
    case AbortCode::kInterrupted:
      return Error(ErrorCode::kPeerTimeout, me + culprit + " was interrupted in " + place + way_out, op,
                   reason.sequence, {reason.rank});
    case AbortCode::kPeerTimeout:
      if (reason.peers.contains(reason.reporter)) {
        return Error(ErrorCode::kPeerTimeout,
                     me + "the GPU of rank " + std::to_string(reason.reporter) +
                         " did not get through its own part of " + place +
                         " before the deadline: other work may hold SMs, and all blocks of a call must run at once" +
                         way_out,
                     op, reason.sequence, reason.peers.ranks());
      }
      return Error(ErrorCode::kPeerTimeout,
                   me + ranks_text(reason.peers.ranks()) + " did not answer rank " + std::to_string(reason.reporter) +
                       " in " + place + " before its deadline" + text_of(reason) + refusals_ + way_out,
                   op, reason.sequence, reason.peers.ranks());
    case AbortCode::kAborted: {
      const std::string text = text_of(reason);
      if (!reason.peers.empty()) {
        return Error(ErrorCode::kInvalidState,
                     me + "ranks wait for each other behind different numbers of boundaries: " + text +
                         "; call recover() on all of them, from which they count anew, and boundary() equally often",
                     op, reason.sequence, reason.peers.ranks());
      }
      return Error(ErrorCode::kAborted,
                   me + (reason.rank == rank_ ? "this rank" : culprit) + " aborted" + (text.empty() ? "" : ": ") +
                       text + way_out,
                   op, reason.sequence, {reason.rank}, text);
    }
    case AbortCode::kEvicted:
      return Error(ErrorCode::kEvicted,
                   me + "the others have gone on without this rank: epoch " + std::to_string(reason.epoch) +
                       " was decided" + (reason.peers.empty() ? "" : " with " + ranks_text(reason.peers.ranks())) +
                       "; close() the communicator",
                   op, reason.epoch, {rank_});
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

void Communicator::log_left(const AbortReason& reason, u32 op_kind) const {
  std::string what = "rank " + std::to_string(reason.rank);
  switch (reason.code) {
    case AbortCode::kPeerLost: what += " is gone (process ended)"; break;
    case AbortCode::kUnreachable: what += " is unreachable (its machine does not answer)"; break;
    case AbortCode::kPeerClosed: what += closed_text(reason); break;
    case AbortCode::kInterrupted: what += " was interrupted"; break;
    case AbortCode::kPeerTimeout:
      what = reason.peers.contains(reason.reporter)
                 ? "the GPU of rank " + std::to_string(reason.reporter) + " did not get through its own part in time"
                 : ranks_text(reason.peers.ranks()) + " did not come before the deadline of rank " +
                       std::to_string(reason.reporter);
      break;
    case AbortCode::kAborted: {
      const std::string text = text_of(reason);
      what += text.empty() ? " aborted" : " aborted: " + text;
      if (!reason.peers.empty()) what = "ranks wait for each other behind different numbers of boundaries: " + text;
      break;
    }
    case AbortCode::kEvicted: what = "the others have gone on without " + what; break;
    case AbortCode::kRefused: what += " was cut off (it sent what is no message of this library)"; break;
    default: what += " and what this rank read of it make no sense (internal error)"; break;
  }
  log_line(kLogWarning, what + "; seen in " + op_name(op_kind) + " by rank " + std::to_string(rank_));
}

std::string Communicator::closed_text(const AbortReason& reason) const {
  const std::string why = text_of(reason);
  return why.empty() ? " has closed its communicator" : " closed its communicator after " + why;
}

AbortReason Communicator::reason() const {
  const std::lock_guard lock(mutex_);
  const int closed = (closed_ranks_ & active_set_).next(0);
  return reason_.code != AbortCode::kNone || closed < 0 ? reason_ : goodbyes_.at(closed);
}

void Communicator::adopt(const AbortReason& reason) {
  const std::lock_guard lock(mutex_);
  adopt_locked(reason);
}

void Communicator::adopt_locked(const AbortReason& reason) {
  const bool is_last = reason.code == AbortCode::kEvicted && reason_.code != AbortCode::kEvicted;
  if ((reason_.code != AbortCode::kNone && !is_last) || closed_) return;
  reason_ = reason;
  if (reason.code == AbortCode::kPeerTimeout) refusals_ = text_of(refusals(reason.peers));
  for (MemberWindow* window : windows_) window->leave_waits();
}

void Communicator::on_abort(const AbortReason& reason) {
  if (reason.code == AbortCode::kDecided) return look();
  if (elastic_) elastic_->wake();
  // Held to the end: what is about this epoch must not be adopted in the next one.
  const std::lock_guard membership_lock(membership_mutex_);
  const std::lock_guard lock(mutex_);
  const bool is_ours = reason.is_ours != 0;
  if (is_ours && !is_active(reason.rank)) return;
  if (is_ours && reason.code == AbortCode::kPeerClosed) {
    // It had sent all it owed before: only what still waits for it ends.
    closed_ranks_.add(reason.rank);
    goodbyes_.insert_or_assign(reason.rank, reason);
    for (MemberWindow* window : windows_) window->notice_closed(closed_ranks_.mask());
    return;
  }
  if (!is_ours) {
    const Origin origin = origin_of(reason, reason.reporter);
    const bool is_of_this_attempt = membership_.knows(origin) && ends_attempt(reason);
    const Hearing hearing = membership_.hear(origin);  // R22
    if (hearing == Hearing::kDropped && !is_of_this_attempt) return;
    if (elastic_ && elastic_->is_solo) {  // about operations that this rank has no part in yet
      early_.insert_or_assign(reason.reporter, reason);
      return;
    }
    if (!is_of_this_attempt && (hearing == Hearing::kLater || reason.epoch > epoch_)) {
      early_.insert_or_assign(reason.reporter, reason);
      return;
    }
  }
  adopt_locked(reason);
}

void Communicator::give_up(AbortReason reason) {
  set_origin(reason, origin());
  reason.is_ours = 0;
  if (reason.code == AbortCode::kPeerClosed) {
    const std::lock_guard lock(mutex_);
    const auto goodbye = goodbyes_.find(reason.rank);
    if (goodbye != goodbyes_.end()) reason.text = goodbye->second.text;
  }
  adopt(reason);
  {
    const std::lock_guard lock(mutex_);
    for (MemberWindow* window : windows_) window->record_error(reason_);
    if (reason_.code != AbortCode::kNone) reason = reason_;  // an earlier one stays: the others hear no other
  }
  set_origin(reason, origin());
  reason.is_ours = 0;
  if (reason.code != AbortCode::kEvicted && !is_outside()) plane_->publish_abort(reason);
}

void Communicator::abort(const std::string& text) {
  AbortReason reason;
  reason.code = AbortCode::kAborted;
  reason.rank = reason.reporter = rank_;
  set_text(reason, text);
  set_origin(reason, origin());
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    reason.attempt = attempt_;
    if (attempt_ != 0) attempt_abort_ = reason;
  }
  adopt(reason);
  if (!is_outside()) plane_->publish_abort(reason);
}

void Communicator::fail(const AbortReason& reason) {
  give_up(reason);
  throw error_of(this->reason());
}

void Communicator::leave_broken() {
  if (is_closed()) throw_invalid_state("the communicator was closed while an operation waited");
  fail(reason());
}

Origin Communicator::origin() const {
  const std::lock_guard lock(membership_mutex_);
  return membership_.origin();
}

void Communicator::close(const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    for (MemberWindow* window : windows_) window->leave_waits();
  }
  if (elastic_) elastic_->stop();
  plane_->close(why);
}

}  // namespace weft
