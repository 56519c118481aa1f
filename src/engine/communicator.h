// A rank's membership: who takes part, in which epoch, and the one reason why it is broken if it is.
#pragma once

#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "bootstrap/control_plane.h"
#include "bootstrap/handshake.h"
#include "bootstrap/membership.h"
#include "engine/poll.h"
#include "engine/window.h"

namespace weft {

constexpr int kTagNumberBits = 25;        // of the tag of an exchange; 32 bits of the epoch follow
constexpr u64 kCallerTag = u64{1} << 60;  // the kind of exchanges that Python's side asks for, and of meet()
constexpr u64 kMeetingTag = kCallerTag | u64{1} << 24;  // plus the number of the meeting in this epoch

std::string text_of(
    const std::map<int, std::string>& refusals);  // "; rank 1 refused its call: ...", for the end of a text

struct Elastic;  // elastic.h
enum class Errand : u64;

// What a planned change has done.
struct DoneChange {
  u32 epoch = 0;
  u64 id = 0;
  u64 boundary = 0;
  std::vector<int> added, removed, active;
  u64 map_hash = 0;      // of the expert map that begins with it; 0: none
  u64 waited_ns = 0;     // for the decision; of a new rank: for the members
  u64 installed_ns = 0;  // the rest of the call
};

// What a boundary of this rank has ended with, kept until the next one ends: a caller that is interrupted may not have heard it.
struct EndedBoundary {
  u64 count = 0;                     // of all that have ended
  std::optional<DoneChange> change;  // of the last one
};

// A change that is wanted here.
struct WantedChange {
  enum class State { kPreparing, kProposed, kCommitted, kWithdrawn };
  State state = State::kPreparing;
  u32 epoch = 0;       // kCommitted
  std::string reason;  // kWithdrawn
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // Takes a connected control plane. Every rank begins in the same epoch (tests begin in a late one) with all ranks active.
  static std::shared_ptr<Communicator> create(std::unique_ptr<ControlPlane> plane, u32 first_epoch = 1);
  // A newcomer: it works alone, in epoch 1, until a record takes it in.
  static std::shared_ptr<Communicator> join(Newcomer&& newcomer);
  ~Communicator();

  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  // Signals in the windows carry the low 16 bits: pages are renewed at the latest kMostEpochsOfEra epochs after they were made,
  // so an old word with the same is on none (R23).
  u32 epoch() const { return epoch_; }
  const std::vector<int>& active_ranks() const { return active_; }
  bool is_local() const { return plane_->is_local(); }            // ranks are threads of one process
  bool is_near(int rank) const { return plane_->is_near(rank); }  // on this rank's machine
  // Error kUnsupported unless all active ranks are on one machine: `what` needs that.
  void check_one_machine(const std::string& what) const;
  bool is_active(int rank) const { return active_set_.contains(rank); }
  GroupId group() const { return plane_->ledger().group(); }
  u64 incarnation(int rank) const;  // of whoever has that slot; 0: nobody
  std::vector<Detection> detections() const { return plane_->detections(); }
  bool has_ended(int rank) const { return plane_->has_ended(rank); }

  // Collective among the active ranks, in the same order: every rank's bytes (and descriptors), by rank. `tag`: a kind, one of
  // the bits 57 to 61, and a number below 2^kTagNumberBits; what lies between is the epoch's.
  std::vector<Parcel> exchange(u64 tag, const std::vector<std::byte>& bytes, const std::vector<int>& fds,
                               u64 deadline_ns, const Poll& poll);

  // Waits on the host until every active rank is here; as exchange(), and kPeerLost if it is broken.
  void meet(u64 deadline_ns, const Poll& poll);

  // A new epoch on fresh memory (R10, R13), with whoever is left: the ranks that are active, less those that are gone, less
  // `evict`. Who belongs is decided once (R11): a rank whose wish comes too late goes along with what was decided. Works on
  // a broken communicator and on a whole one, and goes on by itself when a further rank dies meanwhile. Errors:
  // kInvalidArgument (a bad list), kInvalidState (closed, an operation in flight), kPeerLost (fewer than `min_ranks` are left;
  // nothing is decided), kPeerTimeout (names who did not come), kEvicted, kAborted.
  void recover(const std::vector<int>& evict, int min_ranks, u64 deadline_ns, const Poll& poll);
  // As recover(), and newcomers that are ready are taken in: `spares`, or without that the lowest in place of those lost.
  void recover(const std::vector<int>& evict, int min_ranks, const std::optional<std::vector<int>>& spares,
               u64 deadline_ns, const Poll& poll);

  // As recover(), with exactly `ranks`, a subset of the active ones that holds this rank. Errors besides: kInvalidArgument
  // (another set was decided), kPeerLost (one of `ranks` is gone too: try again without it).
  void rebuild(std::vector<int> ranks, u64 deadline_ns, const Poll& poll);

