// Guards against rows of two sources in one place, holes in the wrong place, and sizes that differ from what is sent.
#include "weft/layout/routing.h"

#include <random>
#include <tuple>
#include <vector>

#include "check.h"

using namespace weft;

namespace {

struct Pick {
  i32 source;
  i32 expert;
};

// Brute force: lay picks out one by one in the documented order (expert, source, order of arrival).
void check_against_brute_force(i32 num_ranks, i32 num_local_experts, Layout layout, i64 alignment, i64 capacity,
                               const std::vector<i32>& counts) {
  std::vector<i64> starts(static_cast<std::size_t>(num_ranks * num_local_experts), -1);
  std::vector<i64> offsets(static_cast<std::size_t>(num_local_experts) + 1, -1);
  const i64 rows = place_by_expert(counts.data(), num_ranks, num_local_experts, layout, alignment, capacity,
                                   starts.data(), offsets.data());
  i64 row = 0;
  for (i32 expert = 0; expert < num_local_experts; ++expert) {
    if (layout == Layout::kMasked) row = 0;
    while (layout != Layout::kMasked && row % alignment != 0) ++row;
    CHECK_EQ(offsets[static_cast<std::size_t>(expert)], layout == Layout::kMasked ? expert * capacity : row);
    for (i32 source = 0; source < num_ranks; ++source) {
      const auto cell = static_cast<std::size_t>(source * num_local_experts + expert);
      CHECK_EQ(starts[cell], row);
      for (i32 pick = 0; pick < counts[cell]; ++pick) ++row;
    }
  }
  while (layout != Layout::kMasked && row % alignment != 0) ++row;
  if (layout == Layout::kMasked) row = num_local_experts * capacity;
  CHECK_EQ(rows, row);
  CHECK_EQ(offsets.back(), row);
}

TEST(place_by_expert_matches_brute_force) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 2000; ++trial) {
    const i32 num_ranks = 1 + static_cast<i32>(random() % 8);
    const i32 num_local_experts = 1 + static_cast<i32>(random() % 9);
    std::vector<i32> counts(static_cast<std::size_t>(num_ranks * num_local_experts));
    for (i32& count : counts) count = random() % 3 == 0 ? 0 : static_cast<i32>(random() % 40);
    const i64 alignment = std::vector<i64>{1, 2, 3, 8, 128}[random() % 5];
    check_against_brute_force(num_ranks, num_local_experts, Layout::kExpertMajor, alignment, kNoCapacity, counts);
    check_against_brute_force(num_ranks, num_local_experts, Layout::kMasked, 1, 1 + static_cast<i64>(random() % 64),
                              counts);
  }
}

TEST(no_picks_give_no_rows) {
  const std::vector<i32> counts(12, 0);
  check_against_brute_force(4, 3, Layout::kExpertMajor, 128, kNoCapacity, counts);
  check_against_brute_force(4, 3, Layout::kMasked, 1, 5, counts);
}

TEST(row_numbers_beyond_31_bits) {
  const std::vector<i32> counts(64, 0x7fffffff);
  std::vector<i64> starts(64), offsets(2);
  CHECK_EQ(place_by_expert(counts.data(), 64, 1, Layout::kExpertMajor, 1, kNoCapacity, starts.data(), offsets.data()),
           64 * i64{0x7fffffff});
  CHECK_EQ(starts[63], 63 * i64{0x7fffffff});
  std::vector<i64> masked_offsets(65);
  CHECK_EQ(
      place_by_expert(counts.data(), 1, 64, Layout::kMasked, 1, i64{1} << 30, starts.data(), masked_offsets.data()),
      i64{1} << 36);
  CHECK_EQ(masked_offsets[63], 63 * (i64{1} << 30));
}

TEST(place_by_rank_sums_up) {
  const i64 rows[] = {3, 0, 7, 0, i64{1} << 33};
  i64 offsets[6];
  CHECK_EQ(place_by_rank(rows, 5, offsets), 10 + (i64{1} << 33));
  const i64 expected[] = {0, 3, 3, 10, 10, 10 + (i64{1} << 33)};
  for (int idx = 0; idx < 6; ++idx) CHECK_EQ(offsets[idx], expected[idx]);
}

TEST(experts_are_dealt_out_in_runs) {
  for (const auto& [num_ranks, num_local_experts] : {std::tuple{1, 1}, {1, 64}, {4, 16}, {7, 3}, {64, 4}}) {
    const ExpertPlacement map{num_ranks, num_local_experts};
    i32 expert = 0;
    for (i32 rank = 0; rank < num_ranks; ++rank) {
      for (i32 local = 0; local < num_local_experts; ++local, ++expert) {
        CHECK(map.contains(expert));
        CHECK_EQ(map.rank_of(expert), rank);
        CHECK_EQ(map.local_id(expert), local);
      }
    }
    CHECK_EQ(map.num_experts(), expert);
    for (const i64 bad : {i64{-1}, i64{expert}, i64{1} << 32, (i64{1} << 32) + 1, i64{-1} << 63})
      CHECK(!map.contains(bad));
  }
}

TEST(counts_of_peers_are_clamped) {
  CHECK_EQ(clamp_count(-1, 10), 0);
  CHECK_EQ(clamp_count(i64{-1} << 63, 10), 0);
  CHECK_EQ(clamp_count(0, 10), 0);
  CHECK_EQ(clamp_count(10, 10), 10);
  CHECK_EQ(clamp_count(11, 10), 10);
  CHECK_EQ(clamp_count(i64{1} << 40, 0), 0);
  CHECK_EQ(align_rows(0, 128), 0);
  CHECK_EQ(align_rows(1, 128), 128);
  CHECK_EQ(align_rows(128, 128), 128);
  CHECK_EQ(align_rows(i64{1} << 33, 128), i64{1} << 33);
}

}  // namespace

int main(int argc, char** argv) { return weft::test::run_tests(argc, argv); }
