// Integer types and function qualifiers for code that both g++ and NVRTC compile.
// No standard header is included anywhere in config/ and layout/: NVRTC knows none of them.
#pragma once

#if defined(__CUDACC__)
#define WEFT_HD __host__ __device__
#else
#define WEFT_HD
#endif

namespace weft {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
#if defined(__CUDACC_RTC__)
using u64 = unsigned long long;
using i64 = long long;
#else
using u64 = __UINT64_TYPE__;
using i64 = __INT64_TYPE__;
#endif
static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8);

constexpr i32 kCacheLine = 64;
constexpr i32 kMaxRanks = 64;  // of a window: the width of its masks. A communicator may have more

}  // namespace weft
