// check: allow-in-file file-size: one class
// Processes as ranks. Threads: one monitor (all sockets and pidfds), one watcher a peer (its life lock), one holder of
// our own life lock. The monitor always reads, so two ranks that send much to each other never wait for each other.
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/thread.h"
#include "bootstrap/board.h"
#include "bootstrap/control_plane.h"
#include "bootstrap/handshake.h"
#include "bootstrap/life_lock.h"
#include "bootstrap/link.h"

namespace weft {
namespace {

// The name of its socket is 128 random bits of that process life.
uint64_t incarnation_of(const Endpoint& endpoint) {
  uint64_t nonce = 0xcbf29ce484222325u;  // FNV-1a
  for (size_t at = 0; at < endpoint.name_bytes; ++at) {
    nonce = (nonce ^ static_cast<uint8_t>(endpoint.name[at])) * 0x100000001b3u;
  }
  return nonce | 1;
}

constexpr const char* kClosedText = "closed its communicator";
constexpr uint64_t kWatchSliceNs = 200'000'000;  // how long a watcher may outlive close()
constexpr int kPacketsATurn = 64;                // of a peer, before the next one is heard
constexpr int kPacketsLeft = 1 << 16;            // more than a socket holds

// Runs detached and touches only what it shares: close() need not wait for it.
void watch(const std::shared_ptr<PeerLife>& life, const std::shared_ptr<Board>& board, int peer) {
  while (!board->closed() && board->is_watched(peer)) {
    switch (life->wait(kWatchSliceNs)) {
      case PeerLife::State::kHeld: continue;
      case PeerLife::State::kReleased: return;  // an orderly end: its goodbye comes behind its last messages
      case PeerLife::State::kUnknown: return;   // the two other channels remain
      case PeerLife::State::kOwnerDied:
        // After a goodbye the owner may also be another watcher that died while it looked.
        if (!life->said_goodbye()) board->gone(peer, DetectionChannel::kOwnerDeath, "died");
        return;
    }
  }
}

struct Peer {
  Peer(int rank_in, Connection&& connection)
      : rank(rank_in),
        link(std::move(connection.wire)),
        pidfd(std::move(connection.pidfd)),
        life(connection.life),
        is_near(life != nullptr),
        running(pidfd.valid()) {}

  bool said_goodbye() const { return life && life->said_goodbye(); }

