#include "bootstrap/membership.h"

#include <limits>
#include <string>

#include "base/status.h"
#include "bootstrap/membership_mutants.h"

namespace weft {
namespace {

using Action = MembershipAction;
using Event = MembershipEvent;
using Failure = MembershipFailure;

constexpr uint32_t kLastEpoch = std::numeric_limits<uint32_t>::max();

RankSet occupied(const std::vector<uint64_t>& incarnations) {
  RankSet slots;
  for (size_t slot = 0; slot < incarnations.size(); ++slot) {
    if (incarnations[slot] != 0) slots.add(static_cast<int>(slot));
  }
  return slots;
}

}  // namespace

Membership::Membership(int rank, const std::vector<uint64_t>& incarnations, const GroupId& group, uint32_t first_epoch)
    : rank_(rank),
      group_(group),
      incarnation_(rank >= 0 && rank < static_cast<int>(incarnations.size()) ? incarnations[static_cast<size_t>(rank)]
                                                                             : 0),
      incarnations_(incarnations),
      known_(occupied(incarnations)),
      epoch_(first_epoch),
      era_(first_epoch),
      active_(known_),
      newest_(first_epoch),
      newest_set_(known_),
      newest_era_(first_epoch),
      let_go_(incarnations.size()),
      taken_in_(incarnations.size()),
      prepared_(incarnations.size()),
      cells_(incarnations.size()) {
  if (incarnations.size() > kMaxControlRanks || !known_.contains(rank)) {
    throw_invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(incarnations.size()) +
                           "; allowed: 1.." + std::to_string(kMaxControlRanks) + " ranks, this one among them");
  }
  cell_.era = era_;
}

Membership::Membership(int rank, uint64_t incarnation, const Welcome& welcome, const GroupId& group)
    : rank_(rank),
      group_(group),
      incarnation_(incarnation),
      incarnations_(welcome.incarnations),
      known_(occupied(welcome.incarnations)),
      epoch_(welcome.epoch),
      era_(welcome.era),
      active_(known_),
      newest_(welcome.epoch),
      newest_set_(known_),
      newest_era_(welcome.era),
      is_member_(false),
      let_go_(welcome.incarnations.size()),
      taken_in_(welcome.incarnations.size()),
      prepared_(welcome.incarnations.size()),
      cells_(welcome.incarnations.size()) {
  const auto num_slots = static_cast<int>(welcome.incarnations.size());
  if (num_slots > kMaxControlRanks || rank < 0 || rank >= num_slots || known_.contains(rank) || incarnation == 0) {
    throw_invalid_argument("slot " + std::to_string(rank) + " of " + std::to_string(num_slots) +
                           " can't be joined: it is taken, or there is none");
  }
  prepared_[static_cast<size_t>(rank)] = incarnation;
  cell_.era = era_;
  cell_.prepared.add(rank);
}

Membership::Welcome Membership::welcome() const {
  Welcome welcome{std::vector<uint64_t>(incarnations_.size()), newest_, newest_era_};
  for (int rank = newest_set_.next(0); rank >= 0; rank = newest_set_.next(rank + 1)) {
    welcome.incarnations[static_cast<size_t>(rank)] = incarnations_[static_cast<size_t>(rank)];
  }
  return welcome;
}

MembershipActions Membership::step(const Event& event) noexcept {
  switch (event.kind) {
    case Event::Kind::kGone: return lose(event.ranks);
    case Event::Kind::kProven: {
      proven_ = proven_ | event.ranks;
      return lose(event.ranks);
    }
    case Event::Kind::kRecover: {
      leave_meeting();
      has_news_ |= is_asking();  // the answer will be taken for this call's, or for nobody's
      waits_ = false;
      if (is_evicted() || !is_member_ || !newest_set_.contains(rank_)) return end(Failure::kEvicted, newest_set_);
      wish_ = event.wish;
      phase_ = Phase::kReading;
      return read_next();
    }
    case Event::Kind::kLook: {
      has_news_ = phase_ != Phase::kIdle;  // what was read for the call under way may be older than that
      return has_news_ ? MembershipActions() : look();
    }
    case Event::Kind::kWord: return take_word(event);
    case Event::Kind::kForgotten: return skip(event.epoch);
    case Event::Kind::kHere:
      return event.epoch == newest_ && phase_ == Phase::kMeeting ? meet(event.ranks) : MembershipActions();
    case Event::Kind::kRenewed: {
      return event.epoch == newest_ && phase_ == Phase::kRenewing ? enter() : MembershipActions();
    }
    case Event::Kind::kDeadline: return run_out();
    case Event::Kind::kLeave: {
      leave_meeting();
      if (waits_) --cell_.passed;  // it comes to this boundary again
      waits_ = false;
      if (is_evicted()) return {};
      if (is_calling()) phase_ = Phase::kIdle;
      return phase_ == Phase::kIdle && has_news_ ? look() : MembershipActions();
    }
    case Event::Kind::kMet: {
      gone_.remove(event.rank);
      proven_.remove(event.rank);
      return progress();
    }
    case Event::Kind::kPrepared: return prepare(event.rank, event.incarnation);
    case Event::Kind::kCell:
      if (event.rank >= 0 && event.rank < static_cast<int>(cells_.size())) {
        cells_[static_cast<size_t>(event.rank)] = *event.cell;
      }
      return progress();
    case Event::Kind::kPropose: return want(event.change);
    case Event::Kind::kTakeBack: return take_back();
    case Event::Kind::kBoundary: return boundary();
    case Event::Kind::kPatience:
      return waits_ && phase_ == Phase::kIdle && is_proposed() ? withdraw() : MembershipActions();
  }
  return {};
}

