// A set of ranks: the type of masks in the control plane and in membership records. Masks of one domain on a device are
// another, smaller type.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace weft {

inline constexpr int kMaxControlRanks = 1024;

// Plain bytes: it travels and lies in shared pages as it is. Ranks outside 0..1023 are in no set.
class RankSet {
 public:
  static RankSet first(int num_ranks) {
    RankSet set;
    for (int rank = 0; rank < num_ranks; ++rank) set.add(rank);
    return set;
  }
  static RankSet of(const std::vector<int>& ranks) {
    RankSet set;
    for (const int rank : ranks) set.add(rank);
    return set;
  }

  // Bit r: rank r, of the first 64: the masks of windows, whose groups have no more.
  static RankSet of_mask(uint64_t mask) {
    RankSet set;
    set.words_[0] = mask;
    return set;
  }
  uint64_t mask() const { return words_[0]; }

  static constexpr bool is_rank(int rank) { return rank >= 0 && rank < kMaxControlRanks; }

  bool contains(int rank) const { return is_rank(rank) && (word(rank) >> (rank % 64) & 1u) != 0; }
  void add(int rank) {
    if (is_rank(rank)) word(rank) |= uint64_t{1} << (rank % 64);
  }
  void remove(int rank) {
    if (is_rank(rank)) word(rank) &= ~(uint64_t{1} << (rank % 64));
  }

  int count() const {
    int ranks = 0;
    for (const uint64_t each : words_) ranks += std::popcount(each);
    return ranks;
  }
  bool empty() const { return *this == RankSet(); }

  // The lowest member that is at least `rank`; -1: none.
  int next(int rank) const {
    if (rank < 0) rank = 0;
    while (rank < kMaxControlRanks) {
      const uint64_t left = word(rank) >> (rank % 64);
      if (left != 0) return rank + std::countr_zero(left);
      rank = (rank / 64 + 1) * 64;
    }
    return -1;
  }

  std::vector<int> ranks() const {  // ascending
    std::vector<int> found;
    for (int rank = next(0); rank >= 0; rank = next(rank + 1)) found.push_back(rank);
    return found;
  }

  RankSet operator|(const RankSet& other) const {
    RankSet set = *this;
    for (size_t idx = 0; idx < words_.size(); ++idx) set.words_[idx] |= other.words_[idx];
    return set;
  }
  RankSet operator&(const RankSet& other) const {
    RankSet set = *this;
    for (size_t idx = 0; idx < words_.size(); ++idx) set.words_[idx] &= other.words_[idx];
    return set;
  }
  RankSet operator-(const RankSet& other) const {  // without those of `other`
    RankSet set = *this;
    for (size_t idx = 0; idx < words_.size(); ++idx) set.words_[idx] &= ~other.words_[idx];
    return set;
  }
  bool operator==(const RankSet&) const = default;

 private:
  uint64_t& word(int rank) { return words_[static_cast<size_t>(rank / 64)]; }
  const uint64_t& word(int rank) const { return words_[static_cast<size_t>(rank / 64)]; }

  std::array<uint64_t, kMaxControlRanks / 64> words_{};
};
static_assert(sizeof(RankSet) == kMaxControlRanks / 8 && std::is_trivially_copyable_v<RankSet>);

}  // namespace weft