  const int rank;
  Link link;
  OwnedFd pidfd;  // monitor only, while it runs
  std::shared_ptr<PeerLife> life;
  const bool is_near;          // on this machine; else it has neither pidfd nor life page
  bool is_given_back = false;  // monitor only: all of this peer was given back
  bool connected = true;       // monitor only: its socket has not ended
  bool running;                // monitor only: its pidfd has not fired
};

class ProcessControlPlane final : public ControlPlane {
 public:
  // NOLINTNEXTLINE(readability-function-size): what connecting has made, each a thing of its own
  ProcessControlPlane(int rank, std::vector<uint64_t>&& incarnations, std::unique_ptr<LifeLock> own_life,
                      std::shared_ptr<Ledger> ledger, std::vector<Connection>&& connections,
                      std::shared_ptr<StoreLedger> store, std::shared_ptr<Decider> decider)
      : rank_(rank),
        num_ranks_(static_cast<int>(incarnations.size())),
        incarnations_(std::move(incarnations)),
        ledger_(std::move(ledger)),
        store_(std::move(store)),
        decider_(std::move(decider)),
        board_(std::make_shared<Board>(rank, num_ranks_)),
        own_life_(std::move(own_life)),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!wake_.valid()) throw_system_error("eventfd", errno);
    peers_.resize(static_cast<size_t>(num_ranks_));
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (peer == rank) continue;
      peers_[static_cast<size_t>(peer)] =
          std::make_unique<Peer>(peer, std::move(connections[static_cast<size_t>(peer)]));
    }
    if (store_) store_->set_announce([this](const Decision& decision) { publish_decision(decision); });
    try {
      for (const auto& peer : peers_) {
        if (!peer || !peer->is_near) continue;
        start_thread("weft-watch", [life = peer->life, board = board_, rank = peer->rank] {
          watch(life, board, rank);
        }).detach();
      }
      monitor_ = start_thread("weft-monitor", [this] { run_monitor(); });
    } catch (...) {
      close_once();
      throw;
    }
  }

  ~ProcessControlPlane() override {
    close_once();
    if (getpid() != owner_pid_) leak();
  }

  int rank() const noexcept override { return rank_; }
  int num_ranks() const noexcept override { return num_ranks_; }
  Ledger& ledger() const noexcept override { return *ledger_; }
  bool is_near(int rank) const noexcept override {
    const auto& peer = peers_[static_cast<size_t>(rank)];
    return !peer || peer->is_near;
  }
  const std::vector<uint64_t>& incarnations() const noexcept override { return incarnations_; }

  std::vector<Parcel> exchange(const std::vector<int>& members, uint64_t tag, const std::vector<std::byte>& bytes,
                               const std::vector<int>& fds, uint64_t deadline_ns, const Poll& poll) override;

  void publish_abort(const AbortReason& reason) noexcept override {
    for (const auto& peer : peers_) {
      if (peer) tell(peer->rank, reason);
    }
  }
  void tell(int rank, const AbortReason& reason) noexcept override {
    AbortReason told = reason;
    told.reporter = rank_;
    told.is_ours = 0;
    Link& link = peers_[static_cast<size_t>(rank)]->link;
    if (store_ && reason.code == AbortCode::kDecided) {
      const std::optional<Decision> newest = store_->newest();
      if (newest) link.send_decision(std::make_shared<std::vector<std::byte>>(pack_decision(*newest)));
    } else {
      link.send_abort(told);
    }
    if (link.waits_for_room()) wake_monitor();
  }

  void publish_note(const Note& note) noexcept override {
    board_->note(rank_, note);
    bool waiting = false;
    for (const auto& peer : peers_) {
      if (!peer) continue;
      peer->link.send_note(note);
      waiting |= peer->link.waits_for_room();
    }
    if (waiting) wake_monitor();
  }
  Note note_of(int rank) const override { return board_->note_of(rank); }
  std::vector<int> silent_ranks() const override { return board_->silent_ranks(); }

  void set_abort_handler(AbortHandler handler) override { board_->relay().set_handler(std::move(handler)); }
  std::vector<int> dead_ranks() const override { return board_->dead_ranks(); }
  uint64_t newest_silent_tag(uint64_t prefix, uint64_t mask) const override {
    return board_->newest_silent_tag(prefix, mask);
  }
  std::vector<int> ended_ranks() const override { return board_->ended_ranks(); }
  void keep_members(const std::vector<int>& members) override {
    board_->keep_members(members);
    wake_monitor();
  }
  void forget_tags(uint64_t prefix, uint64_t mask, uint64_t below) override {
    board_->forget_tags(prefix, mask, below);
  }
  std::vector<Detection> detections() const override { return board_->detections(); }
  void close(std::string_view why) noexcept override { close_once(why); }

 private:
  void publish_decision(const Decision& decision);
  std::string hear_decision(std::span<const std::byte> bytes);
  void run_monitor();
  std::vector<pollfd> watched_fds();
  void read_from(Peer& peer, PacketReader& reader, int most_packets);
  void give_back(Peer& peer) noexcept;
  void wake_monitor() noexcept;
  void close_once(std::string_view why = {}) noexcept;
  void leak() noexcept;

  const int rank_;
  const int num_ranks_;
  const std::vector<uint64_t> incarnations_;
  const std::shared_ptr<Ledger> ledger_;
  const std::shared_ptr<StoreLedger> store_;  // the same, between machines
  const std::shared_ptr<Decider> decider_;    // likewise
  const int owner_pid_ = getpid();
  std::shared_ptr<Board> board_;  // shared with the watchers
  std::unique_ptr<LifeLock> own_life_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank, empty at our own
  OwnedFd wake_;
  std::thread monitor_;
};

std::vector<Parcel> ProcessControlPlane::exchange(const std::vector<int>& members, uint64_t tag,
                                                  const std::vector<std::byte>& bytes, const std::vector<int>& fds,
                                                  uint64_t deadline_ns, const Poll& poll) {
  board_->check(members, tag, bytes.size(), fds.size());
  for (const int member : members) {
    if (fds.empty() || is_near(member)) continue;
    throw_unsupported("rank " + std::to_string(member) + " runs on another machine than rank " + std::to_string(rank_) +
                      ", so it can't be given file descriptors");
  }
  auto message = std::make_shared<OutgoingMessage>(OutgoingMessage{tag, bytes, {}});
  Parcel mine{bytes, {}};
  for (const int fd : fds) {
    message->fds.push_back(OwnedFd::duplicate(fd));
    mine.fds.push_back(OwnedFd::duplicate(fd));
  }
  const auto unsent = [&] {
    std::vector<int> ranks;
    for (const int member : members) {
      if (member != rank_ && peers_[static_cast<size_t>(member)]->link.unsent()) ranks.push_back(member);
    }
    return ranks;
  };
  for (const int member : members) {
    if (member == rank_) continue;
    Link& link = peers_[static_cast<size_t>(member)]->link;
    link.queue(message);
    link.flush();
  }
  if (!unsent().empty()) wake_monitor();
  auto parcels = board_->collect({members, tag, deadline_ns, poll, unsent});
  parcels[static_cast<size_t>(rank_)] = std::move(mine);
  return parcels;
}

