// Guards against slots that nobody can take any more, against a newcomer that counts on a rank which does not watch it, and against
// callers who keep a door from the others.
#include "bootstrap/reception.h"

#include <sys/resource.h>

#include <cstring>
#include <map>
#include <optional>
#include <thread>

#include "bootstrap/group_page.h"
#include "bootstrap/newcomer.h"
#include "bootstrap/ranks.h"

using namespace weft;        // NOLINT(google-build-using-namespace)
using namespace weft::test;  // NOLINT(google-build-using-namespace)

namespace {

constexpr int kSlots = 4;

// Rank 0 of an open group, its door and its page; who has come to it is in `admitted`.
class Lobby final : public OpenGroup {
 public:
  SlotTable& slots() noexcept override { return slots_; }
  const GroupSecret& secret() const noexcept override { return secret_; }
  const Endpoint& endpoint() const noexcept override { return door_.endpoint(); }
  int door() const noexcept override { return door_.fd(); }
  int life_fd() const noexcept override { return life_.fd(); }
  int page_fd() const noexcept override { return page_->fd(); }
  bool has_peer(int slot, uint64_t incarnation) const override {
    const auto found = admitted.find(slot);
    return found != admitted.end() && found->second == incarnation;
  }
  std::vector<int> peers() const override { return connected; }
  void add_peer(int, uint64_t, Connection&&, const Answer&) override {}
  void drop_member(int) override {}
  void send(int, uint64_t, std::vector<std::byte>, std::vector<OwnedFd>) override {}
  void set_listener(Listen) override {}

  Reception::Host host() {
    Reception::Host host;
    host.welcome = [] { return Membership::Welcome{{1, 0, 0, 0}, 1, 1}; };
    host.has_room = [this](int) { return has_room; };
    host.admit = [this](int slot, uint64_t incarnation, Connection&& connection, const Answer& answer) {
      if (admit_fails) throw Error(ErrorCode::kCapacityExceeded, "no thread", "join");
      if (before_answer) before_answer();
      answer();
      admitted[slot] = incarnation;
      connected.push_back(slot);
      wires.push_back(std::move(connection));
    };
    host.caller_ns = caller_ns;
    return host;
  }
  // What rank 0 welcomes the newcomer with; none: it did not.
  std::optional<JoinWelcome> ask(const Endpoint& endpoint, int slot = -1) {
    JoinRequest request;
    request.slot = slot;
    request.build = build;
    request.group = page_->group();
    request.endpoint = endpoint;
    request.endpoint.key = {};
    Reception reception(*this, page_->group(), 0, host());
    const OwnedFd call = connect();
    send_small(call.get(), PacketType::kHello, payload_of(request));
    reception.step();
    PacketReader reader;
    CHECK(reader.receive(call.get()) == ReceiveResult::kPacket);
    if (reader.header.type == PacketType::kRefusal) {
      refusal = read_denial(reader.payload);
      return std::nullopt;
    }
    return read_welcome(reader.header, reader.payload);
  }
  OwnedFd connect() const {
    OwnedFd call = make_socket();
    const SocketAddress address({endpoint().name.data(), endpoint().name_bytes});
    CHECK_EQ(::connect(call.get(), address.get(), address.bytes()), 0);
    return call;
  }
  // As a newcomer in slot 1 says it.
  void say_hello(int call, const Listener& newcomer, const GroupSecret& secret = {}) {
    std::vector<Endpoint> endpoints(kSlots);
    endpoints[1] = newcomer.endpoint();
    endpoints[0] = endpoint();
    const Hello hello = make_hello(1, 0, endpoints, secret);
    std::vector<OwnedFd> fds;
    fds.push_back(OwnedFd::duplicate(life_.fd()));
    PacketHeader header = small_header(PacketType::kHello, sizeof(hello));
    header.num_fds = 1;
    CHECK(send_packet(call, header, payload_of(hello), fds) == SendResult::kSent);
  }
  const GroupId& id() const { return page_->group(); }

  Build build = this_build();  // of who asks
  bool has_room = true, admit_fails = false;
  std::function<void()> before_answer;
  uint64_t caller_ns = Reception::Host{}.caller_ns;
  std::map<int, uint64_t> admitted;
  std::vector<int> connected;
  std::vector<Connection> wires;
  Error refusal{ErrorCode::kInternalError, "", ""};

 private:
  Listener door_;
  LifeLock life_;
  GroupSecret secret_{};
  std::shared_ptr<GroupPage> page_ = GroupPage::create(kSlots);
  SlotTable slots_ = page_->slots();
};

ReceiveResult hear(const OwnedFd& call, PacketReader& reader) { return reader.receive(call.get()); }

}  // namespace

