// The wire of the software NIC: when, by which port and in which order frames arrive (Egress), and what the frames of a put do at the
// other end (Ingress). It has neither clock nor memory: its caller brings both. docs/protocols/software-nic.md is the page to this folder.
#pragma once

#include <algorithm>
#include <map>
#include <random>
#include <unordered_map>
#include <vector>

#include "weft/config/base.h"

namespace weft::nic {

struct Model {
  u64 seed = 1;
  int num_ports = 2;
  double port_bytes_per_s = 0;  // 0: no limit
  u64 latency_ns = 0;
  u64 spread_ns = 20'000;  // a frame takes up to so much longer; 0: frames of a port stay in order
  u32 frame_bytes = 64u << 10;
};

struct Place {
  u32 region = 0;
  u64 offset = 0;
};

struct Put {
  int peer = 0;
  Place from, to;
  u64 num_bytes = 0;
  Place signal;
  u64 add = 0;  // to the signal; 0: it has none
};

// A part of a put.
struct Frame {
  u64 ticket = 0;   // of its put, from the sender
  u64 put_idx = 0;  // of its put, among those of the sender to this peer
  u32 idx = 0;      // in the put
  u32 num_frames = 1;
  u32 num_bytes = 0;
  Place from, to, signal;
  u64 add = 0;
};

// What became of a frame that arrived. kOnItsWay: whoever applies it says so later.
enum class Arrival { kNoRoom, kOnItsWay, kApplied };

// The sending half of a card with up to 64 peers.
class Egress {
 public:
  Egress(int num_peers, const Model& model);

  // The put's ticket. Never waits.
  u64 post(const Put& put, u64 now_ns);
  bool is_done(u64 ticket) const { return !open_.contains(ticket); }
  void acknowledge(u64 ticket);
  bool has_flights() const { return !flights_.empty(); }

  // Hands over the frames that have arrived by now, in the order of their arrival. `deliver(peer, frame, is_mute)` returns an Arrival;
  // the sender must not hear of a mute one.
  template <class Deliver>
  void progress(u64 now_ns, const Deliver& deliver) {
    u64 full_peers = 0;
    for (auto at = flights_.begin(); at != flights_.end() && at->first <= now_ns;) {
      const Flight& flight = at->second;
      const u64 bit = u64{1} << flight.peer;
      const Arrival arrival =
          (full_peers & bit) != 0 ? Arrival::kNoRoom : deliver(flight.peer, flight.frame, flight.is_mute);
      if (arrival == Arrival::kNoRoom) {
        full_peers |= bit;
        ++at;
        continue;
      }
      if (arrival == Arrival::kApplied && !flight.is_mute) acknowledge(flight.frame.ticket);
      at = flights_.erase(at);
    }
  }

  void lose_port(int port, u64 now_ns);
  void drop_peer(int peer);
  u64 port_bytes(int port) const { return ports_[static_cast<size_t>(port)].num_bytes; }  // that it was given

 private:
  struct Port {
    u64 free_ns = 0;
    u64 num_bytes = 0;
    bool is_lost = false;
  };
  struct Flight {
    int peer = 0;
    size_t port = 0;
    bool is_mute = false;
    Frame frame;
  };
  void schedule(Flight flight, u64 now_ns);

  const Model model_;
  std::mt19937_64 random_;
  std::vector<Port> ports_;
  std::vector<u64> num_puts_;  // to each peer
  u64 dropped_peers_ = 0;
  u64 num_tickets_ = 0;
  std::unordered_map<u64, u32> open_;   // frames without an acknowledgement
  std::multimap<u64, Flight> flights_;  // by arrival
};

// The receiving half, for one sender: every frame counts once, and the signal comes after all frames of its put.
class Ingress {
 public:
  // `copy()`: false if it can't be done; `signal()` the same. False then, and the frame has not been here.
  template <class Copy, class Signal>
  bool take(const Frame& frame, const Copy& copy, const Signal& signal) {
    if (frame.put_idx < num_whole_ || frame.idx >= frame.num_frames) return frame.put_idx < num_whole_;
    Parts& parts = puts_[frame.put_idx];
    if (parts.is_here.empty()) parts = {std::vector<bool>(frame.num_frames), frame.num_frames};
    if (frame.idx >= parts.is_here.size()) return false;
    if (parts.is_here[frame.idx]) {
      ++num_again_;
      return true;
    }
    if (!copy()) return false;
    if (parts.num_missing == 1 && !signal()) return false;
    parts.is_here[frame.idx] = true;
    --parts.num_missing;
    for (auto first = puts_.begin(); first != puts_.end() && first->first == num_whole_ && is_whole(first->second);) {
      first = puts_.erase(first);
      ++num_whole_;
    }
    return true;
  }
  u64 num_again() const { return num_again_; }  // frames of unfinished puts that came a second time

 private:
  struct Parts {
    std::vector<bool> is_here;
    u32 num_missing = 0;
  };
  static bool is_whole(const Parts& parts) { return parts.num_missing == 0; }

  std::map<u64, Parts> puts_;  // those that are not whole, and those behind them
  u64 num_whole_ = 0;          // all before this one are
  u64 num_again_ = 0;
};

}  // namespace weft::nic
