// Guards against ranks of several machines that do not find each other, believe a stranger, or hang on one. One machine plays
// several, over its loopback interface.
#include "bootstrap/network.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <cstring>

#include "bootstrap/greeting.h"
#include "bootstrap/handshake.h"
#include "bootstrap/link.h"
#include "bootstrap/ranks.h"
#include "bootstrap/wire.h"

using namespace weft;        // NOLINT(google-build-using-namespace)
using namespace weft::test;  // NOLINT(google-build-using-namespace)

namespace {

// Connects, decides nothing.
void connect(Rank& self, double timeout_s = kLongS, const std::string& secret = "") {
  const auto bytes = std::as_bytes(std::span(secret.data(), secret.size()));
  self.connect(timeout_s, {std::make_shared<Decider>(), {bytes.begin(), bytes.end()}});
}

// A connection to the door of `endpoint`, which may be opened later.
OwnedFd call(const Endpoint& endpoint) {
  const uint64_t deadline_ns = deadline_after_s(kLongS);
  while (now_ns() < deadline_ns) {
    OwnedFd socket = start_call(endpoint.addresses[0], endpoint.port);
    pollfd waited{socket.get(), POLLOUT, 0};
    if (socket.valid() && poll(&waited, 1, 1000) == 1 && call_state(socket.get()) == 0) return socket;
    usleep(2000);
  }
  report_failure(__FILE__, __LINE__, "nobody opens the door");
  return {};
}

// What the called side has drawn for this connection.
Nonce challenge_from(int socket) {
  Wire wire(OwnedFd::duplicate(socket), Wire::Kind::kStream);
  PacketReader reader;
  Nonce drawn{};
  pollfd waited{socket, POLLIN, 0};
  for (;;) {
    if (poll(&waited, 1, 20'000) != 1) break;
    const ReceiveResult result = wire.receive(reader);
    if (result == ReceiveResult::kNothing) continue;
    if (result != ReceiveResult::kPacket) break;
    CHECK_EQ(challenge_problem(reader.header, reader.payload, &drawn), std::string());
    CHECK(drawn != Nonce{});
    return drawn;
  }
  report_failure(__FILE__, __LINE__, "no challenge came");
  return drawn;
}

// What comes back: a refusal's text, "end", or "silence".
std::string answer_to(int socket, std::span<const std::byte> bytes, int longest_ms = 20'000) {
  send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  Wire wire(OwnedFd::duplicate(socket), Wire::Kind::kStream);
  PacketReader reader;
  pollfd waited{socket, POLLIN, 0};
  for (;;) {
    if (poll(&waited, 1, longest_ms) != 1) return "silence";
    switch (wire.receive(reader)) {
      case ReceiveResult::kNothing: continue;
      case ReceiveResult::kPacket: break;
      default: return "end";
    }
    if (reader.header.type == PacketType::kChallenge) continue;
    if (reader.header.type != PacketType::kRefusal) return "no refusal";
    return read_refusal(reader.payload, "rank 0", 1, 2).text;
  }
}

template <class Plain>
std::vector<std::byte> packet_of(const Plain& payload, PacketHeader header = {}) {
  if (header.type == PacketType{}) header.type = PacketType::kHello;
  header.message_bytes = header.payload_bytes = sizeof(payload);
  std::vector<std::byte> bytes(sizeof(header) + sizeof(payload));
  std::memcpy(bytes.data(), &header, sizeof(header));
  std::memcpy(bytes.data() + sizeof(header), &payload, sizeof(payload));
  return bytes;
}

void prove(Hello& hello, const GroupSecret& secret) {
  const auto before = std::as_bytes(std::span<const Hello, 1>(&hello, 1)).first(offsetof(Hello, proof));
  hello.proof = hmac_sha256(std::as_bytes(std::span(secret.key)), before);
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST(ranks_of_several_machines_exchange_what_they_say) {
  ForkedRanks ranks(
      5,
      [](Rank& self) {
        connect(self);
        self.exchange({0, 1, 2, 3, 4}, 1);
        self.exchange({0, 1, 2, 3, 4}, 2, kLongS, 3'000'000);  // more than a connection holds
        if (self.rank % 2 == 0) self.exchange({0, 2, 4}, 3);
        const std::vector<int> machine{0, 0, 1, 1, 2};
        for (int peer = 0; peer < 5; ++peer) {
          const bool is_near = machine[static_cast<size_t>(peer)] == machine[static_cast<size_t>(self.rank)];
          CHECK_EQ(self.plane->is_near(peer), is_near);
        }
        const OwnedFd fd(memfd_create("test", MFD_CLOEXEC));
        if (self.rank < 2) {
          const auto parcels = self.plane->exchange({0, 1}, 4, {}, {fd.get()}, deadline_after_s(kLongS), {});
          CHECK_EQ(parcels[static_cast<size_t>(1 - self.rank)].fds.size(), 1u);
        }
        CHECK_ERROR(kUnsupported, {},
                    self.plane->exchange({0, 1, 2, 3, 4}, 5, {}, {fd.get()}, deadline_after_s(kLongS), {}));
        self.exchange({0, 1, 2, 3, 4}, 6);
      },
      {"a", "a", "b", "b", "c"});
  ranks.join_all();
}

TEST(a_death_and_a_goodbye_are_told_apart_between_machines) {
  ForkedRanks ranks(
      4,
      [](Rank& self) {
        Ear ear;
        connect(self);
        self.plane->set_abort_handler(ear.handler());
        self.exchange({0, 1, 2, 3}, 1);
        self.parent.tell(1);
        if (self.rank == 3) pause();
        if (self.rank == 2) {
          CHECK_EQ(self.parent.hear(), 1u);
          self.plane->close("a reason");
          return;
        }
        CHECK(ear.wait_for(1));
        CHECK_EQ(ear.count(3, AbortCode::kPeerLost), 1);
        CHECK_ERROR(kPeerLost, {3}, self.exchange({0, 1, 2, 3}, 2));
        self.parent.tell(2);
        CHECK(ear.wait_for(2));
        CHECK_EQ(ear.count(2, AbortCode::kPeerClosed), 1);
        CHECK_EQ(text_of(ear.heard().at(1)), std::string("a reason"));
        CHECK(self.plane->ended_ranks() == std::vector<int>{2});  // nothing proves the end of a process elsewhere
        self.exchange({0, 1}, 3);
        self.plane->set_abort_handler({});
      },
      {"a", "a", "b", "c"});
  for (int rank = 0; rank < 4; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
  ranks.signal(3, SIGKILL);
  ranks.join(3, SIGKILL);
  for (const int rank : {0, 1}) CHECK_EQ(ranks.pipe(rank).hear(), 2u);
  ranks.pipe(2).tell(1);
  ranks.join_all({3});
}

TEST(an_abort_reaches_every_machine) {
  ForkedRanks ranks(4,
                    [](Rank& self) {
                      Ear ear;
                      connect(self);
                      self.plane->set_abort_handler(ear.handler());
                      self.exchange({0, 1, 2, 3}, 1);
                      if (self.rank == 2) {
                        AbortReason reason;
                        reason.code = AbortCode::kAborted;
                        reason.rank = 2;
                        set_text(reason, "enough");
                        self.plane->publish_abort(reason);
                        Note note;
                        set_text(note, "a note");
                        self.plane->publish_note(note);
                      } else {
                        CHECK(ear.wait_for(1));
                        CHECK_EQ(ear.heard().at(0).reporter, 2);
                        CHECK_EQ(text_of(ear.heard().at(0)), std::string("enough"));
                      }
                      self.exchange({0, 1, 2, 3}, 2);
                      CHECK_EQ(text_of(self.plane->note_of(2)), std::string("a note"));
                      self.plane->set_abort_handler({});
                    },
                    {"a", "b", "b", "c"});
  ranks.join_all();
}

TEST(a_wrong_secret_is_refused_and_named) {
  ForkedRanks ranks(2,
                    [](Rank& self) {
                      try {
                        connect(self, self.rank == 0 ? 5 : kLongS,
                                self.rank == 0 ? "this is the secret" : "this is another one");
                        CHECK(false);
                      } catch (const Error& error) {
                        CHECK_EQ(error.code, self.rank == 0 ? ErrorCode::kPeerTimeout : ErrorCode::kInvalidArgument);
                        CHECK(contains(error.text, "without the proof that it knows the group's secret"));
                      }
                    },
                    {"a", "b"});
  ranks.join_all();
}

TEST(ranks_of_one_machine_prove_the_secret_too) {
  ForkedRanks ranks(2, [](Rank& self) {
    CHECK_ERROR(kInvalidArgument, {}, connect(self, kLongS, self.rank == 0 ? "one secret" : "another"));
  });
  ranks.join_all();
}

// Each of them is told what was wrong, and the ranks connect afterwards as if nothing had been.
TEST(hostile_callers_change_nothing) {
  ForkedRanks ranks(
      2,
      [](Rank& self) {
        if (self.rank == 1) {
          const GroupSecret secret = group_secret(self.endpoints, {});
          const Hello good = make_hello(1, 0, self.endpoints, secret, {Nonce{1}, Nonce{2}});
          const auto check = [&](std::span<const std::byte> bytes, const std::string& text) {
            const std::string answer = answer_to(call(self.endpoints[0]).get(), bytes);
            if (!contains(answer, text)) report_failure(__FILE__, __LINE__, text + " expected, got " + answer);
          };
          const auto check_hello = [&](const std::string& text, const std::function<void(Hello&)>& change) {
            const OwnedFd caller = call(self.endpoints[0]);
            Hello hello = make_hello(1, 0, self.endpoints, secret, {Nonce{1}, challenge_from(caller.get())});
            change(hello);
            const std::string answer = answer_to(caller.get(), packet_of(hello));
            if (!contains(answer, text)) report_failure(__FILE__, __LINE__, text + " expected, got " + answer);
          };
          const std::string request = "GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n";
          check(std::as_bytes(std::span(request)), "wrong magic number");
          std::vector<std::byte> old = packet_of(good);
          PacketHeader header = small_header(PacketType::kHello, sizeof(good));
          header.version = kPacketVersion - 1;
          std::memcpy(old.data(), &header, sizeof(header));
          check(old, "a packet of version " + std::to_string(kPacketVersion - 1));
          header.version = kPacketVersion;
          header.message_bytes = header.payload_bytes = 1u << 30;
          check(std::as_bytes(std::span<const PacketHeader, 1>(&header, 1)), "a packet of 1073741824 bytes");
          check(packet_of(std::array<std::byte, 4>{}), "a greeting of 4 bytes");
          check(packet_of(std::array<std::byte, 100>{}), "a greeting with a wrong magic number");
          check_hello("wrong magic number", [](Hello& hello) { ++hello.magic; });
          check_hello("a greeting of version " + std::to_string(kHelloVersion + 1),
                      [](Hello& hello) { ++hello.version; });
          check_hello("a greeting of", [](Hello& hello) { ++hello.bytes; });
          check_hello("a group of 3 ranks", [](Hello& hello) { ++hello.num_ranks; });
          check_hello("another group", [](Hello& hello) { hello.group[0] ^= 1; });
          check_hello("from rank 1 to rank 1", [](Hello& hello) { hello.target = 1; });
          check_hello("from rank 0 to rank 0", [](Hello& hello) { hello.source = 0; });
          check_hello("from rank -7 to rank 0", [](Hello& hello) { hello.source = -7; });
          check_hello("without the proof", [](Hello& hello) { hello.proof[31] ^= 1; });
          check_hello("was changed", [](Hello& hello) { hello.target_nonce[0] ^= 1; });
          check_hello("was changed", [](Hello& hello) { hello.endpoint.pid ^= 1; });
          check_hello("does not answer the challenge", [](Hello& hello) { hello.answer[0] ^= 1; });
          check_hello("does not answer the challenge", [&](Hello& hello) {
            hello.answer = {};
            prove(hello, secret);
          });
          check_hello("without the proof", [](Hello& hello) { hello.challenge[0] ^= 1; });
          check_hello("without the proof", [&](Hello& hello) {
            hello.endpoint.pid ^= 1;
            prove(hello, secret);
          });
          const OwnedFd half = call(self.endpoints[0]);  // which never goes on
          CHECK_EQ(send(half.get(), packet_of(good).data(), 40, MSG_NOSIGNAL), 40);
          connect(self);
          self.exchange({0, 1}, 1);
          return;
        }
        const int before = num_open_fds();
        connect(self);
        self.exchange({0, 1}, 1);
        self.plane->close();
        self.plane.reset();
        CHECK(num_open_fds() <= before);  // of the callers nothing is left
      },
      {"a", "b"});
  ranks.join_all();
}

// What a rank sends shows nobody the group's key.
TEST(a_greeting_does_not_hold_a_key) {
  const DoorOptions door{"lo"};
  const Listener first(&door, "a");
  const Listener second(&door, "b");
  const std::vector<Endpoint> endpoints{first.endpoint(), second.endpoint()};
  const GroupSecret secret = group_secret(endpoints, {});
  const Hello hello = make_hello(0, 1, endpoints, secret);
  const auto bytes = std::as_bytes(std::span<const Hello, 1>(&hello, 1));
  const auto holds = [&](std::span<const uint8_t> part) {
    const auto wanted = std::as_bytes(part);
    return std::search(bytes.begin(), bytes.end(), wanted.begin(), wanted.end()) != bytes.end();
  };
  for (const Endpoint& endpoint : endpoints) CHECK(!holds(endpoint.key));
  CHECK(!holds(secret.key));
  CHECK(holds(endpoints[0].nonce) && holds(endpoints[1].nonce));
  CHECK(secret.key != group_secret(endpoints, std::as_bytes(std::span("more"))).key);
}

TEST(a_flood_of_callers_keeps_no_rank_out) {
  ForkedRanks ranks(2,
                    [](Rank& self) {
                      if (self.rank == 1) {
                        std::vector<OwnedFd> held;
                        for (int number = 0; number < 1000; ++number) {
                          held.push_back(call(self.endpoints[0]));
                          if (number % 3 == 0)
                            send(held.back().get(), "WFPK", 4, MSG_NOSIGNAL);  // begins as a packet does
                        }
                        // One that greets later than it calls is heard, too: those before it are cut off, not this one.
                        const OwnedFd slow = call(self.endpoints[0]);
                        usleep(200'000);
                        Hello hello = make_hello(1, 0, self.endpoints, group_secret(self.endpoints, {}),
                                                 {Nonce{1}, challenge_from(slow.get())});
                        ++hello.num_ranks;
                        CHECK(contains(answer_to(slow.get(), packet_of(hello)), "a group of 3 ranks"));
                        connect(self);
                        self.exchange({0, 1}, 1);
                        return;
                      }
                      connect(self);
                      CHECK(num_open_fds() < 200);
                      self.exchange({0, 1}, 1);
                    },
                    {"a", "b"});
  ranks.join_all();
}

// Who has heard what a rank said on another connection can say it again, and is refused by both sides.
TEST(a_recorded_greeting_is_of_no_use_on_another_connection) {
  ForkedRanks ranks(2,
                    [](Rank& self) {
                      if (self.rank == 1) {
                        const GroupSecret secret = group_secret(self.endpoints, {});
                        OwnedFd first = call(self.endpoints[0]);
                        const Nonce drawn = challenge_from(first.get());
                        const auto recorded = packet_of(make_hello(1, 0, self.endpoints, secret, {Nonce{1}, drawn}));
                        first.reset();  // it never arrived
                        const OwnedFd second = call(self.endpoints[0]);
                        CHECK(challenge_from(second.get()) != drawn);
                        CHECK(contains(answer_to(second.get(), recorded), "does not answer the challenge"));
                      }
                      connect(self);
                      self.exchange({0, 1}, 1);
                    },
                    {"a", "b"});
  ranks.join_all();
}

TEST(who_answers_for_a_rank_and_is_another_is_not_believed) {
  enum class Answer { kNoise, kNoChallenge, kOtherSecret, kRecorded };
  for (const Answer kind : {Answer::kNoise, Answer::kNoChallenge, Answer::kOtherSecret, Answer::kRecorded}) {
    ForkedRanks ranks(
        2,
        [&](Rank& self) {
          if (self.rank == 1) return CHECK_ERROR(kInvalidArgument, {}, connect(self));
          self.listener.door()->open();
          pollfd waited{self.listener.door()->fd(), POLLIN, 0};
          CHECK_EQ(poll(&waited, 1, 30'000), 1);
          const OwnedFd caller = accept_caller(self.listener.door()->fd());
          const auto say = [&](std::span<const std::byte> bytes) {
            send(caller.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
          };
          const std::string noise(100, 'x');
          if (kind == Answer::kNoise) say(std::as_bytes(std::span(noise)));
          if (kind == Answer::kOtherSecret || kind == Answer::kRecorded) {
            say(packet_of(Challenge{.drawn = {7}}, PacketHeader{.type = PacketType::kChallenge}));
            Wire wire(OwnedFd::duplicate(caller.get()), Wire::Kind::kStream);
            PacketReader reader;
            waited.fd = caller.get();
            while (poll(&waited, 1, 30'000) == 1 && wire.receive(reader) == ReceiveResult::kNothing) {
            }
            const Nonce drawn = challenge_of(reader.header, reader.payload);
            CHECK(drawn != Nonce{});
            if (kind == Answer::kRecorded) {
              say(packet_of(make_hello(0, 1, self.endpoints, group_secret(self.endpoints, {}), {Nonce{7}, Nonce{8}})));
            } else {
              const GroupSecret other = group_secret(self.endpoints, std::as_bytes(std::span("x")));
              say(packet_of(make_hello(0, 1, self.endpoints, other, {Nonce{7}, drawn})));
            }
          }
          if (kind == Answer::kNoChallenge) {
            say(packet_of(make_hello(0, 1, self.endpoints, group_secret(self.endpoints, {}))));
          }
          CHECK_EQ(self.parent.hear(), 1u);
        },
        {"a", "b"});
    ranks.join(1);
    ranks.pipe(0).tell(1);
    ranks.join(0);
  }
}

TEST(a_rank_that_never_comes_is_named) {
  ForkedRanks ranks(3,
                    [](Rank& self) {
                      if (self.rank == 2) return;
                      CHECK_ERROR(kPeerTimeout, {2}, connect(self, 4));  // the other one has come by then
                    },
                    {"a", "b", "c"});
  ranks.join_all();
}

// A rank that fails while the ranks connect tells those of other machines why.
TEST(a_refusal_crosses_machines) {
  ForkedRanks ranks(3,
                    [](Rank& self) {
                      if (self.rank == 1) {  // waits for rank 2 in vain, having greeted rank 0
                        CHECK_ERROR(kPeerTimeout, {2}, connect(self, 4));
                        return;
                      }
                      if (self.rank == 0) CHECK_ERROR(kPeerTimeout, {2}, connect(self));
                    },
                    {"a", "b", "c"});
  ranks.join_all();
}

TEST(without_a_store_or_an_address_ranks_stay_on_one_machine) {
  ForkedRanks ranks(2, [](Rank& self) { CHECK_ERROR(kUnsupported, {}, self.connect()); }, {"a", "b"});
  ranks.join_all();
  const Listener first(nullptr, "a");
  const Listener second(nullptr, "b");
  const std::vector<Endpoint> endpoints{first.endpoint(), second.endpoint()};
  CHECK_EQ(first.endpoint().num_addresses, 0);
  check_error(
      ErrorCode::kUnsupported, {}, [&] { check_endpoints(0, endpoints, first.endpoint(), true); }, __FILE__, __LINE__);
}

TEST(doors_keep_to_their_interface_and_ports) {
  CHECK_ERROR(kInvalidArgument, {}, Door(DoorOptions{"no-such-interface"}));
  const Door any({"lo"});
  CHECK_EQ(any.addresses().size(), 1u);
  CHECK_EQ(text_of(any.addresses()[0]), std::string("127.0.0.1"));
  CHECK(any.port() != 0);
  Door first({"lo", any.port()});  // taken: the next ones
  CHECK(first.port() > any.port() && first.port() < any.port() + DoorOptions::kNumPorts);
  // Closed until it is opened.
  const OwnedFd refused = start_call(first.addresses()[0], first.port());
  CHECK(!refused.valid() || call_state(refused.get()) == ECONNREFUSED);
  first.open();
  const OwnedFd taken = start_call(first.addresses()[0], first.port());
  pollfd waited{taken.get(), POLLOUT, 0};
  CHECK_EQ(poll(&waited, 1, 10'000), 1);
  CHECK_EQ(call_state(taken.get()), 0);
}

// A group on one machine needs no network.
TEST(a_sandbox_that_denies_tcp_is_no_reason_to_fail) {
  ForkedRanks ranks(1, [](Rank&) {
    const auto load = [](size_t at) {
      return sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<uint32_t>(at));
    };
    std::array<sock_filter, 7> filter{
        load(offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 3),
        load(offsetof(seccomp_data, args)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_INET, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_INET6, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
    };
    const sock_fprog program{filter.size(), filter.data()};
    CHECK_EQ(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
    CHECK_EQ(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
    const DoorOptions any;
    Listener listener(&any);
    CHECK(listener.door() == nullptr && listener.endpoint().num_addresses == 0);
    const DoorOptions asked{"lo"};
    const Listener none(&asked);
    CHECK(none.door_problem() && none.door_problem()->code == ErrorCode::kUnsupported);
  });
  ranks.join_all();
}

TEST(public_addresses_are_told_from_private_ones) {
  const auto mapped = [](uint8_t a, uint8_t b, uint8_t c, uint8_t d) {
    return IpAddress{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d};
  };
  for (const IpAddress& each :
       {mapped(10, 1, 2, 3), mapped(172, 16, 0, 1), mapped(172, 31, 0, 1), mapped(192, 168, 0, 1), mapped(127, 0, 0, 1),
        mapped(169, 254, 0, 1), mapped(100, 64, 0, 1), IpAddress{0xfd, 1}, IpAddress{0xfe, 0x80}}) {
    CHECK(is_private(each));
  }
  for (const IpAddress& each : {mapped(8, 8, 8, 8), mapped(172, 32, 0, 1), mapped(172, 15, 0, 1),
                                mapped(192, 169, 0, 1), mapped(100, 128, 0, 1), IpAddress{0x20, 1}}) {
    CHECK(!is_private(each));
  }
  CHECK_EQ(text_of(mapped(10, 1, 2, 3)), std::string("10.1.2.3"));
  CHECK_EQ(text_of(IpAddress{0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7}), std::string("fd00::7"));
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
