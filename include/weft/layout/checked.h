// Overflow-checked 64-bit sizes (R17). A failed computation stays failed, so one test at the end is enough.
#pragma once

#include "weft/config/base.h"

namespace weft {

struct CheckedSize {
  u64 value = 0;
  bool ok = true;

  constexpr CheckedSize() = default;
  WEFT_HD constexpr CheckedSize(u64 initial) : value(initial) {}  // NOLINT(google-explicit-constructor)

  WEFT_HD constexpr CheckedSize operator+(CheckedSize other) const {
    CheckedSize sum;
    sum.value = value + other.value;
    sum.ok = ok && other.ok && sum.value >= value;
    return sum;
  }
  WEFT_HD constexpr CheckedSize operator*(CheckedSize other) const {
    CheckedSize product;
    product.value = value * other.value;
    product.ok = ok && other.ok && (value == 0 || product.value / value == other.value);
    return product;
  }
  WEFT_HD constexpr CheckedSize aligned(u64 alignment) const {
    CheckedSize padded = *this + CheckedSize(alignment - 1);
    padded.value -= padded.value % alignment;
    return padded;
  }
};

WEFT_HD constexpr u64 align_up(u64 value, u64 alignment) { return (value + alignment - 1) / alignment * alignment; }

}  // namespace weft
