#include "bootstrap/handshake.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "bootstrap/endpoint_list.h"
#include "bootstrap/greeting.h"
#include "bootstrap/network_mesh.h"
#include "bootstrap/socket.h"

namespace weft {
namespace {

constexpr int kSliceMs = 50;
constexpr int kRetryMs = 2;  // while a peer's backlog is full

std::string name_of(int rank) { return "rank " + std::to_string(rank); }

OwnedFd open_pidfd(int pid) { return OwnedFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))); }

class Mesh {
 public:
  explicit Mesh(const MeshRequest& request)
      : request_(request),
        num_ranks_(static_cast<int>(request.endpoints.size())),
        is_one_machine_(on_one_machine(request.endpoints)),
        network_(request.rank, request.endpoints, request.secret, request.door, {}),
        connections_(request.endpoints.size()) {}

  std::vector<Connection> run() {
    try {
      check_descriptors();
      open_pidfds();
      while (!complete()) step();
    } catch (const Error& error) {
      tell_all(error);
      throw;
    } catch (...) {
      tell_all(Error(ErrorCode::kPeerLost, "it was interrupted", "connect", 0, {request_.rank}));
      throw;
    }
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (network_.is_remote(peer)) connection(peer).wire = network_.take(peer);
    }
    return std::move(connections_);
  }

 private:
  const Endpoint& endpoint(int peer) const { return request_.endpoints[static_cast<size_t>(peer)]; }
  Connection& connection(int peer) { return connections_[static_cast<size_t>(peer)]; }
  bool done(int peer) { return connection(peer).life != nullptr; }

  std::vector<int> not_done() {  // of this machine
    std::vector<int> peers;
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (peer != request_.rank && !network_.is_remote(peer) && !done(peer)) peers.push_back(peer);
    }
    return peers;
  }
  std::vector<int> all_not_done() {
    std::vector<int> peers = not_done();
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (network_.is_remote(peer) && !network_.done(peer)) peers.push_back(peer);
    }
    std::sort(peers.begin(), peers.end());
    return peers;
  }
  bool complete() { return all_not_done().empty(); }

  [[noreturn]] void throw_lost(int peer, const std::string& how) {
    throw_peer_lost("connect", {peer}, name_of(peer) + " (pid " + std::to_string(endpoint(peer).pid) + ") " + how);
  }

  void check_alive(int peer) {
    if (process_start_time(endpoint(peer).pid) != endpoint(peer).start_time) {
      throw_lost(peer, "has ended, or runs in another container whose processes this rank can't see");
    }
  }

  // Before anybody is called: half connected, a large group would take long to say what is missing.
  void check_descriptors() {
    size_t needed = 0;
    for (const int peer : all_not_done()) needed += network_.is_remote(peer) ? 1 : 2;
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
    std::error_code error;
    std::filesystem::directory_iterator each("/proc/self/fd", error);
    size_t open = 0;
    for (; !error && each != std::filesystem::directory_iterator(); each.increment(error)) ++open;
    if (open + needed <= limit.rlim_cur) return;
    throw_system_error("connecting " + std::to_string(num_ranks_) + " ranks, which takes " + std::to_string(needed) +
                           " file descriptors besides the " + std::to_string(open) + " that are open",
                       EMFILE);
  }

  // Opened before the start time is compared: from then on the descriptor stands for the right incarnation.
  void open_pidfds() {
    for (const int peer : not_done()) {
      connection(peer).pidfd = open_pidfd(endpoint(peer).pid);
      if (!connection(peer).pidfd.valid() && errno != ESRCH) {
        log_line(kLogInfo, "no pidfd for " + name_of(peer) + ": its death is noticed in the two other ways");
      }
      check_alive(peer);
    }
  }

  void step() {
    bool retry = network_.is_retrying();
    for (const int peer : not_done()) {
      if (peer < request_.rank && !connection(peer).wire.valid()) retry |= !start(peer);
    }
    if (request_.poll) request_.poll();
    wait_for_news(retry ? kRetryMs : kSliceMs);
    accept_callers();
    for (const int peer : not_done()) {
      if (peer < request_.rank && connection(peer).wire.valid()) finish(peer);
    }
    greet_callers();
    check_pidfds();
    network_.step();
    const std::vector<int> late = all_not_done();
    if (!late.empty() && now_ns() >= request_.deadline_ns) {
      throw_peer_timeout("connect", 0, late,
                         ranks_text(late) + " did not connect by the deadline" + network_.hint(late));
    }
  }

  void wait_for_news(int longest_ms) {
    std::vector<pollfd> waited{{request_.listener, POLLIN, 0}};
    for (const int peer : not_done()) {
      if (connection(peer).wire.valid()) waited.push_back({connection(peer).wire.fd(), POLLIN, 0});
      if (connection(peer).pidfd.valid()) waited.push_back({connection(peer).pidfd.get(), POLLIN, 0});
    }
    for (const OwnedFd& caller : callers_) waited.push_back({caller.get(), POLLIN, 0});
    network_.add_waited(waited);
    ::poll(waited.data(), waited.size(), longest_ms);
  }

  // With a pidfd that costs no reading of /proc, which takes the longer the more threads the process has.
  void check_running(int peer) {
    if (!connection(peer).pidfd.valid()) return check_alive(peer);
    pollfd ended{connection(peer).pidfd.get(), POLLIN, 0};
    if (::poll(&ended, 1, 0) == 1) throw_ended(peer);
  }

  void check_pidfds() {
    const std::vector<int> peers = not_done();
    std::vector<pollfd> ended;
    for (const int peer : peers) {
      if (!connection(peer).pidfd.valid()) check_alive(peer);
      ended.push_back({connection(peer).pidfd.get(), POLLIN, 0});
    }
    if (::poll(ended.data(), ended.size(), 0) <= 0) return;
    for (size_t idx = 0; idx < peers.size(); ++idx) {
      if (ended[idx].revents != 0) throw_ended(peers[idx]);
    }
  }

  [[noreturn]] void throw_ended(int peer) { throw_lost(peer, "ended while the ranks connected"); }

  // --- the connecting side -------------------------------------------------------------------------------------------

  // False if the peer's backlog is full: try again soon.
  bool start(int peer) {
    OwnedFd socket = make_socket();
    const SocketAddress address(std::string_view(endpoint(peer).name.data(), endpoint(peer).name_bytes));
    if (::connect(socket.get(), address.get(), address.bytes()) != 0) {
      if (errno == EAGAIN || errno == EINTR) return false;
      if (errno == ECONNREFUSED) {
        throw_lost(peer, "does not listen at its socket: it gave up, ended, or runs in another network namespace");
      }
      throw_system_error("connecting to " + name_of(peer), errno);
    }
    if (credentials(socket.get()).pid == 0) {
      throw_unsupported(name_of(peer) + " is not in the pid namespace of " + name_of(request_.rank) +
                        share_processes_text());
    }
    const std::string problem = stranger(socket.get(), peer);
    if (!problem.empty()) throw_invalid_argument("the endpoint of " + name_of(peer) + " is not its own: " + problem);
    check_running(peer);
    say_hello(socket.get(), peer);
    connection(peer).wire = std::move(socket);
    return true;
  }

  void finish(int peer) {
    switch (reader_.receive(connection(peer).wire.fd())) {
      case ReceiveResult::kNothing: return;
      case ReceiveResult::kUnreachable:
      case ReceiveResult::kEnd: throw_lost(peer, "closed the connection while the ranks connected");
      case ReceiveResult::kBad: throw_invalid_argument(name_of(peer) + " sent " + reader_.problem);
      case ReceiveResult::kPacket: break;
    }
    if (reader_.header.type == PacketType::kRefusal) throw_refusal(name_of(peer));
    const std::string problem = wrong_hello(peer);
    if (!problem.empty()) throw_invalid_argument(name_of(peer) + " sent " + problem);
    throw_if_fds_lost(name_of(peer));
    take_fds(peer);
  }

  // --- the accepting side --------------------------------------------------------------------------------------------

  // Those in the queue, but so few at a time that callers without end don't keep step() from its deadline.
  void accept_callers() {
    for (size_t turn = 0; turn < kCallersAtOnce; ++turn) {
      OwnedFd caller(accept4(request_.listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!caller.valid()) {
        if (errno == EINTR || errno == ECONNABORTED) continue;
        if (errno == EAGAIN || errno == EWOULDBLOCK) return;
        throw_system_error("accepting a connection", errno);
      }
      // Anybody may call an abstract socket: strangers are turned away unread and change nothing.
      if (may_be_peer(caller.get())) callers_.push_back(std::move(caller));
    }
  }

  bool may_be_peer(int socket) {
    const ucred found = credentials(socket);
    std::string problem = "no rank is waited for";
    for (const int peer : not_done()) {
      if (peer < request_.rank) continue;
      problem = stranger(found, peer);
      if (problem.empty()) return true;
    }
    log_line(kLogWarning, "turned a connection away: " + problem);
    return false;
  }

  void greet_callers() {
    std::vector<OwnedFd> waiting;
    waiting.swap(callers_);
    for (OwnedFd& caller : waiting) {
      switch (reader_.receive(caller.get())) {
        case ReceiveResult::kNothing: callers_.push_back(std::move(caller)); break;
        case ReceiveResult::kUnreachable:
        case ReceiveResult::kEnd: break;  // if it was a rank, its pidfd tells
        case ReceiveResult::kBad: refuse_caller(std::move(caller), reader_.problem);
        case ReceiveResult::kPacket: greet(std::move(caller)); break;
      }
    }
  }

  void greet(OwnedFd caller) {
    if (reader_.header.type == PacketType::kRefusal) throw_refusal("a rank");
    const int source = source_of(reader_.header, reader_.payload);
    const bool awaited = source > request_.rank && source < num_ranks_ && !network_.is_remote(source) && !done(source);
    // Compared with that of another rank if it is of none that is awaited: what is no greeting of this group is told as that.
    const int supposed = awaited ? source : (request_.rank == 0 ? num_ranks_ - 1 : 0);
    std::string problem = awaited ? stranger(caller.get(), source) : std::string();
    if (problem.empty()) problem = wrong_hello(supposed);
    if (problem.empty() && !awaited) problem = "a greeting of a rank that is not waited for";
    if (!problem.empty()) refuse_caller(std::move(caller), problem);
    check_running(source);
    if (reader_.has_lost_fds) {
      callers_.push_back(std::move(caller));  // so that tell_all() reaches it
      throw_if_fds_lost(name_of(source));
      return;
    }
    std::shared_ptr<PeerLife> life = std::make_shared<PeerLife>(std::move(reader_.fds.front()));
    say_hello(caller.get(), source);
    connection(source).wire = std::move(caller);
    connection(source).life = std::move(life);
  }

  // The caller has the pid and uid of a rank, so this is no passer-by but a group that can't work.
  [[noreturn]] void refuse_caller(OwnedFd caller, const std::string& problem) {
    callers_.push_back(std::move(caller));  // so that tell_all() reaches it
    throw_invalid_argument("a rank that connected to " + name_of(request_.rank) + " sent " + problem);
  }

  // --- both ----------------------------------------------------------------------------------------------------------

  // Of the process at the other end; pid 0: it is not in this process's pid namespace.
  static ucred credentials(int socket) {
    ucred found{};
    socklen_t bytes = sizeof(found);
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &found, &bytes) != 0) throw_system_error("SO_PEERCRED", errno);
    return found;
  }

  // What speaks against the other end being the process of `peer`; empty: nothing.
  std::string stranger(int socket, int peer) { return stranger(credentials(socket), peer); }
  std::string stranger(const ucred& found, int peer) {
    if (found.pid == endpoint(peer).pid && found.uid == endpoint(peer).uid) return {};
    return "it comes from pid " + std::to_string(found.pid) + " of user " + std::to_string(found.uid) + ", " +
           name_of(peer) + " is pid " + std::to_string(endpoint(peer).pid) + " of user " +
           std::to_string(endpoint(peer).uid);
  }

  void say_hello(int socket, int peer) {
    const Hello hello = make_hello(request_.rank, peer, request_.endpoints, request_.secret);
    std::vector<OwnedFd> fds;
    fds.push_back(OwnedFd::duplicate(request_.life_fd));
    if (request_.page_fd >= 0) fds.push_back(OwnedFd::duplicate(request_.page_fd));
    PacketHeader header = small_header(PacketType::kHello, sizeof(hello));
    header.num_fds = static_cast<uint32_t>(fds.size());
    // A fresh socket has room; a peer that is gone already is noticed by its pidfd or by the end of the connection.
    send_packet(socket, header, std::as_bytes(std::span<const Hello, 1>(&hello, 1)), fds);
  }

  // What is wrong with the packet in reader_ as the greeting of `peer`; empty: nothing. With it come its life lock and, of rank 0
  // of a group on one machine, the group's page.
  std::string wrong_hello(int peer) {
    std::string problem = hello_problem(reader_.header, reader_.payload,
                                        make_hello(peer, request_.rank, request_.endpoints, request_.secret));
    const bool has_page = peer == 0 && is_one_machine_;
    if (!problem.empty() || reader_.header.num_fds == (has_page ? 2 : 1)) return problem;
    return has_page ? "a greeting without its life lock and the group's page" : "a greeting without its life lock";
  }

  void take_fds(int peer) {
    std::shared_ptr<PeerLife> life = std::make_shared<PeerLife>(std::move(reader_.fds[0]));
    if (peer == 0 && is_one_machine_)
      connection(peer).page =
          GroupPage::attach(std::move(reader_.fds[1]), request_.num_slots == 0 ? num_ranks_ : request_.num_slots);
    connection(peer).life = std::move(life);
  }

  void throw_if_fds_lost(const std::string& source) {
    if (reader_.has_lost_fds) throw_system_error("receiving a file descriptor of " + source, EMFILE);
  }

  [[noreturn]] void throw_refusal(const std::string& from) {
    throw read_refusal(reader_.payload, from, request_.rank, num_ranks_);
  }

  void tell_all(const Error& error) noexcept {
    const std::vector<std::byte> bytes = pack_refusal(error);
    for (const Connection& known : connections_) {
      if (known.wire.valid()) send_small(known.wire.fd(), PacketType::kRefusal, bytes);
    }
    for (const OwnedFd& caller : callers_) send_small(caller.get(), PacketType::kRefusal, bytes);
    network_.tell_all(bytes);
  }

  const MeshRequest& request_;
  const int num_ranks_;
  const bool is_one_machine_;
  NetworkMesh network_;
  std::vector<Connection> connections_;
  std::vector<OwnedFd> callers_;  // accepted, of the right process, greeting still to come
  PacketReader reader_;
};

}  // namespace

std::vector<Connection> connect_mesh(const MeshRequest& request) { return Mesh(request).run(); }

}  // namespace weft
