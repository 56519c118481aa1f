// Giving up Python's lock around calls that may wait, such that a thread inside one can't harm the end of the process: to take the
// lock in an interpreter that is being taken down ends the thread by unwinding its stack, which here means std::terminate.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

namespace weft::bindings {

// From now on the calling thread alone comes back to Python from native calls; others stay in them until the process ends.
void keep_other_threads_out();
void have_no_threads_after_fork();  // a child has none of those
// Called with the lock: does not return where the thread is kept out. Such a thread is not among those away.
void stay_if_kept_out();
// Of threads that gave up the lock in a native call, those that do not ask for it again at this moment.
int threads_away();

class ReleasedGil {
 public:
  ReleasedGil();
  ~ReleasedGil();  // does not return where the thread is kept out
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* state_;
};

// Inside a ReleasedGil: the lock for a moment, if the thread may have it.
class Visit {
 public:
  Visit();
  ~Visit();
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;
  explicit operator bool() const { return gil_.has_value(); }

 private:
  std::optional<nanobind::gil_scoped_acquire> gil_;
};

}  // namespace weft::bindings