void ProcessControlPlane::run_monitor() {
  PacketReader reader;
  while (!board_->closed()) {
    std::vector<pollfd> fds = watched_fds();
    if (::poll(fds.data(), fds.size(), -1) < 0) continue;
    if (fds[0].revents != 0) {
      uint64_t count = 0;
      while (read(wake_.get(), &count, sizeof(count)) > 0) {
      }
    }
    for (size_t idx = 0; idx < peers_.size(); ++idx) {
      if (!peers_[idx]) continue;
      Peer& peer = *peers_[idx];
      const pollfd& socket = fds[1 + 2 * idx];
      const bool ended = fds[2 + 2 * idx].revents != 0;
      if ((socket.revents & POLLOUT) != 0) {
        peer.link.flush();
        if (!peer.link.unsent()) board_->wake();
      }
      // Before the end of the process is told: what it still said counts, a goodbye above all.
      if (peer.connected && ((socket.revents & ~POLLOUT) != 0 || ended)) {
        read_from(peer, reader, ended ? kPacketsLeft : kPacketsATurn);
      }
      if (ended) {
        peer.running = false;
        if (peer.said_goodbye()) {
          board_->gone(peer.rank, DetectionChannel::kGoodbye, kClosedText);
        } else {
          board_->gone(peer.rank, DetectionChannel::kPidfd, "died");
        }
      }
      give_back(peer);
    }
  }
}

// R24: what belongs to a peer goes with it, each part when it has told all it can tell. One that closed in order, and one
// that is gone and no member any more, have nothing more to tell.
void ProcessControlPlane::give_back(Peer& peer) noexcept {
  if (peer.is_given_back) return;
  if (!peer.connected && peer.said_goodbye()) peer.running = false;
  if (!board_->is_watched(peer.rank)) peer.connected = false;  // its pidfd still proves its end
  if (!peer.running) peer.pidfd.reset();
  if (!peer.connected) {
    peer.link.shut();
    peer.link.close();
  }
  if (peer.running || peer.connected) return;
  peer.life.reset();
  peer.is_given_back = true;
}

// Entry 0: wake_; then for each rank its socket and its pidfd (-1, which poll skips, where there is nothing to see).
std::vector<pollfd> ProcessControlPlane::watched_fds() {
  std::vector<pollfd> fds{{wake_.get(), POLLIN, 0}};
  for (const auto& peer : peers_) {
    const bool connected = peer && peer->connected;
    const bool full = connected && peer->link.waits_for_room();
    fds.push_back({connected ? peer->link.fd() : -1, static_cast<short>(full ? POLLIN | POLLOUT : POLLIN), 0});
    fds.push_back({peer && peer->running ? peer->pidfd.get() : -1, POLLIN, 0});
  }
  return fds;
}

void ProcessControlPlane::read_from(Peer& peer, PacketReader& reader, int most_packets) {
  const int rank = peer.rank;
  const Link::Events events{
      [&](uint64_t tag, Parcel&& parcel) { board_->put(rank, tag, std::move(parcel)); },
      [&](const AbortReason& reason) {
        AbortReason heard = reason;
        heard.reporter = rank;
        heard.is_ours = 0;
        if (heard.rank < 0 || heard.rank >= num_ranks_) heard.rank = -1;
        board_->published(heard);
      },
      [&](const Note& note) { board_->note(rank, note); },
      [&](const std::string& why) { board_->gone(rank, DetectionChannel::kGoodbye, kClosedText, why); },
      [&](const std::string& why) { board_->gone(rank, DetectionChannel::kRefused, why); },
      [&](std::span<const std::byte> bytes) { return hear_decision(bytes); },
  };
  if (!peer.link.receive(reader, events, most_packets)) return;
  peer.connected = false;
  if (peer.said_goodbye()) {
    board_->gone(rank, DetectionChannel::kGoodbye, kClosedText);
  } else if (peer.link.is_unreachable()) {
    board_->gone(rank, DetectionChannel::kUnreachable,
                 "is unreachable: its machine, or the network between, does not answer");
  } else {
    board_->gone(rank, DetectionChannel::kSocketEnd, "died (its connection ended)");
  }
}

