// What a rank of an open group asks another one for, and is asked for: windows, contracts, and whether all is made.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "engine/elastic.h"
#include "weft/config/fail_point.h"

namespace weft {
namespace {

using Event = MembershipEvent;

constexpr u64 kOtherNewcomerNs = 1'000'000'000;  // for an answer of a rank that is no member
constexpr u64 kWaitSliceNs = 50'000'000;
constexpr u64 kOfferAgainNs = 2'000'000;  // before all is offered again

struct TakenIn {};  // meanwhile: there is nothing to prepare any more

struct AnswerHead {
  u64 code;  // 0: what was asked for follows, else the text of the error
};

std::vector<std::byte> pack_answer(u64 code, std::span<const std::byte> body) {
  const AnswerHead head{code};
  std::vector<std::byte> bytes(sizeof(head) + body.size());
  std::memcpy(bytes.data(), &head, sizeof(head));
  std::copy(body.begin(), body.end(), bytes.begin() + sizeof(head));
  return bytes;
}

std::vector<u64> numbers_of(std::span<const std::byte> bytes) {
  std::vector<u64> numbers(bytes.size() / sizeof(u64));
  if (!numbers.empty()) std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(u64));
  return numbers;
}

std::vector<std::byte> bytes_of(const std::vector<u64>& numbers) {
  const auto bytes = std::as_bytes(std::span(numbers));
  return {bytes.begin(), bytes.end()};
}

}  // namespace

// Error as the other rank's refusal; kPeerLost, kPeerTimeout. A member that is left out meanwhile, and stopped, or awake again and
// closing, is lost: its refusal says nothing of the group.
Parcel Communicator::inquire(int slot, Errand errand, std::vector<std::byte> bytes, std::vector<OwnedFd> fds,
                             bool is_member, const Wait& wait) {
  Elastic& e = *elastic_;
  u64 number = 0;
  {
    const std::lock_guard lock(e.mutex);
    number = ++e.num_asked;
    e.asked.insert(number);
  }
  const std::unique_ptr<Elastic, std::function<void(Elastic*)>> done(&e, [number](Elastic* elastic) {
    const std::lock_guard lock(elastic->mutex);
    elastic->asked.erase(number);
    elastic->answers.erase(number);
  });
  e.group.send(slot, tag_of(errand, number), std::move(bytes), std::move(fds));
  const auto raise_lost = [slot] {
    throw_peer_lost("join", {slot},
                    "rank " + std::to_string(slot) + " ended, closed or was left out before it answered");
  };
  Parcel parcel;
  for (;;) {  // check: allow spin-loop: sleeps on a condition variable and ends at the deadline
    const bool lives = RankSet::of(e.group.peers()).contains(slot) && !(is_member && is_left_out(slot));
    if (wait.poll) wait.poll();
    std::unique_lock lock(e.mutex);
    if (!e.answers.contains(number) && lives) e.changed.wait_for(lock, std::chrono::nanoseconds(kWaitSliceNs));
    const auto found = e.answers.find(number);
    if (found != e.answers.end()) {
      parcel = std::move(found->second);
      break;
    }
    if (!lives) raise_lost();
    if (is_closed()) throw_invalid_state("the communicator was closed while it waited for an answer");
    if (now_ns() >= wait.deadline_ns) {
      if (!is_member && e.is_solo) e.silent.insert(slot);  // under the lock: an answer that comes from now on ends it
      throw_peer_timeout("join", 0, {slot}, "rank " + std::to_string(slot) + " did not answer by the deadline");
    }
  }
  AnswerHead head{};
  if (parcel.bytes.size() < sizeof(head)) throw_internal("a malformed answer of rank " + std::to_string(slot));
  std::memcpy(&head, parcel.bytes.data(), sizeof(head));
  parcel.bytes.erase(parcel.bytes.begin(), parcel.bytes.begin() + sizeof(head));
  if (head.code == 0) return parcel;
  if (is_member && is_left_out(slot)) raise_lost();
  const bool is_known = head.code <= static_cast<u64>(ErrorCode::kControlLost);
  throw Error(is_known ? static_cast<ErrorCode>(head.code) : ErrorCode::kInternalError,
              std::string(reinterpret_cast<const char*>(parcel.bytes.data()), parcel.bytes.size()), "join", 0, {slot});
}

