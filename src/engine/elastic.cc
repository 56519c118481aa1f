// The thread of a rank of an open group: it hears newcomers and the others' cells, and serves what they ask for.
#include "engine/elastic.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "base/thread.h"
#include "weft/config/fail_point.h"

namespace weft {
namespace {

using Action = MembershipAction;
using Event = MembershipEvent;

constexpr int kSlowTurnMs = 200;         // when nothing is heard: what no descriptor tells
constexpr int kFastTurnMs = 5;           // while somebody waits for that
constexpr u64 kUnknownNs = 500'000'000;  // between two looks whether one that never came here is over

}  // namespace

Elastic::Elastic(Communicator& self, OpenGroup& open_group)
    : comm(self),
      group(open_group),
      first_epoch(self.membership_.newest()),
      first_set(self.membership_.newest_set()),
      owner_pid_(getpid()),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_.valid()) throw_system_error("eventfd", errno);
  is_solo = !comm.membership_.is_member();
  const std::vector<u64> members = comm.membership_.welcome().incarnations;
  for (const int peer : group.peers()) {
    if (is_solo && !group.has_peer(peer, members[static_cast<size_t>(peer)])) newcomers_.insert(peer);
  }
  for (const int slot : comm.plane_->dead_ranks()) {
    const u64 member = members[static_cast<size_t>(slot)];
    if (member != 0 && !group.has_peer(slot, member)) absent.emplace(slot, member);
  }
  Reception::Host host;
  host.welcome = [this] {
    const std::lock_guard lock(comm.membership_mutex_);
    const Membership& membership = comm.membership_;
    if (!membership.is_member() || membership.is_leaving() || membership.is_evicted()) {
      throw Error(ErrorCode::kEvicted, "this rank is no member of the group", "join");
    }
    return membership.welcome();
  };
  // Of two that call each other the call of the lower one counts: it may be one that does not hear as yet.
  host.has_room = [this](int slot) { return has_room(slot) && !(slot > comm.rank_ && is_calling(slot)); };
  host.admit = [this](int slot, u64 incarnation, Connection&& connection, const OpenGroup::Answer& answer) {
    comm.admit(slot, incarnation, std::move(connection), answer);
  };
  reception = std::make_unique<Reception>(group, comm.plane_->ledger().group(), comm.rank_, std::move(host));
}

bool Elastic::has_room(int slot) const {
  const std::lock_guard lock(comm.membership_mutex_);
  // Of a newcomer the active set is that of its welcome, with which it has no operations.
  const bool is_active = !is_solo && comm.membership_.active().contains(slot);
  const bool is_member = is_active || comm.membership_.newest_set().contains(slot);
  const std::vector<int> ended = comm.plane_->ended_ranks();
  const std::vector<int> connected = group.peers();
  const bool has_ended = std::find(ended.begin(), ended.end(), slot) != ended.end();
  const bool is_connected = std::find(connected.begin(), connected.end(), slot) != connected.end();
  return !is_member && (has_ended || !is_connected);
}

void Elastic::start() {
  comm.show_cell();
  group.set_listener([this](const OpenGroup::Sender& sender, u64 tag, Parcel&& parcel) {
    const Errand kind = errand_of(tag);
    {
      const std::lock_guard lock(mutex);
      if (silent.erase(sender.slot) > 0 && is_solo) needs_refresh = true;  // it may be asked again
    }
    if (kind != Errand::kBell) {
      const std::lock_guard lock(mutex);
      if (kind == Errand::kAnswer) {
        if (asked.contains(number_of(tag))) answers.insert_or_assign(number_of(tag), std::move(parcel));
        changed.notify_all();
        return;
      }
      inbox.push_back({sender, tag, std::move(parcel)});
    }
    wake();
  });
  thread_ = start_thread("weft-member", [this] { run(); });
  ring();
}

void Elastic::stop() noexcept {
  if (is_in_child()) {  // the thread is not here, and locks may be held for ever
    new std::thread(std::move(thread_));
    return;
  }
  if (is_stopping.exchange(true)) return;
  group.set_listener({});
  wake();
  {
    const std::lock_guard lock(mutex);
    changed.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  reception->close();
}

void Elastic::wake() noexcept {
  const u64 one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));  // full: it wakes anyway
}

void Elastic::ring() {
  for (const int peer : group.peers()) group.send(peer, tag_of(Errand::kBell, 0), {}, {});
}

std::vector<int> Elastic::newcomers() const {
  const std::lock_guard lock(mutex);
  return {newcomers_.begin(), newcomers_.end()};
}

void Elastic::forget_newcomers(const std::vector<int>& ranks) {
  const std::lock_guard lock(mutex);
  for (const int rank : ranks) newcomers_.erase(rank);
}

