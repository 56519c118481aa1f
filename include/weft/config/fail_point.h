// Named points of the protocol where a test may kill or stop the rank. Nothing is left of them in the library.
#pragma once

#if defined(WEFT_FAIL_POINTS)
namespace weft {
void fail_point(const char* name);  // defined by the test
}
#define WEFT_FAIL_POINT(name) ::weft::fail_point(name)
#else
#define WEFT_FAIL_POINT(name) static_cast<void>(0)
#endif
