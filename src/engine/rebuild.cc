// check: allow-in-file file-size: the driver of one state machine, read together
// recover() and rebuild(): the ranks decide who belongs to a new epoch, meet, and back every window with fresh memory (R10,
// R11, R13). The rules are those of docs/protocols/membership.md and of Membership, whose driver this is.
#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <utility>

#include "engine/communicator.h"
#include "engine/elastic.h"
#include "weft/config/fail_point.h"
#include "weft/config/operation.h"

namespace weft {
namespace {

// Tag: kRebuildTag | epoch: 32 bits | step: 12. No epoch is tried twice, so no tag is.
constexpr u64 kRebuildTag = u64{1} << 62;
constexpr u64 kStepBits = 12;
constexpr u64 kPrefixMask = ~((u64{1} << (kStepBits + 32)) - 1);
constexpr u64 kMostWindows = ((u64{1} << kStepBits) - 1) / 3;  // three steps each, and one before them

struct Superseded {};  // the next epoch was decided

using Action = MembershipAction;
using Event = MembershipEvent;
using Failure = MembershipFailure;

u64 tag_of(u32 epoch) { return kRebuildTag | u64{epoch} << kStepBits; }

// What a rank says at a meeting; the ids and the text follow.
struct Proposal {
  u64 next_window_id = 0;
  u64 num_windows = 0;
};

std::vector<std::byte> pack(const Proposal& proposal, const std::vector<u64>& window_ids, const std::string& text) {
  const auto ids = std::as_bytes(std::span(window_ids));
  const auto said = std::as_bytes(std::span(text));
  std::vector<std::byte> bytes(sizeof(proposal));
  std::memcpy(bytes.data(), &proposal, sizeof(proposal));
  bytes.insert(bytes.end(), ids.begin(), ids.end());
  bytes.insert(bytes.end(), said.begin(), said.end());
  return bytes;
}

std::vector<u64> unpack(const std::vector<std::byte>& bytes, Proposal* proposal) {
  if (bytes.size() < sizeof(*proposal)) throw_internal("a malformed rebuild message");
  std::memcpy(proposal, bytes.data(), sizeof(*proposal));
  if (proposal->num_windows > (bytes.size() - sizeof(*proposal)) / sizeof(u64)) {
    throw_internal("a malformed rebuild message");
  }
  std::vector<u64> ids(proposal->num_windows);
  if (!ids.empty()) std::memcpy(ids.data(), bytes.data() + sizeof(*proposal), ids.size() * sizeof(u64));
  return ids;
}

std::string said_in(const std::vector<std::byte>& bytes) {
  Proposal proposal;
  const size_t begin = sizeof(proposal) + unpack(bytes, &proposal).size() * sizeof(u64);
  return {reinterpret_cast<const char*>(bytes.data()) + begin, bytes.size() - begin};
}

}  // namespace

void Communicator::check_members(const std::vector<int>& ranks) const {
  const bool has_twins = std::adjacent_find(ranks.begin(), ranks.end()) != ranks.end();
  const bool has_strangers = std::any_of(ranks.begin(), ranks.end(),
                                         [&](int rank) { return rank < 0 || rank >= num_ranks_ || !is_active(rank); });
  if (has_twins || has_strangers || std::find(ranks.begin(), ranks.end(), rank_) == ranks.end()) {
    throw_invalid_argument("ranks: " + ranks_text(ranks) + "; allowed: distinct active ranks (" + ranks_text(active_) +
                           "), this rank (" + std::to_string(rank_) + ") among them");
  }
}

void Communicator::check_idle() {
  if (is_closed()) throw_invalid_state("the communicator is closed");
  const std::lock_guard lock(mutex_);
  for (const MemberWindow* window : windows_) {
    if (window->is_busy()) throw_invalid_state("an operation is in flight on this communicator");
  }
}

void Communicator::rebuild(std::vector<int> ranks, u64 deadline_ns, const Poll& poll) {
  if (is_solo()) throw_invalid_state("rebuild: this rank is no member of the group yet");
  std::sort(ranks.begin(), ranks.end());
  if (!is_closed()) check_members(ranks);
  check_idle();
  RecoverWish wish;
  wish.exactly = RankSet::of(ranks);
  run_recovery(wish, deadline_ns, poll);
}

void Communicator::recover(const std::vector<int>& evict, int min_ranks, u64 deadline_ns, const Poll& poll) {
  recover(evict, min_ranks, std::vector<int>{}, deadline_ns, poll);
}

void Communicator::recover(const std::vector<int>& evict, int min_ranks, const std::optional<std::vector<int>>& spares,
                           u64 deadline_ns, const Poll& poll) {
  if (is_solo()) throw_invalid_state("recover: this rank is no member of the group yet");
  check_idle();
  for (const int rank : evict) {
    if (rank >= 0 && rank < num_ranks_) continue;
    throw_invalid_argument("evict: " + ranks_text(evict) + "; allowed: ranks 0.." + std::to_string(num_ranks_ - 1));
  }
  if (elastic_) read_cells();  // for whom the others are prepared by now
  RecoverWish wish;
  wish.evict = RankSet::of(evict);
  if (const AbortReason found = reason(); found.code == AbortCode::kPeerLost && found.rank >= 0) {
    wish.evict.add(found.rank);  // by whoever has found it: this rank may not know of it yet
  }
  wish.min_ranks = min_ranks;
  if (elastic_ && !spares) wish.spares = RankSet::of(prepared_ranks());
  if (spares) wish.spares = RankSet::of(*spares);
  wish.takes_all_spares = spares.has_value();
  run_recovery(wish, deadline_ns, poll);
}

std::vector<int> Communicator::evicted_ranks() {
  note_gone();
  const std::lock_guard lock(membership_mutex_);
  return membership_.evicted().ranks();
}

std::vector<int> Communicator::safe_to_delete() {
  note_gone();
  const std::lock_guard lock(membership_mutex_);
  return membership_.safe_to_delete().ranks();
}

// What is learnt during a call comes from its exchanges.
void Communicator::note_gone() {
  Driven driven;
  {
    const std::lock_guard driver_lock(driver_mutex_);
    Event gone, proven;
    {
      // A slot is given to another incarnation under this lock, too.
      const std::lock_guard lock(membership_mutex_);
      if (membership_.is_calling()) return;
      gone.kind = Event::Kind::kGone;
      gone.ranks = RankSet::of(plane_->dead_ranks());
      proven.kind = Event::Kind::kProven;
      proven.ranks = RankSet::of(plane_->ended_ranks());
    }
    driven = drive({gone, proven}, Wait{0, {}});
  }
  finish(driven);
  look_if_told();  // who was told meanwhile found this thread at the wheel
}

void Communicator::run_recovery(const RecoverWish& wish, u64 deadline_ns, const Poll& poll) {
  note_gone();
  {
    const std::lock_guard lock(mutex_);
    attempt_abort_ = AbortReason{};
    // From now on: the store may be asked for long before the first meeting, and an abort must end that, too.
    attempt_ = next_epoch_.load(std::memory_order_relaxed);
  }
  const std::unique_ptr<Communicator, void (*)(Communicator*)> end(this, [](Communicator* self) {
    const std::lock_guard lock(self->mutex_);
    self->attempt_ = 0;
  });
  const std::unique_ptr<Communicator, void (*)(Communicator*)> held(elastic_ ? this : nullptr, [](Communicator* self) {
    const std::lock_guard turn(self->elastic_->prepare_mutex);  // also where the call fails
    self->elastic_->is_holding = false;
  });
  const Poll watch = [&] {
    if (poll) poll();
    raise_if_attempt_aborted();
  };
  Call call{deadline_ns, watch, {}};
  WEFT_FAIL_POINT("recover.begun");
  if (elastic_) tell_loss();
  Event begin;
  begin.kind = Event::Kind::kRecover;
  begin.wish = wish;
  std::optional<Action> action = ask(begin, call.wait());
  while (action && action->kind != Action::Kind::kEnter) {  // bounded: all waits in it end at the deadline
    action = take_part(*action, call);
  }
  if (!action) throw_internal("the membership wants nothing though a call is under way");
  WEFT_FAIL_POINT("recover.renewed");
  MeetingTexts told{action->epoch, {}};
  for (const int rank : action->ranks.ranks()) {
    told.by_rank.emplace(rank, said_in(call.parcels[static_cast<size_t>(rank)].bytes));
  }
  enter_epoch(action->ranks.ranks(), action->epoch);
  meeting_texts_ = std::move(told);
  if (elastic_) plane_->forget_tags(kRebuildTag, kPrefixMask, tag_of(action->epoch));  // of attempts that were left
  WEFT_FAIL_POINT("recover.entered");
  if (elastic_) hold_in_recovery(false, {});  // what newcomers have mapped is not in use any more
}

void Communicator::set_meeting_text(std::string text) {
  const std::lock_guard lock(mutex_);
  meeting_text_ = std::move(text);
}

MembershipActions Communicator::step(const Event& event) {
  const std::lock_guard lock(membership_mutex_);
  const MembershipActions actions = membership_.step(event);
  next_epoch_.store(membership_.newest() + 1, std::memory_order_relaxed);
  return actions;
}

// Tells the machine what happened and does what it wants of the ledger; the last thing that is wanted of others is the caller's.
std::optional<Action> Communicator::ask(const Event& event, const Wait& wait) {
  Driven driven;
  {
    const std::lock_guard lock(driver_mutex_);
    driven = drive(event, wait);
  }
  finish(driven);
  look_if_told();  // who was told meanwhile found this thread at the wheel
  if (driven.failure) std::rethrow_exception(driven.failure);
  return driven.last;
}

Communicator::Driven Communicator::drive(const Event& event, const Wait& wait) {
  return drive(std::vector<Event>{event}, wait);
}

Communicator::Driven Communicator::drive(const std::vector<Event>& events, const Wait& wait) {
  Driven driven;
  std::deque<Action> wanted;
  const auto take = [&](const Event& next) {
    for (const Action& action : step(next)) wanted.push_back(action);
  };
  for (const Event& event : events) take(event);
  while (!wanted.empty()) {  // bounded: an answer leads on to the next epoch, or ends
    const Action action = wanted.front();
    wanted.pop_front();
    if (action.kind == Action::Kind::kTell) {
      driven.told = driven.told | action.ranks;
    } else if (action.kind == Action::Kind::kShow) {
      show_cell();
      driven.rings = true;
    } else if (elastic_ && elastic_->takes(action)) {
      deliver(action);
    } else if (action.kind != Action::Kind::kRead && action.kind != Action::Kind::kDecide &&
               action.kind != Action::Kind::kMove) {
      driven.last = action;
    } else {
      try {
        take(do_on_ledger(action, wait));
        driven.rings |= action.kind == Action::Kind::kMove || action.kind == Action::Kind::kDecide;
      } catch (...) {  // the caller leaves: what the machine wants after that waits for nobody
        driven.failure = std::current_exception();
        Event left;
        left.kind = Event::Kind::kLeave;
        take(left);
      }
    }
  }
  return driven;
}

// Without the driver's lock: who is told may look at once, in this thread, and tell this rank.
void Communicator::finish(const Driven& driven) {
  AbortReason decided;
  decided.code = AbortCode::kDecided;
  for (const int rank : driven.told.ranks()) plane_->tell(rank, decided);
  if (elastic_ && driven.rings) elastic_->ring();
  if (driven.last && driven.last->failure == Failure::kEvicted) note_eviction(*driven.last);
}

// Who looks for nobody's call takes what is known here, and never waits.
Event Communicator::do_on_ledger(const Action& action, const Wait& wait) {
  Ledger& ledger = plane_->ledger();
  Event answer;
  answer.kind = Event::Kind::kWord;
  answer.epoch = action.kind == Action::Kind::kRead ? action.epoch : action.expected.epoch;
  try {
    std::unique_lock lock(membership_mutex_);
    const bool is_calling = membership_.is_calling();
    const MembershipRecord draft = membership_.draft();
    lock.unlock();
    Decision found;
    if (action.kind == Action::Kind::kRead) {
      found = is_calling ? ledger.read(action.epoch, wait) : ledger.find(action.epoch);
    } else {
      const bool is_new = action.kind == Action::Kind::kDecide;
      found = ledger.set(rank_, is_new ? &draft : nullptr, action.expected, action.desired, wait);
    }
    answer.word = found.word;
    kept_record_ = found.record;
    answer.record = kept_record_ ? &*kept_record_ : nullptr;
    if (found.is_forgotten) answer.kind = Event::Kind::kForgotten;
  } catch (const Error& error) {
    if (error.code != ErrorCode::kControlLost) throw;
    control_lost_text_ = error.text;
    answer.kind = Event::Kind::kDeadline;
  }
  return answer;
}

std::optional<Action> Communicator::take_part(const Action& action, Call& call) {
  if (action.kind == Action::Kind::kRaise) raise_failure(action);
  Event event;
  try {
    event = action.kind == Action::Kind::kMeet ? meet(action, call) : renew(action, call);
  } catch (const Superseded&) {
    const std::optional<Action> next = ask(word_after(action.epoch), call.wait());
    if (!next) throw_internal("a decision that can't be found again");
    return next;
  } catch (Error& error) {
    event.kind = Event::Kind::kLeave;
    if (error.code == ErrorCode::kPeerLost) event.kind = Event::Kind::kGone;
    if (error.code == ErrorCode::kPeerTimeout) event.kind = Event::Kind::kDeadline;
    event.ranks = RankSet::of(error.peers);
    const std::optional<Action> next = ask(event, call.wait());
    if (error.code == ErrorCode::kPeerLost && next) return next;
    if (next && next->failure == Failure::kEvicted) raise_failure(*next);
    if (error.code == ErrorCode::kPeerTimeout) error.text += text_of(refusals(RankSet::of(error.peers)));
    throw;
  } catch (...) {
    event.kind = Event::Kind::kLeave;
    ask(event, call.wait());
    throw;
  }
  return ask(event, call.wait());
}

Event Communicator::word_after(u32 epoch) {
  const Decision found = plane_->ledger().find(epoch + 1);
  Event event;
  event.kind = found.is_forgotten ? Event::Kind::kForgotten : Event::Kind::kWord;
  event.epoch = epoch + 1;
  event.word = found.word;
  meeting_record_ = found.record;
  event.record = meeting_record_ ? &*meeting_record_ : nullptr;
  return event;
}

// From a wait of a meeting: throws what ends it.
void Communicator::watch_meeting(u32 epoch, const Call& call, WaitLog& log) {
  if (call.poll) call.poll();
  raise_if_attempt_aborted();
  log.look(RankSet::of(plane_->silent_ranks()));
  if (is_superseded(epoch)) throw Superseded{};
}

// Whether somebody who is waited for in the meeting of `epoch` will not come any more, or this rank is not wanted. Who has ended
// this meeting and begun the next one owes nothing: its parcels are here, or come before those of the next one.
bool Communicator::is_superseded(u32 epoch) const {
  Ledger& ledger = plane_->ledger();
  if (!ledger.is_decided(epoch + 1)) return false;
  if ((plane_->newest_silent_tag(kRebuildTag, kPrefixMask) >> kStepBits & 0xffffffff) > epoch) return true;
  RankSet needed = RankSet::of(plane_->silent_ranks());
  needed.add(rank_);
  for (u32 later = epoch + 1; ledger.is_decided(later); ++later) {
    const Decision found = ledger.find(later);
    if (found.is_forgotten || !found.record) return true;  // left behind
    if (!(needed - found.record->active).empty()) return true;
  }
  return false;
}

Event Communicator::meet(const Action& action, Call& call) {
  const u64 tag = tag_of(action.epoch);
  plane_->forget_tags(kRebuildTag, kPrefixMask, tag);
  if (elastic_) hold_in_recovery(true, action.ranks);
  std::vector<u64> ids;
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    attempt_ = action.epoch;
    text = meeting_text_;
    for (const MemberWindow* window : windows_) {
      if (!window->is_retired()) ids.push_back(window->id());
    }
  }
  WaitLog log(*this);
  call.parcels = plane_->exchange(action.ranks.ranks(), tag, pack({next_window_id_, ids.size()}, ids, text), {},
                                  call.deadline_ns, [&] { watch_meeting(action.epoch, call, log); });
  WEFT_FAIL_POINT("recover.met");
  Event event;
  event.kind = Event::Kind::kHere;
  event.epoch = action.epoch;
  event.ranks = action.ranks;
  return event;
}

