// Guards against a set of ranks that holds others than were put in.
#include "weft/config/route.h"

#include "check.h"

using namespace weft;

namespace {

template <i32 kDomain>
void check_mask() {
  using Mask = RankMask<kDomain>;
  for (i32 rank = 0; rank < kDomain; ++rank) {
    const Mask only = Mask::only(rank);
    Mask others = Mask::none();
    for (i32 other = 0; other < kDomain; ++other) {
      CHECK_EQ(only.has(other), other == rank);
      CHECK_EQ(only.has_or_any(other), other == rank);
      CHECK_EQ(only.bit(other), other == rank ? 1u : 0u);
      CHECK_EQ(Mask::first(rank).has(other), other < rank);
      if (other != rank) others |= Mask::only(other);
    }
    CHECK(!others.has(rank));
    CHECK_EQ((others & only).word, 0u);
    others |= only;
    CHECK_EQ(others.word, Mask::first(kDomain).word);
  }
  CHECK_EQ(Mask::none().word, 0u);
}

TEST(a_mask_holds_what_was_put_in) {
  check_mask<1>();
  check_mask<kMaxGpuRanks>();
  check_mask<32>();
}

}  // namespace

int main(int argc, char** argv) { return weft::test::run_tests(argc, argv); }
