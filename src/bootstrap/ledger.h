// Where the ranks of a group decide: one entry an epoch, changed by compare-and-set alone (docs/protocols/membership.md). On one
// machine it is the group's page; between machines a store, of which each rank also keeps what it has heard.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "bootstrap/decider.h"
#include "bootstrap/decision.h"
#include "bootstrap/group_page.h"
#include "bootstrap/membership.h"

namespace weft {

class Ledger {
 public:
  virtual ~Ledger() = default;

  virtual const GroupId& group() const noexcept = 0;

  // What is known here; these never wait. A committed entry is final; an open one may be decided elsewhere.
  virtual bool is_decided(uint32_t epoch) const noexcept = 0;  // or a later one is
  virtual Decision find(uint32_t epoch) = 0;

  // What is so, wherever it was decided. May wait: error kControlLost if the store does not answer.
  virtual Decision read(uint32_t epoch, const Wait& wait) = 0;
  // Makes the entry `desired` if it is `expected`, and returns what is there afterwards. `draft`: the record of this rank that
  // `desired` names; null: the one that `expected` named.
  virtual Decision set(int rank, const MembershipRecord* draft, const RegisterWord& expected,
                       const RegisterWord& desired, const Wait& wait) = 0;
};

class PageLedger final : public Ledger {
 public:
  explicit PageLedger(std::shared_ptr<GroupPage> page) : page_(std::move(page)) {}

  const GroupId& group() const noexcept override { return page_->group(); }
  bool is_decided(uint32_t epoch) const noexcept override { return page_->words().is_decided(epoch); }
  Decision find(uint32_t epoch) override;
  Decision read(uint32_t epoch, const Wait&) override { return find(epoch); }
  Decision set(int rank, const MembershipRecord* draft, const RegisterWord& expected, const RegisterWord& desired,
               const Wait& wait) override;

 private:
  Decision entry_of(const RegisterWord& word);

  std::shared_ptr<GroupPage> page_;
};

class StoreLedger final : public Ledger {
 public:
  // `announce` is told of each decision that this rank has learnt from the store itself, by the thread that asked.
  using Announce = std::function<void(const Decision&)>;
  StoreLedger(const GroupId& group, std::shared_ptr<Decider> decider) : group_(group), decider_(std::move(decider)) {}
  void set_announce(Announce announce) { announce_ = std::move(announce); }  // before the first read or set

  // What another rank says was decided. False: it was known.
  bool learn(const Decision& decision);
  std::optional<Decision> newest() const;  // that is known

  const GroupId& group() const noexcept override { return group_; }
  bool is_decided(uint32_t epoch) const noexcept override;
  Decision find(uint32_t epoch) override;
  Decision read(uint32_t epoch, const Wait& wait) override;
  Decision set(int rank, const MembershipRecord* draft, const RegisterWord& expected, const RegisterWord& desired,
               const Wait& wait) override;

 private:
  static constexpr size_t kMostKept = PageRegister::kNumWords;

  std::string key_of(uint32_t epoch) const;
  Decision take(uint32_t epoch, const std::string& value);

  const GroupId group_;
  const std::shared_ptr<Decider> decider_;
  Announce announce_;

  mutable std::mutex mutex_;                 // of the two below
  std::map<uint32_t, Decision> decided_;     // the newest that are known: kMostKept, and the one to be forgotten next
  std::map<uint32_t, std::string> pending_;  // what was read and is not committed, word for word
};

}  // namespace weft
