// One communicator of an open group on a control plane that is played by the test: what it hears, and what it sends.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "bootstrap/group_page.h"
#include "bootstrap/ranks.h"
#include "engine/communicator.h"
#include "engine/elastic.h"

namespace weft::test {

inline constexpr int kSlots = 4;

inline bool comes_true(const std::function<bool()>& what) {
  const uint64_t deadline_ns = deadline_after_s(kLongS);
  bool is_true = what();
  for (; !is_true && now_ns() < deadline_ns; is_true = what()) usleep(500);
  return is_true;
}

struct Sent {
  int slot;
  Errand errand;
  u64 number;
  std::vector<std::byte> bytes;
};

// What the ranks of one group share, and what the test plays of the others.
struct Stage {
  std::shared_ptr<GroupPage> page = GroupPage::create(kSlots);
  Listener door;
  LifeLock life;
  GroupSecret secret{};
  std::function<void(const Sent&)> on_send;  // in the thread that sends
  std::function<void(int slot)> on_add;      // in the thread that admits

  std::mutex mutex;
  std::map<int, u64> peers;
  RankSet dead;
  std::vector<Sent> sent;
  std::vector<AbortReason> published;
  OpenGroup::Listen listen;
  ControlPlane::AbortHandler on_abort;

  void hear(int slot, u64 incarnation, Errand errand, u64 number, std::vector<std::byte> bytes) {
    OpenGroup::Listen heard;
    {
      const std::lock_guard lock(mutex);
      heard = listen;
    }
    heard({slot, incarnation}, tag_of(errand, number), Parcel{std::move(bytes), {}, false});
  }
  // What was answered to the request of that number.
  std::optional<std::vector<std::byte>> answer(u64 number) {
    const std::lock_guard lock(mutex);
    const auto found = std::find_if(sent.begin(), sent.end(), [&](const Sent& each) {
      return each.errand == Errand::kAnswer && each.number == number;
    });
    if (found == sent.end()) return std::nullopt;
    return found->bytes;
  }
  std::vector<std::byte> ask(int slot, u64 incarnation, Errand errand, std::vector<std::byte> bytes) {
    const u64 number = ++num_asked;
    hear(slot, incarnation, errand, number, std::move(bytes));
    CHECK(comes_true([&] { return answer(number).has_value(); }));
    return answer(number).value_or(std::vector<std::byte>());
  }
  void set_dead(int slot) {
    const std::lock_guard lock(mutex);
    dead.add(slot);
  }
  void commit(MembershipRecord record) {
    record.group = page->group();
    seal_record(record);
    page->put(0, record);
    const bool is_planned = record.kind == ChangeKind::kPlanned;
    RegisterWord word{record.epoch, RegisterState::kProposed, 1, 0, is_planned};
    if (is_planned) page->words().compare_set({.epoch = record.epoch}, word);
    const RegisterWord before = is_planned ? word : RegisterWord{.epoch = record.epoch};
    word.state = RegisterState::kCommitted;
    page->words().compare_set(before, word);
  }
  void show_installed(const std::vector<int>& ranks, u32 epoch) {
    for (const int rank : ranks) page->slots().show(rank, SlotCell{{}, epoch, 0, 1});
  }
  RankSet prepared(int rank) { return page->slots().look(rank)->membership.prepared; }
  bool was_aborted() {
    const std::lock_guard lock(mutex);
    return std::any_of(published.begin(), published.end(),
                       [](const AbortReason& each) { return each.code == AbortCode::kAborted; });
  }

  u64 num_asked = 1000;
};

class PlayedPlane final : public ControlPlane, public OpenGroup {
 public:
  PlayedPlane(Stage& stage, int rank, std::vector<u64> incarnations)
      : stage_(stage),
        rank_(rank),
        incarnations_(std::move(incarnations)),
        ledger_(stage.page),
        slots_(stage.page->slots()) {}

