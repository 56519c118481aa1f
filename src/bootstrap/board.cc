#include "bootstrap/board.h"

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "base/clock.h"
#include "base/status.h"

namespace weft {
namespace {

constexpr uint64_t kPollIntervalNs = 50'000'000;

AbortCode abort_code(DetectionChannel channel) {
  if (channel == DetectionChannel::kGoodbye) return AbortCode::kPeerClosed;
  if (channel == DetectionChannel::kUnreachable) return AbortCode::kUnreachable;
  return channel == DetectionChannel::kRefused ? AbortCode::kRefused : AbortCode::kPeerLost;
}

}  // namespace

const char* detection_channel_name(DetectionChannel channel) noexcept {
  switch (channel) {
    case DetectionChannel::kOwnerDeath: return "owner_death";
    case DetectionChannel::kSocketEnd: return "socket_end";
    case DetectionChannel::kPidfd: return "pidfd";
    case DetectionChannel::kGoodbye: return "goodbye";
    case DetectionChannel::kRefused: return "refused";
    case DetectionChannel::kUnreachable: return "unreachable";
  }
  return "unknown";
}

void Parcel::check_fds(size_t num_expected, const std::string& source) const {
  if (has_lost_fds) throw_system_error("receiving file descriptors of " + source, EMFILE);
  if (fds.size() == num_expected) return;
  throw_internal(source + " sent " + std::to_string(fds.size()) + " file descriptors where " +
                 std::to_string(num_expected) + " belong");
}

Board::Board(int rank, int num_ranks)
    : rank_(rank),
      num_ranks_(num_ranks),
      parcels_(static_cast<size_t>(num_ranks)),
      num_parcels_(static_cast<size_t>(num_ranks)),
      members_(static_cast<size_t>(num_ranks), true),
      lives_(static_cast<size_t>(num_ranks)),
      fates_(static_cast<size_t>(num_ranks)) {}

void Board::put(int source, uint64_t tag, Parcel&& parcel, uint64_t life) {
  const std::lock_guard lock(mutex_);
  if (closed() || spent_tags_.contains(tag) || !is_member(source) || life != lives_[static_cast<size_t>(source)])
    return;
  Parcels& parcels = parcels_[static_cast<size_t>(source)];
  size_t& num_parcels = num_parcels_[static_cast<size_t>(source)];
  parcels[tag].push_back(std::move(parcel));
  const bool was_awaited = is_awaited(source, tag);
  if (was_awaited) awaited_.remove(source);
  if (++num_parcels > kMostParcels) {
    const auto lowest = parcels.begin();
    if (waits_for_ == lowest->first && waits_with_.contains(source)) awaited_.add(source);
    num_parcels -= lowest->second.size();
    parcels.erase(lowest);
  }
  if (was_awaited && awaited_.empty()) changed_.notify_all();  // of a large group nobody wakes up for each of them
}

void Board::keep_members(const std::vector<int>& members) {
  const std::lock_guard lock(mutex_);
  for (int source = 0; source < num_ranks_; ++source) {
    if (source == rank_ || std::find(members.begin(), members.end(), source) != members.end()) continue;
    members_[static_cast<size_t>(source)] = false;
    parcels_[static_cast<size_t>(source)].clear();
    num_parcels_[static_cast<size_t>(source)] = 0;
  }
}

uint64_t Board::replace(int slot) {
  const std::lock_guard lock(mutex_);
  const auto idx = static_cast<size_t>(slot);
  parcels_[idx].clear();
  num_parcels_[idx] = 0;
  notes_.erase(slot);
  fates_[idx] = {};
  members_[idx] = true;
  std::erase_if(detections_, [&](const Detection& seen) { return seen.rank == slot; });
  return ++lives_[idx];
}

void Board::drop_member(int slot) {
  const std::lock_guard lock(mutex_);
  members_[static_cast<size_t>(slot)] = false;
  parcels_[static_cast<size_t>(slot)].clear();
  num_parcels_[static_cast<size_t>(slot)] = 0;
}

bool Board::is_watched(int peer, uint64_t life) const {
  const std::lock_guard lock(mutex_);
  return life == lives_[static_cast<size_t>(peer)] && (is_member(peer) || !fate(peer).gone);
}

void Board::note(int source, const Note& note) {
  const std::lock_guard lock(mutex_);
  notes_[source] = note;
  notes_[source].heard_ns = now_ns();
}

Note Board::note_of(int rank) const {
  const std::lock_guard lock(mutex_);
  const auto note = notes_.find(rank);
  return note == notes_.end() ? Note{} : note->second;
}

std::vector<int> Board::silent_ranks() const {
  const std::lock_guard lock(mutex_);
  return awaited_.ranks();
}

void Board::gone(int peer, DetectionChannel channel, const std::string& how, std::string_view why, uint64_t life) {
  const uint64_t time_ns = now_ns();
  const std::string reason_given = one_line(why, AbortReason::kTextBytes);
  {
    const std::lock_guard lock(mutex_);
    if (closed() || life != lives_[static_cast<size_t>(peer)]) return;
    const bool known = std::any_of(detections_.begin(), detections_.end(), [&](const Detection& seen) {
      return seen.rank == peer && (seen.channel == channel || seen.channel == DetectionChannel::kGoodbye ||
                                   seen.channel == DetectionChannel::kRefused);
    });
    if (known) return;
    detections_.push_back({peer, channel, time_ns});
    Fate& known_fate = fates_[static_cast<size_t>(peer)];
    if (known_fate.gone) return;
    known_fate = {true, channel == DetectionChannel::kGoodbye,
                  how + (reason_given.empty() ? "" : " after ") + reason_given};
    changed_.notify_all();
  }
  AbortReason reason;
  reason.code = abort_code(channel);
  reason.rank = peer;
  reason.reporter = rank_;
  reason.is_ours = 1;
  set_text(reason, reason_given);
  relay_.post(reason);
}

void Board::wake() {
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

size_t Board::num_parcels(int source) const {
  const std::lock_guard lock(mutex_);
  return num_parcels_[static_cast<size_t>(source)];
}

uint64_t Board::newest_silent_tag(uint64_t prefix, uint64_t mask) const {
  const std::lock_guard lock(mutex_);
  uint64_t newest = 0;
  for (const int source : awaited_.ranks()) {
    for (const auto& [tag, parcels] : parcels_[static_cast<size_t>(source)]) {
      if ((tag & mask) == prefix) newest = std::max(newest, tag);
    }
  }
  return newest;
}

void Board::forget_tags(uint64_t prefix, uint64_t mask, uint64_t below) {
  const std::lock_guard lock(mutex_);
  for (size_t source = 0; source < parcels_.size(); ++source) {
    std::erase_if(parcels_[source], [&](const auto& entry) {
      const bool is_old = (entry.first & mask) == prefix && entry.first < below;
      if (is_old) num_parcels_[source] -= entry.second.size();
      return is_old;
    });
  }
  std::erase_if(spent_tags_, [&](uint64_t tag) { return (tag & mask) == prefix && tag < below; });
}

std::vector<int> Board::dead_ranks() const {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (fate(peer).gone) ranks.push_back(peer);
  }
  return ranks;
}

std::vector<int> Board::ended_ranks() const {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (const Detection& seen : detections_) {
    const bool is_end = seen.channel == DetectionChannel::kPidfd || seen.channel == DetectionChannel::kGoodbye;
    if (is_end && std::find(ranks.begin(), ranks.end(), seen.rank) == ranks.end()) ranks.push_back(seen.rank);
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

std::vector<Detection> Board::detections() const {
  const std::lock_guard lock(mutex_);
  return detections_;
}

void Board::check(const std::vector<int>& members, uint64_t tag, size_t num_bytes, size_t num_fds) const {
  if (closed()) throw_invalid_state("exchange() on a closed control plane");
  std::set<int> seen;
  for (const int member : members) {
    if (member < 0 || member >= num_ranks_ || !seen.insert(member).second) {
      throw_invalid_argument("members of an exchange hold rank " + std::to_string(member) + "; allowed: each of 0.." +
                             std::to_string(num_ranks_ - 1) + " at most once");
    }
  }
  if (!seen.contains(rank_)) {
    throw_invalid_argument("members of an exchange lack this rank (" + std::to_string(rank_) + ")");
  }
  if (num_bytes > kMaxMessageBytes || num_fds > kMaxMessageFds) {
    throw_invalid_argument("an exchange of " + std::to_string(num_bytes) + " bytes and " + std::to_string(num_fds) +
                           " file descriptors; allowed: 0.." + std::to_string(kMaxMessageBytes) + " and 0.." +
                           std::to_string(kMaxMessageFds));
  }
  const std::lock_guard lock(mutex_);
  for (const int member : members) {
    if (is_member(member)) continue;
    throw_invalid_argument("members of an exchange hold rank " + std::to_string(member) + ", which was left out");
  }
  if (spent_tags_.contains(tag)) {
    throw_invalid_argument("tag " + std::to_string(tag) +
                           " belongs to an exchange that failed before; use a fresh one");
  }
}

std::vector<Parcel> Board::collect(const Request& request) {
  {
    const std::lock_guard lock(mutex_);
    waits_for_ = request.tag;
    waits_with_ = RankSet::of(request.members);
    for (const int member : request.members) {
      if (member != rank_ && !has_parcel(member, request.tag)) awaited_.add(member);
    }
  }
  try {
    auto parcels = wait_for_parcels(request);
    stop_waiting();
    return parcels;
  } catch (...) {
    stop_waiting();
    spend(request.tag);
    throw;
  }
}

void Board::stop_waiting() noexcept {
  const std::lock_guard lock(mutex_);
  waits_for_.reset();
  waits_with_ = awaited_ = {};
}

std::vector<Parcel> Board::wait_for_parcels(const Request& request) {
  uint64_t next_poll_ns = 0;
  std::unique_lock lock(mutex_);
  // check: allow spin-loop: sleeps on a condition variable and ends at the deadline of the request
  for (;;) {
    const uint64_t time_ns = now_ns();
    if (closed()) throw_invalid_state("the control plane was closed during an exchange");
    std::vector<int> silent = awaited_.ranks();
    if (silent.empty()) {
      silent = request.unsent();
      std::erase_if(silent, [this](int peer) { return fate(peer).gone; });
      if (silent.empty()) return take(request);
    } else {
      throw_if_lost(request);
    }
    // What is complete was taken above, whatever the poll thinks of it.
    if (request.poll && time_ns >= next_poll_ns) {
      next_poll_ns = time_ns + kPollIntervalNs;
      lock.unlock();
      request.poll();
      lock.lock();
      continue;
    }
    if (time_ns >= request.deadline_ns) {
      throw_peer_timeout("exchange", 0, silent, ranks_text(silent) + " did not answer by the deadline");
    }
    const uint64_t wait_ns = std::min(request.deadline_ns - time_ns, kPollIntervalNs);
    changed_.wait_for(lock, std::chrono::nanoseconds(wait_ns));
  }
}

std::vector<Parcel> Board::take(const Request& request) {
  std::vector<Parcel> result(static_cast<size_t>(num_ranks_));
  for (const int member : request.members) {
    Parcels& parcels = parcels_[static_cast<size_t>(member)];
    const auto queue = parcels.find(request.tag);
    if (member == rank_ || queue == parcels.end()) continue;
    result[static_cast<size_t>(member)] = std::move(queue->second.front());
    queue->second.pop_front();
    if (queue->second.empty()) parcels.erase(queue);
    --num_parcels_[static_cast<size_t>(member)];
  }
  return result;
}

// A member that died ends the exchange even if its own parcel came: others may have seen the death before its parcel,
// given up, and will send nothing more. One that said goodbye matters only if its parcel is missing: it had sent all.
void Board::throw_if_lost(const Request& request) const {
  std::vector<int> lost;
  std::string text;
  for (const int member : request.members) {
    if (!fate(member).gone || (fate(member).orderly && !awaited_.contains(member))) continue;
    lost.push_back(member);
    text += (text.empty() ? "rank " : "; rank ") + std::to_string(member) + " " + fate(member).how;
  }
  if (!lost.empty()) throw_peer_lost("exchange", lost, text);
}

void Board::spend(uint64_t tag) noexcept {
  const std::lock_guard lock(mutex_);
  spent_tags_.insert(tag);
  for (size_t source = 0; source < parcels_.size(); ++source) {
    const auto queue = parcels_[source].find(tag);
    if (queue == parcels_[source].end()) continue;
    num_parcels_[source] -= queue->second.size();
    parcels_[source].erase(queue);
  }
}

void Board::close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    closed_.store(true, std::memory_order_release);
    for (Parcels& parcels : parcels_) parcels.clear();
    changed_.notify_all();
  }
  relay_.close();
}

}  // namespace weft
