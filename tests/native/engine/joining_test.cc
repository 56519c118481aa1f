// Guards against what a rank of an open group does with letters, memory and wishes of others when they come in the wrong order or from
// nobody any more. One communicator on a control plane that is played by the test.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "bootstrap/group_page.h"
#include "bootstrap/ranks.h"
#include "engine/communicator.h"
#include "engine/elastic.h"

using namespace weft;        // NOLINT(google-build-using-namespace)
using namespace weft::test;  // NOLINT(google-build-using-namespace)

namespace {

constexpr int kSlots = 4;

bool comes_true(const std::function<bool()>& what) {
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
  std::vector<Parcel> exchange(const std::vector<int>&, u64, const std::vector<std::byte>&, const std::vector<int>&,
                               u64, const Poll&) override {
    throw_internal("nobody is there");
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
  }
  bool has_taken_in(int slot) const override {
    const std::lock_guard lock(mutex_);
    return mapped_.contains(slot);
  }
  void change(const Step& step) override {
    const std::lock_guard lock(mutex_);
    mapped_ = mapped_ - step.removed;
    if (step.is_new && differs) throw_invalid_state("5 on rank 0, 6 on rank 1");
  }
  void renew(ControlPlane&, const std::vector<int>&, u64, u32, u64, const Poll&) override {}

  bool differs = false;

 private:
  const u64 id_;
  mutable std::mutex mutex_;
  RankSet mapped_;
};

std::vector<std::byte> bytes_of(const std::vector<u64>& words) {
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

MembershipRecord taking_in(u32 epoch, const RankSet& active, int slot, u64 incarnation) {
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

}  // namespace

TEST(letters_of_another_life_are_not_read) {
  MemberCase member;
  Stage& stage = member.stage;
  {
    const std::lock_guard lock(stage.mutex);
    stage.peers[2] = 22;
  }
  stage.hear(2, 21, Errand::kWindow, 1, bytes_of(std::vector<u64>{1}));
  stage.ask(1, 12, Errand::kContract, {});  // letters are read in order
  CHECK(!member.window.has_taken_in(2));
  CHECK(!stage.answer(1));
  stage.ask(2, 22, Errand::kWindow, bytes_of(std::vector<u64>{1}));
  CHECK(member.window.has_taken_in(2));
}

// Whatever order its end and its offer come in.
TEST(what_a_dead_newcomer_offered_is_not_kept) {
  MemberCase member;
  Stage& stage = member.stage;
  const Listener newcomer;
  const u64 incarnation = member.come(2, newcomer);
  stage.ask(2, incarnation, Errand::kWindow, bytes_of(std::vector<u64>{1}));
  CHECK(member.window.has_taken_in(2));
  stage.set_dead(2);
  stage.hear(1, 12, Errand::kBell, 0, {});
  CHECK(comes_true([&] { return !member.window.has_taken_in(2); }));
  stage.hear(2, incarnation, Errand::kWindow, 1, bytes_of(std::vector<u64>{1}));
  stage.ask(1, 12, Errand::kContract, {});
  CHECK(!member.window.has_taken_in(2));
}

TEST(nobody_is_prepared_for_without_a_mapping) {
  MemberCase member;
  Stage& stage = member.stage;
  const Listener newcomer;
  const u64 incarnation = member.come(2, newcomer);
  CHECK(stage.ask(2, incarnation, Errand::kReady, bytes_of(std::vector<u64>{1})) == bytes_of(std::vector<u64>{0, 1}));
  CHECK(!stage.prepared(0).contains(2));
  stage.ask(2, incarnation, Errand::kWindow, bytes_of(std::vector<u64>{1}));
  CHECK(stage.ask(2, incarnation, Errand::kReady, bytes_of(std::vector<u64>{1})) == bytes_of(std::vector<u64>{0}));
  CHECK(stage.prepared(0).contains(2));
}

// It never came here: it has given up, though its process lives.
TEST(a_claim_that_is_over_is_cleared) {
  MemberCase member;
  SlotTable slots = member.stage.page->slots();
  {
    const Listener newcomer;
    slots.claim(3, newcomer.endpoint(), 1);
  }
  member.stage.hear(1, 12, Errand::kBell, 0, {});
  CHECK(comes_true([&] { return slots.claimed(3) == 0; }));
}

// Who enters an epoch meanwhile keeps only the newcomers that it knows.
TEST(a_newcomer_is_known_before_it_is_a_peer) {
  MemberCase member;
  std::vector<int> known;
  member.stage.on_add = [&](int) { known = member.comm->joining_ranks(); };
  const Listener newcomer;
  member.come(2, newcomer);
  CHECK(known == std::vector<int>{2});
}

// What it has mapped before the window grows is not all of it, and it must not be taken in with that.
TEST(nobody_is_prepared_for_while_a_window_changes) {
  MemberCase member;
  Stage& stage = member.stage;
  const Listener newcomer;
  const u64 incarnation = member.come(2, newcomer);
  const auto ready = [&] { return stage.ask(2, incarnation, Errand::kReady, bytes_of(std::vector<u64>{1})); };
  stage.ask(2, incarnation, Errand::kWindow, bytes_of(std::vector<u64>{1}));
  ready();
  CHECK(stage.prepared(0).contains(2));
  member.comm->hold_newcomers(true);
  CHECK(!stage.prepared(0).contains(2));
  CHECK(ready() == bytes_of(std::vector<u64>{0, 1}));
  CHECK(!stage.prepared(0).contains(2));
  member.comm->hold_newcomers(false);
  ready();
  CHECK(stage.prepared(0).contains(2));
  member.comm->propose({{}, {1}, {}, 7}, deadline_after_s(kLongS));  // this rank has given its word
  CHECK_ERROR(kInvalidState, {}, member.comm->hold_newcomers(true));
  member.comm->hold_newcomers(false);
}

// Whoever drives the machine finds it, and the next call says so.
TEST(an_eviction_that_a_wish_finds_is_told) {
  MemberCase member;
  MembershipRecord record;
  record.epoch = record.era = 2;
  record.active = RankSet::of({1});
  member.stage.commit(record);
  try {
    member.comm->propose({{}, {1}, {}, 7}, deadline_after_s(kLongS));
  } catch (const Error& error) {  // the thread of the rank was faster
    CHECK(error.code == ErrorCode::kEvicted);
  }
  CHECK_ERROR(kEvicted, {0}, member.comm->boundary(deadline_after_s(kLongS), {}));
}

// Rank 1 never acknowledges: at the deadline nothing has happened, and nothing may happen later.
TEST(a_proposal_is_withdrawn_at_the_deadline) {
  MemberCase member;
  member.comm->propose({{}, {1}, {}, 7}, deadline_after_s(0.05));
  const WantedChange told = member.comm->await_change(deadline_after_s(kLongS), {});
  CHECK(told.state == WantedChange::State::kWithdrawn);
  CHECK(member.stage.page->words().read(2).state == RegisterState::kOpen);
  CHECK(member.stage.page->words().read(2).version > 0);
  member.comm->propose({{}, {1}, {}, 8}, deadline_after_s(kLongS));  // the next one may come
  CHECK(member.stage.page->words().read(2).state == RegisterState::kProposed);
}

// Ranks that came to one boundary after different numbers of calls: the operation behind it breaks on all.
TEST(a_newcomer_that_can_t_begin_tells_all) {
  NewcomerCase joined;
  joined.window.differs = true;
  joined.stage.show_installed({0, 1}, 2);
  joined.stage.commit(taking_in(2, RankSet::of({0, 1, 2}), 2, 13));
  CHECK_ERROR(kInvalidState, {}, joined.comm->boundary(deadline_after_s(kLongS), {}));
  CHECK(joined.stage.was_aborted());
  CHECK(joined.comm->is_aborted());
  CHECK_EQ(joined.comm->epoch(), u32{2});
  CHECK(!joined.comm->is_solo());
}

// Signals in the memory of a window carry 16 bits of the epoch.
TEST(memory_serves_so_many_changes) {
  NewcomerCase joined(2, {{0, 11}, {1, 12}}, kMostEpochsOfEra - 1);
  joined.stage.show_installed({0, 1}, kMostEpochsOfEra);
  joined.stage.commit(taking_in(kMostEpochsOfEra, RankSet::of({0, 1, 2}), 2, 13));
  CHECK(joined.comm->boundary(deadline_after_s(kLongS), {}).has_value());
  CHECK_ERROR(kInvalidState, {}, joined.comm->propose({{}, {1}, {}, 7}, deadline_after_s(kLongS)));
}

// Of a change that this rank had no part in: rank 2 was a newcomer beside it once.
TEST(a_member_is_no_newcomer_any_more) {
  NewcomerCase joined(3, {{0, 11}, {1, 12}, {2, 21}});
  CHECK(joined.comm->joining_ranks() == std::vector<int>{2});
  joined.stage.show_installed({0, 1, 2}, 3);
  joined.stage.commit(taking_in(2, RankSet::of({0, 1, 2}), 2, 21));
  joined.stage.commit(taking_in(3, RankSet::of({0, 1, 2, 3}), 3, 13));
  const auto done = joined.comm->boundary(deadline_after_s(kLongS), {});
  CHECK(done && done->epoch == 3);
  CHECK(joined.comm->joining_ranks().empty());
}

// A member has made its memory anew between the offer and the question: it is offered again.
TEST(ready_offers_again_what_a_member_has_lost) {
  NewcomerCase joined;
  int num_offers = 0, num_questions = 0;
  joined.stage.on_send = [&](const Sent& message) {
    if (message.errand == Errand::kWindow) {
      ++num_offers;
      joined.answer(message, {});
    } else if (message.errand == Errand::kReady) {
      joined.answer(message, ++num_questions == 1 ? std::vector<u64>{1} : std::vector<u64>{});
    }
  };
  joined.comm->ready(deadline_after_s(kLongS), {});
  CHECK_EQ(num_offers, 2);
  CHECK_EQ(num_questions, 4);
  CHECK(joined.window.has_taken_in(0) && joined.window.has_taken_in(1));
  joined.stage.on_send = [&](const Sent& message) {
    if (message.errand == Errand::kReady) joined.answer(message, {9});
  };
  CHECK_ERROR(kInvalidState, {}, joined.comm->ready(deadline_after_s(kLongS), {}));  // a window that it has not
}

// A stopped newcomer beside it holds up nobody.
TEST(ready_waits_for_members_alone) {
  NewcomerCase joined(2, {{0, 11}, {1, 12}, {3, 31}});
  joined.stage.on_send = [&](const Sent& message) {
    if (message.slot != 3 && message.errand == Errand::kReady) joined.answer(message, {});
  };
  joined.comm->ready(deadline_after_s(kLongS), {});
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
