// Guards against warps that give up, and name their own rank, while the warp that fills their stages still waits for peers, each
// time for less than the deadline; and against those that never give up (R7). Time is a number here.
#define cycles cycles_of_this_machine
#include "weft/ptx/clock.h"
#undef cycles

namespace weft::ptx {
inline u64 cycles_now = 1;
inline u64 cycles() { return cycles_now; }
}  // namespace weft::ptx

#include "check.h"
#include "weft/config/kernel.h"
#include "weft/sync/copy_pause.h"

using namespace weft;
using namespace weft::sync;

namespace {

constexpr u64 kSecond = 1000000000ull * ptx::kCyclesPerNs;
constexpr u64 kCopies = 20;  // seconds for copies that wait for nobody

// How long the wait of a warp lasts, in seconds, if its item comes after so many; at most 100000.
template <u32 kFillerWaits>
u64 seconds_of_wait(const u64* timeout_ns, u64 comes_after, bool& is_there) {
  CopyPause<kFillerWaits> pause(timeout_ns);
  u64 num_turns = 0;
  const auto passed = [&] { return num_turns / 1024; };  // a turn is a 1024th of a second
  const auto look = [&] {
    ptx::cycles_now = kSecond + num_turns * kSecond / 1024;
    ++num_turns;
    return passed() >= comes_after || passed() >= 100000;
  };
  is_there = wait_until(look, pause) == WaitResult::kReady;
  return passed();
}

constexpr DispatchKernelConfig with_quantizers(i32 num) {
  DispatchKernelConfig config;
  config.num_quantize_warps = num;
  return config;
}

// Between two items of a warp its filler waits for this many, each time almost for the deadline.
template <u32 kFillerWaits>
void check_filler(u64 num_items) {
  const u64 deadline_s = 100, timeout_ns = deadline_s * 1000000000;
  bool is_there = false;
  seconds_of_wait<kFillerWaits>(&timeout_ns, num_items * deadline_s - 1, is_there);
  CHECK(is_there);
  const u64 seconds = seconds_of_wait<kFillerWaits>(&timeout_ns, 100000, is_there);
  CHECK(!is_there);
  CHECK(seconds <= num_items * deadline_s + kCopies + 1);
}

TEST(quantisers_wait_as_long_as_their_filler_may) {
  check_filler<with_quantizers(0).filler_waits()>(kStoreWarps);
  check_filler<with_quantizers(2).filler_waits()>(2);
  check_filler<with_quantizers(6).filler_waits()>(6);
  check_filler<with_quantizers(12).filler_waits()>(12);
}

TEST(groups_that_add_wait_as_long_as_their_filler_may) {
  CombineKernelConfig config;
  CHECK_EQ(config.filler_waits(), static_cast<u32>(config.reduce_groups()));
  check_filler<CombineKernelConfig{}.filler_waits()>(2);
  config.route = Route::kNodes;
  config.node_ranks = 1;
  CHECK_EQ(config.filler_waits(), 2 * static_cast<u32>(config.reduce_groups()));
  check_filler<4>(4);
}

TEST(own_copies_have_a_limit_of_their_own) {
  bool is_there = false;
  const u64 seconds = seconds_of_wait<2>(nullptr, 100000, is_there);
  CHECK(!is_there);
  CHECK(seconds >= kCopies && seconds <= kCopies + 1);
}

}  // namespace

int main(int argc, char** argv) { return weft::test::run_tests(argc, argv); }
