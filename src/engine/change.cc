// check: allow-in-file file-size: one change, from its boundary to its end
// Planned changes: a rank comes to a boundary, and there ranks come and go on the pages there are. The rules are those of
// docs/protocols/membership.md and docs/protocols/joining.md.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "engine/apart.h"
#include "engine/elastic.h"
#include "weft/config/fail_point.h"

namespace weft {
namespace {

using Action = MembershipAction;
using Event = MembershipEvent;
using Failure = MembershipFailure;

constexpr u64 kDecideWithinNs = 5'000'000;  // whoever has waited so long at a boundary withdraws the proposal
constexpr u64 kSliceNs = 1'000'000;         // of a wait: cells tell, and a bell wakes earlier
constexpr u64 kPollNs = 50'000'000;
constexpr u64 kRecoverNs = 100'000'000'000;
constexpr u64 kAskAgainNs = 200'000'000;   // so long a member may show that it is not prepared for who waits
constexpr u64 kPrepareNs = 2'000'000'000;  // for the answers of members, at a time

Event event_of(Event::Kind kind) {
  Event event;
  event.kind = kind;
  return event;
}

AbortReason lateness_of(const RankSet& late, int reporter) {
  AbortReason broken;
  broken.code = AbortCode::kPeerTimeout;
  broken.rank = late.next(0);
  broken.reporter = reporter;
  broken.peers = late;
  return broken;
}

// Who has come in by recoveries up to `epoch`, since the record that took `rank` in: a further death makes more than one epoch of it.
RankSet added_with(Ledger& ledger, u32 epoch, int rank) {
  RankSet added = RankSet::of({rank});
  for (; epoch > 0; --epoch) {
    const Decision found = ledger.find(epoch);
    if (!found.record) break;
    RankSet newcomers;
    for (u32 idx = 0; idx < found.record->num_new; ++idx) {
      newcomers.add(static_cast<int>(found.record->new_members[idx].slot));
    }
    added = added | newcomers;
    if (newcomers.contains(rank)) break;
  }
  return added;
}

// Of a new rank that does not know where to begin.
template <class Work>
std::optional<Error> refusal_of(const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

}  // namespace

Elastic& Communicator::elastic(const char* what) const {
  if (elastic_) return *elastic_;
  throw_invalid_state(std::string(what) +
                      ": ranks come and go only in a group of processes on one machine that was made with max_ranks=");
}

bool Communicator::is_solo() const { return elastic_ && elastic_->is_solo; }

void Communicator::show_cell_locked() noexcept {
  Elastic& e = *elastic_;
  e.shown = {membership_.cell(), e.installed, 0, e.next_window_id, e.changes};
  [[maybe_unused]] const bool has_acked = e.shown.membership.acked_epoch > membership_.newest();
  WEFT_FAIL_POINT(has_acked ? "acknowledge.begun" : "cell.begun");
  e.group.slots().show(rank_, e.shown);
  WEFT_FAIL_POINT(has_acked ? "acknowledge.shown" : "cell.shown");
}

void Communicator::show_cell() {
  if (!elastic_) return;
  const std::lock_guard lock(membership_mutex_);
  show_cell_locked();
}

// Of whichever thread drives the machine: the answer to boundary(), and what becomes of the change that is wanted here.
void Communicator::deliver(const Action& action) {
  Elastic& e = *elastic_;
  const std::lock_guard lock(e.mutex);
  switch (action.kind) {
    case Action::Kind::kChanged:
      if (!e.wish.together) {  // there may be more of it
        e.wish.again = e.wish.is_open;
        e.wake();
        break;
      }
      e.wish.is_open = false;
      e.wish.told = {WantedChange::State::kCommitted, action.epoch, {}};
      break;
    case Action::Kind::kWithdrawn: e.wish.again = e.wish.is_open; break;
    default: e.outcome = action;
  }
  e.changed.notify_all();
}

// ---- boundary --------------------------------------------------------------------------------------------------------

std::optional<DoneChange> Communicator::boundary(u64 deadline_ns, const Poll& poll, bool stands_by) {
  raise_if_broken();  // a rank that leaves may have closed before this one comes here
  if (has_left_) raise_if_unusable();
  Elastic& e = elastic("boundary");
  std::optional<Action> action;
  const u64 start_ns = now_ns();
  if (e.is_solo) {
    action = wait_to_be_taken_in(deadline_ns, poll, stands_by);
    if (!action) return std::nullopt;
    if (action->kind == Action::Kind::kRaise) {
      DoneChange done = follow_recovery(poll);
      done.waited_ns = now_ns() - start_ns;
      end_boundary(done);
      return done;
    }
  } else {
    {
      const std::lock_guard lock(membership_mutex_);
      if (membership_.pass()) {
        show_cell_locked();
        end_boundary({});
        return std::nullopt;
      }
    }
    action = wait_at_boundary(deadline_ns, poll);
  }
  if (action->kind == Action::Kind::kPass) {
    end_boundary({});
    return std::nullopt;
  }
  if (action->kind == Action::Kind::kInstall) {
    const u64 waited_ns = now_ns() - start_ns;
    DoneChange done = carry_out(*action);
    done.waited_ns += waited_ns;
    done.installed_ns = now_ns() - start_ns - done.waited_ns;
    note_times(done);
    return done;
  }
  raise_if_unusable();  // what the machine found may be known better here
  const std::string me = "rank " + std::to_string(rank_) + ": ";
  if (action->failure == Failure::kOvertaken) {
    const std::vector<int> out = (RankSet::of(active_) - action->ranks).ranks();
    give_up_overtaken(out);
    throw_peer_timeout("boundary", 0, out,
                       me + "the others have begun to recover (epoch " + std::to_string(action->epoch) +
                           " is decided); call recover()");
  }
  if (action->failure == Failure::kControlLost) {
    throw Error(ErrorCode::kControlLost, me + "a change of the membership was not decided by the deadline", "boundary");
  }
  raise_failure(*action);
}

std::optional<Action> Communicator::wait_at_boundary(u64 deadline_ns, const Poll& poll) {
  Elastic& e = *elastic_;
  {
    const std::lock_guard lock(e.mutex);
    e.outcome.reset();
  }
  e.is_at_boundary = true;
  const std::unique_ptr<Elastic, void (*)(Elastic*)> end(&e, [](Elastic* self) { self->is_at_boundary = false; });
  const auto outcome = [&]() -> std::optional<Action> {
    const std::lock_guard lock(e.mutex);
    return e.outcome;
  };
  ask(event_of(Event::Kind::kBoundary), Wait{deadline_ns, {}});
  u64 patience_ns = now_ns() + kDecideWithinNs;
  u64 poll_ns = now_ns() + kPollNs;
  for (;;) {  // check: allow spin-loop: sleeps on a condition variable and ends at the deadline
    {
      std::unique_lock lock(e.mutex);
      if (!e.outcome) e.changed.wait_for(lock, std::chrono::nanoseconds(kSliceNs));
      if (e.outcome) return e.outcome;
    }
    const u64 now = now_ns();
    if (is_closed() || is_broken()) {
      ask(event_of(Event::Kind::kLeave), Wait{0, {}});
      if (const auto found = outcome()) return found;  // it was decided just now
      raise_if_unusable();
    }
    if (poll && now >= poll_ns) {
      poll_ns = now + kPollNs;
      try {
        poll();
      } catch (...) {
        ask(event_of(Event::Kind::kLeave), Wait{0, {}});
        const auto found = outcome();
        if (found && found->kind == Action::Kind::kInstall) carry_out(*found);
        if (found && found->kind == Action::Kind::kPass) end_boundary({});
        throw;
      }
    }
    if (now >= deadline_ns) {
      ask(event_of(Event::Kind::kDeadline), Wait{0, {}});
      if (const auto found = outcome()) return found;
      raise_if_unusable();
      throw Error(ErrorCode::kControlLost, "a change of the membership was not decided by the deadline", "boundary");
    } else if (now >= patience_ns) {
      patience_ns = now + kDecideWithinNs;
      ask(event_of(Event::Kind::kPatience), Wait{0, {}});
    }
  }
}

EndedBoundary Communicator::ended_boundary() const {
  const std::lock_guard lock(ended_mutex_);
  return ended_;
}

void Communicator::end_boundary(const std::optional<DoneChange>& change) {
  const std::lock_guard lock(ended_mutex_);
  ++ended_.count;
  ended_.change = change;
}

void Communicator::note_times(const DoneChange& change) {
  const std::lock_guard lock(ended_mutex_);
  ended_.change = change;
}

// A newcomer; nothing: the deadline has come.
std::optional<Action> Communicator::wait_to_be_taken_in(u64 deadline_ns, const Poll& poll, bool stands_by) {
  Elastic& e = *elastic_;
  const auto has_to_prepare = [&] { return e.is_ready ? e.needs_refresh : stands_by; };
  u64 poll_ns = 0;
  bool was_gone = false;
  for (;;) {  // check: allow spin-loop: sleeps on a condition variable and ends at the deadline
    bool is_to_refresh = false;
    std::optional<Action> taken;
    {
      std::unique_lock lock(e.mutex);
      if (e.outcome) {
        e.changed.wait_for(lock, std::chrono::nanoseconds(kSliceNs));
      } else if (!has_to_prepare() && now_ns() < deadline_ns) {
        e.changed.wait_for(lock, std::chrono::nanoseconds(std::min(kPollNs, deadline_ns - now_ns())));
      }
      taken = e.outcome;
      is_to_refresh = !taken && has_to_prepare();
    }
    if (taken && taken->kind != Action::Kind::kInstall) return taken;
    if (taken) {  // kept for the next call, if the members do not come by the deadline
      const Decision found = plane_->ledger().find(taken->epoch);
      if (!found.record || may_begin(*found.record)) return taken;
    }
    if (is_closed()) throw_invalid_state("the communicator was closed while it waited to be taken in");
    const bool is_to_ask = has_to_ask_again();
    look();  // whoever has taken this rank in by now is prepared for it no more
    raise_if_unusable();
    if (is_to_ask) {
      const std::lock_guard lock(e.mutex);
      e.needs_refresh |= !e.outcome;
    }
    const bool is_gone = is_group_gone();
    if (is_gone && std::exchange(was_gone, true)) {  // twice: what was decided before has been delivered meanwhile
      throw_peer_lost("boundary", {}, "all members of the group have ended or closed, so nobody takes this rank in");
    }
    if (is_to_refresh && !is_gone) prepare_in_slices(deadline_ns, poll);
    const u64 now = now_ns();
    if (poll && now >= poll_ns) {
      poll_ns = now + kPollNs;
      poll();
    }
    if (now >= deadline_ns) return std::nullopt;
  }
}

// Whether a member that lives shows that it is not prepared for this rank, which was ready for those before it: they were newcomers
// both, and one of them was stopped when the other one asked. Of a rank that was suspended the members are prepared at the boundary
// where it was; who has not come there yet does not count. Or another newcomer shows that it is prepared for this rank, which is not
// for it: that one was silent when it was asked, and no change could take both in.
bool Communicator::is_unprepared_somewhere() {
  {
    const std::lock_guard lock(elastic_->mutex);
    if (!elastic_->is_ready) return false;
  }
  u32 installed = 0;
  RankSet prepared;
  {
    const std::lock_guard lock(membership_mutex_);
    installed = elastic_->installed;
    prepared = membership_.cell().prepared;
  }
  const RankSet living = met_members() - RankSet::of(plane_->dead_ranks());
  for (const int member : living.ranks()) {
    const std::optional<SlotCell> cell = elastic_->group.slots().look(member);
    if (cell && cell->installed >= installed && !cell->membership.prepared.contains(rank_)) return true;
  }
  for (const int newcomer : elastic_->newcomers()) {
    const std::optional<SlotCell> cell = elastic_->group.slots().look(newcomer);
    if (!prepared.contains(newcomer) && cell && cell->membership.prepared.contains(rank_)) return true;
  }
  return false;
}

// Now and then: what is asked for may not be to be had, as where a member has an object that the others have closed.
bool Communicator::has_to_ask_again() {
  u64& ask_ns = elastic_->ask_ns;
  if (!is_unprepared_somewhere()) {
    ask_ns = 0;
  } else if (ask_ns == 0) {
    ask_ns = now_ns() + kAskAgainNs;
  } else if (now_ns() >= ask_ns) {
    ask_ns = 0;
    return true;
  }
  return false;
}

// A member that does not answer may be left out meanwhile, by the very recovery that takes this rank in.
void Communicator::prepare_in_slices(u64 deadline_ns, const Poll& poll) {
  const u64 until_ns = std::min(deadline_ns, now_ns() + kPrepareNs);
  try {
    ready(until_ns, poll);
  } catch (const Error& error) {
    if (error.code != ErrorCode::kPeerTimeout) throw;
    const std::lock_guard lock(elastic_->mutex);
    elastic_->needs_refresh = true;
  }
}

// Members alone decide. One that has ended before this rank came to it counts, too.
bool Communicator::is_group_gone() {
  const RankSet unmet = unmet_members();
  const RankSet met = met_members();
  const RankSet dead = RankSet::of(plane_->dead_ranks());
  const std::lock_guard lock(membership_mutex_);
  return !membership_.newest_set().contains(rank_) && unmet.empty() && (met - dead).empty();
}

// Whether a rank that was a member is none by now. The register knows, whatever this rank has heard of it.
bool Communicator::is_left_out(int slot) {
  if (plane_->ledger().is_decided(next_epoch_.load(std::memory_order_relaxed)))
    ask(event_of(Event::Kind::kLook), Wait{0, {}});
  const std::lock_guard lock(membership_mutex_);
  return !membership_.newest_set().contains(slot);
}

// Who was active before a change that takes this rank in.
RankSet Communicator::set_before(const Action& action, const RankSet& added) const {
  const Decision last = plane_->ledger().find(action.epoch - 1);
  if (last.record) return last.record->active;
  return action.epoch - 1 == elastic_->first_epoch ? elastic_->first_set : action.ranks - added;
}

// Between two operations of this rank.
DoneChange Communicator::carry_out(const Action& action) {
  Elastic& e = *elastic_;
  const Decision found = plane_->ledger().find(action.epoch);
  if (!found.record) throw_internal("the record of epoch " + std::to_string(action.epoch) + " is damaged");
  WEFT_FAIL_POINT("install.before");
  const MembershipRecord& record = *found.record;
  RankSet added;
  for (u32 idx = 0; idx < record.num_new; ++idx) added.add(static_cast<int>(record.new_members[idx].slot));
  const bool was_solo = e.is_solo;
  const RankSet before = was_solo ? set_before(action, added) : RankSet::of(active_);
  const RankSet removed = before - action.ranks;
  DoneChange done{action.epoch,
                  record.id,
                  record.boundary,
                  added.ranks(),
                  removed.ranks(),
                  action.ranks.ranks(),
                  record.map_hash,
                  0,
                  0};
  std::map<int, AbortReason> early;
  const bool is_suspended = record.standby.contains(rank_);
  {
    const std::lock_guard lock(mutex_);
    epoch_ = action.epoch;
    has_left_ = !action.ranks.contains(rank_) && !is_suspended;
    active_ = has_left_ || is_suspended ? std::vector<int>{rank_} : action.ranks.ranks();
    active_set_ = RankSet::of(active_);
    closed_ranks_ = closed_ranks_ & active_set_;
    if (!has_left_) refusals_.clear();
    early = std::exchange(early_, {});
  }
  e.forget_newcomers(action.ranks.ranks());  // of changes that this rank had no part in, too
  {
    const std::lock_guard lock(e.mutex);
    e.outcome.reset();
  }
  WEFT_FAIL_POINT("install.entered");
  MemberWindow::Step step{
      action.epoch, added, removed, was_solo, action.ranks - added, RankSet::of(plane_->dead_ranks())};
  if (has_left_) step.removed = before - RankSet::of({rank_});
  step.removed = is_suspended ? RankSet() : step.removed - record.standby;
  RankSet late;  // of a group that has broken before all came to the boundary: nothing begins here before recover()
  if (was_solo) {
    late = not_installed(record);
    e.is_solo = false;
  }
  if (!late.empty()) step.members = {};
  const std::optional<Error> refusal = refusal_of([&] { change_windows(step); });
  for (const int rank : step.removed.ranks()) e.group.drop_member(rank);
  WEFT_FAIL_POINT("install.mapped");
  {
    const std::lock_guard lock(membership_mutex_);
    e.installed = action.epoch;
    e.next_window_id = next_window_id_;
    show_cell_locked();
  }
  end_boundary(done);
  WEFT_FAIL_POINT("install.shown");
  keep_suspended(record.standby & removed);
  e.ring();
  if (has_left_ || is_suspended) return done;
  for (const auto& [reporter, reason] : early) on_abort(reason);
  if (!late.empty()) adopt(lateness_of(late, rank_));  // not told to anybody: the others know better
  adopt_lost();
  if (refusal) {
    abort(refusal->text);  // the others count on this rank
    throw Error(*refusal);
  }
  return done;
}

// Who is suspended keeps its memory and connections, and so do the others: it is prepared for, like a newcomer. On the rank itself it
// is the machine of a newcomer again.
void Communicator::keep_suspended(const RankSet& ranks) {
  Elastic& e = *elastic_;
  for (const int slot : ranks.ranks()) {
    {
      const std::lock_guard lock(e.mutex);
      if (slot != rank_) e.newcomers_.insert(slot);
      if (slot == rank_) e.is_ready = true;
      if (slot == rank_) e.contract.clear();  // the caller says what it is worth now
    }
    if (slot == rank_) e.is_solo = true;
    Event event = event_of(Event::Kind::kPrepared);
    event.rank = slot;
    event.incarnation = e.group.slots().claimed(slot);
    ask(event, Wait{0, {}});
  }
}

// Of a rank that is outside: who was suspended since is outside, too, and the two have to be prepared for each other, or no change
// could take both in.
void Elastic::meet_suspended() {
  u32 newest = 0;
  RankSet members, resting, prepared;
  {
    const std::lock_guard lock(comm.membership_mutex_);
    newest = comm.membership_.newest();
    members = comm.membership_.newest_set();
    prepared = comm.membership_.cell().prepared;
    if (!is_solo) met_epoch = comm.membership_.epoch();
  }
  if (!is_solo) return;
  for (u32 epoch = std::max(met_epoch, first_epoch) + 1; epoch <= newest; ++epoch) {
    const Decision found = comm.plane_->ledger().find(epoch);
    if (found.record) resting = resting | found.record->standby;
  }
  met_epoch = newest;
  const RankSet outside = resting - members;
  const std::lock_guard lock(mutex);
  for (const int slot : outside.ranks()) {
    if (slot == comm.rank_) continue;
    // It may have been outside before: taken in meanwhile without this rank, it is not prepared for any more.
    const bool is_new = newcomers_.insert(slot).second;
    needs_refresh |= is_new || !prepared.contains(slot);
  }
}

// Of a newcomer that a recovery has taken in: its place is at the meeting, where all memory is made anew.
DoneChange Communicator::follow_recovery(const Poll& poll) {
  Elastic& e = *elastic_;
  {
    const std::lock_guard lock(e.mutex);
    e.outcome.reset();
    e.is_ready = e.needs_refresh = false;
  }
  e.is_solo = false;
  run_recovery(RecoverWish{}, now_ns() + kRecoverNs,
               poll);  // the others wait for this rank, whoever called with which deadline
  DoneChange done;
  done.epoch = epoch_;
  done.active = active_;
  done.added = (added_with(plane_->ledger(), epoch_, rank_) & RankSet::of(active_)).ranks();
  return done;
}

std::vector<u64> Communicator::map_hashes(u32 first, u32 last) const {
  std::vector<u64> found;
  for (u32 epoch = last; epoch >= first && epoch > 0; --epoch) {
    const Decision decided = plane_->ledger().find(epoch);
    if (decided.is_forgotten) break;
    if (decided.word.state != RegisterState::kCommitted) continue;
    const bool is_planned = decided.record && decided.record->kind == ChangeKind::kPlanned;
    found.push_back(is_planned ? decided.record->map_hash : 0);
  }
  return found;
}

void Communicator::change_windows(const MemberWindow::Step& step) {
  std::vector<MemberWindow*> windows;
  {
    const std::lock_guard lock(mutex_);
    windows = windows_;
    std::erase_if(goodbyes_, [this](const auto& each) { return !closed_ranks_.contains(each.first); });
    for (MemberWindow* window : windows_) window->notice_closed(closed_ranks_.mask());  // slots are taken by others
  }
  for (MemberWindow* window : windows) {
    if (has_left_) window->retire();
    window->change(step);
  }
}

// Of those that were members before: who has not come to the boundary yet.
RankSet Communicator::not_installed(const MembershipRecord& record) {
  RankSet waited = record.active;
  for (u32 idx = 0; idx < record.num_new; ++idx) waited.remove(static_cast<int>(record.new_members[idx].slot));
  for (const int rank : waited.ranks()) {
    const std::optional<SlotCell> cell = elastic_->group.slots().look(rank);
    if (!cell || cell->installed < record.epoch) continue;
    next_window_id_ = std::max(next_window_id_, cell->next_window_id);
    waited.remove(rank);
  }
  return waited;
}

// An open group's members come to the boundary of a change with all operations before it ended. So whoever has shown that it has installed
// the change, and has not sent what this rank waits for, has made one call less between two boundaries.
std::optional<std::string> Elastic::gone_on_text(int rank) const {
  const std::optional<SlotCell> cell = group.slots().look(rank);
  if (is_solo || !cell || cell->installed <= comm.epoch_) return std::nullopt;
  const std::lock_guard lock(comm.membership_mutex_);
  return "rank " + std::to_string(rank) + " has passed " + std::to_string(cell->membership.passed) +
         " and is in epoch " + std::to_string(cell->installed) + ", rank " + std::to_string(comm.rank_) +
         " has passed " + std::to_string(comm.membership_.passed()) + " and is in epoch " + std::to_string(comm.epoch_);
}

std::optional<std::string> gone_on_text(const Communicator& comm, int rank) {
  const Elastic* elastic = Elastic::of(comm);
  return elastic == nullptr ? std::nullopt : elastic->gone_on_text(rank);
}

// Whether a new rank need not wait any more: all members have come, or they will not.
bool Communicator::may_begin(const MembershipRecord& record) {
  const RankSet waited = not_installed(record);
  const RankSet gone = RankSet::of(plane_->dead_ranks());
  if (waited.empty() || !(waited & gone).empty()) return true;
  if (plane_->ledger().is_decided(record.epoch + 1)) {
    // Who has given its word for a further planned change has come through this one, and is about to show it.
    const Decision next = plane_->ledger().find(record.epoch + 1);
    if (!next.record || next.record->kind != ChangeKind::kPlanned) return true;
  }
  const std::lock_guard membership_lock(membership_mutex_);
  const std::lock_guard lock(mutex_);
  return std::any_of(early_.begin(), early_.end(), [&](const auto& each) {
    return membership_.hear(origin_of(each.second, each.first)) == Hearing::kCounts;
  });
}

}  // namespace weft