MembershipActions Membership::look() noexcept {
  has_news_ = false;
  if (newest_ == kLastEpoch || is_leaving()) return {};
  phase_ = Phase::kLooking;
  return read_next();
}

MembershipActions Membership::read_next() noexcept {
  if (newest_ == kLastEpoch && phase_ == Phase::kReading) return choose({});
  return one({.kind = Action::Kind::kRead, .epoch = newest_ + num_forgotten_ + 1});
}

MembershipActions Membership::take_word(const Event& event) noexcept {
  if (phase_ == Phase::kIdle || is_evicted() || event.word.epoch != newest_ + num_forgotten_ + 1) return {};
  const bool is_committed = event.word.state == RegisterState::kCommitted;
  if (phase_ == Phase::kDeciding) is_unanswered_ = false;
  if (phase_ == Phase::kSettling && is_draft_planned_) is_plan_unanswered_ = false;
  if (num_forgotten_ > 0) {  // the first one behind them was committed long ago
    return is_committed && event.record != nullptr ? catch_up(*event.record) : end(Failure::kDamaged, {});
  }
  see(event);
  if (is_meeting() && (!is_committed || mutants::kStayBehind)) return {};
  if (is_committed) {
    const bool is_mine = phase_ == Phase::kDeciding && event.word == wanted_;
    if (is_mine || (phase_ == Phase::kDeciding && mutants::kOwnList)) return adopt(draft_);
    if (event.record == nullptr) return end(Failure::kDamaged, {});
    return adopt(*event.record);
  }
  if (phase_ == Phase::kReading) return choose(event.word);
  if (phase_ == Phase::kDeciding) return decide(event.word);  // a proposal came, or went, meanwhile
  MembershipActions actions = leave_boundary();
  phase_ = Phase::kIdle;  // has looked: there is nothing newer
  if (is_wanted_ && planned_.epoch == event.word.epoch && event.word != planned_) {
    is_wanted_ = false;
    actions.add({.kind = Action::Kind::kWithdrawn, .epoch = newest_});
  }
  actions.add(has_news_ ? look() : progress());
  return actions;
}

// This rank was late for `epoch`: the oldest record that is still kept says whether the others count on it.
MembershipActions Membership::skip(uint32_t epoch) noexcept {
  if (phase_ == Phase::kIdle || is_evicted() || epoch != newest_ + num_forgotten_ + 1) return {};
  if (!is_member_ || epoch == kLastEpoch) return end(Failure::kEvicted, {});
  leave_meeting();
  ++num_forgotten_;
  phase_ = is_calling() ? Phase::kReading : Phase::kLooking;
  return read_next();
}

// A planned change needs this rank's word, so who has come in the epochs between is not known here, and can't be followed.
MembershipActions Membership::catch_up(const MembershipRecord& record) noexcept {
  const bool is_known = (record.active - newest_set_).empty();
  if (is_known && record.active.contains(rank_)) return adopt(record);
  take_in(record);
  return end(Failure::kEvicted, newest_set_);
}

