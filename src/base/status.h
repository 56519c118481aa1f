// The typed error of the native code. It is the only exception that crosses a module boundary.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

namespace weft {

// Values are fixed: the Python side maps them to its exception classes.
enum class ErrorCode : int {
  kInvalidArgument = 1,
  kInvalidState,
  kUnsupported,
  kCapacityExceeded,
  kPeerTimeout,
  kPeerLost,
  kCompileError,
  kCudaError,
  kInternalError,
  kAborted,
  kEvicted,
  kControlLost,
};

// "PeerLost", "InvalidArgument", ...
const char* error_code_name(ErrorCode code) noexcept;

class Error : public std::exception {
 public:
  Error(ErrorCode code, std::string text, std::string op = {}, uint64_t sequence = 0, std::vector<int> peers = {},
        std::string reason = {});

  const char* what() const noexcept override { return text.c_str(); }

  ErrorCode code;
  std::string text;   // one or two sentences for the user
  std::string op;     // "dispatch", "connect", ... or empty
  uint64_t sequence;  // of the operation on its window, 0 where there is none; kEvicted: the epoch that was decided
  std::vector<int> peers;  // ascending ranks that the error names; empty where it names none
  std::string reason;      // kAborted: what abort() was given
};

[[noreturn]] void throw_invalid_argument(const std::string& text);
[[noreturn]] void throw_invalid_state(const std::string& text);
[[noreturn]] void throw_unsupported(const std::string& text);
[[noreturn]] void throw_internal(const std::string& text);
[[noreturn]] void throw_peer_lost(const std::string& op, std::vector<int> peers, const std::string& text);
[[noreturn]] void throw_peer_timeout(const std::string& op, uint64_t sequence, std::vector<int> peers,
                                     const std::string& text);

// What the system refused. Where a user can mend that the error names the limit and the mend: kUnsupported (EPERM,
// EACCES, ENOSYS: the call is denied) or kCapacityExceeded (a limit is reached: EMFILE, ENFILE, EFBIG, ENOSPC, ENOMEM,
// EAGAIN of threads and processes). Else kInternalError "<action>: <text of error_number>".
[[noreturn]] void throw_system_error(const std::string& action, int error_number);

// "rank 2", "ranks 1, 3": how every text of the library names ranks.
std::string ranks_text(const std::vector<int>& ranks);

}  // namespace weft
