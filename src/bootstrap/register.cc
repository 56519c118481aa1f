#include "bootstrap/register.h"

#include <atomic>
#include <string>

#include "base/status.h"

namespace weft {
namespace {

// Epoch 32, state 2, version 14, planned 1, writer 15. A zeroed word is epoch 0, which is before the first one.
constexpr int kEpochShift = 32;
constexpr int kStateShift = 30;
constexpr int kVersionShift = 16;
constexpr int kPlannedShift = 15;
constexpr uint16_t kWriterMask = (1u << kPlannedShift) - 1;

[[noreturn]] void throw_forgotten(uint32_t epoch, uint32_t newest) {
  throw_invalid_state("epoch " + std::to_string(epoch) + " is forgotten, its register serves epoch " +
                      std::to_string(newest) + " by now: this rank has been left behind");
}

}  // namespace

uint64_t RegisterWord::pack() const noexcept {
  return uint64_t{epoch} << kEpochShift | uint64_t{static_cast<uint8_t>(state)} << kStateShift |
         uint64_t{static_cast<uint16_t>(version & kMaxRegisterVersion)} << kVersionShift |
         uint64_t{is_planned} << kPlannedShift | uint64_t{static_cast<uint16_t>(writer & kWriterMask)};
}

RegisterWord RegisterWord::unpack(uint64_t bits) noexcept {
  RegisterWord word;
  word.epoch = static_cast<uint32_t>(bits >> kEpochShift);
  word.state = static_cast<RegisterState>(bits >> kStateShift & 3);
  word.version = static_cast<uint16_t>(bits >> kVersionShift & kMaxRegisterVersion);
  word.is_planned = (bits >> kPlannedShift & 1) != 0;
  word.writer = static_cast<uint16_t>(bits & kWriterMask);
  return word;
}

bool may_become(const RegisterWord& from, const RegisterWord& to) noexcept {
  if (from.epoch == 0 || from.epoch != to.epoch || from.state == RegisterState::kCommitted) return false;
  const bool is_same = from.version == to.version && from.writer == to.writer && from.is_planned == to.is_planned;
  if (from.state == RegisterState::kProposed && to.state == RegisterState::kCommitted && is_same) return true;
  if (to.is_planned != (to.state == RegisterState::kProposed)) return false;  // what is decided at once is a recovery
  if (from.state == RegisterState::kOpen && to.state == RegisterState::kOpen) return false;
  return to.version > from.version;
}

PageRegister::PageRegister(std::span<std::byte> page) : page_(page) {
  if (page.size() < kBytes || reinterpret_cast<uintptr_t>(page.data()) % kStride != 0) {
    throw_invalid_argument("a page of " + std::to_string(page.size()) + " bytes; registers take " +
                           std::to_string(kBytes) + ", aligned to " + std::to_string(kStride));
  }
}

uint64_t* PageRegister::word_of(uint32_t epoch) const noexcept {
  return reinterpret_cast<uint64_t*>(page_.data() + epoch % kNumWords * kStride);
}

RegisterWord PageRegister::read(uint32_t epoch) {
  const RegisterWord found =
      RegisterWord::unpack(std::atomic_ref<uint64_t>(*word_of(epoch)).load(std::memory_order_acquire));
  if (found.epoch > epoch) throw_forgotten(epoch, found.epoch);
  if (found.epoch < epoch) return {.epoch = epoch};  // still the word of 64 epochs ago
  return found;
}

bool PageRegister::is_decided(uint32_t epoch) const noexcept {
  const RegisterWord found =
      RegisterWord::unpack(std::atomic_ref<uint64_t>(*word_of(epoch)).load(std::memory_order_acquire));
  if (epoch == 0) return false;
  return found.epoch > epoch || (found.epoch == epoch && found.state == RegisterState::kCommitted);
}

RegisterWord PageRegister::compare_set(const RegisterWord& expected, const RegisterWord& desired) {
  if (!may_become(expected, desired)) {
    throw_invalid_argument("a register of epoch " + std::to_string(expected.epoch) + " can't go from state " +
                           std::to_string(static_cast<int>(expected.state)) + ", version " +
                           std::to_string(expected.version) + " to epoch " + std::to_string(desired.epoch) +
                           ", state " + std::to_string(static_cast<int>(desired.state)) + ", version " +
                           std::to_string(desired.version));
  }
  std::atomic_ref<uint64_t> word(*word_of(expected.epoch));
  uint64_t seen = word.load(std::memory_order_acquire);
  // check: allow spin-loop: each turn either ends or has seen another process's write, of which there are few
  for (;;) {
    const RegisterWord found = RegisterWord::unpack(seen);
    if (found.epoch > expected.epoch) throw_forgotten(expected.epoch, found.epoch);
    const bool is_unwritten = found.epoch < expected.epoch;
    const RegisterWord now = is_unwritten ? RegisterWord{.epoch = expected.epoch} : found;
    if (now != expected) return now;
    // Release: the record that the word names was written before. Acquire: so is whatever another writer's word names.
    if (word.compare_exchange_strong(seen, desired.pack(), std::memory_order_acq_rel)) return desired;
  }
}

}  // namespace weft
