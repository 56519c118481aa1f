// Guards against a machine that is out of reach being taken for a process that has ended.
#include "bootstrap/wire.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <array>
#include <cerrno>
#include <cstddef>

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

int main(int argc, char** argv) { return run_tests(argc, argv); }
