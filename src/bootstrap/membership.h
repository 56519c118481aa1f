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

// Pages are renewed at the latest so many epochs after they were made: signals on them carry 16 bits of the epoch (R23).
inline constexpr uint32_t kMostEpochsOfEra = 1u << 15;

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
  // Newcomers that may be taken in, the lowest first and in place of those that are lost, if all that are left are prepared for
  // them. `takes_all_spares`: all of them, however many are lost.
  RankSet spares{};
  bool takes_all_spares = false;
};

// A planned change: whom it takes in and lets go, at a boundary between two operations.
struct ChangeWish {
  RankSet add{};      // joiners: every member and every one of them must be prepared for them
  RankSet remove{};   // members
  RankSet suspend{};  // of those: they stay connected, and may be taken in again
  uint64_t id = 0;    // of the wish; several ranks may ask for the same
  uint64_t map_hash = 0;
  uint64_t margin = 2;  // how many boundaries ahead of the furthest rank it takes effect
};

// What a rank shows the others: a cell that it alone writes.
struct MembershipCell {
  RankSet prepared{};   // joiners that it has connected, checked and mapped
  uint64_t passed = 0;  // boundaries of `era`
  uint32_t era = 0;
  uint32_t acked_epoch = 0;  // the proposal that it has acknowledged last; 0: none
  uint32_t acked_version = 0;
  uint32_t reserved = 0;
};
static_assert(std::is_trivially_copyable_v<MembershipCell>);

enum class MembershipFailure : uint8_t {
  kNone,
  kEvicted,      // a record without this rank was committed: no call works any more
  kPeersLost,    // `ranks` of the exact set are gone, or were left out of what was decided
  kPeersLate,    // `ranks` had not come when the deadline passed
  kControlLost,  // the register did not answer until the deadline
  kOtherSet,     // `ranks` were decided, which is not the exact set
  kTooFew,       // only `ranks` are left
  kLastEpoch,    // there are no more epochs, or no more versions of the register
  kOvertaken,    // at a boundary: a recovery has decided `epoch`, so the operations are broken; recover() goes there
  kDamaged,      // the record of `epoch` can't be believed
};

struct MembershipEvent {
  enum class Kind : uint8_t {
    kRecover,    // a call of recover() begins, with `wish`
    kLook,       // somebody says that an epoch was decided
    kWord,       // what the register says of word.epoch, and the record that it names (null: damaged) unless it is open
    kForgotten,  // of `epoch`: its word or its record serves a later one by now
    kGone,       // `ranks` have ended, closed, or were cut off
    kProven,     // `ranks` are gone and touch no memory any more: the process has ended, or has closed in order
    kHere,       // `ranks` are at the meeting of `epoch`
    kRenewed,    // fresh memory for `epoch` is in place, this rank's and that of all members
    kDeadline,   // of the call
    kLeave,      // the call ends for a reason that is none of the membership's
    kMet,        // another incarnation is connected in slot `rank`: the last one's end is not its own
    kPrepared,   // this rank could take `rank` in, whose incarnation is `incarnation`; 0: not any more
    kCell,       // `rank` shows `cell`
    kPropose,    // `change` is wanted; one at a time
    kTakeBack,   // it is not any more. Of no use if it was committed
    kBoundary,   // a call of boundary() begins
    kPatience,   // boundary() has waited long enough for a decision
  };

  Kind kind = Kind::kLook;
  uint32_t epoch = 0;
  RankSet ranks{};
  RecoverWish wish{};
  RegisterWord word{};
  const MembershipRecord* record = nullptr;
  int rank = -1;
  uint64_t incarnation = 0;
  const MembershipCell* cell = nullptr;
  ChangeWish change{};
};

struct MembershipAction {
  enum class Kind : uint8_t {
    kRead,    // the register of `epoch`; answer: kWord or kForgotten
    kDecide,  // put draft() where others can read it, then compare-and-set; answer: kWord or kForgotten
    kMove,    // compare-and-set alone: a proposal is decided or withdrawn; answer as of kDecide
    kShow,    // cell() to all others, joiners too
    kTell,    // `ranks` that `epoch` was decided: they are to look
    kMeet,  // tell `ranks` that this rank is at the meeting of `epoch`; until the call ends, answers: kHere, kGone, and kWord
            // of the next epoch when that is committed and the meeting superseded: somebody who is waited for has said
            // something in a later epoch, or it or this rank is missing in a later record
    kRenew,  // fresh memory for `epoch` among `ranks`; answer: kRenewed, kGone, or kWord as above
    kEnter,  // `epoch` with `ranks`; the call has ended well
    kRaise,  // `failure`; the call has ended. kEvicted may also answer kLook, and to a joiner kOvertaken: a recovery has taken it in,
             // and recover() goes there
    kPass,   // the boundary is passed, nothing has changed
    kInstall,  // the boundary is passed, and with it `epoch` begins, with `ranks` and the pages there are. This rank is none of
    // them: it has left. Of a joiner that was taken in: the first operation is the one behind boundary passed()
    kChanged,    // the change that was wanted is `epoch`
    kWithdrawn,  // it is not, and nothing has happened; it may be asked for again, with more margin
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
  std::array<MembershipAction, 8> actions_{};
  size_t num_ = 0;
};

inline MembershipActions one(const MembershipAction& action) noexcept {
  MembershipActions actions;
  actions.add(action);
  return actions;
}

class Membership {
 public:
  // The founders: all of `incarnations` (by slot: nonces; 0: empty) are active in `first_epoch`. Error kInvalidArgument if this
  // rank is none of them.
  Membership(int rank, const std::vector<uint64_t>& incarnations, const GroupId& group, uint32_t first_epoch);