void Communicator::serve(int slot, u64 tag, Parcel&& parcel) {
  Elastic& e = *elastic_;
  look_past_member(slot);
  Parcel answer;
  u64 code = 0;
  try {
    switch (errand_of(tag)) {
      case Errand::kWindow: {
        u64 id = 0;
        if (parcel.bytes.size() < sizeof(id)) throw_invalid_argument("a malformed offer of a window");
        std::memcpy(&id, parcel.bytes.data(), sizeof(id));
        parcel.bytes.erase(parcel.bytes.begin(), parcel.bytes.begin() + sizeof(id));
        const std::lock_guard membership_lock(membership_mutex_);  // nobody comes in meanwhile
        const std::lock_guard lock(mutex_);                        // nor is it closed
        const auto found =
            std::find_if(windows_.begin(), windows_.end(), [&](const MemberWindow* each) { return each->id() == id; });
        if (found == windows_.end()) {
          throw_invalid_state("rank " + std::to_string(rank_) + " has no window " + std::to_string(id) + " (any more)");
        }
        // Operations use what is mapped of it, without a lock.
        if (membership_.newest_set().contains(slot) || (!e.is_solo && membership_.active().contains(slot))) {
          throw_invalid_state("rank " + std::to_string(rank_) + ": rank " + std::to_string(slot) +
                              " belongs to the group already, with the windows that it had");
        }
        (*found)->take_in(slot, std::move(parcel));
        WEFT_FAIL_POINT("window.taken");
        answer = (*found)->offer();
        break;
      }
      case Errand::kContract: {
        const std::lock_guard lock(e.mutex);
        const auto bytes = std::as_bytes(std::span(e.contract));
        answer.bytes.assign(bytes.begin(), bytes.end());
        break;
      }
      case Errand::kReady: answer.bytes = serve_ready(slot, parcel); break;
      case Errand::kUnready: {
        const std::vector<u64> why = numbers_of(parcel.bytes);
        const bool is_for_new_window = !why.empty() && why.front() == 1;
        const std::lock_guard lock(e.mutex);
        ++e.num_unready;
        if (!is_for_new_window) e.needs_refresh = true;
        if (is_for_new_window && std::exchange(e.is_ready, false)) {
          log_line(kLogWarning,
                   "rank " + std::to_string(rank_) +
                       ": the group has made another window; make the same object here, and call ready() again");
        }
        e.changed.notify_all();
        return;
      }
      case Errand::kNotReady: ask(Event{.kind = Event::Kind::kPrepared, .rank = slot}, Wait{0, {}}); return;
      default: throw_invalid_argument("an errand of an unknown kind");
    }
  } catch (const Error& error) {
    code = static_cast<u64>(error.code);
    const auto bytes = std::as_bytes(std::span(error.text));
    answer = Parcel();
    answer.bytes.assign(bytes.begin(), bytes.end());
  }
  e.group.send(slot, tag_of(Errand::kAnswer, number_of(tag)), pack_answer(code, answer.bytes), std::move(answer.fds));
}

// Numbers of windows that this rank has and the newcomer has not; none: this rank is prepared for it.
std::vector<std::byte> Communicator::serve_ready(int slot, const Parcel& parcel) {
  const std::vector<u64> theirs = numbers_of(parcel.bytes);
  std::vector<u64> missing;
  const std::lock_guard turn(elastic_->prepare_mutex);  // what is found is what counts
  {
    const std::lock_guard lock(mutex_);
    for (const MemberWindow* window : windows_) {
      const bool has_it = std::find(theirs.begin(), theirs.end(), window->id()) != theirs.end();
      if (!has_it || !window->has_taken_in(slot)) missing.push_back(window->id());
    }
  }
  if (elastic_->is_holding && missing.empty()) missing = theirs;  // to be offered again, and asked for
  if (missing.empty()) {
    Event event;
    event.kind = Event::Kind::kPrepared;
    event.rank = slot;
    event.incarnation = elastic_->group.slots().claimed(slot);
    ask(event, Wait{0, {}});
  }
  WEFT_FAIL_POINT("ready.served");
  return bytes_of(missing);
}

// Heaps of the members may have grown: this rank's grows as it joins, and is shown once more. Those of other newcomers do not
// count: what members are prepared for does not grow.
void Communicator::share_window(MemberWindow& window, u64 deadline_ns, const Poll& poll, bool is_new) {
  const RankSet members = met_members();
  do {
    swap_offers(window, members, {deadline_ns, poll}, is_new);
  } while (window.match_heaps(members));
}