// The sponsor is killed between the claim and the endpoint: it had said before whom it claims for.
TEST(a_claim_is_never_nobody_s) {
  const uint64_t stride = SlotTable::bytes_for(2) - SlotTable::bytes_for(1);
  SharedMemory memory = SharedMemory::create(SlotTable::bytes_for(kSlots));
  const auto bytes = std::span(reinterpret_cast<std::byte*>(memory.data()), SlotTable::bytes_for(kSlots));
  SlotTable slots(bytes, kSlots);
  const Listener newcomer, next;
  CHECK(slots.claim(1, newcomer.endpoint(), 2));
  auto* place = reinterpret_cast<uint64_t*>(bytes.data() + stride);  // of slot 1: its claim, and whose endpoint follows
  CHECK_EQ(place[1], incarnation_of(newcomer.endpoint()));
  place[1] = 0;
  const auto found = slots.endpoint(1);
  CHECK(found && found->pid == getpid() && incarnation_of(*found) == slots.claimed(1));
  CHECK(!slots.claim(1, next.endpoint(), 3));
  CHECK(slots.claim(1, newcomer.endpoint(), 3));  // by another sponsor
  CHECK_EQ(place[1], incarnation_of(newcomer.endpoint()));
  slots.free(1, incarnation_of(next.endpoint()));
  CHECK_EQ(slots.claimed(1), incarnation_of(newcomer.endpoint()));
  slots.free(1, incarnation_of(newcomer.endpoint()));
  CHECK(!slots.endpoint(1));
}

TEST(another_sponsor_takes_the_claim_over) {
  Lobby lobby;
  const Listener newcomer;
  lobby.slots().claim(2, newcomer.endpoint(), 3);
  const auto welcome = lobby.ask(newcomer.endpoint());
  CHECK(welcome && welcome->slot == 2);
  CHECK_EQ(lobby.slots().claimed(1), uint64_t{0});
}

// This process has given its first attempt up, and does not know which slot that had.
TEST(a_claim_is_over_when_its_door_is_closed) {
  Lobby lobby;
  {
    const Listener first;
    lobby.slots().claim(1, first.endpoint(), 3);
    CHECK(!is_over(first.endpoint()));
    const Listener second;
    CHECK(!lobby.ask(second.endpoint()));
    CHECK(lobby.refusal.code == ErrorCode::kInvalidState);
  }
  CHECK(is_over(*lobby.slots().endpoint(1)));
  const Listener second;
  const auto welcome = lobby.ask(second.endpoint());
  CHECK(welcome && welcome->slot == 1);
  CHECK_EQ(lobby.slots().claimed(1), incarnation_of(second.endpoint()));
}

// The first difference is told, with both values, and no slot is lost.
TEST(a_newcomer_that_differs_is_told_in_what) {
  Lobby lobby;
  const Listener newcomer;
  const Build ours = this_build();
  const auto check_refused = [&](const std::string& theirs_text, const std::string& ours_text) {
    CHECK(!lobby.ask(newcomer.endpoint()));
    CHECK_EQ(lobby.refusal.code, ErrorCode::kUnsupported);
    for (const std::string& each : {theirs_text, ours_text}) {
      if (lobby.refusal.text.find(each) == std::string::npos) {
        report_failure(__FILE__, __LINE__, each + " expected, got " + lobby.refusal.text);
      }
    }
    CHECK_EQ(lobby.slots().claimed(1), uint64_t{0});
  };
  ++lobby.build.sources[31];
  check_refused(sources_text(lobby.build), sources_text(ours));
  lobby.build.version = {'9', '.', '8', '\n'};
  check_refused("is Weft 9.8", "the group Weft " + version_text(ours));
  lobby.build.version.fill('x');  // without an end
  check_refused("is Weft " + std::string(32, 'x'), "the group Weft " + version_text(ours));
  lobby.build = ours;
  CHECK(lobby.ask(newcomer.endpoint()));
}

// Its reader can't read an answer either, but says the same of it.
TEST(packets_of_another_version_are_refused) {
  Lobby lobby;
  Reception reception(lobby, lobby.id(), 0, lobby.host());
  const OwnedFd call = lobby.connect();
  PacketHeader header = small_header(PacketType::kHello, 0);
  header.version = kPacketVersion + 1;
  CHECK(send_packet(call.get(), header, {}, {}) == SendResult::kSent);
  reception.step();
  PacketReader reader;
  CHECK(reader.receive(call.get()) == ReceiveResult::kPacket);
  const Error told = read_denial(reader.payload);
  CHECK_EQ(told.code, ErrorCode::kUnsupported);
  CHECK(told.text.find("version " + std::to_string(kPacketVersion + 1)) != std::string::npos);
  CHECK(told.text.find("version " + std::to_string(kPacketVersion)) != std::string::npos);
}

