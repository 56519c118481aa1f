// The order of additions of combine, as a field of its kernels: the only place that says it, and part of the contract
// (docs/semantics.md, "Sums and bits"). Every question has one answer today; who adds asks for it here, and with another does not compile.
#pragma once

#include "weft/config/base.h"

namespace weft {

// Whose picks of a token are summed first, into one contribution that is rounded once to the type on the wire.
enum class SumDomain : u8 { kRank = 0 };
// In a contribution: picks in the order of k, each product with its weight rounded to float, then added.
enum class Within : u8 { kByPick = 0 };
// When the bias is added: after all contributions.
enum class Bias : u8 { kLast = 0 };
// Contributions, by the owner of the token: ascending ranks, from +0, in float; rounded once, with the bias, to the result's type.
enum class Reduction : u8 { kAscending = 0 };

struct Order {
  SumDomain sum_domain = SumDomain::kRank;
  Within within = Within::kByPick;
  Bias bias = Bias::kLast;
  Reduction reduction = Reduction::kAscending;

  // What makes contributions, and what adds them up.
  WEFT_HD constexpr bool has_contributions_by_pick() const {
    return sum_domain == SumDomain::kRank && within == Within::kByPick;
  }
  WEFT_HD constexpr bool has_ascending_ranks_then_bias() const {
    return reduction == Reduction::kAscending && bias == Bias::kLast;
  }
};

}  // namespace weft