void Communicator::swap_offers(MemberWindow& window, const RankSet& members, const Wait& wait, bool is_new) {
  for (const int peer : elastic_->group.peers()) {
    const bool is_member = members.contains(peer);
    if (!is_member && elastic_->is_silent(peer)) continue;
    const u64 until_ns = is_member ? wait.deadline_ns : std::min(wait.deadline_ns, now_ns() + kOtherNewcomerNs);
    Parcel offer = window.offer();
    std::vector<std::byte> bytes(sizeof(u64) + offer.bytes.size());
    WEFT_FAIL_POINT("window.offered");
    const u64 id = window.id();
    std::memcpy(bytes.data(), &id, sizeof(id));
    std::copy(offer.bytes.begin(), offer.bytes.end(), bytes.begin() + sizeof(id));
    try {
      window.take_in(peer, inquire(peer, Errand::kWindow, std::move(bytes), std::move(offer.fds), is_member,
                                   {until_ns, wait.poll}));
      WEFT_FAIL_POINT("window.shared");
    } catch (const Error& error) {  // another newcomer asks when it makes the window
      const bool is_of_no_use = !is_new && error.code == ErrorCode::kInvalidState;  // the member has closed it
      if (is_member && !is_of_no_use && error.code != ErrorCode::kPeerLost) throw;
    }
  }
}

void Communicator::refresh_windows(u64 deadline_ns, const Poll& poll) {
  std::vector<MemberWindow*> windows;
  {
    const std::lock_guard lock(mutex_);
    windows = windows_;
  }
  for (MemberWindow* window : windows) {
    if (!window->is_retired()) share_window(*window, deadline_ns, poll, false);
  }
}

void Communicator::ready(u64 deadline_ns, const Poll& poll) {
  Elastic& e = elastic("ready");
  raise_if_evicted();
  if (!e.is_solo) throw_invalid_state("ready: this rank is a member of the group already");
  try {
    prepare(deadline_ns, [&] {
      if (poll) poll();
      const std::lock_guard lock(e.mutex);
      if (e.outcome) throw TakenIn{};
    });
  } catch (const TakenIn&) {
    return;  // boundary() says so
  }
}

void Communicator::prepare(u64 deadline_ns, const Poll& poll) {
  Elastic& e = *elastic_;
  for (;;) {  // check: allow spin-loop: each turn asks every rank, and ends at the deadline
    const u32 epoch = meet_members({deadline_ns, poll});
    std::unique_lock refresh_lock(e.mutex);
    const bool needs_refresh = std::exchange(e.needs_refresh, false);
    const u64 num_unready = e.num_unready;
    refresh_lock.unlock();
    bool is_ready = false;
    try {
      if (needs_refresh) refresh_windows(deadline_ns, poll);
      if (ask_whether_all_is_made({deadline_ns, poll}) && !is_newer_than(epoch)) {
        const std::lock_guard lock(e.mutex);
        e.is_ready = e.num_unready == num_unready;  // nobody has taken its word back meanwhile
        is_ready = e.is_ready;
      }
      if (is_ready) return e.show_ready();
    } catch (...) {
      const std::lock_guard lock(e.mutex);
      e.needs_refresh |= needs_refresh;
      throw;
    }
    std::unique_lock lock(e.mutex);
    e.needs_refresh = true;
    if (now_ns() >= deadline_ns)
      throw_peer_timeout("ready", 0, {}, "the windows of the members changed until the deadline");
    e.changed.wait_for(lock, std::chrono::nanoseconds(kOfferAgainNs));
  }
}