Event Communicator::renew(const Action& action, Call& call) {
  const std::vector<int> ranks = action.ranks.ranks();
  const Agreement agreed = agree(ranks, call.parcels);
  AbortReason half_done;  // until all is done, some windows have fresh memory and some not
  half_done.code = AbortCode::kPeerTimeout;
  half_done.rank = half_done.reporter = rank_;
  half_done.epoch = epoch_;
  half_done.peers = RankSet::of(ranks);
  half_done.peers.remove(rank_);
  adopt(half_done);
  WaitLog log(*this);
  u64 tag = tag_of(action.epoch) + 1;
  for (MemberWindow* window : agreed.windows) {
    window->renew(*plane_, ranks, tag, action.epoch, call.deadline_ns, [&] { watch_meeting(action.epoch, call, log); });
    tag += 3;
    WEFT_FAIL_POINT("recover.backed");
  }
  next_window_id_ = agreed.next_window_id;
  Event event;
  event.kind = Event::Kind::kRenewed;
  event.epoch = action.epoch;
  return event;
}

// Closing a window is local, so only those that every member still has go on; the others are of no use any more.
Communicator::Agreement Communicator::agree(const std::vector<int>& ranks, const std::vector<Parcel>& parcels) {
  std::map<u64, MemberWindow*> mine;
  {
    const std::lock_guard lock(mutex_);
    for (MemberWindow* window : windows_) mine.emplace(window->id(), window);
  }
  Agreement agreed{next_window_id_, {}};
  std::vector<u64> common;
  for (const auto& [id, window] : mine) common.push_back(id);
  for (const int rank : ranks) {
    Proposal other;
    const std::vector<u64> theirs = unpack(parcels[static_cast<size_t>(rank)].bytes, &other);
    agreed.next_window_id = std::max(agreed.next_window_id, other.next_window_id);
    std::erase_if(common, [&](u64 id) { return std::find(theirs.begin(), theirs.end(), id) == theirs.end(); });
  }
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

void Communicator::raise_failure(const Action& action) {
  const std::vector<int> ranks = action.ranks.ranks();
  const std::string me = "rank " + std::to_string(rank_) + ": ";
  switch (action.failure) {
    case Failure::kEvicted: note_eviction(action); throw error_of(reason());
    case Failure::kPeersLost:
      throw_peer_lost("rebuild", ranks,
                      me + ranks_text(ranks) + " is gone too, or left out by the others; rebuild without it");
    case Failure::kTooFew: {
      std::unique_lock lock(membership_mutex_);
      const std::vector<int> lost = (membership_.active() - action.ranks).ranks();
      lock.unlock();
      throw_peer_lost("recover", lost,
                      me + "only " + ranks_text(ranks) + " would be left, which is fewer than min_ranks");
    }
    case Failure::kOtherSet:
      throw_invalid_argument(
          "ranks: epoch " + std::to_string(action.epoch) + " was decided with " + ranks_text(ranks) +
          " before this call; a later wish does not change that. Call rebuild() with them, or recover()");
    case Failure::kLastEpoch: throw_invalid_state("rebuild: no more epochs; make a new communicator");
    case Failure::kDamaged: throw_internal("the record of epoch " + std::to_string(action.epoch + 1) + " is damaged");
    case Failure::kControlLost: throw Error(ErrorCode::kControlLost, me + control_lost_text_, "recover", 0, {});
    case Failure::kPeersLate:
    case Failure::kOvertaken:
    case Failure::kNone: break;
  }
  throw_internal("a rebuild that ended without a reason");
}

void Communicator::note_eviction(const Action& action) {
  AbortReason evicted;
  evicted.code = AbortCode::kEvicted;
  evicted.rank = evicted.reporter = rank_;
  evicted.epoch = action.epoch;
  evicted.peers = action.ranks;
  adopt(evicted);
}

// Before each call, and when another rank says so: whether an epoch was decided that this rank is not in.
void Communicator::look() {
  if (!plane_->ledger().is_decided(next_epoch_.load(std::memory_order_relaxed))) return;
  is_told_ = true;
  look_if_told();
}

// Who finds another thread driving leaves it to that one, which looks when it has done with the wheel: nobody waits here.
void Communicator::look_if_told() {
  while (is_told_) {  // bounded: each turn takes what was told
    Driven driven;
    {
      const std::unique_lock lock(driver_mutex_, std::try_to_lock);
      if (!lock.owns_lock()) return;
      if (!is_told_.exchange(false)) return;
      driven = drive(Event{}, Wait{0, {}});
    }
    finish(driven);
    if (driven.last && driven.last->failure == Failure::kEvicted) note_eviction(*driven.last);
  }
}

// Whether an abort that a member published in an attempt to rebuild is about this rank: it is in the same attempt, or an earlier
// one, which then ends; or it has ended that attempt, and is in an epoch that the other will not enter whole.
bool Communicator::ends_attempt(const AbortReason& reason) {
  if (reason.code != AbortCode::kAborted || reason.attempt == 0) return false;
  if (attempt_ == 0) return reason.attempt == epoch_;
  if (reason.attempt >= attempt_) attempt_abort_ = reason;
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
    active_set_ = RankSet::of(ranks);
    if (reason_.code != AbortCode::kEvicted) reason_ = attempt_abort_;  // the next epoch may be known already
    attempt_ = 0;
    closed_ranks_ = closed_ranks_ & active_set_;
    refusals_.clear();
    early = std::exchange(early_, {});
  }
  std::vector<int> kept = ranks;
  std::unique_lock driver_lock(driver_mutex_);  // nobody is let in between the list and its use
  if (elastic_) {
    elastic_->forget_newcomers(ranks);
    for (const int newcomer : elastic_->newcomers()) kept.push_back(newcomer);
  }
  plane_->keep_members(kept);
  driver_lock.unlock();
  for (const auto& [reporter, reason] : early) on_abort(reason);
  adopt_lost();
}

// Who was lost while an epoch was made, or before it belonged here, breaks it at once.
void Communicator::adopt_lost() {
  for (const int dead : plane_->dead_ranks()) {
    AbortReason lost;
    lost.code = AbortCode::kPeerLost;
    lost.rank = dead;
    lost.reporter = rank_;
    lost.is_ours = 1;
    if (is_active(dead)) adopt(lost);
  }
}

}  // namespace weft