  // What this rank says at the meeting of a recovery, in words of the caller, and what the ranks of the last one have said that
  // this rank has entered: all of them have the same of each other. Of the thread that recovers.
  struct MeetingTexts {
    u32 epoch = 0;  // 0: there was none
    std::map<int, std::string> by_rank{};
  };
  void set_meeting_text(std::string text);
  const MeetingTexts& meeting_texts() const { return meeting_texts_; }

  std::vector<int> evicted_ranks();   // were left out, and may still live
  std::vector<int> safe_to_delete();  // were left out, and are proven gone

  // --- open groups (docs/protocols/joining.md); the others raise kInvalidState ---

  bool is_open() const { return elastic_ != nullptr; }
  bool is_solo() const;  // a newcomer that was not taken in yet
  std::string address();

  // A place between two operations, counted alike on all active ranks. What was decided for it is done here; a newcomer waits to be
  // taken in, and returns nothing at the deadline. Errors: what the communicator broke with; kPeerLost or kPeerTimeout if a
  // recovery was decided that this rank has not followed; kControlLost at the deadline.
  // A newcomer that `stands_by` says by itself that it is ready. Besides: kPeerLost, when no member is left to take a newcomer in.
  std::optional<DoneChange> boundary(u64 deadline_ns, const Poll& poll, bool stands_by = false);
  EndedBoundary ended_boundary() const;  // also where the call has thrown what `poll` threw; from any thread
  // Of each decided epoch from `first` to `last`, the newest first: the hash of the expert map that a planned change began with, or 0.
  std::vector<u64> map_hashes(u32 first, u32 last) const;
  // Wants a change, until `deadline_ns`; one at a time. Local. Errors: kInvalidArgument, kInvalidState.
  struct Wanted {
    std::vector<int> admit, remove;
    std::vector<int> suspend{};  // of `remove`: they keep their memory and connections, and may be admitted again
    u64 id = 0;
    bool together = true;  // else each of `admit` as soon as it can be, and `remove` with the first of them
    u64 map_hash = 0;      // of an expert map that begins with the change; 0: none
  };
  void propose(const Wanted& wanted, u64 deadline_ns);
  WantedChange wanted_change();  // the last one
  // Of no use if it is committed; what became of it.
  WantedChange withdraw_change();
  // Waits until it is decided, or `deadline_ns`.
  WantedChange await_change(u64 deadline_ns, const Poll& poll);
  // How far this rank is in a collective change, and of each of `ranks` its stage and epoch: ChangeStage.
  void show_stage(u32 epoch, u32 number, u32 stage);
  std::vector<std::pair<u32, u32>> stages(u32 epoch, u32 number, const std::vector<int>& ranks);

  // A newcomer says to all that it has made its objects. Error kInvalidState naming windows that the members have and it has not.
  void ready(u64 deadline_ns, const Poll& poll);
  std::vector<int> joining_ranks();   // connected, not prepared for by this rank
  std::vector<int> prepared_ranks();  // one change away
  std::vector<int> leaving_ranks();
  std::vector<int> members();  // by the newest decision; a newcomer is none
  // What a newcomer needs to make its objects alone, in words of the caller; of this rank, and of a member.
  void set_contract(std::string contract);
  // `of`: these, in place of the members.
  std::string ask_contract(u64 deadline_ns, const Poll& poll, const std::vector<int>& of = {});
  // For a window of a newcomer: to and from all ranks that it is connected to. `is_new`: error kInvalidState if a member has it no
  // more.
  void share_window(MemberWindow& window, u64 deadline_ns, const Poll& poll, bool is_new = true);

  // Never communicates beyond a best-effort goodbye (R18). Result memory stays valid as long as it is held.
  // `why`: what made the caller leave, in one line, for the errors of the others; empty: nothing special.
  void close(const std::string& why = {});

  // Ends every wait of this rank, a rebuild too, and tells the others, whose waits end as well: they and every later call raise
  // kAborted with this text, until rebuild(). What the communicator broke with before stays. From any thread, also beside a call;
  // nothing after close().
  void abort(const std::string& text);

  // This rank has refused its call before anything was sent, and why; an empty text: it calls again. The others wait as before, but
  // say so in their log and in a kPeerTimeout.
  void note_refusal(const std::string& text);

  bool is_broken() const;   // not: a peer has closed, which ends no call that has all it needs
  bool is_aborted() const;  // or evicted: no operation can end well
  bool is_closed() const;
  void raise_if_broken();    // not if a peer has merely closed
  void raise_if_unusable();  // kInvalidState if closed; the error it broke with if broken; kEvicted
  void raise_if_evicted();   // of what serves a broken communicator, too

  // The calls below are for windows.

