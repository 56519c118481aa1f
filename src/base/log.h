// Log lines of the native code. The sink is the only mutable global of the library.
#pragma once

#include <functional>
#include <string>

namespace weft {

// The numbers of Python's logging.
enum LogLevel : int { kLogDebug = 10, kLogInfo = 20, kLogWarning = 30, kLogError = 40, kLogOff = 100 };

using LogSink = std::function<void(int level, const std::string& text)>;

// Replaces the sink; an empty one brings back the default (stderr). The sink is called from any thread, several at a
// time, without a lock held. Calls under way in
// other threads have ended when this returns, unless one takes longer than a second.
void set_log_sink(LogSink sink);

// Safe from any thread, never throws. Lines below WEFT_LOG_LEVEL (default: warning) are dropped.
void log_line(LogLevel level, const std::string& text) noexcept;

}  // namespace weft
