// Guards against heap blocks that overlap, get lost or come back while peers may still write there, and against shared
// memory that can fault, move or be of another size than both sides think.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"
#include "check.h"
#include "memory/heap.h"
#include "memory/shared_memory.h"

using weft::Error;
using weft::ErrorCode;
using weft::Heap;
using weft::OwnedFd;
using weft::SharedMemory;

namespace {

void is_invalid_argument(const Error& error) { CHECK(error.code == ErrorCode::kInvalidArgument); }

// The same heap, written as an array of units: slow and obvious.
class HeapModel {
 public:
  enum Unit { kFree, kLive, kHeldBack };
  explicit HeapModel(uint64_t num_units) : units_(num_units, kFree) {}

  // The first unit of the smallest hole that is large enough, lowest first; num_units if there is none.
  uint64_t best_hole(uint64_t wanted) const {
    uint64_t best = units_.size();
    uint64_t best_size = units_.size() + 1;
    for (uint64_t at = 0; at < units_.size();) {
      uint64_t end = at;
      while (end < units_.size() && units_[end] == kFree) ++end;
      if (end - at >= wanted && end - at < best_size) {
        best = at;
        best_size = end - at;
      }
      at = std::max(end, at + 1);
    }
    return best;
  }
  void set(uint64_t first, uint64_t count, Unit state) {
    std::fill_n(units_.begin() + static_cast<ptrdiff_t>(first), count, state);
  }
  uint64_t count(Unit state) const { return static_cast<uint64_t>(std::count(units_.begin(), units_.end(), state)); }
  void end_quarantine() { std::replace(units_.begin(), units_.end(), kHeldBack, kFree); }

 private:
  std::vector<Unit> units_;
};

// One random history of reserve, split, release and quarantine against the model.
void compare_with_model(uint32_t seed) {
  std::mt19937 random(seed);
  const auto below = [&](uint64_t limit) { return random() % limit; };
  const uint64_t num_units = 1 + below(200);
  Heap heap(num_units * Heap::kAlignment + below(Heap::kAlignment));
  HeapModel model(num_units);
  std::map<uint64_t, uint64_t> live;  // first unit -> units
  HeapModel::Unit after_release = HeapModel::kFree;
  uint64_t peak = 0;
  for (int turn = 0; turn < 600; ++turn) {
    const uint64_t action = below(100);
    if (action < 50 || live.empty()) {
      const uint64_t bytes = below(8) == 0 ? below(3) : below(num_units * Heap::kAlignment / 4 + 600);
      const uint64_t units = std::max<uint64_t>(1, (bytes + Heap::kAlignment - 1) / Heap::kAlignment);
      const uint64_t expected = model.best_hole(units);
      const auto offset = heap.reserve(bytes);
      CHECK_EQ(offset.has_value(), expected < num_units);
      if (!offset || expected == num_units) continue;
      CHECK_EQ(*offset, expected * Heap::kAlignment);
      model.set(expected, units, HeapModel::kLive);
      live[expected] = units;
    } else if (action < 97) {
      auto block = std::next(live.begin(), static_cast<ptrdiff_t>(below(live.size())));
      const uint64_t kept = action < 65 ? 1 + below(block->second) : 0;
      if (kept > 0) {
        heap.split(block->first * Heap::kAlignment, kept * Heap::kAlignment - below(Heap::kAlignment));
      } else {
        heap.release(block->first * Heap::kAlignment);
      }
      model.set(block->first + kept, block->second - kept, after_release);
      block->second = kept;
      if (kept == 0) live.erase(block);
    } else if (after_release == HeapModel::kFree) {
      heap.quarantine();
      after_release = HeapModel::kHeldBack;
    } else {
      heap.end_quarantine();
      model.end_quarantine();
      after_release = HeapModel::kFree;
    }
    CHECK_EQ(heap.used(), model.count(HeapModel::kLive) * Heap::kAlignment);
    CHECK_EQ(heap.quarantined(), model.count(HeapModel::kHeldBack) * Heap::kAlignment);
    peak = std::max(peak, heap.used() + heap.quarantined());
    CHECK_EQ(heap.peak(), peak);
  }
}

int num_open_fds() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) count += fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
  return count;
}

}  // namespace

TEST(heap_matches_a_brute_force_model) {
  for (uint32_t seed = 0; seed < 200; ++seed) compare_with_model(seed);
}

