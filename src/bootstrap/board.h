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
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bootstrap/abort_relay.h"
#include "bootstrap/control_plane.h"

namespace weft {

class Board {
 public:
  Board(int rank, int num_ranks);

  // --- filling -------------------------------------------------------------------------------------------------------
  void put(int source, uint64_t tag, Parcel&& parcel);

  // `peer` is gone; only the first call for a peer changes its state and reaches the abort handler.
  void gone(int peer, DetectionChannel channel, const std::string& how);
  void published(const AbortReason& reason) { relay_.post(reason); }
  void wake();  // lets collect() look again

  // --- reading -------------------------------------------------------------------------------------------------------
  std::vector<int> dead_ranks() const;
  std::vector<Detection> detections() const;
  uint64_t newest_tag(uint64_t prefix, uint64_t mask) const;
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
  using Key = std::pair<uint64_t, int>;  // (tag, source)

  struct Fate {
    bool gone = false;
    bool orderly = false;  // it said goodbye, so it had sent all that it owed
    std::string how;       // "died", "closed its communicator", ...
  };
  const Fate& fate(int peer) const { return fates_[static_cast<size_t>(peer)]; }

  std::vector<Parcel> wait_for_parcels(const Request& request);
  std::vector<int> missing(const Request& request) const;
  std::vector<Parcel> take(const Request& request);
  void throw_if_lost(const Request& request, const std::vector<int>& silent) const;
  void spend(uint64_t tag) noexcept;

  const int rank_;
  const int num_ranks_;
  AbortRelay relay_;
  std::atomic<bool> closed_{false};

  mutable std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::map<Key, std::deque<Parcel>> parcels_;  // never an empty queue
  std::set<uint64_t> spent_tags_;
  std::vector<Fate> fates_;  // by rank
  std::vector<Detection> detections_;
};

}  // namespace weft
