// Guards against a set of ranks that a word of the window or of a plan gives back as another one, and parts of a plan that overlap.
#include "weft/layout/gpu_window.h"

#include "check.h"
#include "weft/layout/gpu_plan.h"

using namespace weft;

namespace {

TEST(the_membership_word_gives_back_epoch_and_ranks) {
  GpuRankMask active = GpuRankMask::only(0);
  active |= GpuRankMask::only(kMaxGpuRanks - 1);
  const u64 word = membership_word(0xfedc, active);
  CHECK_EQ(word, u64{0xfedc} << 32 | u64{1} << (kMaxGpuRanks - 1) | 1);
  CHECK_EQ(epoch_in(word), 0xfedc);
  CHECK_EQ(active_in(word).word, active.word);
}

TEST(a_send_plan_gives_back_the_ranks_of_a_token) {
  i32 words[4] = {};
  const GpuSendPlan<i32> plan{words, 3, 1};
  plan.set_ranks(1, GpuRankMask::only(kMaxGpuRanks - 1));
  CHECK_EQ(plan.ranks(0).word, 0u);
  CHECK_EQ(plan.ranks(1).word, 1u << (kMaxGpuRanks - 1));
  CHECK_EQ(words[1], 1 << (kMaxGpuRanks - 1));
}

TEST(parts_of_a_forward_plan_lie_side_by_side) {
  constexpr i64 kTokens = 33;
  constexpr i32 kSources = 3, kMates = 2, kTopk = 3;
  constexpr i64 kPickWords = (kTokens * kTopk + 3) / 4;
  i32 words[gpu_forward_plan_len(kSources, kTokens, kMates, kTopk)] = {};
  const GpuForwardPlan<i32> plan{words, kTokens, kMates, kTopk};
  const auto count = [&](i32* begin, i64 num) {
    for (i64 at = 0; at < num; ++at) ++begin[at];
  };
  count(&plan.members(), kGpuForwardHeader);
  for (i32 nth = 0; nth < kSources; ++nth) {
    for (i64 token = 0; token < kTokens; ++token) count(plan.row(nth, token), kMates);
    count(plan.come(nth), 2);
    for (i64 at = 0; at < kTokens * kTopk; ++at) plan.set_pick(nth, at / kTopk, static_cast<i32>(at % kTopk), 7);
    CHECK_EQ(plan.pick(nth, kTokens - 1)[kTopk - 1], 7);
    i32* picks = plan.come(nth) + plan.come_len();
    for (i64 at = 0; at < kPickWords; ++at) {
      CHECK(picks[at] == 0x07070707 || at + 1 == kPickWords);
      picks[at] = 1;
    }
  }
  for (const i32 word : words) CHECK_EQ(word, 1);
}

}  // namespace

int main(int argc, char** argv) { return weft::test::run_tests(argc, argv); }
