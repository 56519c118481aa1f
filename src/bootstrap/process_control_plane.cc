// check: allow-in-file file-size: one class
// Processes as ranks. Threads: one monitor (all sockets and pidfds), one watcher a peer (its life lock), one holder of
// our own life lock. The monitor always reads, so two ranks that send much to each other never wait for each other.
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/thread.h"
#include "bootstrap/board.h"
#include "bootstrap/control_plane.h"
#include "bootstrap/handshake.h"
#include "bootstrap/life_lock.h"
#include "bootstrap/link.h"
#include "bootstrap/network.h"
#include "bootstrap/newcomer.h"
#include "bootstrap/open_group.h"
#include "weft/config/fail_point.h"

namespace weft {
namespace {

constexpr const char* kClosedText = "closed its communicator";
constexpr const char* kUnreachableText = "is unreachable: its machine, or the network between, does not answer";
constexpr uint64_t kWatchSliceNs = 200'000'000;  // how long a watcher may outlive close()
constexpr uint64_t kFounderNs = 1'000'000'000;
constexpr uint64_t kNewcomerNs = 1'000'000'000;  // for the answer of who is no member, and may be stopped
constexpr int kPacketsATurn = 64;                // of a peer, before the next one is heard
constexpr int kPacketsLeft = 1 << 16;            // more than a socket holds
constexpr uint64_t kLookNs = 1'000'000'000;      // as often as kernels ask
constexpr int kSilentLooks = 3;  // in a row: nothing is there; one alone may come of a pause of this machine

// Runs detached and touches only what it shares: close() need not wait for it.
void watch(const std::shared_ptr<PeerLife>& life, const std::shared_ptr<Board>& board, int peer, uint64_t number) {
  while (!board->closed() && board->is_watched(peer, number)) {
    switch (life->wait(kWatchSliceNs)) {
      case PeerLife::State::kHeld: continue;
      case PeerLife::State::kReleased: return;  // an orderly end: its goodbye comes behind its last messages
      case PeerLife::State::kUnknown: return;   // the two other channels remain
      case PeerLife::State::kOwnerDied:
        // After a goodbye the owner may also be another watcher that died while it looked.
        if (!life->said_goodbye()) board->gone(peer, DetectionChannel::kOwnerDeath, "died", {}, number);
        return;
    }
  }
}

struct Peer {
  Peer(int rank_in, Connection&& connection, uint64_t incarnation_in, uint64_t number_in = 0)
      : rank(rank_in),
        incarnation(incarnation_in),
        number(number_in),
        link(std::move(connection.wire)),
        pidfd(std::move(connection.pidfd)),
        life(connection.life),
        is_near(life != nullptr),
        running(pidfd.valid()) {}

  bool said_goodbye() const { return life && life->said_goodbye(); }
  std::shared_ptr<PeerLife> held_life() const {
    const std::lock_guard lock(life_mutex);
    return life;
  }

