// Planned changes: ranks come and go between two operations, on the pages there are. docs/protocols/membership.md.
#include <algorithm>
#include <span>

#include "bootstrap/membership.h"
#include "bootstrap/membership_mutants.h"

namespace weft {
namespace {

using Action = MembershipAction;

std::span<const NewMember> new_members(const MembershipRecord& record) noexcept {
  return std::span(record.new_members).first(std::min<size_t>(record.num_new, record.new_members.size()));
}

}  // namespace

// Of what a register says: which proposal stands. A damaged one is nobody's, so it is withdrawn.
void Membership::see(const MembershipEvent& event) noexcept {
  proposal_ = event.word;
  if (event.word.state != RegisterState::kProposed) return;
  proposed_ = event.record == nullptr ? MembershipRecord() : *event.record;
}

// Of a record that was committed: who belongs, and which incarnations are in the new slots.
void Membership::take_in(const MembershipRecord& record) noexcept {
  newest_ = record.epoch;
  num_forgotten_ = 0;
  newest_era_ = record.era;
  const RankSet let_go = record.kind == ChangeKind::kPlanned ? newest_set_ - record.active : RankSet();
  left_ = left_ | let_go;
  for (int slot = let_go.next(0); slot >= 0 && slot < static_cast<int>(let_go_.size()); slot = let_go.next(slot + 1)) {
    let_go_[static_cast<size_t>(slot)] = record.epoch;
  }
  newest_set_ = record.active;
  is_newest_planned_ = record.kind == ChangeKind::kPlanned;
  newest_boundary_ = record.boundary;
  proposal_ = {};
  here_ = {};
  for (const NewMember& member : new_members(record)) {
    const auto slot = static_cast<int>(member.slot);
    if (slot >= static_cast<int>(incarnations_.size())) continue;
    // Whoever had the slot before is proven gone, else nobody could have claimed it; the new one may be gone by now, too.
    if (prepared_[member.slot] == member.nonce) {
      gone_.remove(slot);
      proven_.remove(slot);
    }
    incarnations_[member.slot] = member.nonce;
    taken_in_[member.slot] = record.epoch;
    prepared_[member.slot] = 0;
    cell_.prepared.remove(slot);
    known_.add(slot);
    left_.remove(slot);
    suspended_.remove(slot);
  }
}

// Between the change that has let it go and the one that has taken it in again what it does is nobody else's business.
bool Membership::was_outside(int slot, uint32_t epoch) const noexcept {
  const auto idx = static_cast<size_t>(slot);
  if (let_go_[idx] == 0 || epoch < let_go_[idx]) return false;
  return taken_in_[idx] < let_go_[idx] || epoch < taken_in_[idx];
}

RankSet Membership::left_out() const noexcept {
  return known_ - active_ - newest_set_ - safe_to_delete() - (suspended_ - gone_);
}

RankSet Membership::evicted() const noexcept { return left_out() - left_; }

RankSet Membership::leaving() const noexcept { return left_out() & left_; }

MembershipActions Membership::prepare(int slot, uint64_t incarnation) noexcept {
  if (slot < 0 || slot >= static_cast<int>(prepared_.size()) || newest_set_.contains(slot)) return {};
  prepared_[static_cast<size_t>(slot)] = incarnation;
  cell_.prepared.remove(slot);
  if (incarnation != 0) {
    cell_.prepared.add(slot);
    for (RankSet* end : {&gone_, &proven_}) end->remove(slot);
    // The one that was active: it stays known, or nobody would hear of its end.
    if (known_.contains(slot) && incarnation == incarnations_[static_cast<size_t>(slot)]) {
      suspended_.add(slot);
    } else {
      for (RankSet* of_the_one_before : {&known_, &left_, &suspended_}) of_the_one_before->remove(slot);
    }
  }
  MembershipActions actions = one({.kind = Action::Kind::kShow});
  // Of a joiner that is ready no more, and has given its word: unless that has been counted, it counts no more.
  if (slot == rank_ && incarnation == 0 && phase_ == Phase::kIdle && is_proposed() && has_acked()) {
    actions.add(withdraw());
  } else {
    actions.add(progress());
  }
  return actions;
}

MembershipActions Membership::want(const ChangeWish& change) noexcept {
  change_ = change;
  change_.add = change.add - newest_set_;  // what a recovery has done of it is not wanted any more
  change_.remove = change.remove & newest_set_;
  change_.suspend = change.suspend & newest_set_;
  is_wanted_ = true;
  planned_ = {};
  const bool is_odd = ((change_.add | change_.remove).empty() && change_.map_hash == 0) || leaves_nobody() ||
                      !(change_.suspend - change_.remove).empty();
  if (is_odd || !is_member_ || newest_ == ~uint32_t{0} || is_era_over()) {
    is_wanted_ = false;
    return one({.kind = Action::Kind::kWithdrawn, .epoch = newest_});
  }
  return progress();
}

// What stands in the register is withdrawn first, and the answer says whether it was committed before.
MembershipActions Membership::take_back() noexcept {
  if (!is_wanted_) return {};
  if (planned_.epoch == newest_ + 1) {
    return phase_ == Phase::kIdle && is_proposed() && proposal_ == planned_ ? withdraw() : MembershipActions();
  }
  is_wanted_ = false;
  return one({.kind = Action::Kind::kWithdrawn, .epoch = newest_});
}

// What the standing proposal, or the change that is wanted here, needs next of this rank. Nothing while it is busy.
MembershipActions Membership::progress() noexcept {
  if (phase_ != Phase::kIdle || is_leaving()) return {};
  if (is_proposed()) return acknowledge();
  if (!can_propose()) return {};
  if (proposal_.epoch == newest_ + 1) return propose();
  phase_ = Phase::kLooking;
  return read_next();
}

bool Membership::has_acked() const noexcept {
  return cell_.acked_epoch == proposal_.epoch && cell_.acked_version == proposal_.version;
}

bool Membership::have_all_acked() const noexcept {
  if (mutants::kNoAck) return true;
  const RankSet named = newest_set_ | proposed_.active;
  for (int rank = named.next(0); rank >= 0; rank = named.next(rank + 1)) {
    if (rank >= static_cast<int>(cells_.size())) return false;
    const MembershipCell& cell = rank == rank_ ? cell_ : cells_[static_cast<size_t>(rank)];
    if (cell.acked_epoch != proposal_.epoch || cell.acked_version != proposal_.version) return false;
  }
  return true;
}

bool Membership::is_prepared() const noexcept {
  if (mutants::kUnprepared) return true;
  const auto members = new_members(proposed_);
  return std::all_of(members.begin(), members.end(), [&](const NewMember& member) {
    return member.slot < prepared_.size() && prepared_[member.slot] == member.nonce;
  });
}

// Acknowledged is what this rank has not passed and could install; decided, when all named in it have acknowledged. A word that
// was given binds: whoever has given it waits at the boundary.
MembershipActions Membership::acknowledge() noexcept {
  const RankSet named = newest_set_ | proposed_.active;
  // Of no use is for members to say: who has just come may know less of them than they do.
  if (!is_member_ && !proposed_.active.contains(rank_)) return {};
  if (proposed_.epoch != proposal_.epoch || !(named & gone_).empty() || is_era_over()) {
    return is_member_ ? withdraw() : MembershipActions();
  }
  MembershipActions actions;
  if (!has_acked()) {
    const bool is_past = is_member_ && cell_.passed >= proposed_.boundary;
    if (is_past && !mutants::kStaleAck) return withdraw();
    if (!named.contains(rank_) || (is_member_ && epoch_ != newest_) || !is_prepared()) return {};
    cell_.acked_epoch = proposal_.epoch;
    cell_.acked_version = proposal_.version;
    actions.add({.kind = Action::Kind::kShow});
  }
  if (have_all_acked()) actions.add(commit());
  return actions;
}

MembershipActions Membership::settle(const Action& action) noexcept {
  phase_ = Phase::kSettling;
  is_draft_planned_ = action.kind == Action::Kind::kDecide;
  is_plan_unanswered_ |= is_draft_planned_;
  return one(action);
}

MembershipActions Membership::commit() noexcept {
  RegisterWord decided = proposal_;
  decided.state = RegisterState::kCommitted;
  return settle({.kind = Action::Kind::kMove, .epoch = proposal_.epoch, .expected = proposal_, .desired = decided});
}

MembershipActions Membership::withdraw() noexcept {
  if (proposal_.version == kMaxRegisterVersion) return {};
  const RegisterWord open{.epoch = proposal_.epoch,
                          .version = static_cast<uint16_t>(proposal_.version + 1),
                          .writer = static_cast<uint16_t>(rank_)};
  return settle({.kind = Action::Kind::kMove, .epoch = proposal_.epoch, .expected = proposal_, .desired = open});
}

// All that the change names have shown that they are prepared for its joiners, and this rank has come to the newest epoch. A
// proposal of this rank that may still be on its way must not name another record than it was made for.
bool Membership::can_propose() const noexcept {
  if (!is_wanted_ || planned_.epoch != 0 || !is_member_ || epoch_ != newest_ || leaves_nobody()) return false;
  if (is_plan_unanswered_ && plan_.epoch == newest_ + 1) return false;
  return are_all_prepared(change_.add);
}

// Whether all members and these joiners live, and have shown that they are prepared for each of the joiners.
bool Membership::are_all_prepared(const RankSet& joiners) const noexcept {
  const RankSet named = newest_set_ | joiners;
  if (!(named & gone_).empty()) return false;
  for (int rank = named.next(0); rank >= 0; rank = named.next(rank + 1)) {
    if (rank >= static_cast<int>(cells_.size())) return false;
    const MembershipCell& cell = rank == rank_ ? cell_ : cells_[static_cast<size_t>(rank)];
    if (!(joiners - cell.prepared).empty()) return false;
  }
  return true;
}

RankSet Membership::admissible(const RankSet& joiners) const noexcept {
  RankSet found;
  const RankSet wanted = joiners - newest_set_;
  for (int slot = wanted.next(0); slot >= 0; slot = wanted.next(slot + 1)) {
    found.add(slot);
    if (!are_all_prepared(found)) found.remove(slot);
  }
  return found;
}

MembershipActions Membership::propose() noexcept {
  if (proposal_.version >= kMaxProposedVersion) return {};  // until a recovery
  uint64_t furthest = cell_.passed;
  for (int rank = active_.next(0); rank >= 0; rank = active_.next(rank + 1)) {
    const MembershipCell& cell = cells_[static_cast<size_t>(rank)];
    if (cell.era == era_) furthest = std::max(furthest, cell.passed);
  }
  plan_ = {};
  plan_.kind = ChangeKind::kPlanned;
  plan_.group = group_;
  plan_.epoch = newest_ + 1;
  plan_.era = era_;
  plan_.id = change_.id;
  plan_.boundary = furthest + change_.margin;
  plan_.map_hash = change_.map_hash;
  plan_.active = (newest_set_ | change_.add) - change_.remove;
  plan_.standby = change_.suspend;
  for (int slot = change_.add.next(0); slot >= 0; slot = change_.add.next(slot + 1)) {
    if (plan_.num_new == plan_.new_members.size()) break;
    plan_.new_members[plan_.num_new++] = {.nonce = prepared_[static_cast<size_t>(slot)],
                                          .slot = static_cast<uint32_t>(slot)};
  }
  planned_ = {.epoch = newest_ + 1,
              .state = RegisterState::kProposed,
              .version = static_cast<uint16_t>(proposal_.version + 1),
              .writer = static_cast<uint16_t>(rank_),
              .is_planned = true};
  return settle({.kind = Action::Kind::kDecide, .epoch = newest_ + 1, .expected = proposal_, .desired = planned_});
}

bool Membership::is_installable() const noexcept {
  return newest_ > epoch_ && is_newest_planned_ && cell_.passed >= newest_boundary_;
}

// Local unless this rank has given its word for this very boundary: what it has not acknowledged can't be decided without it.
MembershipActions Membership::boundary() noexcept {
  if (is_evicted() || !is_member_) return end(MembershipFailure::kEvicted, newest_set_);
  if (is_overtaken()) {
    has_news_ |= is_asking();
    return end(MembershipFailure::kOvertaken, newest_set_);
  }
  ++cell_.passed;
  MembershipActions actions = one({.kind = Action::Kind::kShow});
  if (is_installable()) {
    actions.add(install());
  } else if (is_proposed() && has_acked() && cell_.passed >= proposed_.boundary && !mutants::kNoWait) {
    waits_ = true;
    if (phase_ == Phase::kIdle) actions.add(look());
  } else {
    actions.add({.kind = Action::Kind::kPass, .epoch = epoch_, .ranks = active_});
    actions.add(progress());
  }
  return actions;
}

// A register was read while boundary() waits, or a record takes this joiner in.
MembershipActions Membership::leave_boundary() noexcept {
  if (!is_member_) {
    const bool is_this = incarnations_[static_cast<size_t>(rank_)] == incarnation_;  // the slot may be another's by now
    if (newest_ == epoch_ || !is_this || !newest_set_.contains(rank_)) return {};
    cell_.passed = newest_boundary_;
    is_member_ = true;
    MembershipActions actions = one({.kind = Action::Kind::kShow});
    actions.add(install());
    return actions;
  }
  if (!waits_) return {};
  if (is_installable()) return install();
  if (newest_ == epoch_ && is_proposed() && has_acked()) return {};
  waits_ = false;
  return one({.kind = Action::Kind::kPass, .epoch = epoch_, .ranks = active_});
}

MembershipActions Membership::install() noexcept {
  waits_ = false;
  previous_ = previous_ | active_;
  epoch_ = newest_;
  era_ = newest_era_;
  active_ = newest_set_;
  cell_.era = era_;
  is_member_ = active_.contains(rank_);
  MembershipActions actions = one({.kind = Action::Kind::kInstall, .epoch = epoch_, .ranks = active_});
  actions.add(progress());
  return actions;
}

}  // namespace weft
