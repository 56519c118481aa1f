#include "engine/cpu/memory_offer.h"

namespace weft::cpu {

Error no_memory(int rank, u64 code, const std::string& text) {
  const bool is_known = code >= 1 && code <= static_cast<u64>(ErrorCode::kInternalError);
  return Error(is_known ? static_cast<ErrorCode>(code) : ErrorCode::kInternalError,
               "rank " + std::to_string(rank) + " could not make or map the memory of the window " + text);
}

Error named(const std::string& name, const Error& error) { return Error(error.code, "(" + name + "): " + error.text); }

std::string heap_text(u64 heap_bytes) { return "heap_bytes: " + std::to_string(heap_bytes); }

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto* first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}

std::string text_of(const std::vector<std::byte>& bytes, size_t from) {
  return {reinterpret_cast<const char*>(bytes.data()) + from, bytes.size() - from};
}

}  // namespace weft::cpu
