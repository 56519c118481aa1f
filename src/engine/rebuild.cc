// rebuild(): the members of a new epoch agree on it, then back every window with fresh memory (R10, R11, R13).
// docs/protocols/bootstrap.md has the steps. Ranks may call it at different times and with different deadlines: each
// attempt has a number, and a rank that sees a higher one from a member leaves its own attempt for that one.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "engine/communicator.h"
#include "weft/config/operation.h"

namespace weft {
namespace {

// Tag: kRebuildTag | hash of the member mask: 18 bits | attempt: 32 | step: 12. A list that differs on another rank makes
// another tag, so the two never meet: the ranks then time out naming each other.
constexpr u64 kRebuildTag = u64{1} << 62;
constexpr u64 kStepBits = 12;
constexpr u64 kPrefixShift = kStepBits + 32;
constexpr u64 kPrefixMask = ~((u64{1} << kPrefixShift) - 1);
constexpr u64 kLargestAttempt = 0xffffffff;
constexpr u64 kMostWindows = (u64{1} << (kStepBits - 1)) - 1;  // two steps each, and two before them
constexpr u32 kLastEpoch = 0xffffffff;

struct Superseded {};  // a member has begun a later attempt

struct Proposal {
  u64 mask = 0;
  u64 next_window_id = 0;
  u32 epoch = 0;
  u32 num_windows = 0;  // their ids follow
};

std::vector<std::byte> pack(const Proposal& proposal, const std::vector<u64>& window_ids) {
  std::vector<std::byte> bytes(sizeof(proposal) + window_ids.size() * sizeof(u64));
  std::memcpy(bytes.data(), &proposal, sizeof(proposal));
  if (!window_ids.empty())
    std::memcpy(bytes.data() + sizeof(proposal), window_ids.data(), window_ids.size() * sizeof(u64));
  return bytes;
}

std::vector<u64> unpack(const std::vector<std::byte>& bytes, Proposal* proposal) {
  if (bytes.size() < sizeof(*proposal)) throw_internal("a malformed rebuild message");
  std::memcpy(proposal, bytes.data(), sizeof(*proposal));
  std::vector<u64> ids(proposal->num_windows);
  if (bytes.size() != sizeof(*proposal) + ids.size() * sizeof(u64)) throw_internal("a malformed rebuild message");
  if (!ids.empty()) std::memcpy(ids.data(), bytes.data() + sizeof(*proposal), ids.size() * sizeof(u64));
  return ids;
}

}  // namespace

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
  const std::lock_guard lock(mutex_);
  for (const MemberWindow* window : windows_) {
    if (window->is_busy()) throw_invalid_state("an operation is in flight on this communicator");
  }
}

void Communicator::rebuild(std::vector<int> ranks, u64 deadline_ns, const Poll& poll) try {
  std::sort(ranks.begin(), ranks.end());
  check_rebuild(ranks);
  while (!attempt_rebuild(ranks, deadline_ns, poll)) {  // bounded: every exchange in it ends at the deadline
  }
} catch (Error& error) {
  if (error.code == ErrorCode::kPeerTimeout) error.text += text_of(refusals(mask_of(error.peers)));
  throw;
}

bool Communicator::attempt_rebuild(const std::vector<int>& ranks, u64 deadline_ns, const Poll& poll) try {
  const u64 mask = mask_of(ranks);
  const u64 prefix = kRebuildTag | (hash_bytes(&mask, sizeof(mask)) & 0x3ffff) << kPrefixShift;
  const auto newest_attempt = [&](ControlPlane::Sources sources) {
    return plane_->newest_tag(prefix, kPrefixMask, sources) >> kStepBits & kLargestAttempt;
  };
  const u64 attempt = std::max(num_attempts_[mask], newest_attempt(ControlPlane::Sources::kAll));
  if (attempt == kLargestAttempt) throw_invalid_state("rebuild: no more attempts; make a new communicator");
  num_attempts_[mask] = attempt + 1;
  const u64 tag = prefix | attempt << kStepBits;
  plane_->forget_tags(prefix, kPrefixMask, tag);
  {
    const std::lock_guard lock(mutex_);
    attempt_ = tag;
    attempt_abort_ = AbortReason{};
  }
  const std::unique_ptr<Communicator, void (*)(Communicator*)> end(this, [](Communicator* self) {
    const std::lock_guard lock(self->mutex_);
    self->attempt_ = 0;
  });
  WaitLog log(*this);
  // Left is the attempt only for a member that owes it something: one that is in a later one and has given all has ended it.
  const Poll watch = [&] {
    if (poll) poll();
    raise_if_attempt_aborted();
    log.look(mask_of(plane_->silent_ranks()));
    if (newest_attempt(ControlPlane::Sources::kSilent) > attempt) throw Superseded{};
  };
  const Agreement agreed = agree(ranks, tag, deadline_ns, watch);
  // Everyone is still here: what was read above were no left-overs of a rank that has given up since.
  plane_->exchange(ranks, tag + 1, {}, {}, deadline_ns, watch);
  AbortReason half_done;  // until all is done, some windows have fresh memory and some not
  half_done.code = AbortCode::kPeerTimeout;
  half_done.rank = half_done.reporter = rank_;
  half_done.epoch = epoch_;
  half_done.members = active_mask_;
  half_done.peers = mask & ~(u64{1} << rank_);
  adopt(half_done);
  u64 step = tag + 2;
  for (MemberWindow* window : agreed.windows) {
    window->renew(*plane_, ranks, step, agreed.epoch, deadline_ns, watch);
    step += 2;
  }
  next_window_id_ = agreed.next_window_id;
  enter_epoch(ranks, agreed.epoch);
  return true;
} catch (const Superseded&) {
  return false;
}

