// The door of a rank of an open group: it hears who calls, sponsors newcomers, and connects to those that others sponsor.
// docs/protocols/joining.md.
#pragma once

#include <poll.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "base/fd.h"
#include "bootstrap/joining.h"
#include "bootstrap/open_group.h"

namespace weft {

class Reception {
 public:
  // What it asks its rank.
  struct Host {
    std::function<Membership::Welcome()> welcome;  // throws Error where this rank can't sponsor
    // Whether the last owner of the slot has been let go of, so that a new one may be connected.
    std::function<bool(int slot)> has_room;
    // `answer` is called when nothing can fail any more, before anything else is sent to the newcomer.
    std::function<void(int slot, uint64_t incarnation, Connection&&, const OpenGroup::Answer& answer)> admit;
    uint64_t caller_ns = 10'000'000'000;  // for what a caller has to say, and for its slot to become free
  };
  Reception(OpenGroup& group, const GroupId& id, int rank, Host host)
      : group_(group), id_(id), rank_(rank), host_(std::move(host)) {}

  void add_waited(std::vector<pollfd>& waited) const;
  bool is_waiting() const noexcept { return !callers_.empty(); }  // for something that no descriptor tells
  void step();                                                    // never waits
  void close() noexcept { callers_.clear(); }

 private:
  struct Visitor {
    OwnedFd socket;
    uint64_t since_ns = 0;
    int slot = -1;                 // of one that has said hello
    uint64_t incarnation = 0;      // likewise
    std::optional<Hello> hello{};  // it waits for its slot
    OwnedFd life{};
  };

  void accept_callers();
  bool hear(Visitor& caller);                                     // false: done with it
  void sponsor(Visitor& caller);                                  // throws what the newcomer is to raise
  void check_caller(int socket, const Endpoint& endpoint) const;  // likewise
  int choose_slot(int wanted, const Membership::Welcome& members, const Endpoint& endpoint);
  void greet(Visitor& caller);
  bool take(Visitor& caller);  // false: it has to wait

  OpenGroup& group_;
  const GroupId id_;
  const int rank_;
  const Host host_;
  std::vector<Visitor> callers_;
  uint64_t pause_ns_ = 0;  // nobody is let in before: no descriptor was left
  PacketReader reader_;
};

// Of the process at the other end; pid 0: it is not in this process's pid namespace.
struct ProcessBehind {
  int pid = 0;
  uint32_t uid = 0;
};
ProcessBehind process_behind(int socket);
OwnedFd open_process(int pid);  // invalid where the kernel gives none
// Whether the incarnation is over: its process has ended, or its door is closed, which is open from before it claims a slot until it
// has given up or closed its communicator.
bool is_over(const Endpoint& endpoint);

}  // namespace weft
