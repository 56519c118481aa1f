#include "bindings/gil.h"

#include <unistd.h>

#include <atomic>

namespace weft::bindings {
namespace {

std::atomic<int>& only_thread() {  // 0: every thread may come back
  static std::atomic<int> thread{0};
  return thread;
}

}  // namespace

void keep_other_threads_out() { only_thread() = gettid(); }

bool is_kept_out() {
  const int only = only_thread().load(std::memory_order_acquire);
  return only != 0 && only != gettid();
}

void stay_if_kept_out() {
  while (is_kept_out()) ::pause();  // check: allow spin-loop: sleeps until the process ends
}

}  // namespace weft::bindings
