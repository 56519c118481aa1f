// What one rank knows: parcels that arrived, who is gone and how that was noticed. Filled by the threads that listen
// (monitor and watchers, or the other ranks of a LocalHub), read by exchange(). Owns no socket, so it may outlive
// close().
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "bootstrap/abort_relay.h"
#include "bootstrap/control_plane.h"

namespace weft {

class Board {
 public:
  Board(int rank, int num_ranks);

  // --- filling -------------------------------------------------------------------------------------------------------
  // `life`: which incarnation of the slot this is about; of one that was replaced nothing counts any more.
  void put(int source, uint64_t tag, Parcel&& parcel, uint64_t life = 0);

  // `peer` is gone; only the first call for a peer changes its state and reaches the abort handler. `why`: what it said itself.
  void gone(int peer, DetectionChannel channel, const std::string& how, std::string_view why = {}, uint64_t life = 0);
  void note(int source, const Note& note);
  void published(const AbortReason& reason) { relay_.post(reason); }
  void wake();  // lets collect() look again
  void keep_members(const std::vector<int>& members);
  // Another incarnation in the slot, of which nothing has been heard; its number for put() and gone().
  uint64_t replace(int slot);
  void drop_member(int slot);  // as keep_members() with all others

  // --- reading -------------------------------------------------------------------------------------------------------
  std::vector<int> dead_ranks() const;
  std::vector<int> ended_ranks() const;
  std::vector<Detection> detections() const;
  Note note_of(int rank) const;
  std::vector<int> silent_ranks() const;
  bool is_watched(int peer, uint64_t life = 0) const;  // false: it is gone and no member any more, or replaced
  size_t num_parcels(int source) const;                // that nobody has collected
  uint64_t newest_silent_tag(uint64_t prefix, uint64_t mask) const;
  void forget_tags(uint64_t prefix, uint64_t mask, uint64_t below);
  AbortRelay& relay() noexcept { return relay_; }

  struct Request {
    const std::vector<int>& members;
    uint64_t tag;
    uint64_t deadline_ns;
    const ControlPlane::Poll& poll;
    std::function<std::vector<int>()> unsent;  // ranks that our own parcel did not leave for yet
  };

  // Throws kInvalidArgument or kInvalidState unless an exchange with these arguments may begin.
  void check(const std::vector<int>& members, uint64_t tag, size_t num_bytes, size_t num_fds) const;

  // The waiting half of ControlPlane::exchange; the slot of this rank is left empty.
  std::vector<Parcel> collect(const Request& request);

  void close() noexcept;  // drops everything; exchanges fail from now on
  bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }

 private:
  struct Fate {
    bool gone = false;
    bool orderly = false;  // it said goodbye, so it had sent all that it owed
    std::string how;       // "died", "closed its communicator", ...
  };
  using Parcels = std::map<uint64_t, std::deque<Parcel>>;  // of one source by tag; never an empty queue

  // A member that is far ahead, or tries again and again without this rank, must not fill this rank's memory: of more
  // parcels those with the lowest tags go, which belong to what the member has given up.
  static constexpr size_t kMostParcels = 1024;

  const Fate& fate(int peer) const { return fates_[static_cast<size_t>(peer)]; }
  bool is_member(int peer) const { return members_[static_cast<size_t>(peer)]; }
  bool has_parcel(int source, uint64_t tag) const { return parcels_[static_cast<size_t>(source)].contains(tag); }
  bool is_awaited(int source, uint64_t tag) const { return waits_for_ == tag && awaited_.contains(source); }

  std::vector<Parcel> wait_for_parcels(const Request& request);
  void stop_waiting() noexcept;
  std::vector<Parcel> take(const Request& request);
  void throw_if_lost(const Request& request) const;
  void spend(uint64_t tag) noexcept;

  const int rank_;
  const int num_ranks_;
  AbortRelay relay_;
  std::atomic<bool> closed_{false};

  mutable std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::vector<Parcels> parcels_;       // by source
  std::vector<size_t> num_parcels_;    // by source
  std::vector<bool> members_;          // by rank: it belongs
  std::vector<uint64_t> lives_;        // by rank: how often its slot was taken anew
  std::map<int, Note> notes_;          // by rank, of those that have said something
  std::optional<uint64_t> waits_for_;  // tag of the exchange under way
  RankSet waits_with_;                 // its members
  RankSet awaited_;                    // those of them whose parcel is not there
  std::set<uint64_t> spent_tags_;
  std::vector<Fate> fates_;  // by rank
  std::vector<Detection> detections_;
};

}  // namespace weft