  // Why they refused their calls: those of `ranks` that did, in this epoch.
  std::map<int, std::string> refusals(const RankSet& ranks) const;
  // Who keeps `late` from answering: in place of those who say that they wait, those for whom. All of `late`, if all say so.
  RankSet to_blame(const RankSet& late) const;
  void note_awaited(const RankSet& late);

  void add_window(MemberWindow* window);
  void remove_window(MemberWindow* window);
  void note_changed_window();  // what newcomers have mapped of it is not all of it any more
  // From true to false nobody is prepared for. Error kInvalidState with true: this rank has given its word for a change.
  void hold_newcomers(bool holds);
  u64 next_window_id() { return next_window_id_++; }

  // Ends an operation for everyone: the first reason is kept, published and thrown as a typed error (R9). Epoch and members
  // are filled in.
  [[noreturn]] void fail(const AbortReason& reason);
  // Throws the reason that is there already (a peer that closed, if there is no other), and lets the others know of it.
  [[noreturn]] void leave_broken();
  AbortReason reason() const;  // the first; code kNone without one
  // A line for people: what ended an operation of this rank. `op_kind`: of that operation, whoever found the reason.
  void log_left(const AbortReason& reason, u32 op_kind) const;
  // As fail(), for a caller that has an exception of its own to throw (Ctrl-C).
  void give_up(AbortReason reason);

 private:
  Communicator(std::unique_ptr<ControlPlane> plane, u32 first_epoch, std::optional<Membership::Welcome> welcome = {});

  friend struct Elastic;
  Elastic& elastic(const char* what) const;
  void show_cell_locked() noexcept;  // membership_mutex_ is held
  void show_cell();
  void deliver(const MembershipAction& action);
  std::optional<MembershipAction> wait_at_boundary(u64 deadline_ns, const Poll& poll);
  std::optional<MembershipAction> wait_to_be_taken_in(u64 deadline_ns, const Poll& poll, bool stands_by);
  bool is_group_gone();
  void prepare_in_slices(u64 deadline_ns, const Poll& poll);
  void swap_offers(MemberWindow& window, const RankSet& members, const Wait& wait, bool is_new);
  void prepare(u64 deadline_ns, const Poll& poll);
  void want_again();
  void want_what_is_ready();
  void take_back_wish();
  RankSet set_before(const MembershipAction& action, const RankSet& added) const;
  DoneChange carry_out(const MembershipAction& action);
  void end_boundary(const std::optional<DoneChange>& change);
  void note_times(const DoneChange& change);
  void keep_suspended(const RankSet& ranks);
  DoneChange follow_recovery(const Poll& poll);
  void change_windows(const MemberWindow::Step& step);
  void unprepare_all(bool is_for_new_window, const RankSet& but = {});
  void hold_in_recovery(bool holds, const RankSet& taken_in);
  void admit(int slot, u64 incarnation, Connection&& connection, const std::function<void()>& answer);
  bool is_left_out(int slot);
  Parcel inquire(int slot, Errand errand, std::vector<std::byte> bytes, std::vector<OwnedFd> fds, bool is_member,
                 const Wait& wait);
  void serve(int slot, u64 tag, Parcel&& parcel);
  std::vector<std::byte> serve_ready(int slot, const Parcel& parcel);
  void refresh_windows(u64 deadline_ns, const Poll& poll);
  void turn_member();
  void read_cells();
  void renew_wish();
  void free_claims();
  void call_strangers();
  void unmap(int slot);
  bool has_all_of(int slot) const;
  bool has_some_of(int slot) const;
  bool ask_whether_all_is_made(const Wait& wait);
  bool is_newer_than(u32 epoch);
  RankSet unmet_members();
  RankSet met_members();
  bool is_unprepared_somewhere();
  bool has_to_ask_again();
  void look_past_member(int slot);
  u32 meet_members(const Wait& wait);
  RankSet not_installed(const MembershipRecord& record);
  bool may_begin(const MembershipRecord& record);
  void tell_loss();
  void give_up_overtaken(const std::vector<int>& out);
  bool is_outside() const;  // solo, or it has left: what happens here is nobody else's business