  int rank() const noexcept override { return rank_; }
  int num_ranks() const noexcept override { return kSlots; }
  Ledger& ledger() const noexcept override { return ledger_; }
  bool is_near(int) const noexcept override { return true; }
  const std::vector<u64>& incarnations() const noexcept override { return incarnations_; }
  OpenGroup* open_group() noexcept override { return this; }
  std::vector<Parcel> exchange(const std::vector<int>& ranks, u64, const std::vector<std::byte>& bytes,
                               const std::vector<int>&, u64, const Poll&) override {
    if (ranks != std::vector<int>{rank_}) throw_internal("nobody is there");
    std::vector<Parcel> parcels(kSlots);
    parcels[static_cast<size_t>(rank_)].bytes = bytes;
    return parcels;
  }
  u64 newest_silent_tag(u64, u64) const override { return 0; }
  void forget_tags(u64, u64, u64) override {}
  std::vector<int> silent_ranks() const override { return {}; }
  void keep_members(const std::vector<int>&) override {}
  void publish_abort(const AbortReason& reason) noexcept override {
    const std::lock_guard lock(stage_.mutex);
    stage_.published.push_back(reason);
  }
  void tell(int, const AbortReason&) noexcept override {}
  void publish_note(const Note&) noexcept override {}
  Note note_of(int) const override { return {}; }
  void set_abort_handler(AbortHandler handler) override { stage_.on_abort = std::move(handler); }
  std::vector<int> dead_ranks() const override {
    const std::lock_guard lock(stage_.mutex);
    return stage_.dead.ranks();
  }
  std::vector<int> ended_ranks() const override { return dead_ranks(); }
  std::vector<Detection> detections() const override { return {}; }
  bool has_ended(int) const override { return false; }
  void close(std::string_view) noexcept override {}

  SlotTable& slots() noexcept override { return slots_; }
  const GroupSecret& secret() const noexcept override { return stage_.secret; }
  const Endpoint& endpoint() const noexcept override { return stage_.door.endpoint(); }
  int door() const noexcept override { return stage_.door.fd(); }
  int life_fd() const noexcept override { return stage_.life.fd(); }
  int page_fd() const noexcept override { return stage_.page->fd(); }
  bool has_peer(int slot, u64 incarnation) const override {
    const std::lock_guard lock(stage_.mutex);
    const auto found = stage_.peers.find(slot);
    return found != stage_.peers.end() && found->second == incarnation;
  }
  std::vector<int> peers() const override {
    const std::lock_guard lock(stage_.mutex);
    std::vector<int> ranks;
    for (const auto& [slot, incarnation] : stage_.peers) {
      if (!stage_.dead.contains(slot)) ranks.push_back(slot);
    }
    return ranks;
  }
  void add_peer(int slot, u64 incarnation, Connection&& connection, const Answer& answer) override {
    wires_.push_back(std::move(connection));
    if (stage_.on_add) stage_.on_add(slot);
    if (answer) answer();
    const std::lock_guard lock(stage_.mutex);
    stage_.peers[slot] = incarnation;
    stage_.dead.remove(slot);
  }
  void drop_member(int) override {}
  void send(int slot, u64 tag, std::vector<std::byte> bytes, std::vector<OwnedFd>) override {
    const Sent message{slot, errand_of(tag), number_of(tag), std::move(bytes)};
    {
      const std::lock_guard lock(stage_.mutex);
      stage_.sent.push_back(message);
    }
    if (stage_.on_send) stage_.on_send(message);
  }
  void set_listener(Listen listen) override {
    const std::lock_guard lock(stage_.mutex);
    stage_.listen = std::move(listen);
  }

 private:
  Stage& stage_;
  const int rank_;
  const std::vector<u64> incarnations_;
  mutable PageLedger ledger_;
  SlotTable slots_;
  std::vector<Connection> wires_;
};

// A window that notes whose memory is mapped.
class NotedWindow final : public MemberWindow {
 public:
  explicit NotedWindow(u64 id) : id_(id) {}

  void notice_closed(u64) override {}
  void leave_waits() override {}
  void record_error(const AbortReason&) override {}
  u64 id() const override { return id_; }
  void retire() override {}
  bool is_busy() const override { return false; }
  Parcel offer() const override { return {}; }
  void take_in(int slot, Parcel&&) override {
    const std::lock_guard lock(mutex_);
    mapped_.add(slot);
    ++num_taken_in_;
  }
  bool has_taken_in(int slot) const override {
    const std::lock_guard lock(mutex_);
    return mapped_.contains(slot);
  }
  void unmap(int rank) override {
    const std::lock_guard lock(mutex_);
    mapped_.remove(rank);
  }
  void change(const Step& step) override {
    const std::lock_guard lock(mutex_);
    mapped_ = mapped_ - step.removed;
    if (step.is_new && differs) throw_invalid_state("5 on rank 0, 6 on rank 1");
  }
  void renew(ControlPlane&, const std::vector<int>&, u64, u32, u64, const Poll&) override {}
  int num_taken_in() const {
    const std::lock_guard lock(mutex_);
    return num_taken_in_;
  }

