// The order of additions of combine, as a field of its kernels: the only place that says it, and part of the contract
// (docs/semantics.md, "Sums and bits"). Who adds asks for it here. The kernels know the first answer to each question, and do not
// compile with another; the cpu engine knows those of order_of().
#pragma once

#include "weft/config/base.h"

namespace weft {

// Whose picks of a token are summed first, into one contribution that is rounded once to the type on the wire: those of a rank,
// or each pick by itself, whose row travels as it is and is weighted by the owner.
enum class SumDomain : u8 { kRank = 0, kPick = 1 };
// In a contribution: picks in the order of k, each product with its weight rounded to float, then added.
enum class Within : u8 { kByPick = 0 };
// When the bias is added: after all contributions, or before them.
enum class Bias : u8 { kLast = 0, kFirst = 1 };
// Contributions, by the owner of the token: ascending ranks, or by the last k that each has a pick of; from +0, in float; rounded
// once, with the bias, to the result's type.
enum class Reduction : u8 { kAscending = 0, kByLastPick = 1 };

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

// What a call asks for by name: "rank", "last_pick", "pick".
enum class SumOrder : u8 { kRank = 0, kLastPick = 1, kPick = 2 };

WEFT_HD constexpr Order order_of(SumOrder order) {
  if (order == SumOrder::kRank) return Order{};
  const SumDomain domain = order == SumOrder::kPick ? SumDomain::kPick : SumDomain::kRank;
  return {.sum_domain = domain, .bias = Bias::kFirst, .reduction = Reduction::kByLastPick};
}

}  // namespace weft
