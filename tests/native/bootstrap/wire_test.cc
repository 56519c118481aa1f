// Guards against a machine that is out of reach being taken for a process that has ended, and against streams that lose, mix up or
// tear packets.
#include "bootstrap/wire.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "bootstrap/ranks.h"

using namespace weft;        // NOLINT(google-build-using-namespace)
using namespace weft::test;  // NOLINT(google-build-using-namespace)

// From now on a call of sendmsg fails with this error.
static void fail_sends(unsigned error_number) {
  std::array<sock_filter, 4> filter{{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_sendmsg, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error_number),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog program{filter.size(), filter.data()};
  CHECK_EQ(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  CHECK_EQ(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

// The kernel says it once: a sender that hears it must leave it to the receiver, which then finds an end like any other.
TEST(what_a_sender_hears_of_a_lost_machine_the_receiver_tells) {
  for (const int error_number : {ETIMEDOUT, EHOSTUNREACH, EPIPE}) {
    ForkedRanks ranks(1, [&](Rank&) {
      int ends[2];
      CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
      Wire wire(OwnedFd(ends[0]), Wire::Kind::kStream);
      OwnedFd other(ends[1]);
      fail_sends(static_cast<unsigned>(error_number));
      PacketReader reader;
      CHECK(wire.send(small_header(PacketType::kNote, 0), {}, {}) == SendResult::kGone);
      CHECK(wire.receive(reader) == ReceiveResult::kNothing);
      other.reset();
      const ReceiveResult expected = error_number == EPIPE ? ReceiveResult::kEnd : ReceiveResult::kUnreachable;
      CHECK(wire.receive(reader) == expected);
    });
    ranks.join_all();
  }
}

namespace {

struct StreamPair {
  StreamPair() {
    int ends[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    const int least = 1;  // so that a packet leaves in parts
    CHECK_EQ(setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &least, sizeof(least)), 0);
    one = Wire(OwnedFd(ends[0]), Wire::Kind::kStream);
    other = Wire(OwnedFd(ends[1]), Wire::Kind::kStream);
  }
  Wire one, other;
};

}  // namespace

TEST(packets_come_whole_out_of_a_stream_that_is_full) {
  StreamPair pair;
  PacketReader reader;
  uint32_t num_sent = 0;
  uint32_t num_come = 0;
  for (int turn = 0; turn < 2000; ++turn) {
    const std::vector<std::byte> payload((num_sent * 7919) % kMaxPayloadBytes, static_cast<std::byte>(num_sent));
    PacketHeader header = small_header(PacketType::kMessage, payload.size());
    header.tag = num_sent;
    const SendResult result = pair.one.send(header, payload, {});
    CHECK(result != SendResult::kGone);
    if (result == SendResult::kSent) {
      ++num_sent;
      continue;
    }
    for (int most = 0; most < 3 && pair.other.receive(reader) == ReceiveResult::kPacket; ++most) {
      CHECK_EQ(reader.header.tag, uint64_t{num_come});
      CHECK_EQ(reader.payload.size(), size_t{(num_come * 7919) % kMaxPayloadBytes});
      CHECK(std::all_of(reader.payload.begin(), reader.payload.end(),
                        [&](std::byte each) { return each == static_cast<std::byte>(num_come); }));
      ++num_come;
    }
    pair.one.flush();
  }
  while (pair.one.flush() == SendResult::kFull || num_come < num_sent) {
    if (pair.other.receive(reader) == ReceiveResult::kPacket) CHECK_EQ(reader.header.tag, uint64_t{num_come++});
  }
  CHECK(num_sent > 100);
  CHECK(pair.other.receive(reader) == ReceiveResult::kNothing);
  pair.one.reset();
  CHECK(pair.other.receive(reader) == ReceiveResult::kEnd);
}

TEST(a_stream_takes_no_descriptors) {
  StreamPair pair;
  std::vector<OwnedFd> fds;
  fds.push_back(OwnedFd(memfd_create("test", MFD_CLOEXEC)));
  CHECK(pair.one.send(small_header(PacketType::kMessage, 0), {}, fds) == SendResult::kGone);
  PacketHeader header = small_header(PacketType::kMessage, 0);
  header.num_fds = 1;
  PacketReader reader;
  CHECK(pair.one.send(header, {}, {}) == SendResult::kSent);
  CHECK(pair.other.receive(reader) == ReceiveResult::kBad);
}

TEST(a_packet_in_pieces_is_one) {
  StreamPair pair;
  PacketReader reader;
  const std::vector<std::byte> payload(100, std::byte{5});
  const PacketHeader header = small_header(PacketType::kNote, payload.size());
  std::vector<std::byte> bytes(sizeof(header));
  std::memcpy(bytes.data(), &header, sizeof(header));
  bytes.insert(bytes.end(), payload.begin(), payload.end());
  for (size_t at = 0; at < bytes.size(); ++at) {
    CHECK(pair.other.receive(reader) == ReceiveResult::kNothing);
    CHECK_EQ(send(pair.one.fd(), &bytes[at], 1, 0), 1);
  }
  CHECK(pair.other.receive(reader) == ReceiveResult::kPacket);
  CHECK_EQ(reader.payload.size(), payload.size());
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
