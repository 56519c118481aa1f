// What decides who belongs to an epoch: one word an epoch, changed by compare-and-set alone. docs/protocols/membership.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "bootstrap/rank_set.h"

namespace weft {

enum class RegisterState : uint8_t { kOpen, kProposed, kCommitted };

// One epoch's word. `writer` is the rank whose record it names, `version` the number of the attempt.
struct RegisterWord {
  uint32_t epoch = 0;
  RegisterState state = RegisterState::kOpen;
  uint16_t version = 0;  // 14 bits
  uint16_t writer = 0;   // 15 bits
  bool is_planned =
      false;  // which of the writer's two records of the epoch: that of a planned change, or of a recovery

  uint64_t pack() const noexcept;
  static RegisterWord unpack(uint64_t bits) noexcept;
  bool operator==(const RegisterWord&) const = default;
};

inline constexpr uint16_t kMaxRegisterVersion = (1u << 14) - 1;
// Of a proposal: the two behind it are for withdrawing the last one, and for a recovery, which never lacks a version.
inline constexpr uint16_t kMaxProposedVersion = kMaxRegisterVersion - 2;

// Whether a word may become the other: of one epoch; a committed one never changes; a proposal is withdrawn, or followed
// by another, with a higher version.
bool may_become(const RegisterWord& from, const RegisterWord& to) noexcept;

class Register {
 public:
  virtual ~Register() = default;

  // The word of `epoch`: open with version 0 if nobody has written it. Error kInvalidState if the register has forgotten
  // that epoch: the caller has been left behind.
  virtual RegisterWord read(uint32_t epoch) = 0;

  // Makes it `desired` if it is `expected`, and returns what is there afterwards: `desired` if and only if this call, or
  // an equal one, won. Errors: kInvalidState as read(), kInvalidArgument if `expected` may not become `desired`.
  virtual RegisterWord compare_set(const RegisterWord& expected, const RegisterWord& desired) = 0;
};

// Of the ranks of one machine: words in memory that they share and that lives as long as anyone maps it. The newest 64
// epochs are kept.
class PageRegister final : public Register {
 public:
  static constexpr size_t kNumWords = 64;
  static constexpr size_t kStride = 64;  // a cache line each
  static constexpr size_t kBytes = kNumWords * kStride;

  // `page`: kBytes, aligned to a cache line, zeroed before its first use. Error kInvalidArgument otherwise.
  explicit PageRegister(std::span<std::byte> page);

  RegisterWord read(uint32_t epoch) override;
  RegisterWord compare_set(const RegisterWord& expected, const RegisterWord& desired) override;
  bool is_decided(uint32_t epoch) const noexcept;  // or forgotten; one load

 private:
  uint64_t* word_of(uint32_t epoch) const noexcept;

  std::span<std::byte> page_;
};

}  // namespace weft
