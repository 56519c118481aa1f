#include "bindings/gil.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace weft::bindings {
namespace {

std::atomic<int> only_thread{0};  // 0: every thread may come back
std::atomic<int> num_away{0};

bool is_kept_out() {
  const int only = only_thread.load();
  return only != 0 && only != gettid();
}

// Counted as away or allowed to wait for the lock, never neither: who sees that all are away sees none that comes back.
bool may_come_back() {
  --num_away;
  if (!is_kept_out()) return true;
  ++num_away;
  return false;
}

}  // namespace

void keep_other_threads_out() { only_thread = gettid(); }

void have_no_threads_after_fork() {
  pthread_atfork(nullptr, nullptr, [] {
    only_thread = 0;
    num_away = 0;
  });
}

int threads_away() { return num_away; }

void stay_if_kept_out() {
  if (!is_kept_out()) return;
  PyEval_SaveThread();
  while (true) ::pause();  // check: allow spin-loop: sleeps until the process ends
}

ReleasedGil::ReleasedGil() : state_(PyEval_SaveThread()) { ++num_away; }

ReleasedGil::~ReleasedGil() {
  while (!may_come_back()) ::pause();  // check: allow spin-loop: sleeps until the process ends
  PyEval_RestoreThread(state_);
}

Visit::Visit() {
  if (may_come_back()) gil_.emplace();
}

Visit::~Visit() {
  if (!gil_) return;
  gil_.reset();
  ++num_away;
}

}  // namespace weft::bindings
