// The test harness of the native tests: TEST registers a case, CHECK notes a failure and goes on.
//
//   TEST(sizes_add_up) { CHECK_EQ(1 + 1, 2); }
//   int main(int argc, char** argv) { return weft::test::run_tests(argc, argv); }
//
// The program runs all cases, or those whose name contains one of its arguments. In a forked child, CHECK works too:
// the child leaves with `_exit(weft::test::exit_code())`.
#pragma once

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace weft::test {

struct Case {
  const char* name;
  void (*run)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> list;
  return list;
}

inline std::atomic<int>& num_failures() {
  static std::atomic<int> count{0};
  return count;
}

inline int exit_code() { return num_failures() == 0 ? 0 : 1; }

inline bool register_case(const char* name, void (*run)()) {
  cases().push_back({name, run});
  return true;
}

template <class T>
std::string to_text(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return std::to_string(static_cast<long long>(value));
  } else if constexpr (std::is_same_v<T, bool>) {
    return value ? "true" : "false";
  } else if constexpr (std::is_integral_v<T>) {
    return std::to_string(value);
  } else {
    std::ostringstream text;
    text << value;
    return text.str();
  }
}

// The first failures of a process are printed, the rest only counted.
inline void report_failure(const char* file, int line, const std::string& text) {
  constexpr int kMaxPrinted = 20;
  if (num_failures().fetch_add(1) < kMaxPrinted) std::fprintf(stderr, "%s:%d: %s\n", file, line, text.c_str());
}

template <class A, class B>
bool check_equal(const A& actual, const B& expected, const char* file, int line, const char* text) {
  if (actual == expected) return true;
  report_failure(file, line, std::string(text) + ": got " + to_text(actual) + ", expected " + to_text(expected));
  return false;
}

// A case that hangs is a failure with a name, not the end of somebody's patience. Far more than any case takes, also with
// sanitizers on a busy machine. Forked ranks have limits of their own (alarms are not inherited).
inline const char*& running_case() {
  static const char* name = "";
  return name;
}
inline void on_hang(int) {
  constexpr char kText[] = "hangs: ";
  const char* name = running_case();
  static_cast<void>(!write(STDERR_FILENO, kText, sizeof(kText) - 1));
  static_cast<void>(!write(STDERR_FILENO, name, std::strlen(name)));
  static_cast<void>(!write(STDERR_FILENO, "\n", 1));
  _exit(1);
}
inline void watch(const char* name) {
  constexpr unsigned kLongestS = 200;
  running_case() = name;
  std::signal(SIGALRM, on_hang);
  alarm(kLongestS);
}

inline int run_tests(int argc, char** argv) {
  int num_run = 0;
  for (const Case& one : cases()) {
    bool wanted = argc < 2;
    for (int idx = 1; idx < argc; ++idx) wanted = wanted || std::strstr(one.name, argv[idx]) != nullptr;
    if (!wanted) continue;
    const int before = num_failures();
    watch(one.name);
    try {
      one.run();
    } catch (const std::exception& error) {
      report_failure(one.name, 0, std::string("unexpected exception: ") + error.what());
    }
    ++num_run;
    std::printf("%-8s %s\n", num_failures() == before ? "ok" : "FAILED", one.name);
    std::fflush(stdout);
  }
  const int failed = num_failures();
  std::printf("%d cases, %d failed checks\n", num_run, failed);
  return failed == 0 && num_run > 0 ? 0 : 1;
}

}  // namespace weft::test

#define TEST(name)                                                                                      \
  static void test_##name();                                                                            \
  [[maybe_unused]] static const bool registered_##name = weft::test::register_case(#name, test_##name); \
  static void test_##name()

#define CHECK(condition)                                                                       \
  do {                                                                                         \
    if (!(condition)) weft::test::report_failure(__FILE__, __LINE__, "not true: " #condition); \
  } while (false)

#define CHECK_EQ(actual, expected) \
  static_cast<void>(weft::test::check_equal((actual), (expected), __FILE__, __LINE__, #actual))

// `statement` must throw `type`; what was caught is handed to `verify`, a callable.
#define CHECK_THROWS(statement, type, verify)                                                                \
  do {                                                                                                       \
    bool has_thrown = false;                                                                                 \
    try {                                                                                                    \
      statement;                                                                                             \
    } catch (const type& caught) {                                                                           \
      has_thrown = true;                                                                                     \
      verify(caught);                                                                                        \
    }                                                                                                        \
    if (!has_thrown) weft::test::report_failure(__FILE__, __LINE__, "did not throw " #type ": " #statement); \
  } while (false)
