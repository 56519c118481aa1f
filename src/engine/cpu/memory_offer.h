// What the ranks tell each other of the memory of a window: what one offers to the others, and what the system refused it.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/status.h"
#include "weft/layout/window.h"

namespace weft::cpu {

// Tags of exchange(), each with the number of the window added.
constexpr u64 kWindowTag = u64{1} << 61;
constexpr u64 kAttachedTag = kWindowTag | u64{1} << 60;
constexpr u64 kPieceTag = kWindowTag | u64{1} << 59;  // of resize()
constexpr u64 kGrownTag = kPieceTag | u64{1} << 60;

// Followed by the text of the refusal, if there is one; in an offer to a newcomer, or of one, by the bytes of each piece by which the
// heap has grown, whose descriptors follow those of control memory and heap.
struct MemoryOffer {
  WindowShape shape;
  u64 heap_bytes;  // may differ from rank to rank, and the next, too
  u64 most_heap_bytes;
  u64 refusal_code;  // 0: the memory is there
};

// What the system refused this rank or a peer, as every rank raises it.
Error no_memory(int rank, u64 code, const std::string& text);

// The same error, whose text says which memory it is.
Error named(const std::string& name, const Error& error);

// The refusals of `work` say which memory it is.
template <class Work>
void with_name(const std::string& name, const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    throw named(name, error);
  }
}

std::string heap_text(u64 heap_bytes);  // for errors

// The text of a refusal as it is sent.
std::vector<std::byte> bytes_of(const std::string& text);
std::string text_of(const std::vector<std::byte>& bytes, size_t from);

}  // namespace weft::cpu