// Committed is final, so each epoch is adopted, and then the one after it, until there is none.
MembershipActions Membership::adopt(const MembershipRecord& record) noexcept {
  leave_meeting();
  const bool is_planned = record.kind == ChangeKind::kPlanned;
  const RankSet left_out = is_planned ? RankSet() : newest_set_ - record.active - gone_;
  take_in(record);
  MembershipActions actions;
  if (is_wanted_) {
    is_wanted_ = false;
    const bool is_this = is_planned && record.id == change_.id;
    actions.add({.kind = is_this ? Action::Kind::kChanged : Action::Kind::kWithdrawn, .epoch = newest_});
  }
  const bool is_here = incarnations_[static_cast<size_t>(rank_)] == incarnation_ && newest_set_.contains(rank_);
  if (!is_planned && !is_member_ && is_here) {  // as a spare: its place is at the meeting
    is_member_ = true;
    actions.add({.kind = Action::Kind::kRaise, .failure = Failure::kOvertaken, .epoch = newest_, .ranks = newest_set_});
  } else if (is_planned && !is_calling()) {  // this rank works on until its boundary, also if it leaves there
    if (phase_ == Phase::kSettling) phase_ = Phase::kLooking;
    actions.add(leave_boundary());
  } else if (is_member_ && !newest_set_.contains(rank_) && !mutants::kSelfStays) {
    actions.add(end(Failure::kEvicted, newest_set_));
    return actions;
  } else if (waits_) {
    waits_ = false;
    --cell_.passed;
    actions.add({.kind = Action::Kind::kRaise, .failure = Failure::kOvertaken, .epoch = newest_, .ranks = newest_set_});
  }
  if (!left_out.empty() && !mutants::kTellNobody) {
    actions.add({.kind = Action::Kind::kTell, .epoch = newest_, .ranks = left_out});
  }
  // Who leaves has no part in what comes next, and is not waited for.
  if (!is_calling() && (newest_ == kLastEpoch || is_leaving())) {
    phase_ = Phase::kIdle;
    return actions;
  }
  phase_ = is_calling() ? Phase::kReading : Phase::kLooking;
  actions.add(read_next());
  return actions;
}

// The register has nothing newer than newest_: go there if that is still possible, else decide the next one.
MembershipActions Membership::choose(const RegisterWord& next) noexcept {
  // A planned change that this rank has not come to has no meeting: the operations that led to it are broken.
  const bool is_fresh = newest_ > epoch_ && !is_newest_planned_ && (newest_ > spent_ || mutants::kSameEpoch);
  if (!is_fresh || !(newest_set_ & gone_).empty()) return decide(next);
  if (!wish_.exactly.empty() && wish_.exactly != newest_set_) {
    const bool lacks_some = (newest_set_ - wish_.exactly).empty();  // which others have found gone, or have left out
    if (lacks_some) return end(Failure::kPeersLost, wish_.exactly - newest_set_);
    return end(Failure::kOtherSet, newest_set_);
  }
  phase_ = Phase::kMeeting;
  here_ = {};
  here_.add(rank_);
  return one({.kind = Action::Kind::kMeet, .epoch = newest_, .ranks = newest_set_});
}

MembershipActions Membership::decide(const RegisterWord& next) noexcept {
  if (newest_ == kLastEpoch) return end(Failure::kLastEpoch, {});
  RankSet set = newest_set_ - gone_ - wish_.evict;
  set.add(rank_);
  if (!wish_.exactly.empty()) {
    set = wish_.exactly;
    const RankSet lost = (set & gone_) | (set - newest_set_);
    if (!lost.empty()) return end(Failure::kPeersLost, lost);
    if (!set.contains(rank_)) return end(Failure::kOtherSet, newest_set_);
  }
  if (set.count() < wish_.min_ranks) return end(Failure::kTooFew, set);
  if (next.version == kMaxRegisterVersion) return end(Failure::kLastEpoch, {});
  phase_ = Phase::kDeciding;
  // A compare-and-set of an earlier call may still be on its way: it must not name another record than it was made for.
  if (!is_unanswered_ || draft_.epoch != newest_ + 1 || mutants::kNewDraft) {
    draft_ = {};
    draft_.kind = ChangeKind::kRecovery;
    draft_.group = group_;
    draft_.epoch = draft_.era = newest_ + 1;
    draft_.active = set;
    take_spares(draft_);
  }
  is_unanswered_ = true;
  is_draft_planned_ = false;
  wanted_ = {newest_ + 1, RegisterState::kCommitted, static_cast<uint16_t>(next.version + 1),
             static_cast<uint16_t>(rank_)};
  return one({.kind = Action::Kind::kDecide, .epoch = newest_ + 1, .expected = next, .desired = wanted_});
}

// All memory will be fresh, so a spare needs no more than to be connected to all and to have the same windows: all that are left are
// prepared for it, and it and the spares before it for each other. Else one of the two would take the other for dead, and evict it.
void Membership::take_spares(MembershipRecord& record) const noexcept {
  int room = wish_.takes_all_spares ? wish_.spares.count() : newest_set_.count() - record.active.count();
  const RankSet left = record.active;
  for (int slot = wish_.spares.next(0); slot >= 0 && room > 0; slot = wish_.spares.next(slot + 1)) {
    const auto idx = static_cast<size_t>(slot);
    const bool is_free = idx < prepared_.size() && !newest_set_.contains(slot) && !gone_.contains(slot);
    if (!is_free || prepared_[idx] == 0 || record.num_new == record.new_members.size()) continue;
    bool is_known = true;
    for (int rank = record.active.next(0); rank >= 0; rank = record.active.next(rank + 1)) {
      is_known &= rank == rank_ || cells_[static_cast<size_t>(rank)].prepared.contains(slot);
      is_known &= left.contains(rank) || cells_[idx].prepared.contains(rank);
    }
    if (!is_known) continue;
    record.active.add(slot);
    record.new_members[record.num_new++] = {.nonce = prepared_[idx], .slot = static_cast<uint32_t>(slot)};
    --room;
  }
}

