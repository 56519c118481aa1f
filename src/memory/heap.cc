#include "memory/heap.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "base/status.h"

namespace weft {
namespace {

// `bytes` must not be above the largest multiple of kAlignment.
uint64_t whole_units(uint64_t bytes) {
  return std::max(Heap::kAlignment, (bytes + Heap::kAlignment - 1) / Heap::kAlignment * Heap::kAlignment);
}

[[noreturn]] void throw_no_block(uint64_t offset) {
  throw_invalid_argument("no heap block starts at offset " + std::to_string(offset));
}

}  // namespace

Heap::Heap(uint64_t bytes) : bytes_(bytes / kAlignment * kAlignment) {
  if (bytes_ > 0) insert_free(0, bytes_);
}

std::optional<uint64_t> Heap::reserve(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes > bytes_) return std::nullopt;  // also keeps whole_units from overflowing
  const uint64_t block_bytes = whole_units(bytes);
  const auto hole = free_by_bytes_.lower_bound({block_bytes, 0});
  if (hole == free_by_bytes_.end()) return std::nullopt;
  const auto [hole_bytes, offset] = *hole;
  free_by_bytes_.erase(hole);
  free_.erase(offset);
  // The rest has no free neighbour: the hole had none.
  if (hole_bytes > block_bytes) {
    free_.emplace(offset + block_bytes, hole_bytes - block_bytes);
    free_by_bytes_.emplace(hole_bytes - block_bytes, offset + block_bytes);
  }
  live_.emplace(offset, block_bytes);
  used_ += block_bytes;
  peak_ = std::max(peak_, used_ + quarantined_);
  return offset;
}

void Heap::split(uint64_t offset, uint64_t keep_bytes) {
  const std::lock_guard lock(mutex_);
  const auto block = live_.find(offset);
  if (block == live_.end()) throw_no_block(offset);
  if (keep_bytes > block->second) {
    throw_invalid_argument("keeping " + std::to_string(keep_bytes) + " bytes of a heap block of " +
                           std::to_string(block->second));
  }
  const uint64_t kept_bytes = whole_units(keep_bytes);
  const uint64_t rest_bytes = block->second - kept_bytes;
  if (rest_bytes == 0) return;
  block->second = kept_bytes;
  give_back(offset + kept_bytes, rest_bytes);
}

void Heap::release(uint64_t offset) {
  const std::lock_guard lock(mutex_);
  const auto block = live_.find(offset);
  if (block == live_.end()) throw_no_block(offset);
  const uint64_t block_bytes = block->second;
  live_.erase(block);
  give_back(offset, block_bytes);
}

void Heap::grow(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const uint64_t wanted = bytes / kAlignment * kAlignment;
  if (wanted <= bytes_) return;
  insert_free(bytes_, wanted - bytes_);
  bytes_ = wanted;
}

uint64_t Heap::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

void Heap::quarantine() {
  const std::lock_guard lock(mutex_);
  in_quarantine_ = true;
}

void Heap::end_quarantine() {
  const std::lock_guard lock(mutex_);
  in_quarantine_ = false;
  for (const auto& [offset, bytes] : held_back_) insert_free(offset, bytes);
  held_back_.clear();
  quarantined_ = 0;
}

uint64_t Heap::used() const {
  const std::lock_guard lock(mutex_);
  return used_;
}

uint64_t Heap::largest_free() const {
  const std::lock_guard lock(mutex_);
  return free_by_bytes_.empty() ? 0 : free_by_bytes_.rbegin()->first;
}

uint64_t Heap::quarantined() const {
  const std::lock_guard lock(mutex_);
  return quarantined_;
}

uint64_t Heap::peak() const {
  const std::lock_guard lock(mutex_);
  return peak_;
}

void Heap::give_back(uint64_t offset, uint64_t bytes) {
  used_ -= bytes;
  if (in_quarantine_) {
    held_back_.emplace(offset, bytes);
    quarantined_ += bytes;
  } else {
    insert_free(offset, bytes);
  }
}

void Heap::insert_free(uint64_t offset, uint64_t bytes) {
  const auto after = free_.lower_bound(offset);
  if (after != free_.end() && after->first == offset + bytes) {
    bytes += after->second;
    free_by_bytes_.erase({after->second, after->first});
    free_.erase(after);
  }
  const auto next = free_.lower_bound(offset);
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      free_by_bytes_.erase({before->second, before->first});
      free_.erase(before);
    }
  }
  free_.emplace(offset, bytes);
  free_by_bytes_.emplace(bytes, offset);
}

}  // namespace weft