bool Elastic::takes(const Action& action) const {
  switch (action.kind) {
    case Action::Kind::kPass:
    case Action::Kind::kInstall:
    case Action::Kind::kChanged:
    case Action::Kind::kWithdrawn: return true;
    case Action::Kind::kRaise:
      return (is_at_boundary && action.failure != MembershipFailure::kEvicted) ||
             (is_solo && action.failure == MembershipFailure::kOvertaken);
    default: return false;
  }
}

void Elastic::run() {
  while (!is_stopping) {
    std::vector<pollfd> waited{{wake_.get(), POLLIN, 0}};
    reception->add_waited(waited);
    bool is_waited_for = reception->is_waiting();
    for (const auto& [slot, stranger] : strangers) {
      const int fd = stranger.call ? stranger.call->fd() : -1;
      if (fd >= 0) waited.push_back({fd, POLLIN, 0});
      is_waited_for |= fd < 0;
    }
    ::poll(waited.data(), waited.size(), is_waited_for ? kFastTurnMs : kSlowTurnMs);
    u64 count = 0;
    while (read(wake_.get(), &count, sizeof(count)) > 0) {
    }
    if (is_stopping) return;
    try {
      comm.turn_member();
    } catch (const Error& error) {  // what a peer sent, or the system refused: the caller's thread goes on
      log_line(kLogWarning, "rank " + std::to_string(comm.rank_) + ", changes of the membership: " + error.text);
    }
  }
}

// ---- the thread's turn -----------------------------------------------------------------------------------------------

void Communicator::turn_member() {
  Elastic& e = *elastic_;
  e.reception->step();
  std::deque<Elastic::Letter> letters;
  {
    const std::lock_guard lock(e.mutex);
    letters.swap(e.inbox);
  }
  const RankSet dead = RankSet::of(plane_->dead_ranks());  // what they still offered is not to be mapped
  for (Elastic::Letter& letter : letters) {
    const auto& [slot, incarnation] = letter.sender;
    if (!dead.contains(slot) && e.group.has_peer(slot, incarnation)) serve(slot, letter.tag, std::move(letter.parcel));
  }
  note_gone();
  read_cells();
  is_told_ = true;
  look_if_told();
  e.meet_suspended();
  renew_wish();
  free_claims();
  call_strangers();
  const std::lock_guard lock(e.mutex);
  e.changed.notify_all();
}

// A newcomer before it is a peer: whoever enters an epoch meanwhile keeps it.
void Communicator::admit(int slot, u64 incarnation, Connection&& connection, const OpenGroup::Answer& answer) {
  Elastic& e = *elastic_;
  Event unprepared;  // the last owner's end may not have been told to the machine
  unprepared.kind = Event::Kind::kPrepared;
  unprepared.rank = slot;
  ask(unprepared, Wait{0, {}});
  unmap(slot);
  bool is_member = false;
  {
    const std::lock_guard lock(membership_mutex_);
    is_member = membership_.welcome().incarnations[static_cast<size_t>(slot)] == incarnation;
  }
  {
    const std::lock_guard lock(e.mutex);
    if (!is_member) e.newcomers_.insert(slot);
  }
  try {
    const std::lock_guard driver_lock(driver_mutex_);  // nobody tells the machine of the last owner's end any more
    e.group.add_peer(slot, incarnation, std::move(connection), answer);
  } catch (...) {
    e.forget_newcomers({slot});
    throw;
  }
  // A newcomer may meet a rank that the others have taken in before, in the slot of one whose end it has seen.
  Event met;
  met.kind = Event::Kind::kMet;
  met.rank = slot;
  ask(met, Wait{0, {}});
  {
    const std::lock_guard lock(e.mutex);
    e.seen.erase(slot);
    e.strangers.erase(slot);
    e.absent.erase(slot);
    e.silent.erase(slot);
    if (e.is_solo) e.needs_refresh = true;  // two that may be taken in together have to be prepared for each other
  }
  WEFT_FAIL_POINT("greet.admitted");
  log_line(kLogInfo, "rank " + std::to_string(rank_) + ": a newcomer has connected in slot " + std::to_string(slot));
}

// R14: of a newcomer that has ended, or of one that had the slot before.
void Communicator::unmap(int slot) {
  const std::lock_guard lock(mutex_);
  for (MemberWindow* window : windows_) window->unmap(slot);
  closed_ranks_.remove(slot);  // who said goodbye was its owner before
  goodbyes_.erase(slot);
}