  // What a joiner is told: who is active in the newest epoch that its sponsor knows, by slot: nonces; 0: not active.
  struct Welcome {
    std::vector<uint64_t> incarnations;
    uint32_t epoch = 0;
    uint32_t era = 0;
  };
  // A joiner in an empty slot: it acknowledges what takes it in, and becomes a member by that. Error kInvalidArgument if the
  // slot is taken.
  Membership(int rank, uint64_t incarnation, const Welcome& welcome, const GroupId& group);

  MembershipActions step(const MembershipEvent& event) noexcept;

  // Of `joiners`, those that a change could take in now, together: all members and each of these are prepared for each.
  RankSet admissible(const RankSet& joiners) const noexcept;

  // A boundary where nothing is due, proposed or wanted. False: step() has to be asked.
  bool pass() noexcept {
    const bool is_quiet = phase_ == Phase::kIdle && newest_ == epoch_ && !is_wanted_ && !is_proposed();
    if (!is_member_ || !is_quiet) return false;
    ++cell_.passed;
    return true;
  }

  const MembershipRecord& draft() const noexcept {
    return is_draft_planned_ ? plan_ : draft_;
  }  // of the last kDecide; not sealed
  const MembershipCell& cell() const noexcept { return cell_; }
  Welcome welcome() const;  // for a joiner

  uint32_t epoch() const noexcept { return epoch_; }  // entered
  uint32_t era() const noexcept { return era_; }
  uint64_t passed() const noexcept { return cell_.passed; }  // boundaries of this era
  bool is_member() const noexcept {
    return is_member_;
  }  // not: a joiner that was not taken in yet, or one that has left
  bool is_leaving() const noexcept {  // a change lets it go, at a boundary that it has not come to
    return is_member_ && !is_evicted() && !newest_set_.contains(rank_);
  }
  bool waits_at_boundary() const noexcept { return waits_; }
  bool has_proposed() const noexcept {
    return is_wanted_ && planned_.epoch != 0;
  }  // what is wanted here stands in a register
  const RankSet& active() const noexcept { return active_; }  // in epoch()
  uint32_t newest() const noexcept { return newest_; }        // the last epoch whose record was adopted
  const RankSet& newest_set() const noexcept { return newest_set_; }
  bool is_changing() const noexcept {
    return newest_ > epoch_ || (is_proposed() && has_acked());
  }  // this rank has given its word
  // A planned change would be the first too many on these pages: recover() makes fresh ones.
  bool is_era_over() const noexcept { return newest_ - newest_era_ >= kMostEpochsOfEra - 1; }
  bool is_evicted() const noexcept { return phase_ == Phase::kEvicted; }
  bool is_calling() const noexcept {  // recover(); not boundary()
    return phase_ == Phase::kReading || phase_ == Phase::kDeciding || is_meeting();
  }

  RankSet evicted() const noexcept;         // were active once, were left out, and may still live
  RankSet leaving() const noexcept;         // were let go by a planned change, and are not proven gone yet
  RankSet safe_to_delete() const noexcept;  // were active once, are left out, and are proven gone

  Origin origin() const noexcept;                     // of what this rank says
  bool knows(const Origin& origin) const noexcept;    // whether it is an active member of this group
  Hearing hear(const Origin& origin) const noexcept;  // R22

 private:
  enum class Phase : uint8_t { kIdle, kLooking, kSettling, kReading, kDeciding, kMeeting, kRenewing, kEvicted };

