// Threads of one process as ranks: the same interface and rules, without sockets.
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "bootstrap/board.h"
#include "bootstrap/control_plane.h"

namespace weft {

struct LocalHub::State {
  std::vector<std::unique_ptr<Board>> boards;  // by rank, there from the start
  std::vector<std::atomic<bool>> taken;
  std::shared_ptr<PageLedger> ledger;
  std::vector<uint64_t> incarnations;  // one a thread; the page's group is the hub's own, so numbers will do

  explicit State(int num_ranks) : taken(static_cast<size_t>(num_ranks)) {
    const std::shared_ptr<GroupPage> page = GroupPage::create(num_ranks);
    page->drop_fd();
    ledger = std::make_shared<PageLedger>(page);
    for (int rank = 0; rank < num_ranks; ++rank) {
      boards.push_back(std::make_unique<Board>(rank, num_ranks));
      incarnations.push_back(static_cast<uint64_t>(rank) + 1);
    }
  }
};

namespace {

Parcel copy_parcel(const std::vector<std::byte>& bytes, const std::vector<int>& fds) {
  Parcel parcel{bytes, {}};
  for (const int fd : fds) parcel.fds.push_back(OwnedFd::duplicate(fd));
  return parcel;
}

class LocalControlPlane final : public ControlPlane {
 public:
  LocalControlPlane(std::shared_ptr<LocalHub::State> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}
  ~LocalControlPlane() override { close_once(); }

  int rank() const noexcept override { return rank_; }
  int num_ranks() const noexcept override { return static_cast<int>(hub_->boards.size()); }
  bool is_local() const noexcept override { return true; }
  Ledger& ledger() const noexcept override { return *hub_->ledger; }
  bool is_near(int) const noexcept override { return true; }
  const std::vector<uint64_t>& incarnations() const noexcept override { return hub_->incarnations; }

  std::vector<Parcel> exchange(const std::vector<int>& members, uint64_t tag, const std::vector<std::byte>& bytes,
                               const std::vector<int>& fds, uint64_t deadline_ns, const Poll& poll) override {
    own().check(members, tag, bytes.size(), fds.size());
    Parcel mine = copy_parcel(bytes, fds);
    for (const int member : members) {
      if (member != rank_) board(member).put(rank_, tag, copy_parcel(bytes, fds));
    }
    auto parcels = own().collect({members, tag, deadline_ns, poll, [] { return std::vector<int>(); }});
    parcels[static_cast<size_t>(rank_)] = std::move(mine);
    return parcels;
  }

  void publish_abort(const AbortReason& reason) noexcept override {
    for (int peer = 0; peer < num_ranks(); ++peer) {
      if (peer != rank_) tell(peer, reason);
    }
  }
  void tell(int peer, const AbortReason& reason) noexcept override {
    AbortReason told = reason;
    told.reporter = rank_;
    told.is_ours = 0;
    board(peer).published(told);
  }

  void publish_note(const Note& note) noexcept override {
    for (int peer = 0; peer < num_ranks(); ++peer) board(peer).note(rank_, note);
  }
  Note note_of(int rank) const override { return own().note_of(rank); }
  std::vector<int> silent_ranks() const override { return own().silent_ranks(); }

  void set_abort_handler(AbortHandler handler) override { own().relay().set_handler(std::move(handler)); }
  std::vector<int> dead_ranks() const override { return own().dead_ranks(); }
  uint64_t newest_silent_tag(uint64_t prefix, uint64_t mask) const override {
    return own().newest_silent_tag(prefix, mask);
  }
  std::vector<int> ended_ranks() const override { return own().ended_ranks(); }
  void keep_members(const std::vector<int>& members) override { own().keep_members(members); }
  void forget_tags(uint64_t prefix, uint64_t mask, uint64_t below) override { own().forget_tags(prefix, mask, below); }
  std::vector<Detection> detections() const override { return own().detections(); }
  bool has_ended(int rank) const override {
    const std::vector<int> dead = dead_ranks();
    return std::find(dead.begin(), dead.end(), rank) != dead.end();
  }
  void close(std::string_view why) noexcept override { close_once(why); }

 private:
  Board& board(int rank) const { return *hub_->boards[static_cast<size_t>(rank)]; }
  Board& own() const { return board(rank_); }

  void close_once(std::string_view why = {}) noexcept {
    if (own().closed()) return;
    own().close();
    for (int peer = 0; peer < num_ranks(); ++peer) {
      if (peer != rank_) board(peer).gone(rank_, DetectionChannel::kGoodbye, "closed its communicator", why);
    }
  }

  std::shared_ptr<LocalHub::State> hub_;
  const int rank_;
};

}  // namespace

LocalHub::LocalHub(int num_ranks) {
  if (num_ranks < 1 || num_ranks > kMaxControlRanks) {
    throw_invalid_argument("num_ranks is " + std::to_string(num_ranks) + "; allowed: 1.." +
                           std::to_string(kMaxControlRanks));
  }
  state_ = std::make_shared<State>(num_ranks);
}

LocalHub::~LocalHub() = default;

int LocalHub::num_ranks() const noexcept { return static_cast<int>(state_->boards.size()); }

std::unique_ptr<ControlPlane> connect_threads(const std::shared_ptr<LocalHub>& hub, int rank) {
  if (!hub) throw_invalid_argument("the hub is empty");
  if (rank < 0 || rank >= hub->num_ranks()) {
    throw_invalid_argument("rank is " + std::to_string(rank) + "; allowed: 0.." + std::to_string(hub->num_ranks() - 1));
  }
  if (hub->state()->taken[static_cast<size_t>(rank)].exchange(true)) {
    throw_invalid_argument("rank " + std::to_string(rank) + " of this hub was taken before; each is taken once");
  }
  return std::make_unique<LocalControlPlane>(hub->state(), rank);
}

}  // namespace weft
