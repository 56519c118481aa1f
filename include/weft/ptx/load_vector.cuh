// Loads of 16 bytes that many may be under way of: the compiler leaves them where they stand. Device only; PTX ISA, "ld".
#pragma once

#include "weft/config/base.h"

namespace weft::ptx {

// If `is_there`; else `words` stay as they are, whatever that is. Rows are read once: they are not kept in the L1 cache.
__device__ inline void load_vector(u32 (&words)[4], const void* global, bool is_there) {
  asm volatile(
      "{\n\t.reg .pred p;\n\t"
      "setp.ne.u32 p, %5, 0;\n\t"
      "@p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
      : "l"(global), "r"(static_cast<u32>(is_there)));
}

}  // namespace weft::ptx