  const int rank;
  const uint64_t incarnation;
  const uint64_t number;  // of this life of the slot, for the board
  Link link;
  OwnedFd pidfd;                   // monitor only, while it runs
  mutable std::mutex life_mutex;   // of its end; the monitor alone ends it
  std::shared_ptr<PeerLife> life;  // none: it is given back
  const bool is_near;              // on this machine; else it has neither pidfd nor life page
  bool is_given_back = false;      // monitor only: all of this peer was given back
  bool connected = true;           // monitor only: its socket has not ended
  uint32_t num_heard = 0;          // monitor only: at the last look
  int num_silent_looks = 0;        // monitor only: since then
  bool running;                    // monitor only: its pidfd has not fired
};

using Peers = std::vector<std::shared_ptr<Peer>>;  // by rank, empty at our own and at free slots

// What a plane needs besides so that newcomers may join.
struct OpenParts {
  std::shared_ptr<GroupPage> page;
  std::optional<Listener> listener;  // until close()
  Endpoint endpoint;
  GroupSecret secret;
  SlotTable slots;
};

class ProcessControlPlane final : public ControlPlane, public OpenGroup {
 public:
  // NOLINTNEXTLINE(readability-function-size): what connecting has made, each a thing of its own
  ProcessControlPlane(int rank, std::vector<uint64_t>&& incarnations, std::unique_ptr<LifeLock> own_life,
                      std::shared_ptr<Ledger> ledger, std::vector<Connection>&& connections,
                      std::shared_ptr<StoreLedger> store, std::shared_ptr<Decider> decider,
                      std::optional<OpenParts> open = {})
      : rank_(rank),
        num_ranks_(static_cast<int>(incarnations.size())),
        incarnations_(std::move(incarnations)),
        ledger_(std::move(ledger)),
        store_(std::move(store)),
        decider_(std::move(decider)),
        board_(std::make_shared<Board>(rank, num_ranks_)),
        own_life_(std::move(own_life)),
        open_(std::move(open)),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!wake_.valid()) throw_system_error("eventfd", errno);
    auto peers = std::make_shared<Peers>(static_cast<size_t>(num_ranks_));
    for (int peer = 0; peer < num_ranks_; ++peer) {
      const auto idx = static_cast<size_t>(peer);
      if (peer == rank || !connections[idx].wire.valid()) continue;
      (*peers)[idx] = std::make_shared<Peer>(peer, std::move(connections[idx]), incarnations_[idx]);
    }
    peers_ = std::move(peers);
    if (store_) store_->set_announce([this](const Decision& decision) { publish_decision(decision); });
    try {
      for (const auto& peer : *peers_) {
        if (peer && peer->is_near) start_watch(*peer);
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
    const auto peer = peer_of(rank);
    return !peer || peer->is_near;
  }
  const std::vector<uint64_t>& incarnations() const noexcept override { return incarnations_; }

  std::vector<Parcel> exchange(const std::vector<int>& members, uint64_t tag, const std::vector<std::byte>& bytes,
                               const std::vector<int>& fds, uint64_t deadline_ns, const Poll& poll) override;

  void publish_abort(const AbortReason& reason) noexcept override {
    const auto list = all_peers();  // another thread may replace it meanwhile
    for (const auto& peer : *list) {
      if (peer) tell(peer->rank, reason);
    }
  }
  void tell(int rank, const AbortReason& reason) noexcept override {
    AbortReason told = reason;
    told.reporter = rank_;
    told.is_ours = 0;
    const auto peer = peer_of(rank);
    if (!peer) return;
    Link& link = peer->link;
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
    const auto list = all_peers();  // another thread may replace it meanwhile
    for (const auto& peer : *list) {
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
  bool has_ended(int rank) const override;
  void close(std::string_view why) noexcept override { close_once(why); }

  // --- newcomers ---

  OpenGroup* open_group() noexcept override { return open_ ? this : nullptr; }
  SlotTable& slots() noexcept override { return open_->slots; }
  const GroupSecret& secret() const noexcept override { return open_->secret; }
  const Endpoint& endpoint() const noexcept override { return open_->endpoint; }
  int door() const noexcept override { return open_->listener ? open_->listener->fd() : -1; }
  int life_fd() const noexcept override { return own_life_->fd(); }
  int page_fd() const noexcept override { return open_->page->fd(); }
  bool has_peer(int slot, uint64_t incarnation) const override {
    const auto peer = peer_of(slot);
    return peer && peer->incarnation == incarnation;
  }
  std::vector<int> peers() const override;
  void add_peer(int slot, uint64_t incarnation, Connection&& connection, const Answer& answer) override;
  void drop_member(int slot) override {
    board_->drop_member(slot);
    wake_monitor();
  }
  void send(int slot, uint64_t tag, std::vector<std::byte> bytes, std::vector<OwnedFd> fds) override;
  void set_listener(Listen listen) override {
    const std::lock_guard lock(listen_mutex_);
    listen_ = std::move(listen);
    keeps_letters_ = false;
    for (Letter& letter : std::exchange(letters_, {})) {
      if (listen_) listen_(letter.sender, letter.tag, std::move(letter.parcel));
    }
  }
  void note_ended(int rank) { board_->gone(rank, DetectionChannel::kPidfd, "died"); }  // before this rank came to it

 private:
  std::shared_ptr<const Peers> all_peers() const {
    const std::lock_guard lock(peers_mutex_);
    return peers_;
  }
  std::shared_ptr<Peer> peer_of(int rank) const { return (*all_peers())[static_cast<size_t>(rank)]; }
  void start_watch(const Peer& peer);
  void publish_decision(const Decision& decision);
  std::string hear_decision(std::span<const std::byte> bytes);
  void run_monitor();
  int look_after_callers(const Peers& peers);
  std::vector<pollfd> watched_fds(const Peers& peers);
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
  std::optional<OpenParts> open_;
  mutable std::mutex peers_mutex_;
  std::shared_ptr<const Peers> peers_;  // another list with each newcomer
  std::mutex listen_mutex_;             // held while it is called
  Listen listen_;
  struct Letter {
    Sender sender;
    uint64_t tag;
    Parcel parcel;
  };
  bool keeps_letters_ = open_.has_value();  // until the first listener: nobody sends them again
  std::vector<Letter> letters_;             // of that time
  OwnedFd wake_;
  uint64_t next_look_ns_ = 0;  // monitor only
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
  const auto peers = all_peers();
  const auto unsent = [&] {
    std::vector<int> ranks;
    for (const int member : members) {
      if (member != rank_ && (*peers)[static_cast<size_t>(member)]->link.unsent()) ranks.push_back(member);
    }
    return ranks;
  };
  for (const int member : members) {
    if (member == rank_) continue;
    if (!(*peers)[static_cast<size_t>(member)])
      throw_peer_lost("exchange", {member}, "rank " + std::to_string(member) + " died");
    Link& link = (*peers)[static_cast<size_t>(member)]->link;
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
    const auto peers = all_peers();
    std::vector<pollfd> fds = watched_fds(*peers);
    if (::poll(fds.data(), fds.size(), look_after_callers(*peers)) < 0) continue;
    if (fds[0].revents != 0) {
      uint64_t count = 0;
      while (read(wake_.get(), &count, sizeof(count)) > 0) {
      }
    }
    for (size_t idx = 0; idx < peers->size(); ++idx) {
      if (!(*peers)[idx]) continue;
      Peer& peer = *(*peers)[idx];
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
          board_->gone(peer.rank, DetectionChannel::kGoodbye, kClosedText, {}, peer.number);
        } else {
          board_->gone(peer.rank, DetectionChannel::kPidfd, "died", {}, peer.number);
        }
      }
      give_back(peer);
    }
  }
}

// Ranks of other machines that called this one: their kernels ask, and are unreachable if nothing of theirs comes. Returns for how
// many ms there is nothing to look at; -1: for ever.
int ProcessControlPlane::look_after_callers(const Peers& peers) {
  if (!store_) return -1;  // all are on this machine
  const uint64_t now = now_ns();
  if (now >= next_look_ns_) {
    next_look_ns_ = now + kLookNs;
    for (const auto& peer : peers) {
      if (!peer || !peer->connected || !peer->link.is_accepted()) continue;
      const uint32_t heard = num_heard(peer->link.fd());
      peer->num_silent_looks = heard == std::exchange(peer->num_heard, heard) ? peer->num_silent_looks + 1 : 0;
      if (heard == 0 || peer->num_silent_looks < kSilentLooks) continue;
      peer->connected = false;
      board_->gone(peer->rank, DetectionChannel::kUnreachable, kUnreachableText, {}, peer->number);
      give_back(*peer);
    }
  }
  return static_cast<int>((next_look_ns_ - now) / 1'000'000) + 1;
}

// R24: what belongs to a peer goes with it, each part when it has told all it can tell. One that closed in order, and one
// that is gone and no member any more, have nothing more to tell.
void ProcessControlPlane::give_back(Peer& peer) noexcept {
  if (peer.is_given_back) return;
  if (!peer.connected && peer.said_goodbye()) peer.running = false;
  if (!board_->is_watched(peer.rank, peer.number)) peer.connected = false;  // its pidfd still proves its end
  if (!peer.running) peer.pidfd.reset();
  if (!peer.connected) {
    peer.link.shut();
    peer.link.close();
  }
  if (peer.running || peer.connected) return;
  {
    const std::lock_guard lock(peer.life_mutex);
    peer.life.reset();
  }
  peer.is_given_back = true;
}

// Entry 0: wake_; then for each rank its socket and its pidfd (-1, which poll skips, where there is nothing to see).
std::vector<pollfd> ProcessControlPlane::watched_fds(const Peers& peers) {
  std::vector<pollfd> fds{{wake_.get(), POLLIN, 0}};
  for (const auto& peer : peers) {
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
      [&](uint64_t tag, Parcel&& parcel) {
        if ((tag & kDirectTag) == 0) return board_->put(rank, tag, std::move(parcel), peer.number);
        const std::lock_guard lock(listen_mutex_);
        const Sender sender{rank, peer.incarnation};
        if (listen_) {
          listen_(sender, tag, std::move(parcel));
        } else if (keeps_letters_) {
          letters_.push_back({sender, tag, std::move(parcel)});
        }
      },
      [&](const AbortReason& reason) {
        AbortReason heard = reason;
        heard.reporter = rank;
        heard.is_ours = 0;
        if (heard.rank < 0 || heard.rank >= num_ranks_) heard.rank = -1;
        board_->published(heard);
      },
      [&](const Note& note) { board_->note(rank, note); },
      [&](const std::string& why) { board_->gone(rank, DetectionChannel::kGoodbye, kClosedText, why, peer.number); },
      [&](const std::string& why) { board_->gone(rank, DetectionChannel::kRefused, why, {}, peer.number); },
      [&](std::span<const std::byte> bytes) { return hear_decision(bytes); },
  };
  if (!peer.link.receive(reader, events, most_packets)) return;
  peer.connected = false;
  if (peer.said_goodbye()) {
    board_->gone(rank, DetectionChannel::kGoodbye, kClosedText, {}, peer.number);
  } else if (peer.link.is_unreachable()) {
    board_->gone(rank, DetectionChannel::kUnreachable, kUnreachableText, {}, peer.number);
  } else {
    board_->gone(rank, DetectionChannel::kSocketEnd, "died (its connection ended)", {}, peer.number);
  }
}

// To all, those that are left out and those that are no members any more included: who is in a meeting that it ends, leaves it.
void ProcessControlPlane::publish_decision(const Decision& decision) {
  const auto bytes = std::make_shared<const std::vector<std::byte>>(pack_decision(decision));
  const auto list = all_peers();  // another thread may replace it meanwhile
  for (const auto& peer : *list) {
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
  const auto list = all_peers();  // another thread may replace it meanwhile
  for (const auto& peer : *list) {
    if (!peer) continue;
    peer->link.say_goodbye(line);
    peer->link.close();
    peer->pidfd.reset();
  }
  own_life_->release();
  if (!open_) return;
  open_->listener.reset();  // who calls is refused from now on
  open_->page->drop_fd();
}

void ProcessControlPlane::start_watch(const Peer& peer) {
  start_thread("weft-watch", [life = peer.life, board = board_, rank = peer.rank, number = peer.number] {
    watch(life, board, rank, number);
  }).detach();
}

std::vector<int> ProcessControlPlane::peers() const {
  const std::vector<int> dead = board_->dead_ranks();
  std::vector<int> slots;
  const auto list = all_peers();  // another thread may replace it meanwhile
  for (const auto& peer : *list) {
    if (peer && std::find(dead.begin(), dead.end(), peer->rank) == dead.end()) slots.push_back(peer->rank);
  }
  return slots;
}

bool ProcessControlPlane::has_ended(int rank) const {
  const auto peer = peer_of(rank);
  const std::vector<int> dead = board_->dead_ranks();
  if (rank == rank_ || (peer && !peer->is_near)) return false;
  if (!peer || std::find(dead.begin(), dead.end(), rank) != dead.end()) return true;
  const std::shared_ptr<PeerLife> life = peer->held_life();
  return !life || life->has_ended();
}

void ProcessControlPlane::add_peer(int slot, uint64_t incarnation, Connection&& connection, const Answer& answer) {
  const auto old = peer_of(slot);
  const auto peer = std::make_shared<Peer>(slot, std::move(connection), incarnation, board_->replace(slot));
  auto list = std::make_shared<Peers>(*all_peers());
  (*list)[static_cast<size_t>(slot)] = peer;
  try {
    start_watch(*peer);
  } catch (...) {  // as before: nobody is there
    board_->gone(slot, DetectionChannel::kPidfd, "died", {}, peer->number);
    throw;
  }
  if (answer) answer();
  {
    const std::lock_guard lock(peers_mutex_);
    peers_ = std::move(list);
  }
  if (old) old->link.shut();
  wake_monitor();
}

void ProcessControlPlane::send(int slot, uint64_t tag, std::vector<std::byte> bytes, std::vector<OwnedFd> fds) {
  const auto peer = peer_of(slot);
  if (!peer) return;
  peer->link.queue(std::make_shared<OutgoingMessage>(OutgoingMessage{tag, std::move(bytes), std::move(fds)}));
  peer->link.flush();
  if (peer->link.unsent()) wake_monitor();
}

// In a forked child: the threads are not here, locks may be held for ever, and the peers are none of its business.
void ProcessControlPlane::leak() noexcept {
  new std::thread(std::move(monitor_));
  new std::shared_ptr<const Peers>(std::move(peers_));
  new std::shared_ptr<Board>(std::move(board_));
  own_life_.release();  // NOLINT(bugprone-unused-return-value): leaked on purpose
}

}  // namespace

// NOLINTNEXTLINE(readability-function-size): what connecting needs, each a thing of its own
std::unique_ptr<ControlPlane> connect_processes(int rank, const std::vector<Endpoint>& endpoints, Listener&& listener,
                                                uint64_t deadline_ns, const ControlPlane::Poll& poll,
                                                const Across& across, const Capacity& capacity) {
  Listener own_listener(std::move(listener));  // closed on return, unless newcomers may call
  check_endpoints(rank, endpoints, own_listener.endpoint(), across.decider != nullptr, own_listener.door_problem());
  const bool is_one_machine = on_one_machine(endpoints);
  const bool is_open = capacity.num_slots != 0;
  const auto num_founders = static_cast<int>(endpoints.size());
  const int num_slots = is_open ? capacity.num_slots : num_founders;
  if (is_open && (num_slots < num_founders || num_slots > kMaxRanks)) {
    throw_invalid_argument("max_ranks is " + std::to_string(num_slots) + "; allowed are the " +
                           std::to_string(num_founders) + " ranks of the group to " + std::to_string(kMaxRanks));
  }
  if (is_open && !is_one_machine) {
    throw_unsupported("max_ranks: newcomers join groups on one machine, and the ranks of this one are on several");
  }
  const GroupSecret secret = group_secret(endpoints, across.secret);
  auto life = std::make_unique<LifeLock>();
  std::shared_ptr<GroupPage> page;
  if (rank == 0 && is_one_machine) page = GroupPage::create(num_slots);
  const int page_fd = page ? page->fd() : -1;
  if (!is_one_machine) own_listener.door()->open();
  const int door = is_one_machine ? -1 : own_listener.door()->fd();
  auto connections = connect_mesh(
      {rank, endpoints, own_listener.fd(), door, life->fd(), page_fd, deadline_ns, poll, secret, num_slots});
  connections.resize(static_cast<size_t>(num_slots));
  std::shared_ptr<Ledger> ledger;
  std::shared_ptr<StoreLedger> store;
  if (is_one_machine) {
    if (!page) page = connections[0].page;
    if (!is_open) page->drop_fd();
    ledger = std::make_shared<PageLedger>(page);
  } else {
    GroupId group{};
    std::copy_n(secret.id.begin(), group.size(), group.begin());
    ledger = store = std::make_shared<StoreLedger>(group, across.decider);
  }
  std::vector<uint64_t> incarnations;
  for (const Endpoint& endpoint : endpoints) incarnations.push_back(incarnation_of(endpoint));
  incarnations.resize(static_cast<size_t>(num_slots));
  std::optional<OpenParts> open;
  if (is_open) {
    SlotTable slots = page->slots();
    slots.claim(rank, own_listener.endpoint(), rank);
    const Endpoint own = own_listener.endpoint();
    open.emplace(OpenParts{page, std::move(own_listener), own, secret, slots});
  }
  return std::make_unique<ProcessControlPlane>(rank, std::move(incarnations), std::move(life), std::move(ledger),
                                               std::move(connections), std::move(store), across.decider,
                                               std::move(open));
}

namespace {

struct LeftOut {};

// Whether a member of `epoch` is none by now, as the records say.
bool is_left_out(Ledger& ledger, uint32_t epoch, int slot) {
  bool is_out = false;
  for (uint32_t next = epoch + 1; ledger.is_decided(next); ++next) {
    const Decision found = ledger.find(next);
    if (found.record) is_out = !found.record->active.contains(slot);
  }
  return is_out;
}

}  // namespace

// NOLINTNEXTLINE(readability-function-size): what joining needs, each a thing of its own
Newcomer join_processes(std::string_view address, int slot, Listener&& listener, uint64_t deadline_ns,
                        const ControlPlane::Poll& poll) {
  Listener own_listener(std::move(listener));
  const Endpoint own = own_listener.endpoint();
  const Sponsored sponsored = find_sponsor(JoinAddress::parse(address), slot, own, deadline_ns, poll);
  const JoinWelcome& welcome = sponsored.welcome;
  SlotTable slots = sponsored.page->slots();
  // Given back if this fails; destroyed last, when nothing of this incarnation is left.
  const auto free_claim = [&](SlotTable* table) { table->free(welcome.slot, incarnation_of(own)); };
  std::unique_ptr<SlotTable, decltype(free_claim)> claim(&slots, free_claim);
  slots.show(welcome.slot, SlotCell{});  // what the one before has shown is over
  std::vector<Connection> connections(static_cast<size_t>(welcome.num_slots));
  auto life = std::make_unique<LifeLock>();  // says goodbye before the connections end
  const auto ledger = std::make_shared<PageLedger>(sponsored.page);
  Membership::Welcome members{{}, welcome.epoch, welcome.era};
  members.incarnations.assign(welcome.incarnations.begin(), welcome.incarnations.begin() + welcome.num_slots);
  std::vector<uint64_t> incarnations(static_cast<size_t>(welcome.num_slots));
  incarnations[static_cast<size_t>(welcome.slot)] = incarnation_of(own);
  std::vector<int> ended;
  for (int other = 0; other < welcome.num_slots; ++other) {
    const auto idx = static_cast<size_t>(other);
    const uint64_t member = members.incarnations[idx];
    const bool is_member = member != 0;
    std::optional<Endpoint> endpoint = slots.endpoint(other);
    // A founder claims its slot when it has connected, which may be a moment after another one is asked to sponsor.
    const uint64_t patience_ns = std::min(deadline_ns, now_ns() + kFounderNs);
    while (is_member && !endpoint && now_ns() < patience_ns) {
      ::poll(nullptr, 0, 1);
      endpoint = slots.endpoint(other);
    }
    if (other == welcome.slot || (!is_member && (other > welcome.slot || !endpoint))) continue;
    std::optional<Connection> connection;
    if (endpoint) {
      const CallingRank self{welcome.slot, own, welcome.secret, life->fd()};
      const bool is_waited_for = incarnation_of(*endpoint) == member;
      const uint64_t until_ns = is_waited_for ? deadline_ns : std::min(deadline_ns, now_ns() + kNewcomerNs);
      const auto watch = [&] {
        if (is_waited_for && is_left_out(*ledger, welcome.epoch, other)) throw LeftOut{};
        if (poll) poll();
      };
      try {
        connection = call_rank(self, other, welcome.num_slots, *endpoint, until_ns, watch);
      } catch (const LeftOut&) {  // the others went on without it, and so does this one
        continue;
      } catch (const Error& error) {  // it is called again later
        if (is_waited_for || error.code != ErrorCode::kPeerTimeout) throw;
      }
    }
    if (connection) connections[idx] = std::move(*connection);
    if (connection) incarnations[idx] = incarnation_of(*endpoint);
    if (!connection && is_member) ended.push_back(other);
  }
  WEFT_FAIL_POINT("join.connected");
  auto plane = std::make_unique<ProcessControlPlane>(
      welcome.slot, std::move(incarnations), std::move(life), ledger, std::move(connections), nullptr, nullptr,
      OpenParts{sponsored.page, std::move(own_listener), own, welcome.secret, slots});
  claim.release();  // NOLINT(bugprone-unused-return-value): the slot is this rank's now
  for (const int rank : ended) plane->note_ended(rank);
  WEFT_FAIL_POINT("join.made");
  return {std::move(plane), std::move(members)};
}

}  // namespace weft
