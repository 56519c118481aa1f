// Where in a window's heap receive tensors lie: arithmetic on offsets only, it never touches the memory.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

namespace weft {

// Best fit (of equal holes the lowest), neighbours that are free grow together. All calls O(log n), thread-safe.
class Heap {
 public:
  static constexpr uint64_t kAlignment = 256;

  explicit Heap(uint64_t bytes);  // rounded down to kAlignment; may be 0

  // Offset of a fresh block of at least `bytes` bytes, or nothing if there is no room. 0 bytes take one unit.
  std::optional<uint64_t> reserve(uint64_t bytes);

  // Keeps the first `keep_bytes` (rounded up; at least one unit) of the block at `offset`, frees its rest.
  // Error kInvalidArgument if no block starts there or it is smaller.
  void split(uint64_t offset, uint64_t keep_bytes);

  // Frees the block at `offset`. Error kInvalidArgument if no block starts there.
  void release(uint64_t offset);

  // Room for `bytes` bytes in all, rounded down; no less than there are.
  void grow(uint64_t bytes);

  // From now on what is released (or split off) makes no room: a broken operation's peers may still write there
  // (R20).
  void quarantine();

  // Every peer acknowledged a later epoch or is gone: what was held back makes room again.
  void end_quarantine();

  uint64_t bytes() const;
  uint64_t used() const;  // bytes of live blocks
  uint64_t largest_free() const;
  uint64_t quarantined() const;  // bytes released that make no room yet
  uint64_t peak() const;         // the most that used() + quarantined() ever was

 private:
  void give_back(uint64_t offset, uint64_t bytes);
  void insert_free(uint64_t offset, uint64_t bytes);

  mutable std::mutex mutex_;
  uint64_t bytes_;
  std::map<uint64_t, uint64_t> live_;                      // offset -> bytes
  std::map<uint64_t, uint64_t> free_;                      // offset -> bytes, never two adjacent
  std::set<std::pair<uint64_t, uint64_t>> free_by_bytes_;  // (bytes, offset) of free_
  std::map<uint64_t, uint64_t> held_back_;                 // offset -> bytes, of the quarantine
  uint64_t used_ = 0;
  uint64_t quarantined_ = 0;
  uint64_t peak_ = 0;
  bool in_quarantine_ = false;
};

}  // namespace weft
