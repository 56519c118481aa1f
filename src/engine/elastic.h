// What a rank of an open group has besides: a thread that hears newcomers, cells and requests of others while the caller's thread
// is elsewhere, and what the two threads tell each other. docs/protocols/joining.md.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "bootstrap/ledger.h"
#include "bootstrap/newcomer.h"
#include "bootstrap/reception.h"
#include "engine/communicator.h"

namespace weft {

inline constexpr u32 kSoloEpoch = 1;  // no group has taken a newcomer in by its first epoch

// Of the messages between two ranks; in the tag, before the number of the request.
enum class Errand : u64 {
  kBell,      // look at cells and registers
  kAnswer,    // to a request: code, and the text of an error or what was asked for
  kWindow,    // number of a window, and its offer
  kContract,  // nothing
  kReady,     // numbers of windows
  kUnready,   // to a newcomer: what it had prepared counts no more. 1: a window was made; 0: the memory is fresh
  kNotReady,  // of a newcomer: it has closed a window
};

constexpr int kErrandBits = 56;
inline u64 tag_of(Errand errand, u64 number) { return kDirectTag | static_cast<u64>(errand) << kErrandBits | number; }
inline Errand errand_of(u64 tag) { return static_cast<Errand>((tag & ~kDirectTag) >> kErrandBits); }
inline u64 number_of(u64 tag) { return tag & ((u64{1} << kErrandBits) - 1); }

struct Elastic {
  Elastic(Communicator& self, OpenGroup& open_group);
  ~Elastic() { stop(); }
  Elastic(const Elastic&) = delete;
  Elastic& operator=(const Elastic&) = delete;

  void start();
  void stop() noexcept;  // in a forked child: nothing
  bool is_in_child() const noexcept { return getpid() != owner_pid_; }
  void wake() noexcept;
  void ring();  // all others

  std::vector<int> newcomers() const;  // connected, and not taken in yet
  void forget_newcomers(const std::vector<int>& ranks);
  void meet_suspended();
  void take_ready_back() noexcept;
  void show_ready();
  // Whether the action is the answer to a call of boundary(), or about the change that is wanted here.
  bool takes(const MembershipAction& action) const;
  // Whether the last owner of the slot has been let go of, so that a new one may be connected.
  bool has_room(int slot) const;
  bool is_calling(int slot) const;
  bool is_silent(int slot) const;
  std::optional<std::string> gone_on_text(int rank) const;                            // engine/apart.h
  static const Elastic* of(const Communicator& comm) { return comm.elastic_.get(); }  // null: nobody joins or leaves

  Communicator& comm;
  OpenGroup& group;
  std::unique_ptr<Reception> reception;
  const u32 first_epoch;    // that this rank has known, and
  const RankSet first_set;  // who was in it
  std::atomic<bool> is_solo{false};
  std::atomic<bool> is_stopping{false};
  std::atomic<bool> is_at_boundary{false};

  mutable std::mutex mutex;  // of what follows; a leaf
  std::condition_variable changed;
  struct Letter {
    OpenGroup::Sender sender;
    u64 tag;
    Parcel parcel;
  };
  std::deque<Letter> inbox;
  std::map<u64, Parcel> answers;  // by number of the request
  std::set<u64> asked;            // whose answer is waited for
  u64 num_asked = 0;
  std::optional<MembershipAction> outcome;  // of boundary(); of a newcomer: it was taken in
  std::set<int> newcomers_;
  std::map<int, SlotCell> seen;  // by slot: cells told to the machine
  std::string contract;
  bool needs_refresh = false;  // a newcomer's windows have to be shared anew
  bool is_ready = false;
  u64 num_unready = 0;        // how often members have taken back that they are prepared for this rank
  std::map<int, u64> absent;  // by slot: incarnation that had ended, or closed, before this rank was connected to it
  std::set<int> silent;       // no members: they have not answered in time, and said nothing since

  u64 ask_ns = 0;  // of who waits in boundary(), alone: when it asks again; 0: it has no reason to

  std::mutex cells_mutex;    // before driver_mutex_: from reading the cells to telling the machine
  std::mutex prepare_mutex;  // before driver_mutex_; of
  bool is_holding = false;   // nobody is prepared for: a window changes

  std::mutex wish_mutex;  // before driver_mutex_: from one look at the wish to what is done about it
  struct Wish {
    ChangeWish change;      // that the machine is to decide; one of several, if not `together`
    RankSet coming, going;  // not `together`: those that are left of them
    RankSet taken;          // and who has come in
    bool together = true;
    u32 since = 0;  // the epoch of this rank when it wanted it
    u64 deadline_ns = 0;
    WantedChange told;
    bool is_open = false;        // not decided
    bool is_taken_back = false;  // and is not to be
    bool again = false;          // it was withdrawn, and is to be wanted anew
    u64 again_ns = 0;            // not before
    // Whether it has happened, when its ranks do not tell: with a map.
    bool is_in(Ledger& ledger, u32 newest) const {
      for (u32 epoch = since + 1; epoch <= newest; ++epoch) {
        const Decision found = ledger.find(epoch);
        if (found.record && found.record->id == change.id && found.record->map_hash == change.map_hash) return true;
      }
      return false;
    }
  } wish;

  // Of the thread alone.
  u32 met_epoch = 0;  // up to which it knows who was suspended
  struct Stranger {
    u64 incarnation;
    u64 since_ns;                      // or the last call
    std::unique_ptr<OpenCall> call{};  // that is not answered
    bool was_called = false;
  };
  bool call(int slot, Stranger& stranger, bool is_member);
  std::map<int, Stranger> strangers;  // by slot: it is claimed by somebody whom this rank is not connected to
  std::map<int, u64> unknown;         // likewise: when to look whether that one is over

  // Shown in the cell; membership_mutex_.
  u32 installed = 0;
  u64 next_window_id = 1;
  std::array<ChangeStage, 2> changes{};
  SlotCell shown;

 private:
  void run();

  const pid_t owner_pid_;
  OwnedFd wake_;
  std::thread thread_;
};

}  // namespace weft
