// The ranks of other machines, while the ranks connect: they are called, and call, over TCP, where anybody may call. Nothing is
// believed of a caller, and nothing is told to it, before its greeting has proven that it knows the group's secret.
#pragma once

#include <poll.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "bootstrap/endpoint.h"
#include "bootstrap/greeting.h"
#include "bootstrap/wire.h"

namespace weft {

// Taken from a door in one turn. So many may wait to greet, besides the ranks that are still to call.
inline constexpr size_t kCallersAtOnce = 64;

class NetworkMesh {
 public:
  struct Patience {
    uint64_t caller_ns = 10'000'000'000;              // for the greeting of one that has called
    uint64_t farewell_ns = 1'000'000'000;             // likewise, if this rank gives up: to tell it why
    uint64_t address_ns = 2'000'000'000;              // for an address that does not answer, where there are others
    uint64_t silence_ns = caller_ns + 2'000'000'000;  // likewise, for one that takes the call
    // Every rank opens its door as soon as it has the list of endpoints: only a busy machine does later than others call.
    uint64_t door_ns = 15'000'000'000;
  };

  // Rank i calls every j < i of another machine. `door`: open; -1 if there are no other machines.
  NetworkMesh(int rank, const std::vector<Endpoint>& endpoints, const GroupSecret& secret, int door,
              const Patience& patience);

  bool is_remote(int peer) const { return remote_[static_cast<size_t>(peer)]; }
  bool done(int peer) const { return done_[static_cast<size_t>(peer)].valid(); }
  Wire take(int peer) { return std::move(done_[static_cast<size_t>(peer)]); }

  void add_waited(std::vector<pollfd>& waited) const;
  bool is_retrying() const;  // a call that could not be made is made again soon
  // Errors: kPeerLost, kInvalidArgument (what answers at the address of a rank is not that rank), those of a refusal.
  void step();

  void tell_all(std::span<const std::byte> refusal) noexcept;
  // Why `ranks` may be late: for the end of a text; empty: not known.
  std::string hint(const std::vector<int>& ranks) const;

 private:
  struct Call {
    Wire wire;
    std::vector<IpAddress> addresses;  // in this order
    size_t address_idx = 0;
    bool is_connected = false;
    bool has_greeted = false;
    Nonce drawn{};                  // for this call
    uint64_t since_ns = 0;          // of this call
    uint64_t again_ns = 0;          // not before
    uint64_t refused_since_ns = 0;  // by the kernel: nobody listens there
    size_t num_refused = 0;         // addresses in a row that answered, and not as this rank
    std::string problem;            // of the last call
  };
  struct Caller {
    Wire wire;
    uint64_t since_ns;
    Nonce drawn;
  };

  const Endpoint& endpoint(int peer) const { return endpoints_[static_cast<size_t>(peer)]; }
  Call& call(int peer) { return calls_[static_cast<size_t>(peer)]; }
  bool is_called(int peer) const { return peer < rank_ && is_remote(peer) && !done(peer); }
  std::string place_of(int peer) const;
  void follow(int peer);
  void begin(int peer);
  void call_failed(int peer, int error_number);
  void hear(int peer);
  std::string answer_challenge(int peer);
  void give_up(int peer, const std::string& problem, bool is_answer);
  void accept_callers();
  void hear_callers();
  void hear_farewell();
  bool greet(Caller& caller);  // true: it is a rank now
  void refuse(Caller& caller, const std::string& problem);
  void check_done();
  void say_hello(Wire& wire, int peer, const Drawn& drawn);
  size_t most_callers() const;

  const int rank_;
  const std::vector<Endpoint>& endpoints_;
  const GroupSecret& secret_;
  const int door_;
  const Patience patience_;
  std::vector<bool> remote_;    // by rank
  std::vector<Wire> done_;      // by rank
  std::vector<Call> calls_;     // by rank
  std::deque<Caller> callers_;  // oldest first
  std::string turned_away_;     // why the last caller was
  PacketReader reader_;
};

}  // namespace weft
