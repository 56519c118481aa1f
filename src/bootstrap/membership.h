// What one rank knows of its group's membership and what it does next: a state machine without I/O, clock, threads or
// allocation. The driver tells it what happened, and does what it says. docs/protocols/membership.md has the rules.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "bootstrap/membership_record.h"
#include "bootstrap/rank_set.h"
#include "bootstrap/register.h"

namespace weft {

using GroupId = std::array<uint8_t, 16>;  // random, drawn once for a group

// Who says something, and of which membership (R22).
struct Origin {
  GroupId group{};
  uint32_t epoch = 0;
  uint32_t era = 0;  // the newest epoch with fresh pages
  int rank = -1;
  uint64_t incarnation = 0;  // nonce of the sender's process life
};

enum class Hearing : uint8_t {
  kDropped,  // of a stranger, or of an era that is over
  kCounts,
  kLater,  // of an epoch that this rank has not entered: to be asked again when it has entered another one
};

// What a caller of recover() asks for. Who comes too late with it adopts what was decided.
struct RecoverWish {
  RankSet evict{};    // live ranks that are to be left out; this rank itself never is
  RankSet exactly{};  // not empty: exactly these, else the call fails
  int min_ranks = 1;  // with fewer nothing is decided
};

enum class MembershipFailure : uint8_t {
  kNone,
  kEvicted,      // a record without this rank was committed: no call works any more
  kPeersLost,    // `ranks` of the exact set are gone, or were left out of what was decided
  kPeersLate,    // `ranks` had not come when the deadline passed
  kControlLost,  // the register did not answer until the deadline
  kOtherSet,     // `ranks` were decided, which is not the exact set
  kTooFew,       // only `ranks` are left
  kLastEpoch,    // there are no more epochs, or no more versions of the register
  kDamaged,      // the record of `epoch` can't be believed
};

struct MembershipEvent {
  enum class Kind : uint8_t {
    kRecover,  // a call of recover() begins, with `wish`
    kLook,     // somebody says that an epoch was decided
    kWord,     // what the register says of word.epoch, and the record that it names (null: damaged) if it is committed
    kForgotten,  // the register serves later epochs by now
    kGone,       // `ranks` have ended, closed, or were cut off
    kProven,     // `ranks` are gone and touch no memory any more: the process has ended, or has closed in order
    kHere,       // `ranks` are at the meeting of `epoch`
    kRenewed,    // fresh memory for `epoch` is in place, this rank's and that of all members
    kDeadline,   // of the call
    kLeave,      // the call ends for a reason that is none of the membership's
  };

  Kind kind = Kind::kLook;
  uint32_t epoch = 0;
  RankSet ranks{};
  RecoverWish wish{};
  RegisterWord word{};
  const MembershipRecord* record = nullptr;
};

struct MembershipAction {
  enum class Kind : uint8_t {
    kRead,    // the register of `epoch`; answer: kWord or kForgotten
    kDecide,  // put draft() where others can read it, then compare-and-set; answer: kWord or kForgotten
    kTell,    // `ranks` that `epoch` was decided: they are to look
    kMeet,  // tell `ranks` that this rank is at the meeting of `epoch`; until the call ends, answers: kHere, kGone, and kWord
            // of the next epoch when that is committed and the meeting superseded: somebody who is waited for has said
            // something in a later epoch, or it or this rank is missing in a later record
    kRenew,  // fresh memory for `epoch` among `ranks`; answer: kRenewed, kGone, or kWord as above
    kEnter,  // `epoch` with `ranks`; the call has ended well
    kRaise,  // `failure`; the call has ended. kEvicted may also answer kLook
  };

  Kind kind = Kind::kRead;
  MembershipFailure failure = MembershipFailure::kNone;
  uint32_t epoch = 0;
  RankSet ranks{};
  RegisterWord expected{};  // kDecide
  RegisterWord desired{};
};

// What one step asks for, in order.
class MembershipActions {
 public:
  void add(const MembershipAction& action) noexcept { actions_[num_++] = action; }
  void add(const MembershipActions& others) noexcept {
    for (const MembershipAction& action : others) add(action);
  }
  const MembershipAction* begin() const noexcept { return actions_.data(); }
  const MembershipAction* end() const noexcept { return actions_.data() + num_; }
  bool empty() const noexcept { return num_ == 0; }

 private:
  std::array<MembershipAction, 3> actions_{};
  size_t num_ = 0;
};

class Membership {
 public:
  // All of `incarnations` (by rank; nonces) are active in `first_epoch`. Error kInvalidArgument if this rank is none of them.
  Membership(int rank, const std::vector<uint64_t>& incarnations, const GroupId& group, uint32_t first_epoch);

  MembershipActions step(const MembershipEvent& event) noexcept;

  const MembershipRecord& draft() const noexcept { return draft_; }  // of the last kDecide; not sealed

  uint32_t epoch() const noexcept { return epoch_; }  // entered
  uint32_t era() const noexcept { return era_; }
  const RankSet& active() const noexcept { return active_; }  // in epoch()
  uint32_t newest() const noexcept { return newest_; }        // the last epoch whose record was adopted
  bool is_evicted() const noexcept { return phase_ == Phase::kEvicted; }
  bool is_calling() const noexcept { return phase_ != Phase::kIdle && phase_ != Phase::kLooking && !is_evicted(); }

  RankSet evicted() const noexcept;         // were active once, are left out, and may still live
  RankSet safe_to_delete() const noexcept;  // were active once, are left out, and are proven gone

  Origin origin() const noexcept;                     // of what this rank says
  bool knows(const Origin& origin) const noexcept;    // whether it is an active member of this group
  Hearing hear(const Origin& origin) const noexcept;  // R22

 private:
  enum class Phase : uint8_t { kIdle, kLooking, kReading, kDeciding, kMeeting, kRenewing, kEvicted };

  bool is_meeting() const noexcept { return phase_ == Phase::kMeeting || phase_ == Phase::kRenewing; }
  MembershipActions look() noexcept;
  MembershipActions read_next() noexcept;
  MembershipActions take_word(const MembershipEvent& event) noexcept;
  MembershipActions adopt(const MembershipRecord& record) noexcept;
  MembershipActions choose(const RegisterWord& next) noexcept;
  MembershipActions decide(const RegisterWord& next) noexcept;
  MembershipActions meet(const RankSet& ranks) noexcept;
  MembershipActions lose(const RankSet& ranks) noexcept;
  MembershipActions enter() noexcept;
  MembershipActions end(MembershipFailure failure, const RankSet& ranks) noexcept;
  MembershipActions run_out() noexcept;
  void leave_meeting() noexcept;

  int rank_;
  GroupId group_;
  std::vector<uint64_t> incarnations_;  // by rank
  RankSet founders_;

  uint32_t epoch_;
  uint32_t era_;
  RankSet active_;

  Phase phase_ = Phase::kIdle;
  uint32_t newest_;      // adopted, >= epoch_
  RankSet newest_set_;   // of its record
  uint32_t spent_ = 0;   // newest epoch whose meeting this rank has left: no epoch is tried twice
  RankSet here_;         // at the meeting of newest_
  RankSet gone_;         // also those that are not proven gone
  RankSet proven_;       // part of gone_
  RecoverWish wish_;     // of the call under way
  RegisterWord wanted_;  // that the last kDecide asked for
  MembershipRecord draft_;
  bool has_news_ = false;       // was told of a decision during a call, and has not looked since
  bool is_unanswered_ = false;  // a kDecide with draft_ has had no answer yet
};

}  // namespace weft
