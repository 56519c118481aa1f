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

MembershipActions one(const Action& action) noexcept {
  MembershipActions actions;
  actions.add(action);
  return actions;
}

}  // namespace

Membership::Membership(int rank, const std::vector<uint64_t>& incarnations, const GroupId& group, uint32_t first_epoch)
    : rank_(rank),
      group_(group),
      incarnations_(incarnations),
      founders_(RankSet::first(static_cast<int>(incarnations.size()))),
      epoch_(first_epoch),
      era_(first_epoch),
      active_(founders_),
      newest_(first_epoch),
      newest_set_(founders_) {
  if (incarnations.size() > kMaxControlRanks || !founders_.contains(rank)) {
    throw_invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(incarnations.size()) +
                           "; allowed: 1.." + std::to_string(kMaxControlRanks) + " ranks, this one among them");
  }
}

MembershipActions Membership::step(const Event& event) noexcept {
  switch (event.kind) {
    case Event::Kind::kGone: return lose(event.ranks);
    case Event::Kind::kProven: {
      proven_ = proven_ | event.ranks;
      return lose(event.ranks);
    }
    case Event::Kind::kRecover: {
      if (is_evicted()) return end(Failure::kEvicted, newest_set_);
      leave_meeting();
      wish_ = event.wish;
      phase_ = Phase::kReading;
      return read_next();
    }
    case Event::Kind::kLook: {
      has_news_ = phase_ != Phase::kIdle;  // what was read for the call under way may be older than that
      return has_news_ ? MembershipActions() : look();
    }
    case Event::Kind::kWord: return take_word(event);
    case Event::Kind::kForgotten: {
      const bool has_asked = phase_ == Phase::kLooking || phase_ == Phase::kReading || phase_ == Phase::kDeciding;
      if (!has_asked && !is_meeting()) return {};
      return end(Failure::kEvicted, {});  // who was left behind by that many changes is in none of them
    }
    case Event::Kind::kHere:
      return event.epoch == newest_ && phase_ == Phase::kMeeting ? meet(event.ranks) : MembershipActions();
    case Event::Kind::kRenewed: {
      return event.epoch == newest_ && phase_ == Phase::kRenewing ? enter() : MembershipActions();
    }
    case Event::Kind::kDeadline: return run_out();
    case Event::Kind::kLeave: {
      leave_meeting();
      if (is_evicted()) return {};
      phase_ = Phase::kIdle;
      return has_news_ ? look() : MembershipActions();
    }
  }
  return {};
}

MembershipActions Membership::look() noexcept {
  has_news_ = false;
  if (newest_ == kLastEpoch) return {};
  phase_ = Phase::kLooking;
  return read_next();
}

MembershipActions Membership::read_next() noexcept {
  if (newest_ == kLastEpoch && phase_ == Phase::kReading) return choose({});
  return one({.kind = Action::Kind::kRead, .epoch = newest_ + 1});
}

MembershipActions Membership::take_word(const Event& event) noexcept {
  if (phase_ == Phase::kIdle || is_evicted() || event.word.epoch != newest_ + 1) return {};
  const bool is_committed = event.word.state == RegisterState::kCommitted;
  if (phase_ == Phase::kDeciding) is_unanswered_ = false;
  if (is_meeting() && (!is_committed || mutants::kStayBehind)) return {};
  if (is_committed) {
    const bool is_mine = phase_ == Phase::kDeciding && event.word == wanted_;
    if (is_mine || (phase_ == Phase::kDeciding && mutants::kOwnList)) return adopt(draft_);
    if (event.record == nullptr) return end(Failure::kDamaged, {});
    return adopt(*event.record);
  }
  if (phase_ == Phase::kReading) return choose(event.word);
  if (phase_ == Phase::kDeciding) return decide(event.word);  // a proposal came, or went, meanwhile
  phase_ = Phase::kIdle;                                      // has looked: there is nothing newer
  return has_news_ ? look() : MembershipActions();
}

// Committed is final, so each epoch is adopted, and then the one after it, until there is none.
MembershipActions Membership::adopt(const MembershipRecord& record) noexcept {
  leave_meeting();
  const RankSet left_out = newest_set_ - record.active - gone_;
  newest_ = record.epoch;
  newest_set_ = record.active;
  here_ = {};
  if (!newest_set_.contains(rank_) && !mutants::kSelfStays) return end(Failure::kEvicted, newest_set_);
  MembershipActions actions;
  if (!left_out.empty() && !mutants::kTellNobody) {
    actions.add({.kind = Action::Kind::kTell, .epoch = newest_, .ranks = left_out});
  }
  if (phase_ == Phase::kLooking && newest_ == kLastEpoch) {
    phase_ = Phase::kIdle;
    return actions;
  }
  if (phase_ != Phase::kLooking) phase_ = Phase::kReading;
  actions.add(read_next());
  return actions;
}

// The register has nothing newer than newest_: go there if that is still possible, else decide the next one.
MembershipActions Membership::choose(const RegisterWord& next) noexcept {
  const bool is_fresh = newest_ > epoch_ && (newest_ > spent_ || mutants::kSameEpoch);
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
  }
  is_unanswered_ = true;
  wanted_ = {newest_ + 1, RegisterState::kCommitted, static_cast<uint16_t>(next.version + 1),
             static_cast<uint16_t>(rank_)};
  return one({.kind = Action::Kind::kDecide, .epoch = newest_ + 1, .expected = next, .desired = wanted_});
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
  if (!is_meeting() || (newest_set_ & gone_).empty() || mutants::kWaitForDead) return {};
  leave_meeting();
  if (!(wish_.exactly & gone_).empty()) return end(Failure::kPeersLost, wish_.exactly & gone_);
  phase_ = Phase::kReading;
  return read_next();
}

MembershipActions Membership::enter() noexcept {
  epoch_ = era_ = newest_;  // fresh pages: a new era
  active_ = newest_set_;
  phase_ = Phase::kIdle;
  MembershipActions actions = one({.kind = Action::Kind::kEnter, .epoch = epoch_, .ranks = active_});
  if (has_news_) actions.add(look());
  return actions;
}

MembershipActions Membership::run_out() noexcept {
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
  phase_ = failure == Failure::kEvicted ? Phase::kEvicted : Phase::kIdle;
  MembershipActions actions = one({.kind = Action::Kind::kRaise, .failure = failure, .epoch = newest_, .ranks = ranks});
  if (has_news_ && !is_evicted()) actions.add(look());
  return actions;
}

void Membership::leave_meeting() noexcept {
  if (is_meeting()) spent_ = newest_;
}

RankSet Membership::evicted() const noexcept { return founders_ - active_ - safe_to_delete(); }

RankSet Membership::safe_to_delete() const noexcept {
  return (founders_ - active_) & (mutants::kLostIsSafe ? gone_ : proven_);
}

Origin Membership::origin() const noexcept {
  return {group_, epoch_, era_, rank_, incarnations_[static_cast<size_t>(rank_)]};
}

// Nobody comes back, so who is out here is out in every later epoch, too.
bool Membership::knows(const Origin& origin) const noexcept {
  return active_.contains(origin.rank) && origin.group == group_ &&
         origin.incarnation == incarnations_[static_cast<size_t>(origin.rank)];
}

Hearing Membership::hear(const Origin& origin) const noexcept {
  if (!mutants::kHearStrangers && !knows(origin)) return Hearing::kDropped;
  if (origin.era == era_) return Hearing::kCounts;
  if (origin.era < era_) return mutants::kHearAllEras ? Hearing::kCounts : Hearing::kDropped;
  return Hearing::kLater;
}

}  // namespace weft
