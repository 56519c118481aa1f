// A rank that joins, and those whose slots were claimed at the same time: it may be connected to none of them yet.
#include <chrono>
#include <memory>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "bootstrap/newcomer.h"
#include "engine/elastic.h"
#include "weft/config/fail_point.h"

namespace weft {
namespace {

constexpr u64 kStrangerNs = 500'000'000;  // so long the other one has to call
constexpr u64 kMemberNs = 10'000'000;     // of who is a member by now, and so not about to call
constexpr u64 kSliceNs = 2'000'000;       // of a wait: a turn of the thread that calls wakes earlier

}  // namespace

bool Elastic::is_calling(int slot) const {
  const auto found = strangers.find(slot);
  return found != strangers.end() && found->second.call && found->second.call->fd() >= 0;
}

// Two newcomers that came at the same time: the one in the higher slot calls. It leaves the other one time to call by itself.
// A member calls nobody; what it has begun as a newcomer goes on, for the other one may have heard it.
void Communicator::call_strangers() {
  Elastic& e = *elastic_;
  SlotTable& slots = e.group.slots();
  std::vector<u64> incarnations;
  {
    const std::lock_guard lock(membership_mutex_);
    incarnations = membership_.welcome().incarnations;
  }
  for (int slot = 0; slot < num_ranks_; ++slot) {
    const u64 incarnation = slot == rank_ ? 0 : slots.claimed(slot);
    const auto known = e.strangers.find(slot);
    if (known != e.strangers.end() &&
        (known->second.incarnation != incarnation || e.group.has_peer(slot, incarnation))) {
      e.strangers.erase(slot);
    }
    if (incarnation == 0 || e.group.has_peer(slot, incarnation)) continue;
    const bool is_member = incarnations[static_cast<size_t>(slot)] == incarnation;
    const bool is_to_call = e.is_solo && (slot < rank_ || is_member);
    if (!is_to_call && !e.is_calling(slot)) {  // or no more
      e.strangers.erase(slot);
      continue;
    }
    Elastic::Stranger& stranger = e.strangers.try_emplace(slot, Elastic::Stranger{incarnation, now_ns()}).first->second;
    if (!(is_to_call && is_member) && !e.has_room(slot)) continue;
    try {
      if (e.call(slot, stranger, is_member)) {
        Connection connection = stranger.call->take();
        e.strangers.erase(slot);
        admit(slot, incarnation, std::move(connection), {});
      }
    } catch (const Error& error) {  // it turned the call away: the others are called all the same
      log_line(kLogWarning,
               "rank " + std::to_string(rank_) + " called rank " + std::to_string(slot) + ": " + error.text);
      e.strangers.insert_or_assign(slot, Elastic::Stranger{incarnation, now_ns(), {}, true});
    }
  }
}

// Whether it has answered.
bool Elastic::call(int slot, Stranger& stranger, bool is_member) {
  if (!stranger.call) {
    const u64 pause_ns = is_member && !stranger.was_called ? kMemberNs : kStrangerNs;
    const std::optional<Endpoint> endpoint = group.slots().endpoint(slot);
    if (now_ns() - stranger.since_ns < pause_ns || !endpoint) return false;
    const CallingRank self{comm.rank_, group.endpoint(), group.secret(), group.life_fd()};
    stranger.since_ns = now_ns();
    stranger.was_called = true;
    stranger.call = std::make_unique<OpenCall>(self, slot, group.slots().num_slots(), *endpoint);
  }
  const OpenCall::State state = stranger.call->step();
  if (state == OpenCall::State::kAnswered || state == OpenCall::State::kCalling) {
    return state == OpenCall::State::kAnswered;
  }
  stranger.call.reset();
  if (state == OpenCall::State::kAbsent) {
    const std::lock_guard lock(mutex);
    absent.insert_or_assign(slot, stranger.incarnation);
  }
  return false;
}

bool Elastic::is_silent(int slot) const {
  const std::lock_guard lock(mutex);
  return silent.contains(slot);
}

// Whether there are other members by now than those of `epoch`.
bool Communicator::is_newer_than(u32 epoch) {
  return next_epoch_.load(std::memory_order_relaxed) != epoch + 1 || plane_->ledger().is_decided(epoch + 1);
}

// Those of the newest epoch that live, as far as this rank knows, and that it is not connected to. They were newcomers when it came.
RankSet Communicator::unmet_members() {
  Elastic& e = *elastic_;
  std::vector<u64> members;
  {
    const std::lock_guard lock(membership_mutex_);
    members = membership_.welcome().incarnations;
  }
  {
    const std::lock_guard lock(e.mutex);
    for (const auto& [slot, incarnation] : e.absent) {
      u64& member = members[static_cast<size_t>(slot)];
      if (member == incarnation) member = 0;
    }
  }
  RankSet unmet;
  for (int slot = 0; slot < num_ranks_; ++slot) {
    const u64 incarnation = members[static_cast<size_t>(slot)];
    if (incarnation == 0 || slot == rank_ || e.group.has_peer(slot, incarnation)) continue;
    if (e.group.slots().claimed(slot) == incarnation) unmet.add(slot);  // else it has ended
  }
  return unmet;
}

// Members of the newest epoch that is known here, to which this rank is connected. The slot does not tell: in that of a member that
// a record unread as yet leaves out a newcomer may be by now.
RankSet Communicator::met_members() {
  std::vector<u64> members;
  {
    const std::lock_guard lock(membership_mutex_);
    members = membership_.welcome().incarnations;
  }
  RankSet met;
  for (int slot = 0; slot < num_ranks_; ++slot) {
    const u64 incarnation = members[static_cast<size_t>(slot)];
    if (incarnation != 0 && elastic_->group.has_peer(slot, incarnation)) met.add(slot);
  }
  return met;
}

// A letter has come from this slot, whose owner is connected: if it is not the member that this rank knows there, there is a record to
// read before it is answered.
void Communicator::look_past_member(int slot) {
  u64 member = 0;
  {
    const std::lock_guard lock(membership_mutex_);
    member = membership_.welcome().incarnations[static_cast<size_t>(slot)];
  }
  if (member == 0 || elastic_->group.has_peer(slot, member)) return;
  MembershipEvent look;
  look.kind = MembershipEvent::Kind::kLook;
  ask(look, Wait{0, {}});
}

// Until this rank is connected to all members, which it could not be prepared for otherwise; those of the epoch that is returned.
u32 Communicator::meet_members(const Wait& wait) {
  Elastic& e = *elastic_;
  RankSet called;
  for (;;) {  // check: allow spin-loop: sleeps on a condition variable and ends at the deadline
    if (wait.poll) wait.poll();
    if (is_closed()) throw_invalid_state("the communicator was closed while it waited for members");
    raise_if_evicted();  // looks, too
    const u32 epoch = next_epoch_.load(std::memory_order_relaxed) - 1;
    const RankSet unmet = unmet_members();
    if (unmet.empty() && !is_newer_than(epoch)) return epoch;
    if (now_ns() >= wait.deadline_ns) {
      throw_peer_timeout("ready", 0, unmet.ranks(),
                         "rank " + std::to_string(rank_) + " was not connected to all members by the deadline" +
                             (unmet.empty() ? "" : ": not to " + ranks_text(unmet.ranks())));
    }
    if (!(unmet - called).empty()) e.wake();  // the thread that calls them
    called = unmet;
    std::unique_lock lock(e.mutex);
    e.changed.wait_for(lock, std::chrono::nanoseconds(kSliceNs));
  }
}

// Of a newcomer that closes a window: whoever has prepared for it must not count on that any more, and itself it gives no word. Behind
// the decision that takes it in it is a member, and its windows are its own business.
void Elastic::take_ready_back() noexcept {
  if (is_in_child() || is_stopping || !is_solo) return;
  {
    const std::lock_guard lock(mutex);
    is_ready = false;
  }
  MembershipEvent event;
  event.kind = MembershipEvent::Kind::kPrepared;
  event.rank = comm.rank_;
  try {
    comm.ask(event, Wait{0, {}});
    WEFT_FAIL_POINT("ready.taken_back");
    for (const int peer : group.peers()) group.send(peer, tag_of(Errand::kNotReady, 0), {}, {});
  } catch (const Error& error) {  // the window is closed all the same
    log_line(kLogWarning, "rank " + std::to_string(comm.rank_) + ", not ready any more: " + error.text);
  }
}

// Of a newcomer that is ready: it gives its word again.
void Elastic::show_ready() {
  MembershipEvent event;
  event.kind = MembershipEvent::Kind::kPrepared;
  event.rank = comm.rank_;
  event.incarnation = group.slots().claimed(comm.rank_);
  {
    const std::lock_guard lock(comm.membership_mutex_);
    if (comm.membership_.cell().prepared.contains(comm.rank_)) return;
  }
  comm.ask(event, Wait{0, {}});
}

}  // namespace weft
