// The newcomer's side of joining: it calls a sponsor, and then everybody else. docs/protocols/joining.md.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "bootstrap/control_plane.h"
#include "bootstrap/handshake.h"
#include "bootstrap/joining.h"
#include "bootstrap/rank_set.h"
#include "bootstrap/slot_table.h"

namespace weft {

struct Sponsored {
  JoinWelcome welcome;
  std::shared_ptr<GroupPage> page;
};

// By the first door of `address` that answers. Errors: those of a sponsor's refusal, kUnsupported (another machine or namespace),
// kPeerLost (nobody answers at any door), kPeerTimeout.
Sponsored find_sponsor(const JoinAddress& address, int wanted_slot, const Endpoint& own, uint64_t deadline_ns,
                       const ControlPlane::Poll& poll);

struct CallingRank {  // whoever says hello first
  int slot;
  const Endpoint& endpoint;
  const GroupSecret& secret;
  int life_fd;
};
// A call that nobody waits for.
class OpenCall {
 public:
  enum class State {
    kCalling,
    kAnswered,
    kAbsent,  // the other one has ended, or has closed
    kCutOff,  // unread: it has ended, or had no room for another caller just now
  };
  // What `caller` refers to outlives the call.
  OpenCall(const CallingRank& caller, int slot, int num_slots, const Endpoint& endpoint)
      : caller_(caller), slot_(slot), num_slots_(num_slots), endpoint_(endpoint) {}

  State step();                                         // never waits; errors: those of a refusal
  int fd() const noexcept { return socket_.get(); }     // -1: its door is full, which no descriptor tells
  Connection take() { return std::move(connection_); }  // of one that was answered

 private:
  State begin();
  void greet();
  void read_answer(PacketReader& reader);

  const CallingRank caller_;
  const int slot_, num_slots_;
  const Endpoint endpoint_;
  OwnedFd socket_;
  Connection connection_;
};

// A connection to the rank in `slot`; none: it has ended, or has closed. Errors: those of its refusal, kPeerTimeout.
std::optional<Connection> call_rank(const CallingRank& caller, int slot, int num_slots, const Endpoint& endpoint,
                                    uint64_t deadline_ns, const ControlPlane::Poll& poll);

}  // namespace weft
