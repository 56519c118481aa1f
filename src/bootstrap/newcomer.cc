#include "bootstrap/newcomer.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "base/clock.h"
#include "bootstrap/reception.h"
#include "weft/config/fail_point.h"

namespace weft {
namespace {

constexpr int kSliceMs = 50;
constexpr u64 kDoorNs = 5'000'000'000;  // for the answer of a door, where there is another one
constexpr int kRetryMs = 2;             // while the backlog of a door is full

// A connected socket, which is invalid where nobody listens; none: the door is full just now.
std::optional<OwnedFd> try_door(std::string_view name) {
  OwnedFd socket = make_socket();
  const SocketAddress address(name);
  if (::connect(socket.get(), address.get(), address.bytes()) != 0) {
    if (errno == EAGAIN || errno == EINTR) return std::nullopt;
    return OwnedFd();
  }
  const ProcessBehind found = process_behind(socket.get());
  if (found.uid != geteuid()) {
    throw_unsupported("the group runs as user " + std::to_string(found.uid) + ", this process as user " +
                      std::to_string(geteuid()) + "; all ranks of a machine need the same user");
  }
  return socket;
}

// The same; waits while the door is full.
OwnedFd call_door(std::string_view name, uint64_t deadline_ns, const ControlPlane::Poll& poll) {
  for (;;) {  // check: allow spin-loop: sleeps in poll() and ends at the deadline
    if (std::optional<OwnedFd> socket = try_door(name)) return std::move(*socket);
    if (now_ns() >= deadline_ns) throw_peer_timeout("join", 0, {}, "a door of the group took no call by the deadline");
    if (poll) poll();
    ::poll(nullptr, 0, kRetryMs);
  }
}

[[noreturn]] void throw_bad(const PacketReader& reader, const std::string& who) {
  if (reader.is_other_version) throw_unsupported(who + reader.problem + "; all ranks need the same Weft");
  throw_invalid_argument(who + reader.problem);
}

// False: the other end is gone.
bool await_packet(int socket, PacketReader& reader, uint64_t deadline_ns, const ControlPlane::Poll& poll) {
  for (;;) {  // check: allow spin-loop: sleeps in poll() and ends at the deadline
    switch (reader.receive(socket)) {
      case ReceiveResult::kPacket: return true;
      case ReceiveResult::kNothing: break;
      case ReceiveResult::kBad: throw_bad(reader, "the address: who answers there sent ");
      case ReceiveResult::kEnd:
      case ReceiveResult::kUnreachable: return false;
    }
    if (now_ns() >= deadline_ns)
      throw_peer_timeout("join", 0, {}, "a rank of the group did not answer by the deadline");
    if (poll) poll();
    pollfd waited{socket, POLLIN, 0};
    ::poll(&waited, 1, kSliceMs);
  }
}

struct Asked {
  std::optional<Sponsored> sponsored;
  std::optional<Error> denial;  // that rank is no member any more; another one may be
  bool is_cut_off = false;      // unread: a door had no room, or its rank has ended
};

// All doors, until one answers.
Asked ask_doors(const JoinAddress& address, const JoinRequest& request, uint64_t deadline_ns,
                const ControlPlane::Poll& poll) {
  Asked asked;
  PacketReader reader;
  for (const std::string& door : address.doors) {
    OwnedFd socket = call_door(door, deadline_ns, poll);
    if (!socket.valid()) continue;
    WEFT_FAIL_POINT("join.called");
    send_small(socket.get(), PacketType::kHello, payload_of(request));
    WEFT_FAIL_POINT("join.asked");
    const bool is_last = &door == &address.doors.back();
    try {
      const u64 until_ns = is_last ? deadline_ns : std::min(deadline_ns, now_ns() + kDoorNs);
      if (!await_packet(socket.get(), reader, until_ns, poll)) {
        asked.is_cut_off = true;
        continue;
      }
    } catch (const Error& error) {
      if (is_last || error.code != ErrorCode::kPeerTimeout) throw;
      continue;  // a stopped rank, maybe
    }
    if (reader.header.type == PacketType::kRefusal) {
      Error found = read_denial(reader.payload);
      if (found.code != ErrorCode::kEvicted) throw std::move(found);
      asked.denial = std::move(found);
      continue;
    }
    const JoinWelcome welcome = read_welcome(reader.header, reader.payload);
    if (reader.has_lost_fds) throw_system_error("receiving the group's page", EMFILE);
    if (reader.fds.size() != 1) throw_invalid_argument("the address: who answers there sent no page");
    std::shared_ptr<GroupPage> page = GroupPage::attach(std::move(reader.fds.front()), welcome.num_slots);
    if (page->group() != address.group) throw_invalid_argument("address: another group lives there by now");
    WEFT_FAIL_POINT("join.welcomed");
    asked.sponsored = Sponsored{welcome, std::move(page)};
    return asked;
  }
  return asked;
}

}  // namespace

Sponsored find_sponsor(const JoinAddress& address, int wanted_slot, const Endpoint& own, uint64_t deadline_ns,
                       const ControlPlane::Poll& poll) {
  const bool is_same_network = address.network_namespace == own.network_namespace;
  if (address.boot_id != own.boot_id || address.pid_namespace != own.pid_namespace || !is_same_network) {
    throw_unsupported(std::string("the group lives ") +
                      (address.boot_id != own.boot_id ? "on another machine"
                       : is_same_network              ? "in another pid namespace"
                                                      : "in another network namespace") +
                      " than this process; newcomers join on the machine of the group, in its namespaces");
  }
  JoinRequest request;
  request.slot = wanted_slot;
  request.build = this_build();
  request.group = address.group;
  request.endpoint = own;
  request.endpoint.key = {};
  for (;;) {  // check: allow spin-loop: sleeps in poll() and ends at the deadline
    Asked asked = ask_doors(address, request, deadline_ns, poll);
    if (asked.sponsored) return std::move(*asked.sponsored);
    if (!asked.is_cut_off) {
      if (asked.denial) throw Error(*asked.denial);
      throw_peer_lost("join", {}, "nobody answers at the address: its ranks have ended, or have left the group");
    }
    if (now_ns() >= deadline_ns) {
      throw_peer_timeout("join", 0, {}, "the doors of the group had no room for another caller by the deadline");
    }
    if (poll) poll();
    ::poll(nullptr, 0, kSliceMs);
  }
}

OpenCall::State OpenCall::step() {
  if (!socket_.valid()) {
    const State begun = begin();
    if (begun != State::kCalling || !socket_.valid()) return begun;
  }
  PacketReader reader;
  switch (reader.receive(socket_.get())) {
    case ReceiveResult::kNothing: return State::kCalling;
    case ReceiveResult::kEnd:
    case ReceiveResult::kUnreachable: return State::kCutOff;
    case ReceiveResult::kBad: throw_bad(reader, "rank " + std::to_string(slot_) + " sent ");
    case ReceiveResult::kPacket: break;
  }
  read_answer(reader);
  return State::kAnswered;
}

OpenCall::State OpenCall::begin() {
  connection_.pidfd = open_process(endpoint_.pid);  // before the start time is compared: it stands for the right life
  if (process_start_time(endpoint_.pid) != endpoint_.start_time) return State::kAbsent;
  std::optional<OwnedFd> socket = try_door({endpoint_.name.data(), endpoint_.name_bytes});
  if (!socket) return State::kCalling;
  if (!socket->valid()) return State::kAbsent;
  if (process_behind(socket->get()).pid != endpoint_.pid) {
    throw_invalid_argument("the endpoint of rank " + std::to_string(slot_) + " is not its own");
  }
  socket_ = std::move(*socket);
  greet();
  return State::kCalling;
}

void OpenCall::greet() {
  std::vector<Endpoint> endpoints(static_cast<size_t>(num_slots_));
  endpoints[static_cast<size_t>(caller_.slot)] = caller_.endpoint;
  endpoints[static_cast<size_t>(slot_)] = endpoint_;
  const Hello hello = make_hello(caller_.slot, slot_, endpoints, caller_.secret);
  std::vector<OwnedFd> fds;
  fds.push_back(OwnedFd::duplicate(caller_.life_fd));
  PacketHeader header = small_header(PacketType::kHello, sizeof(hello));
  header.num_fds = 1;
  send_packet(socket_.get(), header, payload_of(hello), fds);
  WEFT_FAIL_POINT("join.greeted");
}

void OpenCall::read_answer(PacketReader& reader) {
  if (reader.header.type == PacketType::kRefusal) throw read_denial(reader.payload);
  std::vector<Endpoint> endpoints(static_cast<size_t>(num_slots_));
  endpoints[static_cast<size_t>(caller_.slot)] = caller_.endpoint;
  endpoints[static_cast<size_t>(slot_)] = endpoint_;
  const std::string problem =
      hello_problem(reader.header, reader.payload, make_hello(slot_, caller_.slot, endpoints, caller_.secret));
  if (!problem.empty()) throw_invalid_argument("rank " + std::to_string(slot_) + " sent " + problem);
  if (reader.has_lost_fds) throw_system_error("receiving a file descriptor of a rank", EMFILE);
  if (reader.fds.size() != 1) throw_invalid_argument("rank " + std::to_string(slot_) + " sent no life lock");
  connection_.life = std::make_shared<PeerLife>(std::move(reader.fds.front()));
  connection_.wire = std::move(socket_);
  WEFT_FAIL_POINT("join.answered");
}

std::optional<Connection> call_rank(const CallingRank& caller, int slot, int num_slots, const Endpoint& endpoint,
                                    uint64_t deadline_ns, const ControlPlane::Poll& poll) {
  for (;;) {  // check: allow spin-loop: sleeps in poll() and ends at the deadline
    OpenCall call(caller, slot, num_slots, endpoint);
    OpenCall::State state = call.step();
    for (; state == OpenCall::State::kCalling && now_ns() < deadline_ns; state = call.step()) {
      if (poll) poll();
      pollfd waited{call.fd(), POLLIN, 0};
      ::poll(&waited, 1, call.fd() < 0 ? kRetryMs : kSliceMs);
    }
    if (state == OpenCall::State::kAnswered) return call.take();
    if (state == OpenCall::State::kAbsent) return std::nullopt;
    if (now_ns() >= deadline_ns) {
      throw_peer_timeout("join", 0, {slot}, "rank " + std::to_string(slot) + " took no call by the deadline");
    }
    ::poll(nullptr, 0, kSliceMs);  // cut off
  }
}

}  // namespace weft
