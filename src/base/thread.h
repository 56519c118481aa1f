// Threads of the library: they take no signals, which belong to the threads of the user (Ctrl-C would not wake Python).
#pragma once

#include <functional>
#include <thread>

namespace weft {

// Error kCapacityExceeded if the system refuses a thread. `name`: at most 15 characters.
std::thread start_thread(const char* name, std::function<void()> body);

}  // namespace weft
