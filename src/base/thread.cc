#include "base/thread.h"

#include <pthread.h>

#include <csignal>
#include <system_error>
#include <utility>

#include "base/status.h"

namespace weft {

std::thread start_thread(const char* name, std::function<void()> body) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  int error_number = 0;
  try {
    thread = std::thread(std::move(body));
  } catch (const std::system_error& error) {
    error_number = error.code().value();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error_number != 0) throw_system_error("starting a thread", error_number);
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace weft
