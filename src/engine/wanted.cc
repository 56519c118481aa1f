// A change that this rank wants: until it is decided, or its time is over.
#include <algorithm>
#include <chrono>
#include <utility>

#include "base/clock.h"
#include "engine/elastic.h"

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
  const auto& [admit, remove, suspend, id] = wanted;
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
  if (admit.empty() && remove.empty()) throw_invalid_argument("a change needs ranks to admit or to remove");
  if (remove.size() >= active_.size()) {
    throw_invalid_argument("remove: none of the active ranks would be left, of whom new ones learn where to begin");
  }
  {
    const std::lock_guard lock(e.mutex);
    if (e.wish.is_open) throw_invalid_state("propose: a change of this rank is not decided yet; wait for its ticket");
    e.wish = {};
    e.wish.change.add = RankSet::of(admit);
    e.wish.change.remove = RankSet::of(remove);
    e.wish.change.suspend = RankSet::of(suspend);
    e.wish.change.id = id;
    e.wish.deadline_ns = deadline_ns;
    e.wish.is_open = true;
  }
  Event event = event_of(Event::Kind::kPropose);
  event.change = e.wish.change;
  ask(event, Wait{0, {}});
  e.wake();
}

// A change that was withdrawn is wanted again with twice the margin, until its deadline.
void Communicator::renew_wish() {
  Elastic& e = *elastic_;
  bool is_done = false, is_lost = false, has_proposed = false;
  RankSet lacking;
  ChangeWish change;
  {
    const std::lock_guard lock(e.mutex);
    if (!e.wish.is_open) return;
    change = e.wish.change;
  }
  {
    const std::lock_guard lock(membership_mutex_);
    has_proposed = membership_.has_proposed();
    const RankSet& now = membership_.newest_set();
    is_done = (change.add - now).empty() && (change.remove & now).empty();
    is_lost = !membership_.is_member() || membership_.is_evicted();
    lacking = change.add - membership_.cell().prepared;
  }
  const auto withdraw = [&](const std::string& reason) {
    ask(event_of(Event::Kind::kPropose), Wait{0, {}});  // nothing is wanted any more
    const std::lock_guard lock(e.mutex);
    e.wish.is_open = e.wish.again = false;
    e.wish.told = {WantedChange::State::kWithdrawn, 0, reason};
  };
  bool again = false;
  {
    const std::lock_guard lock(e.mutex);
    e.wish.told.state = has_proposed ? WantedChange::State::kProposed : WantedChange::State::kPreparing;
    again = e.wish.again && now_ns() >= e.wish.again_ns;
    if (again) e.wish.again = false;
    if (again) e.wish.again_ns = now_ns() + std::min<u64>(e.wish.change.margin * 1'000'000, 1'000'000'000);
  }
  if (is_done) {
    ask(event_of(Event::Kind::kPropose), Wait{0, {}});
    const std::lock_guard lock(e.mutex);
    e.wish.is_open = false;
    e.wish.told = {WantedChange::State::kCommitted, next_epoch_.load(std::memory_order_relaxed) - 1, {}};
    return;
  }
  if (is_lost) return withdraw("this rank is no member of the group any more");
  if (now_ns() >= e.wish.deadline_ns && !has_proposed) {
    return withdraw(lacking.empty() ? "the ranks did not come to a boundary in time"
                                    : ranks_text(lacking.ranks()) + " was not ready by the deadline");
  }
  if (!again) return;
  change.margin = std::min(change.margin * 2, kMostMargin);
  {
    const std::lock_guard lock(e.mutex);
    e.wish.change = change;
  }
  Event event = event_of(Event::Kind::kPropose);
  event.change = change;
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

}  // namespace weft
