#include "engine/cpu/communicator.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/env.h"
#include "weft/layout/window.h"

namespace weft::cpu {
namespace {

constexpr u64 kRebuildTag = u64{1} << 62;

u64 mask_of(const std::vector<int>& ranks) {
  u64 mask = 0;
  for (int rank : ranks) mask |= u64{1} << rank;
  return mask;
}

std::vector<int> ranks_of(u64 mask) {
  std::vector<int> ranks;
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    if ((mask >> rank & 1) != 0) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace

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

std::vector<Parcel> Communicator::exchange(u64 tag, const std::vector<std::byte>& bytes, const std::vector<int>& fds,
                                           u64 deadline_ns, const Poll& poll) {
  raise_if_unusable();
  return plane_->exchange(active_, tag, bytes, fds, deadline_ns, poll);
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
  switch (reason.code) {
    case AbortCode::kPeerLost:
      return Error(ErrorCode::kPeerLost, me + culprit + " is gone: its process ended" + way_out, op, reason.sequence,
                   {reason.rank});
    case AbortCode::kPeerClosed:
      return Error(ErrorCode::kPeerLost, me + culprit + " has closed its communicator" + way_out, op, reason.sequence,
                   {reason.rank});
    case AbortCode::kInterrupted:
      return Error(
          ErrorCode::kPeerTimeout,
          me + culprit + " was interrupted in " + op + " (sequence " + std::to_string(reason.sequence) + ")" + way_out,
          op, reason.sequence, {reason.rank});
    case AbortCode::kPeerTimeout:
      return Error(ErrorCode::kPeerTimeout,
                   me + ranks_text(ranks_of(reason.peers)) + " did not answer rank " + std::to_string(reason.reporter) +
                       " in " + op + " (sequence " + std::to_string(reason.sequence) + ", phase " +
                       phase_name(reason.phase) + ") before its deadline" + way_out,
                   op, reason.sequence, ranks_of(reason.peers));
    case AbortCode::kRefused:
      return Error(ErrorCode::kPeerLost,
                   me + culprit + " was cut off: it sent what is no message of this library" + way_out, op,
                   reason.sequence, {reason.rank});
    default:
      return Error(ErrorCode::kInternalError, me + culprit + " reported an internal error in " + op + way_out, op,
                   reason.sequence, {reason.rank});
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

void Communicator::check_rebuild(const std::vector<int>& ranks) const {
  if (is_closed()) throw_invalid_state("the communicator is closed");
  const bool has_twins = std::adjacent_find(ranks.begin(), ranks.end()) != ranks.end();
  const bool has_strangers = std::any_of(ranks.begin(), ranks.end(),
                                         [&](int rank) { return rank < 0 || rank >= num_ranks_ || !is_active(rank); });
  if (has_twins || has_strangers || std::find(ranks.begin(), ranks.end(), rank_) == ranks.end()) {
    throw_invalid_argument("ranks: " + ranks_text(ranks) + "; allowed: distinct active ranks (" + ranks_text(active_) +
                           "), this rank (" + std::to_string(rank_) + ") among them");
  }
  std::vector<int> gone;
  for (int dead : plane_->dead_ranks()) {
    if (std::find(ranks.begin(), ranks.end(), dead) != ranks.end()) gone.push_back(dead);
  }
  if (!gone.empty()) {
    throw_peer_lost("rebuild", gone,
                    "rank " + std::to_string(rank_) + ": " + ranks_text(gone) + " is gone too; rebuild without it");
  }
}

// The next epoch is one above the highest that any member is in: a member may have entered one that others did not reach,
// if a rank died between its last two messages. A list that differs on another rank makes another tag, so the two never
// meet: the ranks then time out naming each other.
u16 Communicator::agree_on_epoch(const std::vector<int>& ranks, u64 tag, u64 deadline_ns, const Poll& poll) {
  struct Proposal {
    u64 mask;
    u32 epoch;
    u32 num_windows;
  };
  Proposal mine{mask_of(ranks), epoch_, 0};
  {
    const std::lock_guard lock(mutex_);
    mine.num_windows = static_cast<u32>(windows_.size());
  }
  std::vector<std::byte> bytes(sizeof(mine));
  std::memcpy(bytes.data(), &mine, sizeof(mine));
  const auto parcels = plane_->exchange(ranks, tag, bytes, {}, deadline_ns, poll);
  u32 highest = epoch_;
  for (int rank : ranks) {
    Proposal other{};
    if (parcels[rank].bytes.size() != sizeof(other)) throw_internal("a malformed rebuild message");
    std::memcpy(&other, parcels[rank].bytes.data(), sizeof(other));
    if (other.mask != mine.mask || other.num_windows != mine.num_windows) {
      throw_invalid_argument("rebuild: rank " + std::to_string(rank) + " has " + std::to_string(other.num_windows) +
                             " windows, rank " + std::to_string(rank_) + " has " + std::to_string(mine.num_windows));
    }
    highest = std::max(highest, other.epoch);
  }
  return static_cast<u16>(highest + 1);
}

void Communicator::rebuild(std::vector<int> ranks, u64 deadline_ns, const Poll& poll) {
  std::sort(ranks.begin(), ranks.end());
  check_rebuild(ranks);
  std::vector<MemberWindow*> windows;
  {
    const std::lock_guard lock(mutex_);
    windows = windows_;
  }
  for (MemberWindow* window : windows) {
    if (window->is_busy()) throw_invalid_state("an operation is in flight on this communicator");
  }
  const u64 mask = mask_of(ranks);
  const u64 tag =
      kRebuildTag | (hash_bytes(&mask, sizeof(mask)) & 0xffffffffu) << 28 | (num_attempts_[mask]++ & 0x3fffu) << 14;
  const u16 next_epoch = agree_on_epoch(ranks, tag, deadline_ns, poll);
  renew_windows(windows, ranks, tag, deadline_ns, poll);
  enter_epoch(ranks, next_epoch);
}

// A failure between the windows leaves some on fresh memory and some not: the communicator is broken then, if it was not.
void Communicator::renew_windows(const std::vector<MemberWindow*>& windows, const std::vector<int>& ranks, u64 tag,
                                 u64 deadline_ns, const Poll& poll) {
  try {
    for (MemberWindow* window : windows) window->renew(*plane_, ranks, ++tag, deadline_ns, poll);
  } catch (const Error& error) {
    AbortReason half_done;
    half_done.code = error.code == ErrorCode::kPeerLost ? AbortCode::kPeerLost : AbortCode::kPeerTimeout;
    half_done.rank = error.peers.empty() ? rank_ : error.peers.front();
    half_done.reporter = rank_;
    half_done.epoch = epoch_;
    half_done.peers = mask_of(error.peers);
    adopt(half_done);
    throw;
  }
}

void Communicator::enter_epoch(const std::vector<int>& ranks, u16 epoch) {
  std::vector<AbortReason> early;
  {
    const std::lock_guard lock(mutex_);
    epoch_ = epoch;
    active_ = ranks;
    active_mask_ = mask_of(ranks);
    reason_ = AbortReason{};
    closed_ranks_ &= active_mask_;
    early = std::exchange(early_, {});
  }
  for (const AbortReason& reason : early) on_abort(reason);
  for (int dead : plane_->dead_ranks()) {  // lost while the new epoch was made
    AbortReason lost;
    lost.code = AbortCode::kPeerLost;
    lost.rank = dead;
    lost.reporter = rank_;
    if (is_active(dead)) adopt(lost);
  }
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
