// A group of ranks in one thread, one seed a run: each rank is the library's own Membership, all around it (register,
// messages, deaths, stops, deadlines) comes in an order that the seed chooses. What must always hold is checked at each step.
#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bootstrap/membership.h"

namespace weft::test {

// What a run found; the text says which rule of docs/protocols/membership.md is broken.
struct Found {
  std::string text;
};

class World {
 public:
  World(uint64_t seed, bool prints_trace);

  void run();  // throws Found

  uint64_t num_steps() const { return num_steps_; }
  uint64_t num_epochs() const { return decided_.size(); }
  uint64_t num_installed() const { return num_installed_; }  // planned changes, by rank

 private:
  enum class ItemKind : uint8_t {
    kRequest,
    kReply,
    kForgotten,
    kLook,
    kParcel,
    kAbort,
    kGone,
    kProven,
    kPrepared,
    kCell
  };

  // Something on its way to `target`. Parcels, aborts, cells and looks of one rank to another arrive in the order in which they
  // left.
  struct Item {
    ItemKind kind;
    int target;
    int source = -1;
    uint32_t epoch = 0;
    int stage = 0;              // kParcel: 0 here, 1 fresh memory
    uint64_t request = 0;       // kRequest, kReply, kForgotten
    bool decides = false;       // kRequest
    RegisterWord expected{};    // kRequest
    RegisterWord word{};        // kRequest: desired; kReply: found
    MembershipRecord record{};  // kReply: that it names
    Origin origin{};            // kAbort
    bool is_forged = false;     // kAbort
    uint64_t incarnation = 0;   // kPrepared
    MembershipCell cell{};      // kCell
  };

  struct Node {
    explicit Node(Membership machine) : membership(std::move(machine)) {}
    Membership membership;
    bool lives = true;
    bool is_stopped = false;
    bool is_calling = false;
    bool is_broken = false;
    uint64_t request = 0;  // the last one; replies to others are of a call that has ended
    uint32_t meeting = 0;  // epoch; 0: none
    bool is_renewing = false;
    RankSet members;  // of the meeting
    RankSet here;     // told to the machine
    RankSet told_gone;
    RankSet exactly;                                      // wish of the call under way
    RankSet unwanted;                                     // in any call so far
    std::set<uint32_t> met;                               // epochs whose meeting it has joined
    std::map<std::pair<uint32_t, int>, RankSet> parcels;  // by epoch and stage
    std::vector<Item> early;
    // Planned changes.
    bool is_joiner = false;
    bool has_left = false;
    bool waits = false;                   // in boundary()
    bool is_wanted = false;               // a change of its own has not ended
    std::map<int, uint64_t> prepared;     // told to the machine: nonces by slot
    std::pair<uint32_t, uint32_t> acked;  // epoch and version that it has shown last
  };

  // One collective operation: the one behind a boundary of an era.
  struct Operation {
    uint32_t epoch = 0;
    RankSet members;
    RankSet started;
  };

  int pick(int below) { return static_cast<int>(random_() % static_cast<uint64_t>(below)); }
  bool chance(int per_mille) { return pick(1000) < per_mille; }
  Node& node(int rank) { return nodes_[static_cast<size_t>(rank)]; }
  int num_ranks() const { return static_cast<int>(nodes_.size()); }
  template <class... Parts>
  void trace(const Parts&... parts);
  [[noreturn]] void fail(int rank, const std::string& text) const;
  void check(bool holds, int rank, const char* rule) const {
    if (!holds) fail(rank, rule);
  }

  // What happens.
  void disturb();  // one fault, or one thing that a caller does
  void kill(int rank);
  void cut(int one, int other);
  void call(int rank, const RecoverWish& wish);
  RecoverWish random_wish(int rank);
  void give_up_operation(int rank);
  bool deliver_one();
  void deliver(const Item& item);
  void ask_register(int rank, uint32_t epoch, bool decides, const MembershipAction* action);
  void serve(const Item& item);
  bool is_superseded(const Node& self) const;
  void ring();
  void join();
  void want_change(int rank);
  bool can_go_on(int rank);
  void begin_operation(int rank);
  void check_installed(int rank, const MembershipAction& action);
  void check_shown(int rank);
  void settle();
  bool is_settled(uint32_t newest, const RankSet& set);
  bool was_taken_in(int slot);
  void check_end(const RankSet& set);

  // What a machine wants.
  void step(int rank, const MembershipEvent& event);
  void perform(int rank, const MembershipAction& action);
  void meet(int rank, const MembershipAction& action);
  void look_at_parcels(int rank);
  void enter(int rank, const MembershipAction& action);
  void raise(int rank, const MembershipAction& action);
  void hear(int rank, const Item& item);

  uint32_t newest_decided() const { return decided_.empty() ? kFirstEpoch : decided_.rbegin()->first; }
  RankSet members_of(uint32_t epoch) const;

  static constexpr uint32_t kFirstEpoch = 1;
  static constexpr int kSlots = 11;

  const uint64_t seed_;
  const bool prints_trace_;
  std::mt19937_64 random_;
  GroupId group_{};
  alignas(64) std::array<std::byte, PageRegister::kBytes> page_{};
  PageRegister register_{page_};
  bool register_is_away_ = false;
  std::map<std::tuple<int, uint32_t, bool>, MembershipRecord> records_;  // by writer, epoch mod 64, and whether planned
  std::map<uint32_t, MembershipRecord> decided_;
  std::map<uint32_t, RankSet> said_here_;                          // by epoch
  std::map<std::pair<uint32_t, uint64_t>, Operation> operations_;  // by era and boundary
  RankSet founders_;
  std::vector<Node> nodes_;
  std::vector<Item> items_;
  int kill_rate_ = 0, stop_rate_ = 0, cut_rate_ = 0, away_rate_ = 0, call_rate_ = 0, deadline_rate_ = 0;  // per mille
  int join_rate_ = 0, change_rate_ = 0, patience_rate_ = 0;
  uint64_t num_requests_ = 0;
  uint64_t num_steps_ = 0;
  uint64_t num_installed_ = 0;
};

}  // namespace weft::test