// To all, those that are left out and those that are no members any more included: who is in a meeting that it ends, leaves it.
void ProcessControlPlane::publish_decision(const Decision& decision) {
  const auto bytes = std::make_shared<const std::vector<std::byte>>(pack_decision(decision));
  for (const auto& peer : peers_) {
    if (!peer) continue;
    peer->link.send_decision(bytes);
    if (peer->link.waits_for_room()) wake_monitor();
  }
}

std::string ProcessControlPlane::hear_decision(std::span<const std::byte> bytes) {
  const std::optional<Decision> decision = store_ ? read_decision(bytes, store_->group()) : std::nullopt;
  if (!decision) return "a decision that can't be believed";
  if (!store_->learn(*decision)) return {};
  AbortReason told;
  told.code = AbortCode::kDecided;
  board_->published(told);
  return {};
}

void ProcessControlPlane::wake_monitor() noexcept {
  const uint64_t one = 1;
  // Fails only when the counter is full, and then the monitor wakes anyway.
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
}

void ProcessControlPlane::close_once(std::string_view why) noexcept {
  if (getpid() != owner_pid_ || board_->closed()) return;
  const std::string line = one_line(why, AbortReason::kTextBytes);
  if (decider_) decider_->close();
  own_life_->say_goodbye();  // first: whatever the peers see from now on is no death
  board_->close();
  wake_monitor();
  if (monitor_.joinable()) monitor_.join();
  for (const auto& peer : peers_) {
    if (!peer) continue;
    peer->link.say_goodbye(line);
    peer->link.close();
    peer->pidfd.reset();
  }
  own_life_->release();
}

// In a forked child: the threads are not here, locks may be held for ever, and the peers are none of its business.
void ProcessControlPlane::leak() noexcept {
  new std::thread(std::move(monitor_));
  new std::vector<std::unique_ptr<Peer>>(std::move(peers_));
  new std::shared_ptr<Board>(std::move(board_));
  own_life_.release();  // NOLINT(bugprone-unused-return-value): leaked on purpose
}

}  // namespace

std::unique_ptr<ControlPlane> connect_processes(int rank, const std::vector<Endpoint>& endpoints, Listener&& listener,
                                                uint64_t deadline_ns, const ControlPlane::Poll& poll,
                                                const Across& across) {
  Listener own_listener(std::move(listener));  // closed on return, whatever happens
  check_endpoints(rank, endpoints, own_listener.endpoint(), across.decider != nullptr, own_listener.door_problem());
  const bool is_one_machine = on_one_machine(endpoints);
  const GroupSecret secret = group_secret(endpoints, across.secret);
  auto life = std::make_unique<LifeLock>();
  std::shared_ptr<GroupPage> page;
  if (rank == 0 && is_one_machine) page = GroupPage::create(static_cast<int>(endpoints.size()));
  const int page_fd = page ? page->fd() : -1;
  if (!is_one_machine) own_listener.door()->open();
  const int door = is_one_machine ? -1 : own_listener.door()->fd();
  auto connections =
      connect_mesh({rank, endpoints, own_listener.fd(), door, life->fd(), page_fd, deadline_ns, poll, secret});
  std::shared_ptr<Ledger> ledger;
  std::shared_ptr<StoreLedger> store;
  if (is_one_machine) {
    if (!page) page = connections[0].page;
    page->drop_fd();
    ledger = std::make_shared<PageLedger>(page);
  } else {
    GroupId group{};
    std::copy_n(secret.id.begin(), group.size(), group.begin());
    ledger = store = std::make_shared<StoreLedger>(group, across.decider);
  }
  std::vector<uint64_t> incarnations;
  for (const Endpoint& endpoint : endpoints) incarnations.push_back(incarnation_of(endpoint));
  return std::make_unique<ProcessControlPlane>(rank, std::move(incarnations), std::move(life), std::move(ledger),
                                               std::move(connections), std::move(store), across.decider);
}

}  // namespace weft
