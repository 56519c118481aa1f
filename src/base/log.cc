#include "base/log.h"

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
};

// Never destroyed: threads that are still about at process exit may log.
SinkHolder& sink_holder() {
  static auto* holder = new SinkHolder;
  return *holder;
}

const char* level_name(int level) {
  if (level >= kLogError) return "error";
  if (level >= kLogWarning) return "warning";
  return level >= kLogInfo ? "info" : "debug";
}

}  // namespace

void set_log_sink(LogSink sink) {
  auto fresh = sink ? std::make_shared<const LogSink>(std::move(sink)) : nullptr;
  SinkHolder& holder = sink_holder();
  const std::lock_guard lock(holder.mutex);
  holder.sink.swap(fresh);
}

void log_line(LogLevel level, const std::string& text) noexcept {
  try {
    if (level < env().log_level) return;
    std::shared_ptr<const LogSink> sink;
    {
      SinkHolder& holder = sink_holder();
      const std::lock_guard lock(holder.mutex);
      sink = holder.sink;
    }
    if (sink) {
      (*sink)(level, text);
    } else {
      std::fprintf(stderr, "weft: %s: %s\n", level_name(level), text.c_str());
    }
  } catch (...) {  // NOLINT(bugprone-empty-catch): a log line is not worth a failure
  }
}

}  // namespace weft
