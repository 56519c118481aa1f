#include "base/status.h"

#include <algorithm>
#include <system_error>
#include <utility>

namespace weft {

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
  }
  return "InternalError";
}

Error::Error(ErrorCode code_in, std::string text_in, std::string op_in, uint64_t sequence_in, std::vector<int> peers_in)
    : code(code_in), text(std::move(text_in)), op(std::move(op_in)), sequence(sequence_in), peers(std::move(peers_in)) {
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
  throw_internal(action + ": " + std::system_category().message(error_number));
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
