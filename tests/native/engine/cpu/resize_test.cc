// Guards against a refused growth of heaps that takes away what was mapped of a newcomer meanwhile.
#include <sys/resource.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <memory>
#include <thread>

#include "bootstrap/ranks.h"
#include "engine/cpu/window.h"
#include "engine/engine_rank.h"

using namespace weft;
using namespace weft::test;

namespace {

constexpr u64 kLargest = 1 << 20;

// As src/engine/cpu/memory_offer.h has it: written again here, for a change of what is sent shows.
struct MemoryOffer {
  WindowShape shape;
  u64 heap_bytes;
  u64 most_heap_bytes;
  u64 refusal_code;
};

int num_mappings() {
  std::ifstream maps("/proc/self/maps");
  int number = 0;
  for (std::string line; std::getline(maps, line);) number += line.find("/memfd:weft") != std::string::npos ? 1 : 0;
  return number;
}

}  // namespace

TEST(a_newcomer_stays_mapped_when_heaps_can_not_grow) {
  WindowShape shape;
  shape.num_ranks = shape.num_experts = 3;
  shape.top_k = 1;
  shape.max_tokens = 4;
  shape.max_row_bytes = 64;
  const auto hub = std::make_shared<LocalHub>(3);
  std::atomic<bool> is_mapped{false}, has_left{false};
  std::atomic<int> num_ready{0}, num_done{0};
  std::vector<std::thread> threads;
  rlimit before{};
  CHECK_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  for (int me = 0; me < 3; ++me) {
    threads.emplace_back([&, me] {
      const auto comm = Communicator::create(connect_threads(hub, me));
      cpu::Window window(comm, shape, 4096, deadline_after_s(kLongS), Poll{}, 16 * kLargest);
      if (me == 2) {
        window.close();
        comm->close();
        has_left = true;
        return;
      }
      while (!has_left) usleep(500);
      comm->recover({}, 1, deadline_after_s(kLongS), {});
      CHECK(comm->active_ranks() == all_but(3, {2}));
      const MemoryOffer offer{shape, 4096, 16 * kLargest, 0};
      Parcel parcel;
      parcel.bytes.resize(sizeof(offer));
      std::memcpy(parcel.bytes.data(), &offer, sizeof(offer));
      for (const u64 bytes : {window.layout().total_bytes, u64{4096}}) {
        const SharedMemory memory = SharedMemory::create(bytes);
        parcel.fds.push_back(OwnedFd::duplicate(memory.fd()));
      }
      ++num_ready;
      while (num_ready < 2) usleep(500);
      if (me == 0) {
        const rlimit limit{kLargest, before.rlim_max};
        CHECK_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
      }
      int wanted = 0;
      const auto poll = [&] {  // rank 1 has not come to its exchange yet
        if (me != 0 || is_mapped) return;
        window.take_in(2, std::move(parcel));
        wanted = num_mappings();
        is_mapped = true;
      };
      while (me == 1 && !is_mapped) usleep(500);
      try {
        window.resize(8 * kLargest, deadline_after_s(kLongS), poll);
        CHECK(false);
      } catch (const Error& error) {
        CHECK_EQ(error.code, ErrorCode::kCapacityExceeded);
      }
      if (me == 0) {
        CHECK(window.has_taken_in(2));
        CHECK_EQ(num_mappings(), wanted);
      }
      ++num_done;
      while (num_done < 2) usleep(500);
      if (me == 0) CHECK_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
