// Giving up Python's lock around calls that may wait, such that a thread inside one can't harm the end of the process: to take the
// lock in an interpreter that is being taken down ends the thread by unwinding its stack, which here means std::terminate.
#pragma once

#include <nanobind/nanobind.h>

namespace weft::bindings {

// From now on the calling thread alone comes back to Python from native calls; others stay in them until the process ends.
void keep_other_threads_out();
bool is_kept_out();       // of the calling thread
void stay_if_kept_out();  // does not return then

class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() {
    stay_if_kept_out();
    PyEval_RestoreThread(state_);
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace weft::bindings
