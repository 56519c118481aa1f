// A software NIC between ranks of one machine: registered memory, puts with a signal, faults. Ranks are processes, or threads of one.
// The protocol is docs/protocols/software-nic.md.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "nic/wire.h"

namespace weft::nic {

enum class Space : u32 { kHost, kDevice };

struct Region {
  u8* data = nullptr;
  u64 num_bytes = 0;
  Space space = Space::kHost;
};

// How bytes get from one space to another. This one knows the host's. False: it can't be done.
class Copier {
 public:
  virtual ~Copier() = default;
  virtual bool copy(u8* to, Space to_space, const u8* from, Space from_space, u64 num_bytes);
  virtual bool add(u8* word, Space space, u64 value);  // visible after every copy before it
};

// Of a rank, for one thread at a time. Nothing here waits.
class Nic {
 public:
  // The memory into which others send: of each rank, mapped by all, zeroed at the beginning.
  struct Segment {
    u8* data = nullptr;
    bool is_thread = false;  // the rank is a thread of this process
  };
  static u64 segment_bytes(int num_ranks, const Model& model);

  // Ranks have the same `model`, but for the seed. `copier` must live as long.
  Nic(int rank, const Model& model, std::vector<Segment> segments, Copier& copier);
  Nic(const Nic&) = delete;
  Nic& operator=(const Nic&) = delete;

  // The number of the region. Ranks register in the same order.
  u32 add_region(const Region& region);
  void remove_region(u32 region);

  // A ticket. Error kInvalidArgument: no such peer, or `from` isn't registered here.
  u64 post(const Put& put, u64 now_ns);
  bool is_done(u64 ticket) const { return egress_.is_done(ticket); }
  void progress(u64 now_ns);
  const std::string& error() const { return error_; }  // empty: none so far

  void lose_port(int port, u64 now_ns) { egress_.lose_port(port, now_ns); }
  void drop_peer(int peer);
  void set_dark(bool is_dark) { is_dark_ = is_dark; }

  u64 port_bytes(int port) const { return egress_.port_bytes(port); }
  u64 num_again() const;  // frames that came twice

 private:
  struct Slot;
  struct Ring;
  struct Peer {
    Ring* in = nullptr;
    Ring* out = nullptr;
    bool is_thread = false;
    bool is_dropped = false;
    u64 num_sent = 0;
    std::deque<u64> tickets;  // of the frames in `out`; 0: a mute one
    Ingress ingress;
  };

  u8* payload(Ring* ring, u64 n) const;
  u8* find(const Place& place, u64 num_bytes, Space* space);  // null: not registered
  bool fail(const std::string& text);
  Arrival deliver(int peer, const Frame& frame, bool is_mute);
  void collect(Peer& peer);
  void take(Peer& peer);
  bool apply(Peer& peer, const Slot& slot, const u8* bytes);

  const Model model_;
  Copier& copier_;
  std::vector<Peer> peers_;
  std::vector<Region> regions_;
  Egress egress_;
  bool is_dark_ = false;
  std::string error_;
};

}  // namespace weft::nic
