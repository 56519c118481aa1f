// The newcomer's side of joining: it calls a sponsor, and then everybody else. docs/protocols/joining.md.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
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
// A connection to the rank in `slot`; none: it has ended, or has closed. Errors: those of its refusal, kPeerTimeout.
std::optional<Connection> call_rank(const CallingRank& caller, int slot, int num_slots, const Endpoint& endpoint,
                                    uint64_t deadline_ns, const ControlPlane::Poll& poll);

}  // namespace weft