  bool differs = false;

 private:
  const u64 id_;
  mutable std::mutex mutex_;
  RankSet mapped_;
  int num_taken_in_ = 0;
};

inline std::vector<std::byte> bytes_of(const std::vector<u64>& words) {
  const auto bytes = std::as_bytes(std::span(words));
  return {bytes.begin(), bytes.end()};
}

// Rank 0 of two members.
struct MemberCase {
  MemberCase() {
    stage.peers = {{1, 12}};
    comm = Communicator::create(std::make_unique<PlayedPlane>(stage, 0, std::vector<u64>{11, 12, 0, 0}));
    comm->add_window(&window);
  }
  ~MemberCase() {
    comm->close();
    comm->remove_window(&window);
  }
  // By the door.
  u64 come(int slot, const Listener& newcomer) {
    stage.page->slots().claim(slot, newcomer.endpoint(), 0);
    std::vector<Endpoint> endpoints(kSlots);
    endpoints[static_cast<size_t>(slot)] = newcomer.endpoint();
    endpoints[0] = stage.door.endpoint();
    const Hello hello = make_hello(slot, 0, endpoints, stage.secret);
    OwnedFd call = make_socket();
    const SocketAddress address({stage.door.endpoint().name.data(), stage.door.endpoint().name_bytes});
    CHECK_EQ(::connect(call.get(), address.get(), address.bytes()), 0);
    std::vector<OwnedFd> fds;
    fds.push_back(OwnedFd::duplicate(stage.life.fd()));
    PacketHeader header = small_header(PacketType::kHello, sizeof(hello));
    header.num_fds = 1;
    CHECK(send_packet(call.get(), header, payload_of(hello), fds) == SendResult::kSent);
    PacketReader reader;
    CHECK(comes_true([&] { return reader.receive(call.get()) == ReceiveResult::kPacket; }));
    calls.push_back(std::move(call));
    const u64 incarnation = incarnation_of(newcomer.endpoint());
    CHECK(comes_true([&] {
      const std::lock_guard lock(stage.mutex);
      return stage.peers.contains(slot);
    }));
    return incarnation;
  }

  Stage stage;
  NotedWindow window{1};
  std::shared_ptr<Communicator> comm;
  std::vector<OwnedFd> calls;
};

// Rank 2, which joins ranks 0 and 1.
struct NewcomerCase {
  explicit NewcomerCase(int rank = 2, std::map<int, u64> peers = {{0, 11}, {1, 12}}, u32 epoch = 1) {
    stage.peers = std::move(peers);
    std::vector<u64> incarnations(kSlots);
    incarnations[static_cast<size_t>(rank)] = 13;
    Newcomer newcomer{std::make_unique<PlayedPlane>(stage, rank, incarnations), {{11, 12, 0, 0}, epoch, 1}};
    comm = Communicator::join(std::move(newcomer));
    comm->add_window(&window);
  }
  ~NewcomerCase() {
    comm->close();
    comm->remove_window(&window);
  }
  void answer(const Sent& request, const std::vector<u64>& words, u64 code = 0) {
    std::vector<u64> all{code};
    all.insert(all.end(), words.begin(), words.end());
    stage.hear(request.slot, 11 + static_cast<u64>(request.slot), Errand::kAnswer, request.number, bytes_of(all));
  }

  Stage stage;
  NotedWindow window{1};
  std::shared_ptr<Communicator> comm;
};

inline MembershipRecord taking_in(u32 epoch, const RankSet& active, int slot, u64 incarnation) {
  MembershipRecord record;
  record.kind = ChangeKind::kPlanned;
  record.epoch = epoch;
  record.era = 1;
  record.boundary = 2;
  record.active = active;
  record.num_new = 1;
  record.new_members[0] = {.nonce = incarnation, .slot = static_cast<u32>(slot)};
  return record;
}

}  // namespace weft::test