// False: a member has not mapped this rank's part of a window that both have, or not the memory that it has now.
bool Communicator::ask_whether_all_is_made(const Wait& wait) {
  Elastic& e = *elastic_;
  std::vector<u64> ids;
  const RankSet members = met_members();
  {
    const std::lock_guard lock(mutex_);
    for (const MemberWindow* window : windows_) ids.push_back(window->id());
  }
  std::map<u64, size_t> missing;  // by window: how many members have it
  size_t num_members = 0;
  for (const int peer : e.group.peers()) {
    const bool is_member = members.contains(peer);
    if (!is_member && e.is_silent(peer)) continue;
    const u64 until_ns = is_member ? wait.deadline_ns : std::min(wait.deadline_ns, now_ns() + kOtherNewcomerNs);
    try {
      const Parcel answer = inquire(peer, Errand::kReady, bytes_of(ids), {}, is_member, {until_ns, wait.poll});
      WEFT_FAIL_POINT("ready.answered");
      const std::vector<u64> lacks = numbers_of(answer.bytes);
      if (is_member) {
        ++num_members;
        for (const u64 id : lacks) ++missing[id];
        continue;
      }
      if (lacks.empty() && has_all_of(peer)) {  // of two newcomers the later one is prepared for both
        Event event;
        event.kind = Event::Kind::kPrepared;
        event.rank = peer;
        event.incarnation = e.group.slots().claimed(peer);
        ask(event, Wait{0, {}});
      }
    } catch (const Error& error) {  // another newcomer, which may be stopped, holds up nobody
      if (is_member && error.code != ErrorCode::kPeerLost) throw;
    }
  }
  bool is_all = true;
  std::string text;
  for (const auto& [id, count] : missing) {
    const bool is_here = std::find(ids.begin(), ids.end(), id) != ids.end();
    if (is_here) is_all = false;
    // What a member has closed is of no use to anybody.
    if (!is_here && count == num_members) text += (text.empty() ? "" : ", ") + std::to_string(id);
  }
  if (!text.empty()) {
    throw_invalid_state("ready: the group has windows that this rank has not: " + text +
                        "; make the objects that the members have, and call ready() again");
  }
  return is_all;
}

bool Communicator::has_some_of(int slot) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(windows_.begin(), windows_.end(),
                     [&](const MemberWindow* window) { return window->has_taken_in(slot); });
}

// Whether this rank has mapped the windows of another one.
bool Communicator::has_all_of(int slot) const {
  const std::lock_guard lock(mutex_);
  return std::all_of(windows_.begin(), windows_.end(),
                     [&](const MemberWindow* window) { return window->has_taken_in(slot); });
}

void Communicator::set_contract(std::string contract) {
  if (!elastic_) return;
  const std::lock_guard lock(elastic_->mutex);
  elastic_->contract = std::move(contract);
}

std::string Communicator::ask_contract(u64 deadline_ns, const Poll& poll, const std::vector<int>& of) {
  static_cast<void>(elastic("join"));
  const RankSet members = of.empty() ? met_members() : RankSet::of(of);
  for (const int member : members.ranks()) {
    try {
      const bool is_member = of.empty() || is_solo();  // who is no newcomer may ask one that is let go
      const Parcel answer = inquire(member, Errand::kContract, {}, {}, is_member, {deadline_ns, poll});
      return {reinterpret_cast<const char*>(answer.bytes.data()), answer.bytes.size()};
    } catch (const Error& error) {
      if (error.code != ErrorCode::kPeerLost) throw;  // the next one knows it, too
    }
  }
  throw_peer_lost("join", {}, "no member of the group answers any more");
}

// Newcomers have to be prepared for anew: `is_for_new_window`: one that they lack; else all memory is fresh.
void Communicator::unprepare_all(bool is_for_new_window, const RankSet& but) {
  Elastic& e = *elastic_;
  for (const int slot : e.newcomers()) {
    if (but.contains(slot)) continue;
    Event event;
    event.kind = Event::Kind::kPrepared;
    event.rank = slot;
    ask(event, Wait{0, {}});
    if (e.is_solo) continue;  // what a newcomer makes others need not have; it asks them when it is ready
    e.group.send(slot, tag_of(Errand::kUnready, 0), bytes_of({is_for_new_window ? u64{1} : u64{0}}), {});
  }
}

// Before a recovery renews all memory, and until this rank is in its epoch: a change must not count on what newcomers had mapped before.
// `taken_in`: spares that come in with it.
void Communicator::hold_in_recovery(bool holds, const RankSet& taken_in) {
  const std::lock_guard turn(elastic_->prepare_mutex);
  elastic_->is_holding = holds;
  unprepare_all(false, taken_in);
}

// While memory of a window changes: what a newcomer has mapped before must not be acknowledged.
void Communicator::hold_newcomers(bool holds) {
  if (!elastic_) return;
  Elastic& e = *elastic_;
  {
    const std::lock_guard turn(e.prepare_mutex);
    e.is_holding = holds;
    if (holds) unprepare_all(false);
  }
  if (!holds) return;
  look();
  const std::lock_guard lock(membership_mutex_);
  if (membership_.is_changing()) {
    throw_invalid_state("a change of the membership is under way on rank " + std::to_string(rank_) +
                        "; go on to the boundary where it takes effect, and try again");
  }
}

}  // namespace weft
