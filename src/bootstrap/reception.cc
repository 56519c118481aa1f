#include "bootstrap/reception.h"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "weft/config/fail_point.h"

namespace weft {
namespace {

constexpr size_t kMostCallers = 64;
constexpr uint64_t kPauseNs = 100'000'000;

std::vector<OwnedFd> copy_of(int fd) {
  std::vector<OwnedFd> fds;
  fds.push_back(OwnedFd::duplicate(fd));
  return fds;
}

// A fresh socket has room.
SendResult send_hello(int socket, std::span<const std::byte> payload, const std::vector<OwnedFd>& fds) noexcept {
  PacketHeader header = small_header(PacketType::kHello, payload.size());
  header.num_fds = 1;
  return send_packet(socket, header, payload, fds);
}

}  // namespace

ProcessBehind process_behind(int socket) {
  ucred found{};
  socklen_t bytes = sizeof(found);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &found, &bytes) != 0) throw_system_error("SO_PEERCRED", errno);
  return {found.pid, found.uid};
}

OwnedFd open_process(int pid) { return OwnedFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))); }

bool is_over(const Endpoint& endpoint) {
  if (process_start_time(endpoint.pid) != endpoint.start_time) return true;
  const OwnedFd socket = make_socket();
  const SocketAddress address({endpoint.name.data(), endpoint.name_bytes});
  return ::connect(socket.get(), address.get(), address.bytes()) != 0 && errno == ECONNREFUSED;
}

void Reception::add_waited(std::vector<pollfd>& waited) const {
  waited.push_back({now_ns() < pause_ns_ ? -1 : group_.door(), POLLIN, 0});
  for (const Visitor& caller : callers_) waited.push_back({caller.hello ? -1 : caller.socket.get(), POLLIN, 0});
}

void Reception::step() {
  accept_callers();
  std::vector<Visitor> waiting;
  waiting.swap(callers_);
  for (Visitor& caller : waiting) {
    bool stays = false;
    try {
      stays = hear(caller);
    } catch (const Error& error) {
      // Without its socket: it was about to be connected; cut off, it calls again.
      if (caller.socket.valid()) send_small(caller.socket.get(), PacketType::kRefusal, pack_denial(error));
      log_line(kLogInfo, "rank " + std::to_string(rank_) + " turned a newcomer away: " + error.text);
    }
    if (stays) callers_.push_back(std::move(caller));
  }
}

