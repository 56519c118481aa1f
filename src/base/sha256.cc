#include "base/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace weft {
namespace {

constexpr size_t kBlockBytes = 64;

constexpr std::array<uint32_t, 64> kRound{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t big_endian(const std::byte* bytes) noexcept {
  uint32_t word = 0;
  for (int at = 0; at < 4; ++at) word = word << 8 | static_cast<uint32_t>(bytes[at]);
  return word;
}

}  // namespace

void Sha256::mix(const std::byte* block) noexcept {
  std::array<uint32_t, 64> word{};
  for (size_t at = 0; at < 16; ++at) word[at] = big_endian(block + 4 * at);
  for (size_t at = 16; at < word.size(); ++at) {
    const uint32_t a = word[at - 15];
    const uint32_t b = word[at - 2];
    word[at] = word[at - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + word[at - 7] +
               (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t at = 0; at < word.size(); ++at) {
    const uint32_t first =
        h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) + kRound[at] + word[at];
    const uint32_t second = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
  }
  const std::array<uint32_t, 8> mixed{a, b, c, d, e, f, g, h};
  for (size_t at = 0; at < state_.size(); ++at) state_[at] += mixed[at];
}

void Sha256::add(std::span<const std::byte> bytes) noexcept {
  while (!bytes.empty()) {
    const size_t filled = num_bytes_ % kBlockBytes;
    const size_t part = std::min(bytes.size(), kBlockBytes - filled);
    std::memcpy(block_.data() + filled, bytes.data(), part);
    num_bytes_ += part;
    bytes = bytes.subspan(part);
    if (filled + part == kBlockBytes) mix(block_.data());
  }
}

Digest Sha256::finish() noexcept {
  const uint64_t num_bits = num_bytes_ * 8;
  const std::byte one{0x80};
  const std::byte zero{};
  add({&one, 1});
  while (num_bytes_ % kBlockBytes != kBlockBytes - 8) add({&zero, 1});
  std::array<std::byte, 8> length{};
  for (size_t at = 0; at < length.size(); ++at) length[at] = static_cast<std::byte>(num_bits >> (56 - 8 * at));
  add(length);
  Digest digest{};
  for (size_t at = 0; at < digest.size(); ++at) {
    digest[at] = static_cast<uint8_t>(state_[at / 4] >> (24 - 8 * (at % 4)));
  }
  return digest;
}

Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> message) noexcept {
  std::array<std::byte, kBlockBytes> padded{};
  if (key.size() > padded.size()) {
    Sha256 hash;
    hash.add(key);
    const Digest digest = hash.finish();
    std::memcpy(padded.data(), digest.data(), digest.size());
  } else if (!key.empty()) {
    std::memcpy(padded.data(), key.data(), key.size());
  }
  const auto hash_of = [&](std::byte pad, std::span<const std::byte> bytes) {
    std::array<std::byte, kBlockBytes> first = padded;
    for (std::byte& each : first) each ^= pad;
    Sha256 hash;
    hash.add(first);
    hash.add(bytes);
    return hash.finish();
  };
  const Digest inner = hash_of(std::byte{0x36}, message);
  return hash_of(std::byte{0x5c}, std::as_bytes(std::span(inner)));
}

bool equal_digests(const Digest& a, const Digest& b) noexcept {
  uint8_t differs = 0;
  for (size_t at = 0; at < a.size(); ++at) differs = static_cast<uint8_t>(differs | (a[at] ^ b[at]));
  return differs == 0;
}

}  // namespace weft