// The slot is its own, but not the group, or it has not heard the secret of any sponsor.
TEST(who_does_not_know_the_secret_is_not_connected) {
  Lobby lobby;
  const Listener newcomer;
  lobby.slots().claim(1, newcomer.endpoint(), 0);
  Reception reception(lobby, lobby.id(), 0, lobby.host());
  for (const bool is_other_group : {false, true}) {
    GroupSecret secret;
    ++(is_other_group ? secret.id : secret.key)[0];
    const OwnedFd call = lobby.connect();
    lobby.say_hello(call.get(), newcomer, secret);
    reception.step();
    PacketReader reader;
    CHECK(reader.receive(call.get()) == ReceiveResult::kPacket);
    CHECK(reader.header.type == PacketType::kRefusal);
    const Error told = read_denial(reader.payload);
    CHECK_EQ(told.code, ErrorCode::kInvalidArgument);
    CHECK(told.text.find(is_other_group ? "another group" : "the proof that it knows the group's secret") !=
          std::string::npos);
    CHECK(lobby.admitted.empty());
  }
}

// It had the slot, slept, and calls when another incarnation has it.
TEST(a_replaced_incarnation_is_evicted) {
  Lobby lobby;
  const Listener before, after;
  lobby.slots().claim(1, before.endpoint(), 0);
  lobby.slots().free(1, incarnation_of(before.endpoint()));
  CHECK(lobby.slots().claim(1, after.endpoint(), 0));
  Reception reception(lobby, lobby.id(), 0, lobby.host());
  const OwnedFd call = lobby.connect();
  lobby.say_hello(call.get(), before);
  reception.step();
  PacketReader reader;
  CHECK(reader.receive(call.get()) == ReceiveResult::kPacket);
  CHECK(reader.header.type == PacketType::kRefusal);
  const Error told = read_denial(reader.payload);
  CHECK_EQ(told.code, ErrorCode::kEvicted);
  CHECK(told.text.find("slot 1 belongs to another process") != std::string::npos);
  CHECK(lobby.admitted.empty());
  CHECK_EQ(lobby.slots().claimed(1), incarnation_of(after.endpoint()));
}

// The welcome can't be sent: the slot is free again. Nothing else that happens at a door frees one.
TEST(a_sponsor_frees_what_it_could_not_give) {
  Lobby lobby;
  const Listener newcomer;
  JoinRequest request;
  request.build = this_build();
  request.group = lobby.id();
  request.endpoint = newcomer.endpoint();
  request.endpoint.key = {};
  Reception reception(lobby, lobby.id(), 0, lobby.host());
  OwnedFd call = lobby.connect();
  send_small(call.get(), PacketType::kHello, payload_of(request));
  call.reset();
  reception.step();
  CHECK_EQ(lobby.slots().claimed(1), uint64_t{0});
  CHECK(lobby.ask(newcomer.endpoint()));  // and its call has ended by now
  reception.step();
  CHECK_EQ(lobby.slots().claimed(1), incarnation_of(newcomer.endpoint()));
}

TEST(who_is_answered_is_watched) {
  Lobby lobby;
  const Listener newcomer;
  lobby.slots().claim(1, newcomer.endpoint(), 0);
  PacketReader reader;
  OwnedFd call = lobby.connect();
  lobby.before_answer = [&] { CHECK(hear(call, reader) == ReceiveResult::kNothing); };
  Reception reception(lobby, lobby.id(), 0, lobby.host());
  lobby.say_hello(call.get(), newcomer);
  lobby.admit_fails = true;
  reception.step();
  CHECK(hear(call, reader) == ReceiveResult::kEnd);  // no hello: it calls again
  CHECK(lobby.admitted.empty());
  CHECK_EQ(lobby.slots().claimed(1), incarnation_of(newcomer.endpoint()));  // it lives
  lobby.admit_fails = false;
  call = lobby.connect();
  lobby.say_hello(call.get(), newcomer);
  reception.step();
  CHECK(hear(call, reader) == ReceiveResult::kPacket);
  CHECK(reader.header.type == PacketType::kHello);
  CHECK(lobby.has_peer(1, incarnation_of(newcomer.endpoint())));
}

// Its connection broke while both lived: it may come again. While it holds it may not.
TEST(a_newcomer_that_was_cut_off_comes_again) {
  Lobby lobby;
  const Listener newcomer;
  lobby.slots().claim(1, newcomer.endpoint(), 0);
  lobby.admitted[1] = incarnation_of(newcomer.endpoint());
  PacketReader reader;
  for (const bool is_connected : {true, false}) {
    lobby.connected = is_connected ? std::vector<int>{1} : std::vector<int>{};
    Reception reception(lobby, lobby.id(), 0, lobby.host());
    const OwnedFd call = lobby.connect();
    lobby.say_hello(call.get(), newcomer);
    reception.step();
    CHECK(hear(call, reader) == ReceiveResult::kPacket);
    CHECK(reader.header.type == (is_connected ? PacketType::kRefusal : PacketType::kHello));
  }
}

