// Guards against believing a process that is not the right incarnation of the right rank, and bytes that are no message
// of ours. The attackers are real processes that speak the raw protocol; ranks must refuse them with a typed error.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/un.h>

#include <cstring>

#include "bootstrap/greeting.h"
#include "bootstrap/handshake.h"
#include "bootstrap/life_lock.h"
#include "bootstrap/link.h"
#include "bootstrap/ranks.h"
#include "bootstrap/socket.h"

using namespace weft;        // NOLINT(google-build-using-namespace)
using namespace weft::test;  // NOLINT(google-build-using-namespace)

namespace {

OwnedFd call(const Endpoint& endpoint) {
  OwnedFd socket = make_socket();
  const SocketAddress address(std::string_view(endpoint.name.data(), endpoint.name_bytes));
  CHECK_EQ(::connect(socket.get(), address.get(), address.bytes()), 0);
  return socket;
}

template <class Plain>
std::span<const std::byte> plain_bytes(const Plain& value) {
  return std::as_bytes(std::span<const Plain, 1>(&value, 1));
}

// A rank that is connected by the real handshake and then sends what it likes.
struct RawPeer {
  explicit RawPeer(Rank& self) {
    if (self.rank == 0) page = GroupPage::create(self.num_ranks);
    const int page_fd = page ? page->fd() : -1;
    connections = connect_mesh({self.rank,
                                self.endpoints,
                                self.listener.fd(),
                                -1,
                                life.fd(),
                                page_fd,
                                deadline_after_s(kLongS),
                                {},
                                group_secret(self.endpoints, {})});
  }
  int socket(int peer) const { return connections[static_cast<size_t>(peer)].wire.fd(); }