TEST(heap_limits) {
  Heap none(0);
  CHECK(!none.reserve(0));
  Heap small(255);
  CHECK_EQ(small.bytes(), 0u);
  Heap heap(1024);
  CHECK(!heap.reserve(1025));
  CHECK(!heap.reserve(~uint64_t{0}));
  CHECK(!heap.reserve(~uint64_t{0} - 100));
  CHECK_EQ(heap.reserve(1024).value(), 0u);
  CHECK(!heap.reserve(0));
  CHECK_THROWS(heap.release(256), Error, is_invalid_argument);
  CHECK_THROWS(heap.split(256, 1), Error, is_invalid_argument);
  CHECK_THROWS(heap.split(0, 1025), Error, is_invalid_argument);
  heap.split(0, 0);
  CHECK_EQ(heap.used(), 256u);
  heap.release(0);
  CHECK_THROWS(heap.release(0), Error, is_invalid_argument);
  CHECK_EQ(heap.used(), 0u);
  CHECK_EQ(heap.peak(), 1024u);
  CHECK_EQ(heap.reserve(1024).value(), 0u);
}

TEST(heap_serves_several_threads) {
  Heap heap(1 << 20);
  std::vector<std::thread> threads;
  for (uint32_t seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&heap, seed] {
      std::mt19937 random(seed);
      for (int turn = 0; turn < 2000; ++turn) {
        const auto offset = heap.reserve(random() % 40000);
        if (!offset) continue;
        heap.split(*offset, 1);
        heap.release(*offset);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(heap.used(), 0u);
  CHECK_EQ(heap.reserve(1 << 20).value(), 0u);
}

TEST(shared_memory_is_zeroed_shared_and_leaves_nothing) {
  const int before = num_open_fds();
  {
    SharedMemory mine = SharedMemory::create(5000);
    CHECK_EQ(mine.bytes() % static_cast<uint64_t>(sysconf(_SC_PAGESIZE)), 0u);
    CHECK(mine.bytes() >= 5000);
    for (uint64_t at = 0; at < mine.bytes(); ++at) CHECK(mine.data()[at] == std::byte{0});
    CHECK_EQ(fcntl(mine.fd(), F_GETFD), FD_CLOEXEC);
    SharedMemory other = SharedMemory::attach(OwnedFd::duplicate(mine.fd()), 5000);
    mine.data()[4999] = std::byte{7};
    CHECK(other.data()[4999] == std::byte{7});
    const std::byte* address = other.data();
    SharedMemory moved = std::move(other);
    CHECK(moved.data() == address && !other.valid());
    moved.drop_fd();
    CHECK(moved.data()[4999] == std::byte{7});
  }
  CHECK_EQ(num_open_fds(), before);
}

TEST(shared_memory_can_not_be_resized) {
  SharedMemory memory = SharedMemory::create(8192);
  CHECK(ftruncate(memory.fd(), 4096) != 0);
  CHECK(ftruncate(memory.fd(), 1 << 20) != 0);
}

TEST(shared_memory_refuses_what_create_did_not_make) {
  const int before = num_open_fds();
  SharedMemory memory = SharedMemory::create(8192);
  CHECK_THROWS(SharedMemory::attach(OwnedFd::duplicate(memory.fd()), 4096), Error, is_invalid_argument);
  CHECK_THROWS(SharedMemory::attach(OwnedFd::duplicate(memory.fd()), 8193), Error, is_invalid_argument);
  OwnedFd unsealed(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK_EQ(ftruncate(unsealed.get(), 8192), 0);
  CHECK_THROWS(SharedMemory::attach(std::move(unsealed), 8192), Error, is_invalid_argument);
  int ends[2];
  CHECK_EQ(pipe2(ends, O_CLOEXEC), 0);
  const OwnedFd writer(ends[1]);
  CHECK_THROWS(SharedMemory::attach(OwnedFd(ends[0]), 8192), Error, is_invalid_argument);
  CHECK_THROWS(SharedMemory::create(0), Error, is_invalid_argument);
  CHECK_THROWS(SharedMemory::create(~uint64_t{0}), Error, is_invalid_argument);
  CHECK_EQ(num_open_fds(), before + 2);  // memory and writer
}

TEST(shared_memory_replaced_keeps_its_address_and_leaves_the_old_one_alone) {
  const int before = num_open_fds();
  {
    SharedMemory window = SharedMemory::create(8192);
    SharedMemory stale_view = SharedMemory::attach(OwnedFd::duplicate(window.fd()), 8192);
    std::byte* const address = window.data();
    address[0] = std::byte{1};
    window.replace(SharedMemory::create(8192));
    CHECK(window.data() == address);
    CHECK(address[0] == std::byte{0});
    stale_view.data()[0] = std::byte{9};  // an old process that wakes up
    CHECK(address[0] == std::byte{0});
    SharedMemory fresh_view = SharedMemory::attach(OwnedFd::duplicate(window.fd()), 8192);
    fresh_view.data()[1] = std::byte{5};
    CHECK(address[1] == std::byte{5});
    CHECK_THROWS(window.replace(SharedMemory::create(4096)), Error, is_invalid_argument);
    SharedMemory dropped = SharedMemory::create(8192);
    dropped.drop_fd();
    CHECK_THROWS(window.replace(std::move(dropped)), Error, is_invalid_argument);
    CHECK(address[1] == std::byte{5});
  }
  CHECK_EQ(num_open_fds(), before);
}

TEST(shared_memory_grows_by_pieces_and_gives_its_pages_back) {
  const int before = num_open_fds();
  {
    CHECK_EQ(SharedMemory::piece_bytes(5000, 8192), uint64_t{0});
    CHECK_EQ(SharedMemory::piece_bytes(5000, 8193), uint64_t{4096});
    SharedMemory heap = SharedMemory::create(5000, 20000);
    CHECK_EQ(heap.bytes(), uint64_t{8192});
    SharedMemory view = SharedMemory::attach(OwnedFd::duplicate(heap.fd()), 5000, 20000);
    std::byte* const address = heap.data();
    address[1] = std::byte{1};
    const OwnedFd piece = SharedMemory::make_piece(8192);
    heap.append(piece, 8192);
    view.append(OwnedFd::duplicate(piece.get()), 8192);
    CHECK(heap.data() == address);
    CHECK_EQ(heap.bytes(), uint64_t{16384});
    address[16383] = std::byte{7};
    CHECK(view.data()[16383] == std::byte{7});
    CHECK_THROWS(heap.append(SharedMemory::make_piece(8192), 8192), Error, is_invalid_argument);  // beyond 20480
    CHECK_THROWS(heap.append(piece, 4096), Error, is_invalid_argument);
    heap.release(4096);
    CHECK(view.data()[16383] == std::byte{0});
    CHECK(view.data()[1] == std::byte{1});
    heap.release(1);  // whole pages alone
    CHECK(view.data()[1] == std::byte{1});
    view.data()[16383] = std::byte{3};
    CHECK(address[16383] == std::byte{3});
    heap.cut(8192);
    CHECK_EQ(heap.bytes(), uint64_t{8192});
    heap.append(SharedMemory::make_piece(4096), 4096);
    CHECK(address[8192] == std::byte{0});
    CHECK_THROWS(SharedMemory::create(4096).append(SharedMemory::make_piece(4096), 4096), Error, is_invalid_argument);
  }
  CHECK_EQ(num_open_fds(), before);
}

TEST(heap_grows_behind_what_lies_there) {
  Heap heap(1000);  // 768
  CHECK_EQ(heap.bytes(), uint64_t{768});
  const auto first = heap.reserve(700);
  CHECK(first == uint64_t{0});
  CHECK(!heap.reserve(256));
  heap.grow(1279);
  CHECK_EQ(heap.bytes(), uint64_t{1024});
  const auto second = heap.reserve(256);
  CHECK(second == uint64_t{768});
  heap.grow(2048);
  heap.grow(10);
  CHECK_EQ(heap.bytes(), uint64_t{2048});
  heap.release(*second);
  CHECK_EQ(heap.largest_free(), uint64_t{1280});  // with the new room in one
  CHECK(heap.reserve(1280) == uint64_t{768});
}

TEST(shared_memory_outlives_its_maker) {
  SharedMemory memory = SharedMemory::create(4096);
  const pid_t child = fork();
  if (child == 0) {
    memory.data()[3] = std::byte{42};
    _exit(0);
  }
  waitpid(child, nullptr, 0);
  CHECK(memory.data()[3] == std::byte{42});
}

int main(int argc, char** argv) { return weft::test::run_tests(argc, argv); }
