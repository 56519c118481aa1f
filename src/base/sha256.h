// SHA-256 and HMAC-SHA-256 (FIPS 180-4, RFC 2104): what proves that a stranger on the network is a rank of this group.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace weft {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  void add(std::span<const std::byte> bytes) noexcept;
  Digest finish() noexcept;  // once

 private:
  void mix(const std::byte* block) noexcept;

  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, 64> block_{};
  uint64_t num_bytes_ = 0;
};

Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> message) noexcept;

// Takes the same time whichever byte differs.
bool equal_digests(const Digest& a, const Digest& b) noexcept;

}  // namespace weft
