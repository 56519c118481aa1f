// A change that this rank wants: until it is decided, or its time is over.
#include <algorithm>
#include <chrono>
#include <utility>

#include "base/clock.h"
#include "engine/elastic.h"
#include "weft/config/fail_point.h"

namespace weft {
namespace {

using Event = MembershipEvent;

constexpr u64 kPollNs = 50'000'000;
constexpr u64 kMostMargin = 1 << 20;

Event event_of(Event::Kind kind) {
  Event event;
  event.kind = kind;
  return event;
}

}  // namespace

void Communicator::propose(const Wanted& wanted, u64 deadline_ns) {
  const auto& [admit, remove, suspend, id, together, map_hash] = wanted;
  raise_if_broken();
  Elastic& e = elastic("propose");
  if (e.is_solo) throw_invalid_state("propose: this rank is no member of the group yet");
  const auto check = [&](const char* name, const std::vector<int>& ranks, bool are_active) {
    for (const int rank : ranks) {
      if (rank >= 0 && rank < num_ranks_ && is_active(rank) == are_active) continue;
      throw_invalid_argument(
          std::string(name) + ": " + ranks_text(ranks) + "; allowed are " +
          (are_active ? "active ranks (" : "ranks 0.." + std::to_string(num_ranks_ - 1) + " that are not active (") +
          ranks_text(active_) + (are_active ? ")" : " are)"));
    }
  };
  check("admit", admit, false);
  check("remove", remove, true);
  if (admit.empty() && remove.empty() && together && map_hash == 0) {
    throw_invalid_argument("a change needs ranks to admit or to remove, or an expert map");
  }
  if (remove.size() >= active_.size()) {
    throw_invalid_argument("remove: none of the active ranks would be left, of whom new ones learn where to begin");
  }
  {
    const std::lock_guard lock(membership_mutex_);
    if (membership_.is_era_over()) {
      throw_invalid_state(
          "propose: there were " + std::to_string(kMostEpochsOfEra) +
          " changes since the memory of the windows was made; call recover() on all ranks, which makes it anew");
    }
  }
  const std::lock_guard turn(e.wish_mutex);
  {
    const std::lock_guard lock(e.mutex);
    if (e.wish.is_open) throw_invalid_state("propose: a change of this rank is not decided yet; wait for its ticket");
    e.wish = {};
    e.wish.coming = RankSet::of(admit);
    e.wish.going = RankSet::of(remove);
    e.wish.change.add = e.wish.coming;
    e.wish.change.remove = e.wish.going;
    e.wish.change.suspend = RankSet::of(suspend);
    e.wish.change.id = id;
    e.wish.change.map_hash = map_hash;
    e.wish.since = epoch_;  // another rank's wish may have been decided, and this rank not have come to its boundary
    e.wish.together = together || admit.empty();
    e.wish.again = !e.wish.together;
    e.wish.deadline_ns = deadline_ns;
    e.wish.is_open = true;
  }
  Event event = event_of(Event::Kind::kPropose);
  event.change = e.wish.change;  // nobody else writes it meanwhile
  if (e.wish.together) ask(event, Wait{0, {}});
  e.wake();
}

// Of a change that need not happen at once: whoever could be taken in now, and with the first of them who is to go.
void Communicator::want_what_is_ready() {
  Elastic& e = *elastic_;
  Event event = event_of(Event::Kind::kPropose);
  {
    const std::lock_guard membership_lock(membership_mutex_);
    const RankSet& now = membership_.newest_set();
    const std::lock_guard lock(e.mutex);
    ChangeWish& change = e.wish.change;
    const RankSet ready = membership_.admissible(e.wish.coming);
    const bool is_new = ready != change.add || e.wish.again;
    const bool is_of_use = !ready.empty() || (e.wish.coming - now).empty();
    if (!is_of_use || !is_new || membership_.has_proposed() || now_ns() < e.wish.again_ns) return;
    if (ready != change.add) change.margin = ChangeWish{}.margin;
    change.add = ready;
    change.remove = e.wish.going & now;
    change.suspend = change.suspend & now;
    e.wish.again = false;
    e.wish.again_ns = now_ns() + std::min<u64>(change.margin * 1'000'000, 1'000'000'000);
    event.change = change;
    change.margin = std::min(change.margin * 2, kMostMargin);  // if it is withdrawn
  }
  ask(event, Wait{0, {}});
}

void Communicator::take_back_wish() {
  Elastic& e = *elastic_;
  ask(event_of(Event::Kind::kTakeBack), Wait{0, {}});
  const std::lock_guard membership_lock(membership_mutex_);
  const std::lock_guard lock(e.mutex);
  if (!e.wish.is_open || membership_.has_proposed()) return;  // it was committed; or tried again
  const RankSet& now = membership_.newest_set();
  const RankSet taken = e.wish.together ? RankSet() : e.wish.taken | (e.wish.coming & now);
  const bool is_in = e.wish.change.map_hash == 0 || e.wish.is_in(plane_->ledger(), membership_.newest());
  const bool is_done = (e.wish.coming - now).empty() && (e.wish.going & now).empty() && is_in;
  e.wish.is_open = e.wish.again = false;
  e.wish.told = {WantedChange::State::kWithdrawn, 0,
                 (taken.empty() ? "" : ranks_text(taken.ranks()) + " came in; ") + "it was taken back"};
  if (is_done) e.wish.told = {WantedChange::State::kCommitted, membership_.newest(), {}};
  e.changed.notify_all();
}

WantedChange Communicator::withdraw_change() {
  Elastic& e = elastic("withdraw");
  const std::lock_guard turn(e.wish_mutex);
  {
    const std::lock_guard lock(e.mutex);
    if (!e.wish.is_open) return e.wish.told;
    e.wish.is_taken_back = true;
  }
  take_back_wish();
  return wanted_change();
}

// A change that was withdrawn is wanted again with twice the margin, until its deadline.
void Communicator::renew_wish() {
  Elastic& e = *elastic_;
  const std::lock_guard turn(e.wish_mutex);  // the wish below is one and the same
  bool is_lost = false, has_proposed = false, is_taken_back = false, together = true, is_in = true;
  RankSet now, lacking, coming, going;
  const u32 newest = next_epoch_.load(std::memory_order_relaxed) - 1;
  {
    const std::lock_guard lock(e.mutex);
    if (!e.wish.is_open) return;
    coming = e.wish.coming;
    going = e.wish.going;
    is_taken_back = e.wish.is_taken_back;
    together = e.wish.together;
    if (e.wish.change.map_hash != 0) is_in = e.wish.is_in(plane_->ledger(), newest);
  }
  if (is_taken_back) return take_back_wish();
  {
    const std::lock_guard lock(membership_mutex_);
    has_proposed = membership_.has_proposed();
    now = membership_.newest_set();
    is_lost = !membership_.is_member() || membership_.is_evicted();
    lacking = coming - now - membership_.cell().prepared;
  }
  if (!together) {  // who came in once is wanted no more, whatever becomes of it
    const std::lock_guard lock(e.mutex);
    e.wish.taken = e.wish.taken | (coming & now);
    e.wish.coming = coming = coming - now;
    e.wish.going = going = going & now;
  }
  const bool is_done = (coming - now).empty() && (going & now).empty() && is_in;
  const auto end = [&](WantedChange::State state, u32 epoch, const std::string& reason) {
    ask(event_of(Event::Kind::kPropose), Wait{0, {}});  // nothing is wanted any more
    const std::lock_guard lock(e.mutex);
    if (!e.wish.is_open) return;  // it was decided meanwhile
    e.wish.is_open = e.wish.again = false;
    e.wish.told = {state, epoch, reason};
  };
  if (is_done) {
    return end(WantedChange::State::kCommitted, next_epoch_.load(std::memory_order_relaxed) - 1, {});
  }
  if (is_lost) return end(WantedChange::State::kWithdrawn, 0, "this rank is no member of the group any more");
  if ((now - going).empty()) {  // other changes were first
    return end(WantedChange::State::kWithdrawn, 0,
               "without " + ranks_text(going.ranks()) + " none of the active ranks would be left");
  }
  if (now_ns() >= e.wish.deadline_ns) {
    // First, since boundary() may propose it at any time: what stands in the register is withdrawn, or was committed.
    ask(event_of(Event::Kind::kTakeBack), Wait{0, {}});
    {
      const std::lock_guard lock(membership_mutex_);
      if (membership_.has_proposed()) return e.wake();  // not answered yet
    }
    const RankSet taken = e.wish.taken;
    return end(WantedChange::State::kWithdrawn, 0,
               (taken.empty() ? "" : ranks_text(taken.ranks()) + " came in; ") +
                   (lacking.empty() ? "the ranks did not come to a boundary in time"
                                    : ranks_text(lacking.ranks()) + " was not ready by the deadline"));
  }
  {
    const std::lock_guard lock(e.mutex);
    if (!e.wish.is_open) return;  // decided just now
    e.wish.told.state = has_proposed ? WantedChange::State::kProposed : WantedChange::State::kPreparing;
  }
  together ? want_again() : want_what_is_ready();
}

void Communicator::want_again() {
  Elastic& e = *elastic_;
  Event event = event_of(Event::Kind::kPropose);
  {
    const std::lock_guard lock(e.mutex);
    if (!e.wish.again || now_ns() < e.wish.again_ns) return;
    e.wish.again = false;
    e.wish.again_ns = now_ns() + std::min<u64>(e.wish.change.margin * 1'000'000, 1'000'000'000);
    e.wish.change.margin = std::min(e.wish.change.margin * 2, kMostMargin);
    event.change = e.wish.change;
  }
  WEFT_FAIL_POINT("wish.again");
  ask(event, Wait{0, {}});
}

WantedChange Communicator::wanted_change() {
  Elastic& e = elastic("propose");
  const std::lock_guard lock(e.mutex);
  return e.wish.told;
}

WantedChange Communicator::await_change(u64 deadline_ns, const Poll& poll) {
  Elastic& e = elastic("propose");
  for (;;) {  // check: allow spin-loop: sleeps on a condition variable and ends at the deadline
    if (poll) poll();
    std::unique_lock lock(e.mutex);
    if (!e.wish.is_open || now_ns() >= deadline_ns || e.is_stopping) return e.wish.told;
    e.changed.wait_for(lock, std::chrono::nanoseconds(std::min(kPollNs, deadline_ns - now_ns())));
  }
}

void Communicator::show_stage(u32 epoch, u32 number, u32 stage) {
  Elastic& e = elastic("change");
  const std::lock_guard lock(membership_mutex_);
  auto& [last, before] = e.changes;
  if (last.epoch != epoch || last.number != number) before = last;
  last = {epoch, number, stage, epoch_};
  show_cell_locked();
}

std::vector<std::pair<u32, u32>> Communicator::stages(u32 epoch, u32 number, const std::vector<int>& ranks) {
  Elastic& e = elastic("change");
  std::vector<std::pair<u32, u32>> found(ranks.size());
  for (size_t idx = 0; idx < ranks.size(); ++idx) {
    const std::optional<SlotCell> cell = e.group.slots().look(ranks[idx]);
    if (!cell) continue;
    for (const ChangeStage& each : cell->changes) {
      if (each.epoch == epoch && each.number == number) found[idx] = {each.stage, each.newest};
    }
  }
  return found;
}

}  // namespace weft