  bool is_asking() const noexcept {
    return phase_ == Phase::kLooking || phase_ == Phase::kSettling;
  }  // for nobody's call
  bool is_meeting() const noexcept { return phase_ == Phase::kMeeting || phase_ == Phase::kRenewing; }
  MembershipActions look() noexcept;
  MembershipActions read_next() noexcept;
  MembershipActions take_word(const MembershipEvent& event) noexcept;
  MembershipActions adopt(const MembershipRecord& record) noexcept;
  MembershipActions skip(uint32_t epoch) noexcept;
  MembershipActions catch_up(const MembershipRecord& record) noexcept;
  MembershipActions choose(const RegisterWord& next) noexcept;
  MembershipActions decide(const RegisterWord& next) noexcept;
  void take_spares(MembershipRecord& record) const noexcept;
  MembershipActions meet(const RankSet& ranks) noexcept;
  MembershipActions lose(const RankSet& ranks) noexcept;
  MembershipActions enter() noexcept;
  MembershipActions end(MembershipFailure failure, const RankSet& ranks) noexcept;
  MembershipActions run_out() noexcept;
  void leave_meeting() noexcept;
  RankSet left_out() const noexcept;  // may still live, and is not suspended

  // Planned changes; membership_planned.cc.
  MembershipActions progress() noexcept;
  MembershipActions settle(const MembershipAction& action) noexcept;
  MembershipActions prepare(int slot, uint64_t incarnation) noexcept;
  MembershipActions want(const ChangeWish& change) noexcept;
  MembershipActions take_back() noexcept;
  bool are_all_prepared(const RankSet& joiners) const noexcept;
  MembershipActions acknowledge() noexcept;
  MembershipActions commit() noexcept;
  MembershipActions withdraw() noexcept;
  MembershipActions propose() noexcept;
  MembershipActions boundary() noexcept;
  MembershipActions leave_boundary() noexcept;
  MembershipActions install() noexcept;
  void see(const MembershipEvent& event) noexcept;
  void take_in(const MembershipRecord& record) noexcept;
  bool is_proposed() const noexcept {
    return proposal_.state == RegisterState::kProposed && proposal_.epoch == newest_ + 1;
  }
  bool has_acked() const noexcept;
  bool have_all_acked() const noexcept;
  bool is_prepared() const noexcept;
  bool is_installable() const noexcept;
  bool was_outside(int slot, uint32_t epoch) const noexcept;
  bool is_overtaken() const noexcept { return newest_ > epoch_ && !is_newest_planned_; }
  bool can_propose() const noexcept;
  bool leaves_nobody() const noexcept {  // of the members, of whom joiners learn where to begin
    return (newest_set_ - change_.remove).empty();
  }

  int rank_;
  GroupId group_;
  uint64_t incarnation_;                // of this rank
  std::vector<uint64_t> incarnations_;  // by slot: of whoever is or was active in it last
  RankSet known_;                       // slots whose incarnation is or was active

  uint32_t epoch_;
  uint32_t era_;
  RankSet active_;

  Phase phase_ = Phase::kIdle;
  uint32_t newest_;             // adopted, >= epoch_
  uint32_t num_forgotten_ = 0;  // epochs behind newest_ that can't be read any more
  RankSet newest_set_;          // of its record
  uint32_t newest_era_;         // likewise
  bool is_newest_planned_ = false;
  uint64_t newest_boundary_ = 0;
  uint32_t spent_ = 0;   // newest epoch whose meeting this rank has left: no epoch is tried twice
  RankSet here_;         // at the meeting of newest_
  RankSet gone_;         // also those that are not proven gone
  RankSet proven_;       // part of gone_
  RecoverWish wish_;     // of the call under way
  RegisterWord wanted_;  // that the last kDecide asked for
  MembershipRecord draft_;
  bool has_news_ = false;       // was told of a decision during a call, and has not looked since
  bool is_unanswered_ = false;  // a kDecide with draft_ has had no answer yet

  bool is_member_ = true;
  RankSet previous_;                   // active in this era before epoch_
  std::vector<uint32_t> let_go_;       // by slot: by which planned change last; 0: none
  std::vector<uint32_t> taken_in_;     // by slot: by which record last; 0: a founder, or nobody
  RankSet left_;                       // by a planned change
  RankSet suspended_;                  // of those in known_, that this rank was prepared for since: they may come back
  std::vector<uint64_t> prepared_;     // by slot: nonce of the joiner that this rank could take in; 0: none
  std::vector<MembershipCell> cells_;  // of the others
  MembershipCell cell_;                // of this rank
  RegisterWord proposal_;              // what the register of newest_ + 1 said last
  MembershipRecord proposed_;          // the record that it names, if it is a proposal
  ChangeWish change_;                  // wanted here
  bool is_wanted_ = false;             // change_ has not ended yet
  RegisterWord planned_;               // the proposal that change_ has become; epoch 0: none yet
  MembershipRecord plan_;              // its record
  bool is_plan_unanswered_ = false;    // a kDecide with plan_ has had no answer yet
  bool is_draft_planned_ = false;      // the last kDecide was for plan_
  bool waits_ = false;                 // boundary() waits for a decision
};

}  // namespace weft
