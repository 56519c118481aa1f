// The order of additions of combine, as a field of its kernels: the only place that says it, and part of the contract
// (docs/semantics.md, "Sums and bits"). Who adds asks for it here, and knows the answers of order_of(); the kernels have no domains but in
// the order of the ranks.
#pragma once

#include "weft/config/base.h"

namespace weft {

// Whose picks of a token are summed first, into one contribution that is rounded once to the type on the wire: those of a rank,
// or each pick by itself, whose row travels as it is and is weighted by the owner.
enum class Contribution : u8 { kOfRank = 0, kOfPick = 1 };
// In a contribution: picks in the order of k, each product with its weight rounded to float, then added.
enum class Within : u8 { kByPick = 0 };
// When the bias is added: after all contributions, or before them.
enum class Bias : u8 { kLast = 0, kFirst = 1 };
// Contributions of a domain: ascending ranks, or by the last k that each has a pick of; from +0, in float. The owner of the token adds
// domains ascending, and rounds once, with the bias, to the result's type.
enum class Reduction : u8 { kAscending = 0, kByLastPick = 1 };

// Domains are the ranks d * i to d * i + d - 1; the last one may have fewer. The sum of a domain is rounded once, to FP8 or to the
// type of the rows, which contributions have then.
struct Order {
  Contribution contribution = Contribution::kOfRank;
  Within within = Within::kByPick;
  Bias bias = Bias::kLast;
  Reduction reduction = Reduction::kAscending;
  i32 sum_domain = 0;  // ranks of a domain; 0: all are one, whose sum is rounded to the result alone
  bool sum_is_fp8 = false;

  WEFT_HD constexpr bool has_domains() const { return sum_domain != 0; }
  WEFT_HD constexpr i32 domain_of(i32 rank) const { return has_domains() ? rank / sum_domain : 0; }
  // What makes contributions, and what adds them up.
  WEFT_HD constexpr bool has_contributions_by_pick() const {
    return contribution == Contribution::kOfRank && within == Within::kByPick;
  }
  WEFT_HD constexpr bool is_by_pick() const { return contribution == Contribution::kOfPick; }
  WEFT_HD constexpr bool is_by_last_pick() const { return !is_by_pick() && reduction == Reduction::kByLastPick; }
  WEFT_HD constexpr bool has_bias_first() const { return bias == Bias::kFirst; }
};

// What a call asks for by name: "rank", "last_pick", "pick".
enum class SumOrder : u8 { kRank = 0, kLastPick = 1, kPick = 2 };

// `sum_domain`: what was asked for; domains of one rank and of all ranks are none, and picks have none.
WEFT_HD constexpr Order order_of(SumOrder name, i32 sum_domain, i32 num_ranks, bool wire_is_fp8) {
  Order order;
  if (name != SumOrder::kRank) {
    order.bias = Bias::kFirst;
    order.reduction = Reduction::kByLastPick;
  }
  if (name == SumOrder::kPick) {
    order.contribution = Contribution::kOfPick;
  } else if (sum_domain > 1 && sum_domain < num_ranks) {
    order.sum_domain = sum_domain;
    order.sum_is_fp8 = wire_is_fp8;
  }
  return order;
}

}  // namespace weft