void Communicator::read_cells() {
  Elastic& e = *elastic_;
  const std::lock_guard turn(e.cells_mutex);  // what was read last is told last
  for (const int peer : e.group.peers()) {
    const std::optional<SlotCell> cell = e.group.slots().look(peer);
    if (!cell) continue;
    {
      const std::lock_guard lock(e.mutex);
      const auto [seen, is_new] = e.seen.try_emplace(peer, *cell);
      if (!is_new && std::memcmp(&seen->second, &*cell, sizeof(*cell)) == 0) continue;
      seen->second = *cell;
    }
    Event event;
    event.kind = Event::Kind::kCell;
    event.rank = peer;
    event.cell = &cell->membership;
    ask(event, Wait{0, {}});
  }
}

// Of ranks that are gone and belong to nothing any more: their memory, and the slots of those that are proven gone.
void Communicator::free_claims() {
  Elastic& e = *elastic_;
  RankSet kept;
  {
    const std::lock_guard lock(membership_mutex_);
    kept = membership_.active() | membership_.newest_set();
  }
  for (const int slot : plane_->dead_ranks()) {
    if (kept.contains(slot)) continue;
    e.forget_newcomers({slot});
    if (has_some_of(slot)) unmap(slot);
  }
  for (int slot = 0; slot < num_ranks_; ++slot) {  // claimed by one that ended, or gave up, before it came here
    const u64 incarnation = e.group.slots().claimed(slot);
    if (incarnation == 0 || slot == rank_ || kept.contains(slot) || e.group.has_peer(slot, incarnation)) {
      e.unknown.erase(slot);
      continue;
    }
    const auto [look_ns, is_new] = e.unknown.try_emplace(slot, now_ns() + kUnknownNs);
    if (now_ns() < look_ns->second) continue;
    look_ns->second = now_ns() + kUnknownNs;
    const std::optional<Endpoint> endpoint = e.group.slots().endpoint(slot);
    if (endpoint && is_over(*endpoint)) e.group.slots().free(slot, incarnation);
  }
  for (const int slot : plane_->ended_ranks()) {
    if (kept.contains(slot)) continue;
    const u64 incarnation = e.group.slots().claimed(slot);
    if (incarnation != 0 && e.group.has_peer(slot, incarnation)) e.group.slots().free(slot, incarnation);
  }
}

std::vector<int> Communicator::joining_ranks() {
  std::vector<int> ranks;
  for (const int slot : elastic("membership").newcomers()) {
    const std::lock_guard lock(membership_mutex_);
    if (!elastic_->shown.membership.prepared.contains(slot)) ranks.push_back(slot);
  }
  return ranks;
}

std::vector<int> Communicator::prepared_ranks() {
  std::vector<int> ranks;
  for (const int slot : elastic("membership").newcomers()) {
    const std::lock_guard lock(membership_mutex_);
    if (elastic_->shown.membership.prepared.contains(slot)) ranks.push_back(slot);
  }
  return ranks;
}

std::vector<int> Communicator::leaving_ranks() {
  const std::lock_guard lock(membership_mutex_);
  return membership_.leaving().ranks();
}

std::vector<int> Communicator::members() {
  const std::lock_guard lock(membership_mutex_);
  return membership_.newest_set().ranks();
}

std::string Communicator::address() {
  OpenGroup& group = elastic("address").group;
  JoinAddress address;
  const Endpoint& own = group.endpoint();
  address.boot_id = own.boot_id;
  address.pid_namespace = own.pid_namespace;
  address.network_namespace = own.network_namespace;
  address.group = plane_->ledger().group();
  const auto add = [&](const std::optional<Endpoint>& endpoint) {
    if (endpoint) address.doors.emplace_back(endpoint->name.data(), endpoint->name_bytes);
  };
  add(own);
  for (const int rank : active_) {
    if (rank != rank_) add(group.slots().endpoint(rank));
  }
  return address.text();
}

// Of a death that this rank has seen itself: whoever is past a boundary at which the dead was let go, and waits for this rank behind
// it, learns of it in no other way.
void Communicator::tell_loss() {
  AbortReason lost;
  {
    const std::lock_guard lock(mutex_);
    lost = reason_;
  }
  if (lost.code == AbortCode::kNone || lost.is_ours == 0 || is_outside()) return;
  set_origin(lost, origin());
  lost.is_ours = 0;
  plane_->publish_abort(lost);
}

// Whoever waits for this rank in an operation is to follow the others, too.
void Communicator::give_up_overtaken(const std::vector<int>& out) {
  AbortReason left;
  left.code = AbortCode::kPeerTimeout;
  left.rank = left.reporter = rank_;
  left.peers = RankSet::of(out);
  give_up(left);
}

bool Communicator::is_outside() const {
  if (!elastic_) return false;
  const std::lock_guard lock(mutex_);
  return has_left_ || elastic_->is_solo;
}

}  // namespace weft