void Reception::accept_callers() {
  for (size_t turn = 0; turn < kMostCallers; ++turn) {
    OwnedFd socket(accept4(group_.door(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EMFILE || errno == ENFILE) pause_ns_ = now_ns() + kPauseNs;
      return;  // nobody, or no descriptor left: the next turn tries again
    }
    if (callers_.size() >= kMostCallers || process_behind(socket.get()).uid != geteuid()) continue;  // unread
    callers_.push_back({std::move(socket), now_ns()});
  }
}

bool Reception::hear(Visitor& caller) {
  const bool is_late = now_ns() - caller.since_ns >= host_.caller_ns;  // cut off, a newcomer calls again
  if (!caller.hello) {
    const ReceiveResult result = reader_.receive(caller.socket.get());
    if (result == ReceiveResult::kNothing) return !is_late;
    if (result == ReceiveResult::kBad && reader_.is_other_version) {  // its own reader tells it the same
      throw_unsupported("the newcomer sent " + reader_.problem + "; all ranks need the same Weft");
    }
    if (result != ReceiveResult::kPacket) return false;
    if (is_join_request(reader_.header, reader_.payload)) {
      sponsor(caller);
      return false;  // what else it has to say it says to every rank
    }
    greet(caller);
  }
  return !take(caller) && !is_late;
}

// Both at once: the kernel tells who has connected, and the endpoint which life of that process it is.
void Reception::check_caller(int socket, const Endpoint& endpoint) const {
  const ProcessBehind found = process_behind(socket);
  if (!on_one_machine(endpoint, group_.endpoint()) || found.pid == 0) {
    throw_unsupported("the newcomer is on another machine, or in another pid or network namespace, than rank " +
                      std::to_string(rank_) + "; newcomers join on the machine of the group, in its namespaces");
  }
  if (found.uid != endpoint.uid || found.pid != endpoint.pid || process_start_time(found.pid) != endpoint.start_time) {
    throw_invalid_argument("the newcomer says that it is pid " + std::to_string(endpoint.pid) + ", it calls from pid " +
                           std::to_string(found.pid));
  }
}

void Reception::sponsor(Visitor& caller) {
  const JoinRequest request = read_join_request(reader_.payload);
  check_caller(caller.socket.get(), request.endpoint);
  if (request.group != id_) throw_invalid_argument("address: another group lives there by now");
  WEFT_FAIL_POINT("sponsor.heard");
  const Membership::Welcome members = host_.welcome();
  JoinWelcome welcome;
  welcome.num_slots = group_.slots().num_slots();
  welcome.epoch = members.epoch;
  welcome.era = members.era;
  welcome.secret = group_.secret();
  std::copy_n(members.incarnations.begin(), welcome.num_slots, welcome.incarnations.begin());
  const std::vector<OwnedFd> page = copy_of(group_.page_fd());
  welcome.slot = choose_slot(request.slot, members, request.endpoint);
  WEFT_FAIL_POINT("sponsor.claimed");
  // Who has its welcome gives its slot back itself, or ends: only here it is still this rank's to do.
  const bool is_told = send_hello(caller.socket.get(), payload_of(welcome), page) == SendResult::kSent;
  if (!is_told) group_.slots().free(welcome.slot, incarnation_of(request.endpoint));
  WEFT_FAIL_POINT("sponsor.welcomed");
}

int Reception::choose_slot(int wanted, const Membership::Welcome& members, const Endpoint& endpoint) {
  SlotTable& slots = group_.slots();
  const int num_slots = slots.num_slots();
  if (wanted < -1 || wanted >= num_slots) {
    throw_invalid_argument("slot is " + std::to_string(wanted) + "; allowed are 0 to " + std::to_string(num_slots - 1) +
                           ", or None for any that is free");
  }
  const uint64_t incarnation = incarnation_of(endpoint);
  for (int slot = 0; slot < num_slots; ++slot) {
    if (slots.claimed(slot) == incarnation && slots.claim(slot, endpoint, rank_))
      return slot;  // a sponsor ended meanwhile
    const std::optional<Endpoint> owner = slots.endpoint(slot);
    if (!owner || owner->pid != endpoint.pid || owner->start_time != endpoint.start_time) continue;
    if (members.incarnations[static_cast<size_t>(slot)] != 0 || !is_over(*owner)) {
      throw_invalid_state("this process is rank " + std::to_string(slot) + " of the group already");
    }
    slots.free(slot, incarnation_of(*owner));  // of an attempt that it has given up
  }
  for (int slot = 0; slot < num_slots; ++slot) {
    if (wanted >= 0 && slot != wanted) continue;
    if (members.incarnations[static_cast<size_t>(slot)] == 0 && slots.claim(slot, endpoint, rank_)) return slot;
  }
  if (wanted >= 0) throw_invalid_argument("slot is " + std::to_string(wanted) + ", which another process has");
  throw Error(
      ErrorCode::kCapacityExceeded,
      "the group is full: all " + std::to_string(num_slots) +
          " slots are taken; a slot is free when its last owner has ended or closed (max_ranks= of the founders)",
      "join");
}

// What a newcomer that another rank sponsors says: the hello of this group, for this rank, from the process that has the slot.
void Reception::greet(Visitor& caller) {
  const int source = source_of(reader_.header, reader_.payload);
  if (source < 0 || source >= group_.slots().num_slots() || source == rank_) {
    throw_invalid_argument("what calls is no newcomer");
  }
  Hello hello;
  std::memcpy(static_cast<void*>(&hello), reader_.payload.data(), sizeof(hello));
  check_caller(caller.socket.get(), hello.endpoint);
  std::vector<Endpoint> endpoints(static_cast<size_t>(group_.slots().num_slots()));
  endpoints[static_cast<size_t>(source)] = hello.endpoint;
  endpoints[static_cast<size_t>(rank_)] = group_.endpoint();
  const std::string problem =
      hello_problem(reader_.header, reader_.payload, make_hello(source, rank_, endpoints, group_.secret()));
  if (!problem.empty()) throw_invalid_argument("the newcomer sent " + problem);
  if (reader_.has_lost_fds) throw_system_error("receiving a file descriptor of a newcomer", EMFILE);
  if (reader_.fds.size() != 1) throw_invalid_argument("the newcomer sent a greeting without its life lock");
  const uint64_t incarnation = incarnation_of(hello.endpoint);
  if (group_.slots().claimed(source) != incarnation) {
    throw Error(ErrorCode::kEvicted, "slot " + std::to_string(source) + " belongs to another process by now", "join");
  }
  const std::vector<int> connected = group_.peers();
  const bool is_connected = std::find(connected.begin(), connected.end(), source) != connected.end();
  if (is_connected && group_.has_peer(source, incarnation)) throw_invalid_state("this newcomer is connected already");
  caller.hello = hello;
  caller.life = std::move(reader_.fds.front());
  caller.slot = source;
  caller.incarnation = incarnation;
}

bool Reception::take(Visitor& caller) {
  pollfd ended{caller.socket.get(), POLLRDHUP, 0};
  if (::poll(&ended, 1, 0) == 1) return true;  // it has given up, and calls again if it has not ended
  if (!host_.has_room(caller.slot)) return false;
  Connection connection;
  connection.pidfd = open_process(caller.hello->endpoint.pid);
  if (process_start_time(caller.hello->endpoint.pid) != caller.hello->endpoint.start_time) return true;  // it has ended
  connection.life = std::make_shared<PeerLife>(std::move(caller.life));
  std::vector<Endpoint> endpoints(static_cast<size_t>(group_.slots().num_slots()));
  endpoints[static_cast<size_t>(caller.slot)] = caller.hello->endpoint;
  endpoints[static_cast<size_t>(rank_)] = group_.endpoint();
  const Hello hello = make_hello(rank_, caller.slot, endpoints, group_.secret());
  const std::vector<OwnedFd> life = copy_of(group_.life_fd());
  const int socket = caller.socket.get();
  connection.wire = std::move(caller.socket);
  // Who has heard the hello counts on being watched.
  const auto answer = [&] {
    WEFT_FAIL_POINT("greet.heard");
    send_hello(socket, payload_of(hello), life);
    WEFT_FAIL_POINT("greet.answered");
  };
  host_.admit(caller.slot, caller.incarnation, std::move(connection), answer);
  return true;
}

}  // namespace weft
