// Guards against an old signal taken for a new one, and against a call of another kind taken for one's own (R1, R2, R6).
#include "weft/sync/header.h"

#include <random>

#include "check.h"

using namespace weft;
using namespace weft::sync;

namespace {

TEST(header_fields_do_not_touch_each_other) {
  std::mt19937_64 random(3);
  for (int trial = 0; trial < 100000; ++trial) {
    const Turn turn{static_cast<u16>(random()), static_cast<u32>(random())};
    const u16 print = static_cast<u16>(random());
    const u64 word = pack_header(turn, print);
    CHECK_EQ(word >> 48, turn.epoch);
    CHECK_EQ((word >> 16) & 0xffffffffu, turn.sequence);
    CHECK_EQ(word & 0xffff, print);
  }
}

TEST(classify_by_turn_then_by_fingerprint) {
  const Turn turn{7, 1000};
  const u16 print = 0x1234;
  CHECK_EQ(classify_header(pack_header(turn, print), turn, print), HeaderState::kMatch);
  CHECK_EQ(classify_header(pack_header(turn, 0x1235), turn, print), HeaderState::kMismatch);
  CHECK_EQ(classify_header(pack_header(turn, kRefusalFingerprint), turn, print), HeaderState::kRefusal);
  // A refusal of another turn is none of ours.
  CHECK_EQ(classify_header(pack_header({7, 998}, kRefusalFingerprint), turn, print), HeaderState::kNotYet);
}

TEST(stale_headers_are_not_yet) {
  const u16 print = 0x77;
  const Turn turns[] = {{1, 1}, {1, 2}, {2, 1}, {1, 0xffffffff}, {1, 0}, {0xffff, 1}, {2, 0x80000001}};
  for (const Turn mine : turns) {
    CHECK_EQ(classify_header(0, mine, print), HeaderState::kNotYet);  // zeroed memory; epochs start at 1
    for (const Turn other : turns) {
      const bool is_same = mine.epoch == other.epoch && mine.sequence == other.sequence;
      CHECK_EQ(classify_header(pack_header(other, print), mine, print),
               is_same ? HeaderState::kMatch : HeaderState::kNotYet);
      for (int bit = 16; bit < 64; ++bit) {  // any other turn, newer ones included
        CHECK_EQ(classify_header(pack_header(mine, print) ^ (1ull << bit), mine, print), HeaderState::kNotYet);
      }
    }
  }
}

TEST(progress_counts_only_in_its_own_operation) {
  std::mt19937_64 random(4);
  for (int trial = 0; trial < 100000; ++trial) {
    const Turn turn{static_cast<u16>(1 + random() % 0xffff), static_cast<u32>(random())};
    const u32 n = static_cast<u32>(random()) & kMaxProgress;
    const u64 word = pack_progress(turn, n);
    CHECK_EQ(progress_in(word, turn), n);
    CHECK_EQ(progress_in(word, {turn.epoch, turn.sequence + 1}), 0u);
    CHECK_EQ(progress_in(word, {turn.epoch, turn.sequence - 1}), 0u);
    CHECK_EQ(progress_in(word, {static_cast<u16>(turn.epoch + 1), turn.sequence}), 0u);
  }
  CHECK_EQ(progress_in(pack_progress({1, 5}, kMaxProgress), {1, 5}), kMaxProgress);
  CHECK_EQ(progress_in(0, {1, 0}), 0u);
}

TEST(send_writes_payload_then_header) {
  u64 cell = 0;
  u64 seen_during_payload = 1;
  send_header(&cell, 0x55, [&] { seen_during_payload = cell; });
  CHECK_EQ(seen_during_payload, 0u);
  CHECK_EQ(cell, 0x55u);
}

struct StopAt {
  int turns_left;
  PauseResult verdict;
  PauseResult turn() { return turns_left-- > 0 ? PauseResult::kLookAgain : verdict; }
};

TEST(wait_header_takes_any_fingerprint_of_the_turn) {
  const Turn turn{1, 9};
  for (const u16 print : {u16{1}, u16{0xfffe}, kRefusalFingerprint}) {
    u64 cell = pack_header(turn, print);
    StopAt pause{0, PauseResult::kDeadline};
    CHECK_EQ(wait_header(&cell, turn, pause), WaitResult::kReady);
  }
  u64 cell = pack_header({1, 7}, 5);  // same parity, the operation before last
  StopAt late{10, PauseResult::kDeadline};
  CHECK_EQ(wait_header(&cell, turn, late), WaitResult::kDeadline);
  StopAt aborted{10, PauseResult::kAbort};
  CHECK_EQ(wait_header(&cell, turn, aborted), WaitResult::kAborted);
}

TEST(wait_progress_takes_at_least_and_resets_nothing) {
  const Turn turn{3, 100};
  u64 word = 0;
  post_progress(&word, turn, 10);
  const u64 before = word;
  for (const u32 target : {0u, 1u, 10u}) {
    StopAt pause{0, PauseResult::kDeadline};
    CHECK_EQ(wait_progress(&word, turn, target, pause), WaitResult::kReady);
    CHECK_EQ(word, before);
  }
  StopAt pause{5, PauseResult::kDeadline};
  CHECK_EQ(wait_progress(&word, turn, 11, pause), WaitResult::kDeadline);
  CHECK_EQ(word, before);
  StopAt next{5, PauseResult::kAbort};
  CHECK_EQ(wait_progress(&word, {3, 101}, 1, next), WaitResult::kAborted);
}

}  // namespace

int main(int argc, char** argv) { return weft::test::run_tests(argc, argv); }
