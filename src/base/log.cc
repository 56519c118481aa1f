#include "base/log.h"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <utility>

#include "base/env.h"

namespace weft {
namespace {

struct SinkHolder {
  std::mutex mutex;
  std::shared_ptr<const LogSink> sink;
  int num_calls = 0;  // of sinks under way
  std::condition_variable is_idle;
};

// Never destroyed: threads that are still about at process exit may log.
SinkHolder& sink_holder() {
  static auto* holder = new SinkHolder;
  return *holder;
}

thread_local int calls_of_this_thread = 0;

class SinkCall {
 public:
  SinkCall() {
    SinkHolder& holder = sink_holder();
    const std::lock_guard lock(holder.mutex);
    sink = holder.sink;
    ++holder.num_calls;
    ++calls_of_this_thread;
  }
  ~SinkCall() {
    sink.reset();
    SinkHolder& holder = sink_holder();
    const std::lock_guard lock(holder.mutex);
    --calls_of_this_thread;
    --holder.num_calls;
    holder.is_idle.notify_all();
  }
  SinkCall(const SinkCall&) = delete;
  SinkCall& operator=(const SinkCall&) = delete;

  std::shared_ptr<const LogSink> sink;
};

const char* level_name(int level) {
  if (level >= kLogError) return "error";
  if (level >= kLogWarning) return "warning";
  return level >= kLogInfo ? "info" : "debug";
}

}  // namespace

void set_log_sink(LogSink sink) {
  auto fresh = sink ? std::make_shared<const LogSink>(std::move(sink)) : nullptr;
  SinkHolder& holder = sink_holder();
  std::unique_lock lock(holder.mutex);
  holder.sink.swap(fresh);
  holder.is_idle.wait_for(lock, std::chrono::seconds(1), [&] { return holder.num_calls == calls_of_this_thread; });
}

void log_line(LogLevel level, const std::string& text) noexcept {
  try {
    if (level < env().log_level) return;
    const SinkCall call;
    if (call.sink) {
      (*call.sink)(level, text);
    } else {
      std::fprintf(stderr, "weft: %s: %s\n", level_name(level), text.c_str());
    }
  } catch (...) {  // NOLINT(bugprone-empty-catch): a log line is not worth a failure
  }
}

}  // namespace weft