MembershipActions Membership::meet(const RankSet& ranks) noexcept {
  here_ = here_ | ranks;
  if (!(newest_set_ - here_).empty() && !mutants::kMeetHalf) return {};
  phase_ = Phase::kRenewing;
  return one({.kind = Action::Kind::kRenew, .epoch = newest_, .ranks = newest_set_});
}

// Each death costs the meeting that waits for the dead one epoch; all see the same register.
MembershipActions Membership::lose(const RankSet& ranks) noexcept {
  gone_ = gone_ | ranks;
  for (int slot = ranks.next(0); slot >= 0 && slot < static_cast<int>(prepared_.size()); slot = ranks.next(slot + 1)) {
    if (slot == rank_) continue;
    prepared_[static_cast<size_t>(slot)] = 0;
    cells_[static_cast<size_t>(slot)] = {};
  }
  cell_.prepared = cell_.prepared - ranks;
  if (!is_meeting()) return progress();
  if ((newest_set_ & gone_).empty() || mutants::kWaitForDead) return {};
  leave_meeting();
  if (!(wish_.exactly & gone_).empty()) return end(Failure::kPeersLost, wish_.exactly & gone_);
  phase_ = Phase::kReading;
  return read_next();
}

MembershipActions Membership::enter() noexcept {
  epoch_ = era_ = newest_;  // fresh pages: a new era
  active_ = newest_set_;
  previous_ = {};
  cell_.era = era_;
  cell_.passed = 0;  // all begin alike
  phase_ = Phase::kIdle;
  MembershipActions actions = one({.kind = Action::Kind::kEnter, .epoch = epoch_, .ranks = active_});
  actions.add(has_news_ ? look() : progress());
  return actions;
}

MembershipActions Membership::run_out() noexcept {
  if (waits_) {
    has_news_ |= is_asking();
    return end(Failure::kControlLost, {});
  }
  switch (phase_) {
    case Phase::kReading:
    case Phase::kDeciding: return end(Failure::kControlLost, {});
    case Phase::kMeeting: return end(Failure::kPeersLate, newest_set_ - here_);
    case Phase::kRenewing: return end(Failure::kPeersLate, {});  // the driver knows for whom it waited
    default: return {};
  }
}

MembershipActions Membership::end(Failure failure, const RankSet& ranks) noexcept {
  leave_meeting();
  if (waits_) --cell_.passed;  // it comes to this boundary again
  waits_ = false;
  phase_ = failure == Failure::kEvicted ? Phase::kEvicted : Phase::kIdle;
  MembershipActions actions = one({.kind = Action::Kind::kRaise, .failure = failure, .epoch = newest_, .ranks = ranks});
  if (has_news_ && !is_evicted()) actions.add(look());
  return actions;
}

void Membership::leave_meeting() noexcept {
  if (is_meeting()) spent_ = newest_;
}

RankSet Membership::safe_to_delete() const noexcept {
  return (known_ - active_) & (mutants::kLostIsSafe ? gone_ : proven_);
}

Origin Membership::origin() const noexcept { return {group_, epoch_, era_, rank_, incarnation_}; }

bool Membership::knows(const Origin& origin) const noexcept {
  return active_.contains(origin.rank) && origin.group == group_ &&
         origin.incarnation == incarnations_[static_cast<size_t>(origin.rank)];
}

Hearing Membership::hear(const Origin& origin) const noexcept {
  const bool is_slot = origin.rank >= 0 && origin.rank < static_cast<int>(incarnations_.size());
  if (origin.group != group_ && !mutants::kHearStrangers) return Hearing::kDropped;
  if (!is_slot) return Hearing::kDropped;
  if (origin.era < era_ && !mutants::kHearAllEras) return Hearing::kDropped;
  const bool is_known = origin.incarnation == incarnations_[static_cast<size_t>(origin.rank)];
  const bool is_member =
      is_known && (active_ | newest_set_ | previous_).contains(origin.rank) && !was_outside(origin.rank, origin.epoch);
  if (!is_member && !mutants::kHearStrangers) {
    // A joiner may have been taken in by a record that this rank has not read; who was left out does not come back.
    const bool is_out = is_known && known_.contains(origin.rank) && !suspended_.contains(origin.rank);
    return origin.epoch > newest_ && !is_out ? Hearing::kLater : Hearing::kDropped;
  }
  return origin.era > era_ ? Hearing::kLater : Hearing::kCounts;
}

}  // namespace weft
