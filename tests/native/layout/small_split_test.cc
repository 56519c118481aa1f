// Guards against columns of a token that no warp of a small-batch combine sees to, or two do, and against blocks left idle.
#include "weft/layout/small_split.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "check.h"

using namespace weft;

namespace {

SmallCombineKernelConfig config_of(Dtype dtype, i32 hidden, i32 num_ranks) {
  SmallCombineKernelConfig config;
  config.num_ranks = num_ranks;
  config.hidden = hidden;
  config.dtype = dtype;
  return config;
}

// As kernels/small/combine_block.cuh goes through them.
void check_covers(const SmallCombineKernelConfig& config, const SmallSplit& split, i32 num_tokens, i32 num_blocks) {
  std::vector<int> seen(static_cast<std::size_t>(num_tokens) * static_cast<std::size_t>(config.hidden));
  for (i32 block = 0; block < num_blocks; ++block) {
    for (i32 idx = 0; idx < split.num_units(num_tokens, block, num_blocks); ++idx) {
      const i32 unit = block + idx * num_blocks;
      const i32 token = unit / split.num_parts, column = unit % split.num_parts * split.part;
      CHECK(token < num_tokens);
      CHECK(column < config.hidden);
      for (i32 at = column; at < std::min(column + split.part, config.hidden); ++at) {
        ++seen[static_cast<std::size_t>(token) * static_cast<std::size_t>(config.hidden) +
               static_cast<std::size_t>(at)];
      }
    }
  }
  CHECK(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }));
}

}  // namespace

TEST(every_column_of_every_token_has_one_warp) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp32}) {
    for (const i32 hidden : {8, 16, 272, 2880, 7168}) {
      for (const i32 num_blocks : {1, 3, 32, 132}) {
        for (const i32 max_tokens : {0, 1, 5, 64, 128}) {
          const SmallCombineKernelConfig config = config_of(dtype, hidden, 4);
          const SmallSplit split = SmallSplit::make(config, max_tokens, num_blocks);
          CHECK_EQ(split.part % SmallSplit::granule(dtype), 0);  // groups that share a scale stay whole
          CHECK(split.part <= SmallCombineKernelConfig::kVectors * SmallSplit::granule(dtype));
          check_covers(config, split, max_tokens, num_blocks);
          check_covers(config, split, max_tokens / 2, num_blocks);  // a rank that has fewer tokens than others
        }
      }
    }
  }
}

TEST(few_tokens_keep_all_blocks_busy) {
  const SmallCombineKernelConfig config = config_of(Dtype::kBf16, 7168, 4);
  for (i32 max_tokens = 2; max_tokens <= 8; ++max_tokens) {
    const SmallSplit split = SmallSplit::make(config, max_tokens, 32);
    CHECK_EQ(split.part, SmallSplit::granule(Dtype::kBf16));
    CHECK(split.num_units(max_tokens, 31, 32) > 0);
  }
  CHECK_EQ(SmallSplit::make(config, 1, 28).num_units(1, 27, 28), 1);
}

TEST(many_tokens_are_cut_into_wide_parts) {
  const SmallCombineKernelConfig config = config_of(Dtype::kBf16, 7168, 4);
  const SmallSplit split = SmallSplit::make(config, 128, 32);
  CHECK_EQ(split.part, 4 * SmallSplit::granule(Dtype::kBf16));
  CHECK_EQ(split.num_parts, 7);
}

TEST(a_slot_holds_codes_and_scales) {
  SmallCombineKernelConfig config = config_of(Dtype::kBf16, 7168, 4);
  CHECK_EQ(config.wire_row_bytes(), 14336);
  config.wire_is_fp8 = true;
  CHECK_EQ(config.wire_row_bytes(), 7168 + 56 * 4);
  config.hidden = 264;  // three groups, codes padded to 16 bytes
  CHECK_EQ(config.scales_at(), 272);
  CHECK_EQ(config.wire_row_bytes(), 272 + 3 * 4);
}

TEST(warps_leave_128_registers) { CHECK_EQ(SmallCombineKernelConfig::num_threads(), 512); }

int main(int argc, char** argv) { return weft::test::run_tests(argc, argv); }