  LifeLock life;
  std::shared_ptr<GroupPage> page;
  std::vector<Connection> connections;
};

PacketHeader header_of(uint64_t tag, uint32_t message_bytes, uint32_t offset, uint32_t payload_bytes) {
  PacketHeader header;
  header.type = PacketType::kMessage;
  header.tag = tag;
  header.message_bytes = message_bytes;
  header.offset = offset;
  header.payload_bytes = payload_bytes;
  return header;
}

// Rank 1 sends something bad; rank 0 must cut it off, say so and go on with rank 2.
void check_cut_off(const std::function<void(int socket)>& send_bad) {
  ForkedRanks ranks(3, [&](Rank& self) {
    if (self.rank == 1) {
      const RawPeer raw(self);
      CHECK_EQ(self.parent.hear(), 1u);
      send_bad(raw.socket(0));
      CHECK_EQ(self.parent.hear(), 1u);
      return;
    }
    Ear ear;
    self.connect();
    self.plane->set_abort_handler(ear.handler());
    if (self.rank == 0) {
      const int before = num_open_fds();
      self.parent.tell(3);
      CHECK_ERROR(kPeerLost, {1}, self.exchange({0, 1}, 1));
      CHECK(ear.wait_for(1));  // exchange() may end a moment earlier
      CHECK_EQ(ear.count(1, AbortCode::kRefused), 1);
      CHECK_EQ(ear.heard().size(), 1u);
      CHECK(self.plane->detections().at(0).channel == DetectionChannel::kRefused);
      // Descriptors that came with it are closed, and so is its socket.
      const uint64_t deadline_ns = deadline_after_s(kLongS);
      while (num_open_fds() != before - 1 && now_ns() < deadline_ns) usleep(500);
      CHECK_EQ(num_open_fds(), before - 1);
    }
    self.exchange({0, 2}, 2);
    self.parent.tell(2);
    CHECK_EQ(self.parent.hear(), 1u);
    self.plane->set_abort_handler({});
  });
  CHECK_EQ(ranks.pipe(0).hear(), 3u);
  ranks.pipe(1).tell(1);
  for (const int rank : {0, 2}) CHECK_EQ(ranks.pipe(rank).hear(), 2u);
  for (const int rank : {0, 1, 2}) ranks.pipe(rank).tell(1);
  ranks.join_all();
}

void check_header_cut_off(const PacketHeader& header, size_t num_payload_bytes) {
  check_cut_off([&](int socket) {
    const std::vector<std::byte> payload(num_payload_bytes);
    CHECK(send_packet(socket, header, payload, {}) == SendResult::kSent);
  });
}

// Rank 1 greets rank 0 with `first_packet`; rank 0 must refuse to connect, and tell rank 1 so.
void check_greeting_refused(const std::function<void(Rank& self, int socket)>& first_packet) {
  ForkedRanks ranks(2, [&](Rank& self) {
    if (self.rank == 0) {
      CHECK_ERROR(kInvalidArgument, {}, self.connect());
      return;
    }
    const OwnedFd socket = call(self.endpoints[0]);
    first_packet(self, socket.get());
    PacketReader reader;
    pollfd answer{socket.get(), POLLIN, 0};
    CHECK_EQ(poll(&answer, 1, 30'000), 1);
    CHECK(reader.receive(socket.get()) == ReceiveResult::kPacket);
    CHECK(reader.header.type == PacketType::kRefusal);
  });
  ranks.join_all();
}

// Rank 0 gets the true list, rank 1 one that `change` has changed; both must refuse to connect, rank 1 with `code`.
void check_lists_refused(ErrorCode code, const std::function<void(std::vector<Endpoint>&)>& change) {
  ForkedRanks ranks(2, [&](Rank& self) {
    if (self.rank == 1) {
      change(self.endpoints);
      try {
        self.connect();
        CHECK(false);
      } catch (const Error& error) {
        CHECK_EQ(error.code, code);
      }
      return;
    }
    try {
      self.connect();
      CHECK(false);
    } catch (const Error& error) {  // refused, or rank 1 has ended
      CHECK(error.code == ErrorCode::kInvalidArgument || error.code == ErrorCode::kPeerLost);
    }
  });
  ranks.join_all();
}

}  // namespace

TEST(endpoints_are_checked) {
  const Listener listener;
  const Endpoint good = listener.endpoint();
  const auto parse = [](const Endpoint& endpoint) { return parse_endpoint(plain_bytes(endpoint), "endpoints[0]"); };
  CHECK(parse(good) == good);
  CHECK_EQ(good.start_time, process_start_time(getpid()));
  CHECK_EQ(process_start_time(1 << 30), 0u);
  Endpoint bad = good;
  bad.magic ^= 1;
  CHECK_ERROR(kInvalidArgument, {}, parse(bad));
  bad = good;
  bad.version = kEndpointVersion - 1;
  CHECK_ERROR(kUnsupported, {}, parse(bad));
  bad = good;
  bad.name_bytes = 41;
  CHECK_ERROR(kInvalidArgument, {}, parse(bad));
  bad = good;
  bad.num_addresses = kMaxAddresses + 1;  // nor 1 without a port
  CHECK_ERROR(kInvalidArgument, {}, parse(bad));
  bad = good;
  bad.pid = 0;
  CHECK_ERROR(kInvalidArgument, {}, parse(bad));
  CHECK_ERROR(kInvalidArgument, {}, parse_endpoint(plain_bytes(good).first(255), "endpoints[0]"));
}

TEST(lists_of_endpoints_are_checked) {
  const Listener first;
  const Listener second;
  const auto check = [&](int rank, std::vector<Endpoint> endpoints) {
    check_endpoints(rank, endpoints, first.endpoint());
  };
  check(0, {first.endpoint(), second.endpoint()});
  CHECK_ERROR(kInvalidArgument, {}, check(0, {}));
  CHECK_ERROR(kInvalidArgument, {}, check(2, {first.endpoint(), second.endpoint()}));
  CHECK_ERROR(kInvalidArgument, {}, check(-1, {first.endpoint(), second.endpoint()}));
  CHECK_ERROR(kInvalidArgument, {}, check(1, {first.endpoint(), second.endpoint()}));
  CHECK_ERROR(kInvalidArgument, {}, check(0, {first.endpoint(), first.endpoint()}));
  CHECK_ERROR(kInvalidArgument, {}, check(0, std::vector<Endpoint>(65, first.endpoint())));
  Endpoint elsewhere = second.endpoint();
  elsewhere.boot_id[3] ^= 1;
  CHECK_ERROR(kUnsupported, {}, check(0, {first.endpoint(), elsewhere}));
  Endpoint other_user = second.endpoint();
  ++other_user.uid;
  CHECK_ERROR(kUnsupported, {}, check(0, {first.endpoint(), other_user}));
  Endpoint other_pids = second.endpoint();
  other_pids.pid_namespace ^= 1;
  CHECK_ERROR(kUnsupported, {}, check(0, {first.endpoint(), other_pids}));
  Endpoint other_network = second.endpoint();
  other_network.network_namespace ^= 1;
  CHECK_ERROR(kUnsupported, {}, check(0, {first.endpoint(), other_network}));
}

TEST(wrong_incarnations_are_refused) {
  check_lists_refused(ErrorCode::kPeerLost, [](auto& endpoints) { ++endpoints[0].start_time; });
  check_lists_refused(ErrorCode::kPeerLost, [](auto& endpoints) { endpoints[0].pid = 1 << 22; });
  check_lists_refused(ErrorCode::kPeerLost, [](auto& endpoints) { endpoints[0].name[10] ^= 1; });
  // A live process, but not the one behind the socket.
  check_lists_refused(ErrorCode::kInvalidArgument, [](auto& endpoints) {
    endpoints[0].pid = endpoints[1].pid;
    endpoints[0].start_time = endpoints[1].start_time;
  });
  // Both are right about each other, but not about the group.
  check_lists_refused(ErrorCode::kInvalidArgument, [](auto& endpoints) { endpoints[0].reserved[0] = 1; });
  check_lists_refused(ErrorCode::kInvalidArgument, [](auto& endpoints) { endpoints.push_back(Listener().endpoint()); });
}

TEST(wrong_greetings_are_refused) {
  check_greeting_refused([](Rank&, int socket) {
    const uint32_t noise[8] = {0xdeadbeef, 1, 2, 3, 4, 5, 6, 7};
    CHECK_EQ(send(socket, noise, sizeof(noise), 0), ssize_t{sizeof(noise)});
  });
  check_greeting_refused([](Rank&, int socket) { CHECK_EQ(send(socket, "x", 1, 0), ssize_t{1}); });
  check_greeting_refused([](Rank&, int socket) {
    PacketHeader header;
    header.type = PacketType::kHello;
    header.version = kPacketVersion + 1;
    send_packet(socket, header, {}, {});
  });
  check_greeting_refused([](Rank&, int socket) { send_small(socket, PacketType::kHello, {}); });
  check_greeting_refused([](Rank&, int socket) {
    send_small(socket, PacketType::kHello, std::vector<std::byte>(sizeof(Hello), std::byte{1}));
  });
  check_greeting_refused([](Rank&, int socket) { send_small(socket, PacketType::kGoodbye, {}); });
}

// The only thing wrong with it is that it is meant for another rank.
TEST(a_greeting_for_another_rank_is_refused) {
  for (const int target : {0, 1}) {
    ForkedRanks ranks(2, [&](Rank& self) {
      if (self.rank == 0) {
        if (target == 0) self.connect();
        if (target != 0) CHECK_ERROR(kInvalidArgument, {}, self.connect());
        return;
      }
      const auto secret = group_secret(self.endpoints, {});
      Hello hello = make_hello(1, 0, self.endpoints, secret);
      hello.target = target;
      const auto before = plain_bytes(hello).first(offsetof(Hello, proof));
      hello.proof = hmac_sha256(std::as_bytes(std::span(secret.key)), before);
      const LifeLock life;
      const OwnedFd socket = call(self.endpoints[0]);
      std::vector<OwnedFd> fds;
      fds.push_back(OwnedFd::duplicate(life.fd()));
      PacketHeader header;
      header.type = PacketType::kHello;
      header.message_bytes = header.payload_bytes = sizeof(hello);
      header.num_fds = 1;
      CHECK(send_packet(socket.get(), header, plain_bytes(hello), fds) == SendResult::kSent);
      PacketReader reader;
      pollfd answer{socket.get(), POLLIN, 0};
      CHECK_EQ(poll(&answer, 1, 30'000), 1);
      CHECK(reader.receive(socket.get()) == ReceiveResult::kPacket);
      CHECK(reader.header.type == (target == 0 ? PacketType::kHello : PacketType::kRefusal));
    });
    ranks.join_all();
  }
}

// Anybody on the machine may call an abstract socket: it must not disturb the ranks.
TEST(strangers_are_turned_away) {
  ForkedRanks ranks(2, [](Rank& self) {
    if (self.rank == 1) CHECK_EQ(self.parent.hear(), 1u);
    if (self.rank == 0) {
      for (const bool as_other_user : {false, true}) {
        const pid_t stranger = fork();
        if (stranger == 0) {
          if (as_other_user && setuid(65534) != 0) _exit(0);  // only root can play another user
          std::vector<OwnedFd> sockets;                       // more than a rank accepts at a time
          for (int idx = 0; idx < 150; ++idx) sockets.push_back(call(self.endpoints[0]));
          for (const OwnedFd& socket : sockets) {
            send_small(socket.get(), PacketType::kHello, std::vector<std::byte>(sizeof(Hello)));
            PacketReader reader;
            pollfd ended{socket.get(), POLLIN, 0};
            if (poll(&ended, 1, 30'000) != 1 || reader.receive(socket.get()) != ReceiveResult::kEnd) _exit(1);
          }
          _exit(0);
        }
      }
      self.parent.tell(2);
    }
    self.connect();
    self.exchange({0, 1}, 1);
    int status = 0;
    while (self.rank == 0 && waitpid(-1, &status, 0) > 0) CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  });
  CHECK_EQ(ranks.pipe(0).hear(), 2u);
  usleep(300'000);
  ranks.pipe(1).tell(1);
  ranks.join_all();
}

TEST(malformed_packets_cut_their_sender_off) {
  PacketHeader header = header_of(1, 8, 0, 8);
  header.magic ^= 1;
  check_header_cut_off(header, 8);
  header = header_of(1, 8, 0, 8);
  header.version = 99;
  check_header_cut_off(header, 8);
  header = header_of(1, 8, 0, 8);
  header.type = static_cast<PacketType>(77);
  check_header_cut_off(header, 8);
  header = header_of(1, 8, 0, 8);
  header.num_fds = 1;  // and none comes
  check_header_cut_off(header, 8);
}

TEST(lengths_that_do_not_fit_cut_their_sender_off) {
  check_header_cut_off(header_of(1, 8, 0, 8), 7);
  check_header_cut_off(header_of(1, 8, 0, 8), 9);
  check_header_cut_off(header_of(1, 4, 0, 8), 8);
  check_header_cut_off(header_of(1, 8, 0, 0), 0);
  check_header_cut_off(header_of(1, kMaxMessageBytes + 1, 0, 8), 8);
  check_header_cut_off(header_of(1, ~0u, ~0u, 8), 8);
  check_header_cut_off(header_of(1, 100, 50, 8), 8);  // begins in the middle
  check_header_cut_off(header_of(1, 200'000, 0, 100'000), 100'000);
}

TEST(mixed_up_messages_cut_their_sender_off) {
  const auto send_two = [](const PacketHeader& first, const PacketHeader& second) {
    check_cut_off([&](int socket) {
      send_packet(socket, first, std::vector<std::byte>(8), {});
      send_packet(socket, second, std::vector<std::byte>(8), {});
    });
  };
  send_two(header_of(1, 16, 0, 8), header_of(2, 16, 8, 8));
  send_two(header_of(1, 16, 0, 8), header_of(1, 24, 8, 8));
  send_two(header_of(1, 24, 0, 8), header_of(1, 24, 16, 8));
  send_two(header_of(1, 24, 0, 8), header_of(1, 24, 0, 8));
  check_cut_off([](int socket) { send_small(socket, PacketType::kHello, {}); });
  check_cut_off([](int socket) { send_small(socket, PacketType::kAbort, std::vector<std::byte>(8)); });
  check_cut_off([](int socket) {
    AbortReason reason;
    reason.code = static_cast<AbortCode>(99);
    send_small(socket, PacketType::kAbort, plain_bytes(reason));
  });
  check_cut_off([](int socket) { send_small(socket, PacketType::kNote, std::vector<std::byte>(9)); });
  check_cut_off([](int socket) { send_small(socket, PacketType::kDecision, std::vector<std::byte>(9)); });
  check_cut_off([](int socket) {
    send_small(socket, PacketType::kGoodbye, std::vector<std::byte>(AbortReason::kTextBytes + 1, std::byte{'x'}));
  });
}

TEST(texts_of_peers_become_one_line) {
  const std::string wild = std::string("a\nb\x01\xff\xc3\xa9") + '\0' + "never";
  ForkedRanks ranks(2, [&](Rank& self) {
    if (self.rank == 1) {
      const RawPeer raw(self);
      Note note;
      std::copy(wild.begin(), wild.end(), note.text.begin());
      send_small(raw.socket(0), PacketType::kNote, plain_bytes(note));
      AbortReason reason;
      reason.code = AbortCode::kAborted;
      reason.text.fill('x');  // without an end
      send_small(raw.socket(0), PacketType::kAbort, plain_bytes(reason));
      send_small(raw.socket(0), PacketType::kGoodbye, std::as_bytes(std::span(wild)));
      CHECK_EQ(self.parent.hear(), 1u);
      return;
    }
    Ear ear;
    self.connect();
    self.plane->set_abort_handler(ear.handler());
    CHECK(ear.wait_for(2));
    CHECK_EQ(text_of(self.plane->note_of(1)), std::string("a b ?\xc3\xa9"));
    CHECK_EQ(text_of(ear.heard().at(0)), std::string(AbortReason::kTextBytes, 'x'));
    CHECK_EQ(text_of(ear.heard().at(1)), std::string("a b ?\xc3\xa9 never"));
    self.parent.tell(1);
    self.plane->close();
  });
  CHECK_EQ(ranks.pipe(0).hear(), 1u);
  ranks.pipe(1).tell(1);
  ranks.join_all();
}

// An abort that found no room leaves when there is some, and does not keep later ones back for ever.
TEST(what_waited_for_room_is_sent) {
  constexpr uint64_t kLast = 1'000'000;
  ForkedRanks ranks(2, [&](Rank& self) {
    const uint64_t deadline_ns = deadline_after_s(kLongS);
    if (self.rank == 1) {
      const RawPeer raw(self);
      CHECK_EQ(self.parent.hear(), 1u);  // there is no room any more
      PacketReader reader;
      AbortReason reason;
      while (reason.sequence != kLast && now_ns() < deadline_ns) {
        if (reader.receive(raw.socket(0)) != ReceiveResult::kPacket) {
          usleep(1000);
          continue;
        }
        std::memcpy(&reason, reader.payload.data(), sizeof(reason));
      }
      CHECK_EQ(reason.sequence, kLast);
      self.parent.tell(2);
      return;
    }
    self.connect();
    usleep(100'000);  // the monitor sleeps and does not ask for room: whoever finds none has to wake it
    AbortReason reason;
    reason.code = AbortCode::kPeerTimeout;
    for (reason.sequence = 1; reason.sequence < 5000; ++reason.sequence) self.plane->publish_abort(reason);
    self.parent.tell(1);
    reason.sequence = kLast;
    pollfd told{self.parent.fd(), POLLIN, 0};
    while (poll(&told, 1, 50) == 0 && now_ns() < deadline_ns) self.plane->publish_abort(reason);
    CHECK_EQ(self.parent.hear(), 2u);
  });
  CHECK_EQ(ranks.pipe(0).hear(), 1u);
  ranks.pipe(1).tell(1);
  CHECK_EQ(ranks.pipe(1).hear(), 2u);
  ranks.pipe(0).tell(2);
  ranks.join_all();
}

TEST(unwanted_descriptors_are_closed) {
  check_cut_off([](int socket) {
    std::vector<OwnedFd> fds;
    for (int count = 0; count < 5; ++count) fds.push_back(OwnedFd(memfd_create("test", MFD_CLOEXEC)));
    PacketHeader header = header_of(1, 8, 0, 8);
    header.num_fds = 4;
    CHECK(send_packet(socket, header, std::vector<std::byte>(8), fds) == SendResult::kSent);
  });
  check_cut_off([](int socket) {
    std::vector<OwnedFd> fds;
    fds.push_back(OwnedFd(memfd_create("test", MFD_CLOEXEC)));
    PacketHeader header;
    header.type = PacketType::kGoodbye;
    header.num_fds = 1;
    CHECK(send_packet(socket, header, {}, fds) == SendResult::kSent);
  });
}

TEST(a_reason_that_names_no_rank_is_made_harmless) {
  ForkedRanks ranks(2, [](Rank& self) {
    if (self.rank == 1) {
      const RawPeer raw(self);
      AbortReason reason;
      reason.code = AbortCode::kPeerTimeout;
      reason.rank = 1'000'000;
      reason.reporter = -7;
      reason.is_ours = 1;
      send_small(raw.socket(0), PacketType::kAbort, plain_bytes(reason));
      CHECK_EQ(self.parent.hear(), 1u);
      return;
    }
    Ear ear;
    self.connect();
    self.plane->set_abort_handler(ear.handler());
    CHECK(ear.wait_for(1));
    CHECK(ear.heard().at(0).rank == -1 && ear.heard().at(0).reporter == 1);
    CHECK_EQ(ear.heard().at(0).is_ours, 0u);
    self.parent.tell(1);
    self.plane->close();
  });
  CHECK_EQ(ranks.pipe(0).hear(), 1u);
  ranks.pipe(1).tell(1);
  ranks.join_all();
}

TEST(of_a_peer_that_sends_without_end_some_packets_are_read_at_a_time) {
  int ends[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
  const OwnedFd peer(ends[1]);
  Link link{OwnedFd(ends[0])};
  for (int number = 0; number < 7; ++number) send_small(peer.get(), PacketType::kGoodbye, {});
  int num_read = 0;
  const Link::Events events{{}, {}, {}, [&](const std::string&) { ++num_read; }, {}, {}};
  PacketReader reader;
  for (const int so_far : {3, 6, 7, 7}) {
    CHECK(!link.receive(reader, events, 3));
    CHECK_EQ(num_read, so_far);
  }
}

TEST(whatever_a_refusal_holds_its_text_is_a_line_and_its_culprit_a_peer) {
  Error error(ErrorCode::kPeerLost, "two\nlines \xff", "connect", 0, {3});
  const Error told = read_refusal(pack_refusal(error), "rank 2", 1, 4);
  CHECK(told.code == ErrorCode::kPeerLost);
  CHECK(told.peers == std::vector<int>{3});
  CHECK(told.text.find('\n') == std::string::npos && told.text.find('\xff') == std::string::npos);
  for (const int culprit : {-1, 1, 4}) {
    error.peers = {culprit};
    CHECK(read_refusal(pack_refusal(error), "rank 2", 1, 4).peers.empty());
  }
  CHECK(read_refusal({}, "rank 2", 1, 4).code == ErrorCode::kInvalidArgument);
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
