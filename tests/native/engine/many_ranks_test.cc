// Guards against a control plane that ends at 64 ranks, or needs a step a pair where one will do: a group of more than two masks'
// width connects, exchanges, aborts, loses ranks and recovers, as processes of several machines and as threads.
#include <sys/resource.h>

#include <memory>
#include <thread>

#include "bootstrap/handshake.h"
#include "bootstrap/ranks.h"
#include "engine/engine_rank.h"

using namespace weft;        // NOLINT(google-build-using-namespace)
using namespace weft::test;  // NOLINT(google-build-using-namespace)

namespace {

constexpr u64 kTag = u64{1} << 60;
constexpr int kRanks = 130;
constexpr int kRanksAMachine = 10;

std::vector<std::string> machines() {
  std::vector<std::string> names;
  for (int rank = 0; rank < kRanks; ++rank) names.push_back("m" + std::to_string(rank / kRanksAMachine));
  return names;
}

// Every rank's number reaches every other.
void exchange_all(Communicator& comm, u64 number) {
  const auto mine = static_cast<uint64_t>(comm.rank());
  const auto parcels = comm.exchange(kTag | number, bytes_of(mine), {}, deadline_after_s(kLongS), {});
  for (const int rank : comm.active_ranks()) {
    CHECK(parcels[static_cast<size_t>(rank)].bytes == bytes_of(static_cast<uint64_t>(rank)));
  }
}

double ms_since(uint64_t start_ns) { return static_cast<double>(now_ns() - start_ns) * 1e-6; }

}  // namespace