  void on_abort(const AbortReason& reason);  // monitor thread
  void adopt(const AbortReason& reason);     // the first reason of this epoch wins; sets every window's abort word
  void adopt_lost();
  void adopt_locked(const AbortReason& reason);  // mutex_ is held
  struct Agreement {
    u64 next_window_id;
    std::vector<MemberWindow*> windows;  // that every member has, by id
  };
  struct Call {  // of recover() or rebuild()
    u64 deadline_ns;
    const Poll& poll;
    std::vector<Parcel> parcels;  // of the last meeting, by rank
    Wait wait() const { return {deadline_ns, poll}; }
  };
  void check_members(const std::vector<int>& ranks) const;
  void check_idle();
  void note_gone();
  void run_recovery(const RecoverWish& wish, u64 deadline_ns, const Poll& poll);
  std::optional<MembershipAction> ask(const MembershipEvent& event, const Wait& wait);
  struct Driven {
    std::optional<MembershipAction> last;  // that is wanted of the caller
    RankSet told;                          // who is to be told to look
    bool rings = false;                    // others are to look at this rank's cell, or at the register
    std::exception_ptr failure;            // what the wait was left with
  };
  Driven drive(const MembershipEvent& event, const Wait& wait);  // driver_mutex_ is held
  Driven drive(const std::vector<MembershipEvent>& events, const Wait& wait);
  void finish(const Driven& driven);
  MembershipEvent do_on_ledger(const MembershipAction& action, const Wait& wait);
  MembershipActions step(const MembershipEvent& event);
  MembershipEvent word_after(u32 epoch);
  std::optional<MembershipAction> take_part(const MembershipAction& action, Call& call);
  bool is_superseded(u32 epoch) const;
  void watch_meeting(u32 epoch, const Call& call, class WaitLog& log);
  MembershipEvent meet(const MembershipAction& action, Call& call);
  MembershipEvent renew(const MembershipAction& action, Call& call);
  Agreement agree(const std::vector<int>& ranks, const std::vector<Parcel>& parcels);
  [[noreturn]] void raise_failure(const MembershipAction& action);
  void note_eviction(const MembershipAction& action);
  void look();
  void look_if_told();
  void enter_epoch(const std::vector<int>& ranks, u32 epoch);
  bool ends_attempt(const AbortReason& reason);  // mutex_ is held
  void raise_if_attempt_aborted();
  Error error_of(const AbortReason& reason) const;
  Origin origin() const;
  std::string closed_text(const AbortReason& reason) const;

  std::unique_ptr<ControlPlane> plane_;
  const int rank_;
  const int num_ranks_;
  u32 epoch_;
  std::vector<int> active_;
  RankSet active_set_;  // the same
  u64 next_window_id_ = 1;
  u32 meeting_epoch_ = 0;  // in which the meetings are counted
  u64 num_meetings_ = 0;
  MeetingTexts meeting_texts_;

  std::mutex driver_mutex_;  // before the two below; of whoever drives the machine, while it waits for a store, too
  std::atomic<bool> is_told_{false};             // somebody said that an epoch was decided, and nobody has looked since
  std::optional<MembershipRecord> kept_record_;  // for the machine, while it reads it; driver_mutex_
  std::optional<MembershipRecord> meeting_record_;  // likewise; of the thread that recovers
  std::string control_lost_text_;                   // of the thread that recovers
  mutable std::mutex membership_mutex_;             // before mutex_; never held for long
  Membership membership_;
  std::atomic<u32> next_epoch_;  // after the newest one known: what look() looks at

  mutable std::mutex mutex_;  // guards what follows; never held while calling what may wait or call back
  std::vector<MemberWindow*> windows_;
  RankSet closed_ranks_;                 // said goodbye; the next operation with them breaks
  std::map<int, AbortReason> goodbyes_;  // of those, with what they said
  AbortReason reason_;                   // code kNone: not broken
  std::string refusals_;                 // when it broke, of those that were late
  std::map<int, AbortReason> early_;     // of an epoch this rank has not entered yet: the latest of each reporter
  std::string meeting_text_;
  bool closed_ = false;
  bool has_left_ = false;
  u32 attempt_ = 0;            // the epoch that this rank is about to enter; 0: none
  AbortReason attempt_abort_;  // code kNone: the attempt under way was not aborted

  std::unique_ptr<Elastic> elastic_;  // none: nobody joins or leaves
  mutable std::mutex ended_mutex_;    // a leaf, of
  EndedBoundary ended_;
};

// For one wait on a rank that may wait for another one: lets the others know whom it is for, again and again.
class WaitNote {
 public:
  static constexpr u64 kPeriodNs = 400'000'000;
  static constexpr u64 kFreshNs = 5 * kPeriodNs;  // a rank that was stopped in a wait says nothing new
  explicit WaitNote(Communicator& comm) : comm_(comm) {}
  ~WaitNote();
  WaitNote(const WaitNote&) = delete;
  WaitNote& operator=(const WaitNote&) = delete;
  void look(const RankSet& late);  // from a poll

 private:
  Communicator& comm_;
  u64 next_ns_ = 0;
  bool has_told_ = false;
};

// For one wait: after a second it logs who of those waited for has refused its call, each once.
class WaitLog {
 public:
  explicit WaitLog(const Communicator& comm) : comm_(comm) {}
  void look(const RankSet& late);  // from a poll

 private:
  const Communicator& comm_;
  u64 start_ns_ = 0;
  std::map<int, std::string> logged_;
};

}  // namespace weft