// The next epoch is one above the highest that any member is in: a member may have entered one that others did not reach,
// if a rank died between its last two messages. Closing a window is local, so only those that every member still has go
// on; the others are of no use any more.
Communicator::Agreement Communicator::agree(const std::vector<int>& ranks, u64 tag, u64 deadline_ns, const Poll& poll) {
  std::map<u64, MemberWindow*> mine;
  {
    const std::lock_guard lock(mutex_);
    for (MemberWindow* window : windows_) mine.emplace(window->id(), window);
  }
  std::vector<u64> ids;
  for (const auto& [id, window] : mine) ids.push_back(id);
  const Proposal proposal{mask_of(ranks), next_window_id_, epoch_, static_cast<u32>(ids.size())};
  const auto parcels = plane_->exchange(ranks, tag, pack(proposal, ids), {}, deadline_ns, poll);
  Agreement agreed{epoch_, next_window_id_, {}};
  std::vector<u64> common = ids;
  for (int rank : ranks) {
    Proposal other;
    const std::vector<u64> theirs = unpack(parcels[rank].bytes, &other);
    if (other.mask != proposal.mask) throw_internal("a rebuild message of other ranks");
    agreed.epoch = std::max(agreed.epoch, other.epoch);
    agreed.next_window_id = std::max(agreed.next_window_id, other.next_window_id);
    std::erase_if(common, [&](u64 id) { return std::find(theirs.begin(), theirs.end(), id) == theirs.end(); });
  }
  if (agreed.epoch == kLastEpoch) throw_invalid_state("rebuild: no more epochs; make a new communicator");
  ++agreed.epoch;
  if (common.size() > kMostWindows) {
    throw_invalid_state("rebuild: " + std::to_string(common.size()) + " windows; allowed: up to " +
                        std::to_string(kMostWindows));
  }
  for (const auto& [id, window] : mine) {
    const bool is_common = std::find(common.begin(), common.end(), id) != common.end();
    if (is_common) agreed.windows.push_back(window);
    if (!is_common) window->retire();
  }
  return agreed;
}

// Whether an abort that a member published in an attempt to rebuild is about this rank: it is in the same attempt, or an earlier one
// with the same members, which then ends; or it has ended that attempt, and is in an epoch that the other will not enter whole.
bool Communicator::ends_attempt(const AbortReason& reason) {
  if (reason.code != AbortCode::kAborted || reason.attempt == 0) return false;
  if (attempt_ == 0) return reason.attempt == last_attempt_;
  if ((reason.attempt & kPrefixMask) == (attempt_ & kPrefixMask) && reason.attempt >= attempt_) attempt_abort_ = reason;
  return false;
}

void Communicator::raise_if_attempt_aborted() {
  AbortReason aborted;
  {
    const std::lock_guard lock(mutex_);
    if (attempt_abort_.code == AbortCode::kNone) return;
    aborted = reason_ = attempt_abort_;
    for (MemberWindow* window : windows_) window->leave_waits();
  }
  throw error_of(aborted);
}

void Communicator::enter_epoch(const std::vector<int>& ranks, u32 epoch) {
  std::map<int, AbortReason> early;
  {
    const std::lock_guard lock(mutex_);
    epoch_ = epoch;
    active_ = ranks;
    active_mask_ = mask_of(ranks);
    reason_ = attempt_abort_;
    last_attempt_ = std::exchange(attempt_, 0);
    closed_ranks_ &= active_mask_;
    refusals_.clear();
    early = std::exchange(early_, {});
  }
  plane_->keep_members(ranks);
  for (const auto& [reporter, reason] : early) on_abort(reason);
  for (int dead : plane_->dead_ranks()) {  // lost while the new epoch was made
    AbortReason lost;
    lost.code = AbortCode::kPeerLost;
    lost.rank = dead;
    lost.reporter = rank_;
    lost.is_ours = 1;
    if (is_active(dead)) adopt(lost);
  }
}

}  // namespace weft
