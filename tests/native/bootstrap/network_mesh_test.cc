// Guards against an address that takes calls and says nothing keeping a rank from its other addresses, and against callers that are not
// told why a rank gave up.
#include "bootstrap/network_mesh.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <thread>

#include "bootstrap/ranks.h"

using namespace weft;        // NOLINT(google-build-using-namespace)
using namespace weft::test;  // NOLINT(google-build-using-namespace)

namespace {

constexpr uint64_t kShortNs = 200'000'000;

IpAddress loopback(uint8_t last) { return {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, last}; }

// Two ranks of two machines, in one thread.
struct Two {
  Two() : doors{Listener(&lo, "a"), Listener(&lo, "b")} {
    for (Listener& each : doors) {
      each.door()->open();
      endpoints.push_back(each.endpoint());
    }
  }
  NetworkMesh mesh(int rank, const NetworkMesh::Patience& patience = {}) {
    return {rank, endpoints, secret, doors[static_cast<size_t>(rank)].door()->fd(), patience};
  }

  const DoorOptions lo{"lo"};
  std::array<Listener, 2> doors;
  std::vector<Endpoint> endpoints;
  GroupSecret secret = group_secret({}, {});
};

// The kernel takes its calls; nobody ever reads them.
OwnedFd silent(const IpAddress& address, uint16_t port, int most_waiting = 8) {
  OwnedFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_port = htons(port);
  std::memcpy(&name.sin_addr, &address[12], sizeof(name.sin_addr));
  CHECK_EQ(bind(fd.get(), reinterpret_cast<const sockaddr*>(&name), sizeof(name)), 0);
  CHECK_EQ(listen(fd.get(), most_waiting), 0);
  return fd;
}

}  // namespace

TEST(a_silent_address_does_not_keep_a_rank_from_the_others) {
  Two two;
  const OwnedFd nobody = silent(loopback(2), two.endpoints[0].port);
  two.endpoints[0].addresses = {loopback(2), loopback(1)};
  two.endpoints[0].num_addresses = 2;
  two.endpoints[1].addresses[0] = loopback(3);  // so that rank 0's second address is not its own; nobody calls it
  two.secret = group_secret(two.endpoints, {});
  NetworkMesh called = two.mesh(0);
  NetworkMesh calling = two.mesh(1, {.silence_ns = kShortNs});
  const uint64_t deadline_ns = deadline_after_s(kLongS);
  bool is_named = false;
  while (!(calling.done(0) && called.done(1)) && now_ns() < deadline_ns) {
    calling.step();
    called.step();
    is_named |= calling.hint({0}).find("127.0.0.2 port") != std::string::npos;
    usleep(2000);
  }
  CHECK(calling.done(0) && called.done(1));
  CHECK(is_named);
}

// Refused at one address, while another says nothing: it may be that the rank is behind that one.
TEST(only_refusals_on_end_are_a_rank_that_has_gone) {
  Two two;
  two.endpoints[0].addresses = {loopback(2), loopback(3)};
  two.secret = group_secret(two.endpoints, {});
  const auto call_for = [&](uint16_t num_addresses, double seconds) {
    two.endpoints[0].num_addresses = num_addresses;
    NetworkMesh calling = two.mesh(1, {.address_ns = kShortNs / 4, .door_ns = kShortNs});
    const uint64_t deadline_ns = deadline_after_s(seconds);
    while (now_ns() < deadline_ns) {
      calling.step();
      usleep(500);
    }
  };
  CHECK_ERROR(kPeerLost, {0}, call_for(1, kLongS));
  // A queue of one that is full: the kernel lets further calls wait.
  const OwnedFd full = silent(loopback(3), two.endpoints[0].port, 0);
  std::vector<OwnedFd> callers;
  for (int number = 0; number < 4; ++number) callers.push_back(start_call(loopback(3), two.endpoints[0].port));
  call_for(2, 1.0);
}

// Bridges of containers have the same address on every machine: who listens there is of this machine.
TEST(an_address_that_both_machines_have_is_not_called) {
  Two two;
  const uint16_t port = two.endpoints[0].port;
  const OwnedFd nobody = silent(loopback(2), port);
  two.endpoints[0].addresses = {loopback(1), loopback(2)};  // and 127.0.0.1 is rank 1's, too
  two.endpoints[0].num_addresses = 2;
  two.secret = group_secret(two.endpoints, {});
  NetworkMesh calling = two.mesh(1);
  const uint64_t deadline_ns = deadline_after_s(kLongS);
  while (calling.hint({0}).empty() && now_ns() < deadline_ns) {
    calling.step();
    usleep(500);
  }
  CHECK(calling.hint({0}).find("127.0.0.2 port") != std::string::npos);
}

// It has called, but nobody has looked when the rank gives up.
TEST(who_has_called_is_told_why_a_rank_gives_up) {
  Two two;
  two.secret = group_secret(two.endpoints, {});
  NetworkMesh calling = two.mesh(1);
  const uint64_t deadline_ns = deadline_after_s(kLongS);
  while (calling.hint({0}).find("no greeting came") == std::string::npos && now_ns() < deadline_ns) {
    calling.step();
    usleep(500);
  }
  std::thread other([&] {
    two.mesh(0, {.farewell_ns = 20'000'000'000})
        .tell_all(pack_refusal(Error(ErrorCode::kUnsupported, "it found no device")));
  });
  try {
    while (now_ns() < deadline_ns) {
      calling.step();
      usleep(500);
    }
    CHECK(false);
  } catch (const Error& error) {
    CHECK_EQ(error.code, ErrorCode::kUnsupported);
    CHECK(error.text.find("it found no device") != std::string::npos);
  }
  other.join();
}

// Questions of both ends get lost (decision 0048).
TEST(the_callers_kernel_asks_and_the_called_end_counts) {
  Door door{DoorOptions{}};
  door.open();
  const OwnedFd caller = start_call(door.addresses()[0], door.port());
  pollfd waited{door.fd(), POLLIN, 0};
  CHECK_EQ(poll(&waited, 1, 20'000), 1);
  const OwnedFd called = accept_caller(door.fd());
  const auto asks = [](int socket) {
    int is_on = -1;
    socklen_t bytes = sizeof(is_on);
    CHECK_EQ(getsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &is_on, &bytes), 0);
    return is_on;
  };
  CHECK_EQ(asks(caller.get()), 1);
  CHECK_EQ(asks(called.get()), 0);
  const uint32_t before = num_heard(called.get());
  CHECK(before > 0);
  const uint64_t deadline_ns = deadline_after_s(kLongS);
  while (num_heard(called.get()) < before + 2 && now_ns() < deadline_ns) usleep(10'000);
  CHECK(num_heard(called.get()) >= before + 2);
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