// A stopped newcomer that waits for its slot must not keep a place at the door.
TEST(who_waits_for_its_slot_is_cut_off_in_the_end) {
  Lobby lobby;
  const Listener newcomer;
  lobby.slots().claim(1, newcomer.endpoint(), 0);
  lobby.has_room = false;
  PacketReader reader;
  {
    Reception reception(lobby, lobby.id(), 0, lobby.host());
    const OwnedFd call = lobby.connect();
    lobby.say_hello(call.get(), newcomer);
    reception.step();
    reception.step();
    CHECK(reception.is_waiting());
    CHECK(hear(call, reader) == ReceiveResult::kNothing);
  }
  lobby.caller_ns = 1;
  Reception reception(lobby, lobby.id(), 0, lobby.host());
  const OwnedFd call = lobby.connect();
  lobby.say_hello(call.get(), newcomer);
  reception.step();
  CHECK(!reception.is_waiting());
  CHECK(hear(call, reader) == ReceiveResult::kEnd);
  CHECK_EQ(lobby.slots().claimed(1), incarnation_of(newcomer.endpoint()));
}

// More than a door hears at once are cut off unread; a newcomer calls again then, and is taken.
TEST(a_newcomer_that_is_cut_off_unread_calls_again) {
  Lobby lobby;
  const Listener newcomer;
  lobby.slots().claim(1, newcomer.endpoint(), 0);
  std::atomic<bool> is_done{false}, was_cut_off{false};
  std::thread door([&] {
    const uint64_t deadline_ns = deadline_after_s(kLongS);
    OwnedFd first;
    while (!first.valid() && now_ns() < deadline_ns) first.reset(accept4(lobby.door(), nullptr, nullptr, SOCK_CLOEXEC));
    first.reset();
    was_cut_off = true;
    Reception reception(lobby, lobby.id(), 0, lobby.host());
    while (!is_done && now_ns() < deadline_ns) {
      reception.step();
      usleep(1000);
    }
  });
  const LifeLock life;
  const CallingRank self{1, newcomer.endpoint(), lobby.secret(), life.fd()};
  const auto connection = call_rank(self, 0, kSlots, lobby.endpoint(), deadline_after_s(kLongS), {});
  is_done = true;
  door.join();
  CHECK(was_cut_off);
  CHECK(connection.has_value());
}

// A group of one member whose door is full of callers that say nothing: it has room again when they are late.
TEST(a_newcomer_finds_a_sponsor_behind_a_flood) {
  Lobby lobby;
  lobby.caller_ns = 200'000'000;
  std::vector<OwnedFd> silent;
  for (int idx = 0; idx < 64; ++idx) silent.push_back(lobby.connect());
  Reception reception(lobby, lobby.id(), 0, lobby.host());
  reception.step();
  std::atomic<bool> is_done{false};
  std::thread door([&] {
    const uint64_t deadline_ns = deadline_after_s(kLongS);
    while (!is_done && now_ns() < deadline_ns) {
      reception.step();
      usleep(1000);
    }
  });
  const Listener newcomer;
  const Endpoint& own = lobby.endpoint();
  JoinAddress address;
  address.boot_id = own.boot_id;
  address.pid_namespace = own.pid_namespace;
  address.network_namespace = own.network_namespace;
  address.group = lobby.id();
  address.doors = {{own.name.data(), own.name_bytes}};
  std::optional<Sponsored> found;
  try {
    found = find_sponsor(address, -1, newcomer.endpoint(), deadline_after_s(kLongS), {});
  } catch (const Error& error) {
    report_failure(__FILE__, __LINE__, error.text);
  }
  is_done = true;
  door.join();
  CHECK(found && found->welcome.slot == 1);
}

// Else poll() would say again and again that somebody is there.
TEST(a_door_without_descriptors_rests) {
  Lobby lobby;
  Reception reception(lobby, lobby.id(), 0, lobby.host());
  const OwnedFd call = lobby.connect();
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit none{static_cast<rlim_t>(call.get()), before.rlim_max};
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  std::vector<OwnedFd> all;
  for (OwnedFd each = OwnedFd(dup(call.get())); each.valid(); each = OwnedFd(dup(call.get())))
    all.push_back(std::move(each));
  reception.step();
  std::vector<pollfd> waited;
  reception.add_waited(waited);
  CHECK_EQ(waited.front().fd, -1);
  all.clear();
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
