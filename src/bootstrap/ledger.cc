#include "bootstrap/ledger.h"

#include "base/status.h"
#include "weft/config/fail_point.h"

namespace weft {
namespace {

// Of a fail point beside a compare-and-set.
[[maybe_unused]] const char* move_name(const RegisterWord& desired, bool is_new, bool is_done) {
  switch (desired.state) {
    case RegisterState::kProposed: return is_done ? "propose.done" : "propose.recorded";
    case RegisterState::kOpen: return is_done ? "withdraw.done" : "withdraw.begun";
    case RegisterState::kCommitted: break;
  }
  if (is_new) return is_done ? "decide.done" : "decide.recorded";
  return is_done ? "commit.done" : "commit.begun";
}

}  // namespace

Decision PageLedger::entry_of(const RegisterWord& word) {
  Decision entry{.word = word};
  if (word.state != RegisterState::kOpen) entry.record = page_->find(word);
  return entry;
}

Decision PageLedger::find(uint32_t epoch) {
  try {
    return entry_of(page_->words().read(epoch));
  } catch (const Error& error) {
    if (error.code != ErrorCode::kInvalidState) throw;
    return {.word = {.epoch = epoch}, .is_forgotten = true};
  }
}

Decision PageLedger::set(int rank, const MembershipRecord* draft, const RegisterWord& expected,
                         const RegisterWord& desired, const Wait&) {
  try {
    if (draft != nullptr) page_->put(rank, *draft);
    WEFT_FAIL_POINT(move_name(desired, draft != nullptr, false));
    const RegisterWord word = page_->words().compare_set(expected, desired);
    WEFT_FAIL_POINT(move_name(desired, draft != nullptr, true));
    return entry_of(word);
  } catch (const Error& error) {
    if (error.code != ErrorCode::kInvalidState) throw;
    return {.word = {.epoch = expected.epoch}, .is_forgotten = true};
  }
}

bool StoreLedger::learn(const Decision& decision) {
  if (decision.word.state != RegisterState::kCommitted || !decision.record) return false;
  const std::lock_guard lock(mutex_);
  pending_.erase(decision.word.epoch);
  const bool is_new = decided_.emplace(decision.word.epoch, decision).second;
  if (decided_.size() > kMostKept + 1) decided_.erase(decided_.begin());
  return is_new;
}

std::optional<Decision> StoreLedger::newest() const {
  const std::lock_guard lock(mutex_);
  if (decided_.empty()) return std::nullopt;
  return decided_.rbegin()->second;
}

bool StoreLedger::is_decided(uint32_t epoch) const noexcept {
  const std::lock_guard lock(mutex_);
  return epoch != 0 && !decided_.empty() && decided_.rbegin()->first >= epoch;
}

Decision StoreLedger::find(uint32_t epoch) {
  const std::lock_guard lock(mutex_);
  const auto found = decided_.find(epoch);
  if (found != decided_.end()) return found->second;
  // What lies before one that is known was decided, too, but this rank did not hear of it.
  const bool is_before = !decided_.empty() && decided_.rbegin()->first > epoch;
  return {.word = {.epoch = epoch}, .is_forgotten = is_before};
}

Decision StoreLedger::read(uint32_t epoch, const Wait& wait) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = decided_.find(epoch);
    if (found != decided_.end()) return found->second;
  }
  return take(epoch, decider_->compare_set(key_of(epoch), "", "", wait));
}

Decision StoreLedger::set(int rank, const MembershipRecord* draft, const RegisterWord& expected,
                          const RegisterWord& desired, const Wait& wait) {
  std::string before;
  {
    const std::lock_guard lock(mutex_);
    const auto found = pending_.find(expected.epoch);
    if (found != pending_.end()) before = found->second;
  }
  const Decision now = read_value(before, group_, expected.epoch);
  if (now.word != expected) return read(expected.epoch, wait);
  if (!may_become(expected, desired) || desired.writer != (draft != nullptr ? rank : expected.writer)) {
    throw_invalid_argument("a decision that can't be made: epoch " + std::to_string(desired.epoch));
  }
  Decision wanted{.word = desired, .record = draft != nullptr ? std::optional(*draft) : now.record};
  if (draft != nullptr) seal_record(*wanted.record);
  const std::string value = write_value(wanted);
  const Decision after = take(expected.epoch, decider_->compare_set(key_of(expected.epoch), before, value, wait));
  const bool is_mine = after.word == desired && desired.state == RegisterState::kCommitted;
  if (is_mine && desired.epoch > kMostKept) {
    // So that the store does not grow: a rank that asks for it was late for all that came since.
    const uint32_t old = desired.epoch - static_cast<uint32_t>(kMostKept);
    const std::lock_guard lock(mutex_);
    const auto kept = decided_.find(old);
    if (kept != decided_.end()) decider_->post(key_of(old), write_value(kept->second), std::string(kForgottenValue));
  }
  return after;
}

Decision StoreLedger::take(uint32_t epoch, const std::string& value) {
  const Decision found = read_value(value, group_, epoch);
  if (found.word.state == RegisterState::kCommitted) {
    if (learn(found) && announce_) announce_(found);
  } else if (!found.is_forgotten) {
    const std::lock_guard lock(mutex_);
    pending_.insert_or_assign(epoch, value);
    if (pending_.size() > kMostKept) pending_.erase(pending_.begin());
  }
  return found;
}

std::string StoreLedger::key_of(uint32_t epoch) const {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string key = "weft/membership/";
  for (const uint8_t byte : group_) {
    key += kDigits[byte >> 4];
    key += kDigits[byte & 15];
  }
  return key + "/" + std::to_string(epoch);
}

}  // namespace weft
