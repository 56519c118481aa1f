// Guards against sizes that wrap around silently (R17): a window of 2^64 + 4096 bytes must not look like one of 4096.
#include "weft/layout/checked.h"

#include "check.h"

using weft::CheckedSize;
using weft::u64;

namespace {

constexpr u64 kMax = ~0ull;
constexpr u64 kInteresting[] = {0,          1,
                                2,          3,
                                63,         64,
                                4095,       4096,
                                1ull << 31, (1ull << 32) - 1,
                                1ull << 32, 1ull << 33,
                                1ull << 62, (1ull << 63) - 1,
                                1ull << 63, kMax - 64,
                                kMax - 1,   kMax};

TEST(sums_and_products_match_wide_arithmetic) {
  for (const u64 a : kInteresting) {
    for (const u64 b : kInteresting) {
      const unsigned __int128 wide_sum = static_cast<unsigned __int128>(a) + b;
      const unsigned __int128 wide_product = static_cast<unsigned __int128>(a) * b;
      const CheckedSize sum = CheckedSize(a) + CheckedSize(b);
      const CheckedSize product = CheckedSize(a) * CheckedSize(b);
      CHECK_EQ(sum.ok, wide_sum <= kMax);
      CHECK_EQ(product.ok, wide_product <= kMax);
      if (sum.ok) CHECK_EQ(sum.value, a + b);
      if (product.ok) CHECK_EQ(product.value, a * b);
    }
  }
}

TEST(a_failure_stays) {
  const CheckedSize bad = CheckedSize(kMax) + CheckedSize(1);
  CHECK(!bad.ok);
  CHECK(!(bad + CheckedSize(1)).ok);
  CHECK(!(CheckedSize(1) + bad).ok);
  CHECK(!(bad * CheckedSize(0)).ok);
  CHECK(!(CheckedSize(0) * bad).ok);
  CHECK(!bad.aligned(64).ok);
}

TEST(alignment_rounds_up_and_fails_at_the_top) {
  for (const u64 alignment : {1ull, 16ull, 64ull, 4096ull}) {
    for (const u64 value : kInteresting) {
      const CheckedSize padded = CheckedSize(value).aligned(alignment);
      const bool fits = value <= kMax - (alignment - 1);
      CHECK_EQ(padded.ok, fits);
      if (!fits) continue;
      CHECK_EQ(padded.value % alignment, 0u);
      CHECK(padded.value >= value && padded.value - value < alignment);
      CHECK_EQ(weft::align_up(value, alignment), padded.value);
    }
  }
}

}  // namespace

int main(int argc, char** argv) { return weft::test::run_tests(argc, argv); }