TEST(processes_of_many_machines) {
  const FileStore store;
  const std::vector<int> victims{3, 64, 128, 129};
  ForkedRanks ranks(
      kRanks,
      [&](Rank& self) {
        const ServedDecider served(
            [&](const std::string& key, const std::string& expected, const std::string& desired) {
              return store.compare_set(key, expected, desired);
            });
        const uint64_t start_ns = now_ns();
        self.connect(kLongS, {served.decider, {}});
        if (self.rank == 0) std::printf("  connect: %.0f ms\n", ms_since(start_ns));
        std::fflush(stdout);
        const auto comm = Communicator::create(std::move(self.plane));
        exchange_all(*comm, 1);

        self.parent.tell(1);
        CHECK_EQ(self.parent.hear(), 1u);  // all have ended that exchange
        if (self.rank == 100) comm->abort("enough");
        CHECK_ERROR(kAborted, {100}, exchange_all(*comm, 2));
        comm->recover({}, 1, deadline_after_s(kLongS), {});
        CHECK_EQ(comm->num_ranks(), kRanks);
        CHECK(comm->active_ranks() == all_but(kRanks));
        exchange_all(*comm, 3);

        self.parent.tell(1);
        if (std::find(victims.begin(), victims.end(), self.rank) != victims.end()) pause();
        CHECK(self.parent.hear() == 2u);  // they are dead
        try {
          exchange_all(*comm, 4);
          CHECK(false);
        } catch (const Error& error) {  // whichever this rank heard of first
          CHECK_EQ(error.code, ErrorCode::kPeerLost);
          CHECK(!error.peers.empty() &&
                std::includes(victims.begin(), victims.end(), error.peers.begin(), error.peers.end()));
        }
        const std::vector<int> left = all_but(kRanks, victims);
        while (comm->active_ranks() != left) comm->recover({}, 1, deadline_after_s(kLongS), {});
        exchange_all(*comm, 5);
        CHECK(!comm->is_active(128) && comm->is_active(127));

        // One that is left out though it lives.
        self.parent.tell(4);
        CHECK_EQ(self.parent.hear(), 5u);
        if (self.rank != 99) comm->recover({99}, 1, deadline_after_s(kLongS), {});
        if (self.rank == 99) {
          CHECK_ERROR(kEvicted, {99}, comm->recover({}, 1, deadline_after_s(kLongS), {}));
          CHECK_ERROR(kEvicted, {99}, exchange_all(*comm, 6));
        } else {
          exchange_all(*comm, 6);
        }
        self.parent.tell(comm->epoch());
        CHECK_EQ(self.parent.hear(), 3u);
        comm->close();
      },
      machines());
  for (int rank = 0; rank < kRanks; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
  for (int rank = 0; rank < kRanks; ++rank) ranks.pipe(rank).tell(1);
  for (int rank = 0; rank < kRanks; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
  const uint64_t start_ns = now_ns();
  for (const int rank : victims) {
    ranks.signal(rank, SIGKILL);
    ranks.join(rank, SIGKILL);
  }
  const std::vector<int> left = all_but(kRanks, victims);
  for (const int rank : left) ranks.pipe(rank).tell(2);
  for (const int rank : left) CHECK_EQ(ranks.pipe(rank).hear(), 4u);
  const std::vector<int> deciding = all_but(kRanks, {3, 64, 99, 128, 129});
  for (const int rank : deciding) ranks.pipe(rank).tell(5);
  std::vector<uint64_t> epochs;
  for (const int rank : deciding) epochs.push_back(ranks.pipe(rank).hear());
  ranks.pipe(99).tell(5);  // only now: it must not be the one that decides
  static_cast<void>(ranks.pipe(99).hear());
  std::printf("  two recoveries of %zu: %.0f ms\n", left.size(), ms_since(start_ns));
  for (const uint64_t epoch : epochs) CHECK_EQ(epoch, epochs[0]);
  for (const int rank : left) ranks.pipe(rank).tell(3);
  ranks.join_all(victims);
}

TEST(threads_of_one_process) {
  constexpr int kThreads = 200;
  const auto hub = std::make_shared<LocalHub>(kThreads);
  const std::vector<int> leaving{70, 150};
  std::atomic<int> num_left{0};
  const auto body = [&](int rank) {
    const auto comm = Communicator::create(connect_threads(hub, rank));
    exchange_all(*comm, 1);
    if (rank == 199) {
      WindowShape shape;
      shape.num_ranks = kThreads;
      shape.num_experts = kThreads;
      shape.top_k = 1;
      shape.max_tokens = 4;
      shape.max_row_bytes = 64;
      try {
        cpu::Window(comm, shape, 1 << 16, deadline_after_s(kLongS), Poll{});
        CHECK(false);
      } catch (const Error& error) {
        CHECK_EQ(error.code, ErrorCode::kInvalidArgument);
        CHECK(error.text.find("200 ranks") != std::string::npos &&
              error.text.find("up to 64 ranks") != std::string::npos);
      }
    }
    exchange_all(*comm, 2);
    if (rank == 70 || rank == 150) {
      comm->close();
      ++num_left;
      return;
    }
    while (num_left < 2) usleep(500);
    try {
      exchange_all(*comm, 3);
      CHECK(false);
    } catch (const Error& error) {
      CHECK_EQ(error.code, ErrorCode::kPeerLost);
    }
    while (comm->active_ranks() != all_but(kThreads, leaving)) comm->recover({}, 1, deadline_after_s(kLongS), {});
    exchange_all(*comm, 4);
    CHECK(comm->safe_to_delete() == leaving);
    comm->close();
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kThreads; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        report_failure("thread rank", rank, std::string("unexpected exception: ") + error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(the_limit_is_1024) {
  CHECK_EQ(LocalHub(kMaxControlRanks).num_ranks(), 1024);
  CHECK_ERROR(kInvalidArgument, {}, LocalHub(kMaxControlRanks + 1));
  const Listener own;
  std::vector<Endpoint> endpoints(kMaxControlRanks, own.endpoint());
  for (size_t rank = 1; rank < endpoints.size(); ++rank) {
    endpoints[rank].name[0] = static_cast<char>(rank);
    endpoints[rank].name[1] = static_cast<char>(rank >> 8);
  }
  check_endpoints(0, endpoints, own.endpoint());
  endpoints.push_back(own.endpoint());
  CHECK_ERROR(kInvalidArgument, {}, check_endpoints(0, endpoints, own.endpoint()));
}

// A limit of descriptors that is too low is told by the rank that has it before it calls anybody.
TEST(too_few_descriptors_are_told_before_anybody_is_called) {
  const FileStore store;
  ForkedRanks ranks(
      40,
      [](Rank& self) {
        const auto decider = std::make_shared<Decider>();
        if (self.rank != 7) {
          try {
            self.connect(kLongS, {decider, {}});
            CHECK(false);
          } catch (const Error& error) {  // what rank 7 said, or that it or one that had given up before is gone
            bool is_right = error.code == ErrorCode::kPeerLost || error.code == ErrorCode::kCapacityExceeded;
            // It calls nobody: on a busy machine all others may have left before it came to hear them.
            is_right |= self.rank == 0 && error.code == ErrorCode::kPeerTimeout && error.peers == all_but(40, {0});
            if (!is_right) {
              report_failure("rank", self.rank, std::string(error_code_name(error.code)) + ": " + error.text);
            }
          }
          return;
        }
        const auto open = static_cast<rlim_t>(num_open_fds());
        const rlimit limit{open + 30, open + 30};
        CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
        try {
          self.connect(kLongS, {decider, {}});
          CHECK(false);
        } catch (const Error& error) {
          CHECK_EQ(error.code, ErrorCode::kCapacityExceeded);
          CHECK(error.text.find("connecting 40 ranks, which takes 47 file descriptors") != std::string::npos);
          CHECK(error.text.find("ulimit -n, RLIMIT_NOFILE") != std::string::npos);
        }
      },
      [] {
        std::vector<std::string> names(40, "a");
        names[0] = "b";
        for (size_t rank = 10; rank < 40; ++rank) names[rank] = "m" + std::to_string(rank);
        return names;
      }());
  ranks.join_all();
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
