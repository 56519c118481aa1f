#include "base/status.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace weft {

namespace {

// "24", "unlimited": a limit of this process.
std::string limit_text(__rlimit_resource which) {
  rlimit limit{};
  if (getrlimit(which, &limit) != 0) return "unknown";
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(limit.rlim_cur);
}

// The limit that was reached and its mend; empty where `error_number` stands for none.
std::string limit_reached(int error_number) {
  switch (error_number) {
    case EMFILE:
      return "this process has no file descriptor left of " + limit_text(RLIMIT_NOFILE) +
             " (ulimit -n, RLIMIT_NOFILE). Raise that limit: Weft takes about 4 for each rank of the group and 20 more";
    case ENFILE: return "this machine has no open file left. Raise the sysctl fs.file-max";
    case EFBIG:
      return "files of this process have at most " + limit_text(RLIMIT_FSIZE) +
             " bytes (ulimit -f, RLIMIT_FSIZE), and shared memory counts as one. Raise that limit";
    case ENOSPC:
    case ENOMEM:
      return "there is not enough memory. Lower heap_bytes or max_tokens_per_rank, or raise what limits this process: "
             "address space " +
             limit_text(RLIMIT_AS) +
             " (bytes; ulimit -v, RLIMIT_AS), the memory of its container or cgroup, the sysctls vm.max_map_count and "
             "vm.overcommit_memory";
    case EAGAIN:
      return "no further thread or process may start: " + limit_text(RLIMIT_NPROC) +
             " are allowed to this user (ulimit -u, RLIMIT_NPROC), and a container or service may set a limit of its "
             "own (pids.max, TasksMax). Raise it";
    default: return {};
  }
}

}  // namespace

const char* error_code_name(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidArgument: return "InvalidArgument";
    case ErrorCode::kInvalidState: return "InvalidState";
    case ErrorCode::kUnsupported: return "Unsupported";
    case ErrorCode::kCapacityExceeded: return "CapacityExceeded";
    case ErrorCode::kPeerTimeout: return "PeerTimeout";
    case ErrorCode::kPeerLost: return "PeerLost";
    case ErrorCode::kCompileError: return "CompileError";
    case ErrorCode::kCudaError: return "CudaError";
    case ErrorCode::kInternalError: return "InternalError";
    case ErrorCode::kAborted: return "Aborted";
    case ErrorCode::kEvicted: return "Evicted";
    case ErrorCode::kControlLost: return "ControlLost";
  }
  return "InternalError";
}

Error::Error(ErrorCode code_in, std::string text_in, std::string op_in, uint64_t sequence_in, std::vector<int> peers_in,
             std::string reason_in)
    : code(code_in),
      text(std::move(text_in)),
      op(std::move(op_in)),
      sequence(sequence_in),
      peers(std::move(peers_in)),
      reason(std::move(reason_in)) {
  std::sort(peers.begin(), peers.end());
}

void throw_invalid_argument(const std::string& text) { throw Error(ErrorCode::kInvalidArgument, text); }
void throw_invalid_state(const std::string& text) { throw Error(ErrorCode::kInvalidState, text); }
void throw_unsupported(const std::string& text) { throw Error(ErrorCode::kUnsupported, text); }
void throw_internal(const std::string& text) { throw Error(ErrorCode::kInternalError, text); }

void throw_peer_lost(const std::string& op, std::vector<int> peers, const std::string& text) {
  throw Error(ErrorCode::kPeerLost, text, op, 0, std::move(peers));
}

void throw_peer_timeout(const std::string& op, uint64_t sequence, std::vector<int> peers, const std::string& text) {
  throw Error(ErrorCode::kPeerTimeout, text, op, sequence, std::move(peers));
}

void throw_system_error(const std::string& action, int error_number) {
  const std::string what = action + ": " + std::system_category().message(error_number);
  if (error_number == EPERM || error_number == EACCES || error_number == ENOSYS) {
    throw_unsupported(what +
                      ". The seccomp profile of a container, a sandbox or the kernel denies this system call; "
                      "allow it there");
  }
  const std::string limit = limit_reached(error_number);
  if (!limit.empty()) throw Error(ErrorCode::kCapacityExceeded, what + ": " + limit);
  throw_internal(what);
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t idx = 0; idx < ranks.size(); ++idx) {
    if (idx > 0) text += ", ";
    text += std::to_string(ranks[idx]);
  }
  return text;
}

}  // namespace weft
