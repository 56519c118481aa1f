// check: allow-in-file file-size: one world and what must hold in it, read together
#include "simulator/world.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <iterator>
#include <utility>

#include "base/status.h"

namespace weft::test {
namespace {

using Action = MembershipAction;
using Event = MembershipEvent;
using Failure = MembershipFailure;

std::string text_of(const RankSet& ranks) {
  std::string text = "{";
  for (const int rank : ranks.ranks()) {
    if (text.size() > 1) text += ',';
    text += std::to_string(rank);
  }
  text += '}';
  return text;
}
std::string text_of(const char* text) { return text; }
template <class Number>
  requires std::is_integral_v<Number>
std::string text_of(Number number) {
  return std::to_string(number);
}
std::string text_of(const RegisterWord& word) {
  constexpr std::array<const char*, 3> kStates{"open", "proposed", "committed"};
  return "epoch " + std::to_string(word.epoch) + " " + kStates[static_cast<size_t>(word.state)] + " by rank " +
         std::to_string(word.writer);
}

RankSet only(int rank) { return RankSet::of({rank}); }
bool holds_all(const RankSet& set, const RankSet& part) { return (part - set).empty(); }

}  // namespace

World::World(uint64_t seed, bool prints_trace) : seed_(seed), prints_trace_(prints_trace), random_(seed) {
  const int num_ranks = 2 + pick(7);
  for (uint8_t& byte : group_) byte = static_cast<uint8_t>(random_());
  std::vector<uint64_t> incarnations(kSlots);
  for (int rank = 0; rank < num_ranks; ++rank) incarnations[static_cast<size_t>(rank)] = random_() | 1;
  founders_ = RankSet::first(num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank) nodes_.emplace_back(Membership(rank, incarnations, group_, kFirstEpoch));
  // Each kind of fault is rare in some runs and common in others.
  kill_rate_ = pick(2) * pick(25);
  stop_rate_ = pick(2) * pick(40);
  cut_rate_ = pick(3) == 0 ? pick(15) : 0;
  away_rate_ = pick(2) * pick(20);
  call_rate_ = 20 + pick(400);
  deadline_rate_ = pick(2) * pick(40);
  join_rate_ = pick(2) * pick(30);
  change_rate_ = pick(2) * pick(200);
  patience_rate_ = pick(2) * pick(100);
  if (change_rate_ > 0 && pick(2) == 0) call_rate_ = 1 + pick(20);
}

template <class... Parts>
void World::trace(const Parts&... parts) {
  if (!prints_trace_) return;
  std::string line = std::to_string(num_steps_) + ":";
  ((line += " " + text_of(parts)), ...);
  std::puts(line.c_str());
}

void World::fail(int rank, const std::string& text) const {
  throw Found{text + " (rank " + std::to_string(rank) + ", step " + std::to_string(num_steps_) + ", seed " +
              std::to_string(seed_) + ")"};
}

RankSet World::members_of(uint32_t epoch) const {
  if (epoch == kFirstEpoch) return founders_;
  const auto record = decided_.find(epoch);
  return record == decided_.end() ? RankSet() : record->second.active;
}

void World::run() {
  trace("ranks", num_ranks());
  const int num_turns = 100 + pick(300);
  for (int turn = 0; turn < num_turns; ++turn, ++num_steps_) {
    if (chance(250) || !deliver_one()) disturb();
  }
  settle();
}

// ---- what happens

void World::disturb() {
  const int rank = pick(num_ranks());
  Node& self = node(rank);
  if (chance(away_rate_)) {
    register_is_away_ = !register_is_away_;
    trace("the register", register_is_away_ ? "is away" : "is back");
  }
  if (chance(kill_rate_)) return kill(rank);
  if (chance(join_rate_)) return join();
  if (!self.lives) return;
  if (chance(stop_rate_)) {
    self.is_stopped = !self.is_stopped;
    return trace("rank", rank, self.is_stopped ? "is stopped" : "runs on");
  }
  if (self.is_stopped) return;
  if (chance(cut_rate_)) return cut(rank, pick(num_ranks()));
  if (self.meeting != 0 && chance(200)) return ask_register(rank, self.meeting + 1, false, nullptr);
  if (self.is_calling && chance(deadline_rate_)) {
    const bool is_deadline = chance(700);
    trace("rank", rank, is_deadline ? "has reached its deadline" : "is interrupted");
    step(rank, {.kind = is_deadline ? Event::Kind::kDeadline : Event::Kind::kLeave, .epoch = self.meeting});
    self.is_calling = false;
    self.meeting = 0;
    return;
  }
  if (self.waits) {
    if (chance(patience_rate_)) {
      trace("rank", rank, "has waited long enough at its boundary");
      return step(rank, {.kind = Event::Kind::kPatience});
    }
    if (!chance(deadline_rate_)) return;
    trace("rank", rank, "leaves its boundary");
    step(rank, {.kind = chance(500) ? Event::Kind::kDeadline : Event::Kind::kLeave});
    self.waits = false;
    return;
  }
  if (self.is_calling || self.membership.is_evicted() || !self.membership.is_member()) return;
  if (!self.prepared.empty() && chance(join_rate_ / 2)) {  // what it has mapped of a joiner is lost
    auto& [slot, incarnation] = *self.prepared.begin();
    incarnation = 0;
    trace("rank", rank, "is not prepared for rank", slot, "any more");
    return step(rank, {.kind = Event::Kind::kPrepared, .rank = slot});
  }
  if (!self.is_wanted && chance(change_rate_)) return want_change(rank);
  if (self.is_wanted && chance(20)) {
    trace("rank", rank, "takes its change back");
    return step(rank, {.kind = Event::Kind::kTakeBack});
  }
  if (can_go_on(rank) && chance(800)) {
    trace("rank", rank, "comes to boundary", self.membership.passed() + 1);
    self.waits = true;
    return step(rank, {.kind = Event::Kind::kBoundary});
  }
  if (!chance(call_rate_)) return;
  if (!self.is_broken && chance(700)) return give_up_operation(rank);
  call(rank, random_wish(rank));
}

void World::kill(int rank) {
  int num_left = 0;
  for (const Node& each : nodes_) num_left += each.lives ? 1 : 0;
  if (!node(rank).lives || num_left == 1) return;
  trace("rank", rank, "dies");
  node(rank).lives = false;
  for (int other = 0; other < num_ranks(); ++other) {
    if (other == rank) continue;
    items_.push_back({.kind = ItemKind::kGone, .target = other, .source = rank});
    items_.push_back({.kind = ItemKind::kProven, .target = other, .source = rank});
  }
}

// Their connection ends though both live.
void World::cut(int one, int other) {
  if (one == other || !node(other).lives) return;
  trace("ranks", one, "and", other, "lose their connection");
  items_.push_back({.kind = ItemKind::kGone, .target = one, .source = other});
  items_.push_back({.kind = ItemKind::kGone, .target = other, .source = one});
}

// A new process in an empty slot, or in one whose owner all know to have ended.
void World::join() {
  const int sponsor = pick(num_ranks());
  if (!node(sponsor).lives || node(sponsor).membership.is_evicted() || !node(sponsor).membership.is_member()) return;
  int slot = pick(num_ranks() + 2);
  if (slot >= num_ranks()) {
    if (num_ranks() == kSlots) return;
    slot = num_ranks();
  } else {
    if (node(slot).lives || members_of(newest_decided()).contains(slot)) return;
    for (const Item& item : items_) {
      const bool is_news = item.kind == ItemKind::kGone || item.kind == ItemKind::kProven;
      if (is_news && item.source == slot && node(item.target).lives) return;
    }
    for (const Node& each : nodes_) {
      if (each.lives && each.membership.active().contains(slot)) return;
    }
    std::erase_if(items_, [&](const Item& item) {
      return item.target == slot || (item.source == slot && item.kind != ItemKind::kAbort);
    });
  }
  const uint64_t incarnation = random_() | 1;
  const Membership::Welcome welcome = node(sponsor).membership.welcome();
  if (welcome.incarnations[static_cast<size_t>(slot)] != 0) return;
  trace("rank", slot, "joins by rank", sponsor, "in epoch", welcome.epoch);
  Node joiner(Membership(slot, incarnation, welcome, group_));
  joiner.is_joiner = true;
  joiner.prepared[slot] = incarnation;
  if (slot == num_ranks()) {
    nodes_.push_back(joiner);
  } else {
    node(slot) = joiner;
  }
  for (int other = 0; other < num_ranks(); ++other) {
    if (other == slot) continue;
    if (!node(other).lives) {
      items_.push_back({.kind = ItemKind::kGone, .target = slot, .source = other});
      items_.push_back({.kind = ItemKind::kProven, .target = slot, .source = other});
      continue;
    }
    const uint64_t other_life = node(other).membership.origin().incarnation;
    items_.push_back({.kind = ItemKind::kPrepared, .target = other, .source = slot, .incarnation = incarnation});
    items_.push_back({.kind = ItemKind::kPrepared, .target = slot, .source = other, .incarnation = other_life});
    items_.push_back({.kind = ItemKind::kCell, .target = other, .source = slot, .cell = node(slot).membership.cell()});
    items_.push_back({.kind = ItemKind::kCell, .target = slot, .source = other, .cell = node(other).membership.cell()});
  }
  items_.push_back({.kind = ItemKind::kLook, .target = slot, .source = slot});
}

void World::want_change(int rank) {
  Node& self = node(rank);
  ChangeWish change{.id = random_(), .margin = 1 + static_cast<uint64_t>(pick(3))};
  for (const auto& [slot, incarnation] : self.prepared) {
    const bool is_there = !self.membership.active().contains(slot) && !self.told_gone.contains(slot);
    if (incarnation != 0 && is_there && chance(700)) change.add.add(slot);
  }
  for (const int other : self.membership.active().ranks()) {
    if (chance(100)) change.remove.add(other);
  }
  trace("rank", rank, "wants", change.add, "and not", change.remove);
  self.is_wanted = true;
  step(rank, {.kind = Event::Kind::kPropose, .change = change});
}

// Whether the last operation has ended well: all its members have begun it.
bool World::can_go_on(int rank) {
  const Node& self = node(rank);
  if (self.is_broken || self.waits || self.is_calling) return false;
  const auto last = operations_.find({self.membership.era(), self.membership.passed()});
  return self.membership.passed() == 0 ||
         (last != operations_.end() && holds_all(last->second.started, last->second.members));
}

// Behind the boundary that it has passed. What its members are must be the same on all of them.
void World::begin_operation(int rank) {
  Node& self = node(rank);
  const RankSet members = self.membership.active();
  Operation& operation = operations_[{self.membership.era(), self.membership.passed()}];
  if (operation.epoch == 0) operation = {self.membership.epoch(), members, {}};
  const bool is_same = operation.epoch == self.membership.epoch() && operation.members == members;
  check(is_same, rank, "members of one operation are of different epochs");
  operation.started.add(rank);
}

void World::check_installed(int rank, const Action& action) {
  Node& self = node(rank);
  ++num_installed_;
  trace("rank", rank, "installs epoch", action.epoch, action.ranks, "at boundary", self.membership.passed());
  check(action.ranks == members_of(action.epoch), rank, "an epoch is not as it was decided");
  const bool is_planned = decided_.at(action.epoch).kind == ChangeKind::kPlanned;
  check(is_planned, rank, "a recovery is installed without a meeting");
}

// A word that is given binds: it must be one that the rank could keep.
void World::check_shown(int rank) {
  Node& self = node(rank);
  const MembershipCell& cell = self.membership.cell();
  const std::pair<uint32_t, uint32_t> acked{cell.acked_epoch, cell.acked_version};
  if (std::exchange(self.acked, acked) == acked || members_of(acked.first).count() > 0) return;
  const RegisterWord word = register_.read(acked.first);
  if (word.state != RegisterState::kProposed || word.version != acked.second) return;
  const MembershipRecord& record = records_[{word.writer, word.epoch % 64, true}];
  for (uint32_t idx = 0; idx < record.num_new; ++idx) {
    const NewMember& member = record.new_members[idx];
    check(self.prepared[static_cast<int>(member.slot)] == member.nonce, rank,
          "a rank acknowledges one that it is not prepared for");
  }
}

RecoverWish World::random_wish(int rank) {
  RecoverWish wish;
  const Membership& self = node(rank).membership;
  if (chance(250)) wish.evict.add(pick(num_ranks()));
  if (chance(150)) {
    wish.exactly = self.active() - node(rank).told_gone - wish.evict;
    wish.exactly.add(rank);
  }
  if (chance(50)) wish.min_ranks = 1 + pick(num_ranks());
  if (chance(400)) {
    for (const auto& [slot, incarnation] : node(rank).prepared) {
      if (incarnation != 0) wish.spares.add(slot);
    }
    wish.takes_all_spares = chance(300);
  }
  wish.evict.remove(rank);
  return wish;
}

void World::call(int rank, const RecoverWish& wish) {
  Node& self = node(rank);
  trace("rank", rank, "calls recover: evict", wish.evict, "exactly", wish.exactly, "at least", wish.min_ranks);
  self.is_calling = true;
  self.waits = false;
  self.exactly = wish.exactly;
  self.unwanted = self.unwanted | wish.evict;
  if (!wish.exactly.empty()) self.unwanted = self.unwanted | (RankSet::first(kSlots) - wish.exactly);
  step(rank, {.kind = Event::Kind::kRecover, .wish = wish});
}

// A deadline of an operation, nobody is dead; all members are told, and so are those that are none.
void World::give_up_operation(int rank) {
  trace("rank", rank, "gives up an operation of epoch", node(rank).membership.epoch());
  node(rank).is_broken = true;
  Origin origin = node(rank).membership.origin();
  const bool is_forged = chance(50);
  if (is_forged && chance(500)) {
    origin.group[3] ^= 1;
  } else if (is_forged) {
    origin.incarnation ^= 2;
  }
  for (int other = 0; other < num_ranks(); ++other) {
    if (other == rank) continue;
    items_.push_back(
        {.kind = ItemKind::kAbort, .target = other, .source = rank, .origin = origin, .is_forged = is_forged});
  }
}

bool World::deliver_one() {
  if (items_.empty()) return false;
  size_t idx = static_cast<size_t>(pick(static_cast<int>(items_.size())));
  const auto is_message = [](const Item& item) {
    return item.kind == ItemKind::kLook || item.kind == ItemKind::kParcel || item.kind == ItemKind::kAbort ||
           item.kind == ItemKind::kCell;
  };
  if (is_message(items_[idx])) {
    idx = static_cast<size_t>(std::find_if(items_.begin(), items_.end(),
                                           [&](const Item& item) {
                                             return is_message(item) && item.source == items_[idx].source &&
                                                    item.target == items_[idx].target;
                                           }) -
                              items_.begin());
  }
  const Item item = items_[idx];
  if (item.kind == ItemKind::kRequest && register_is_away_) return false;
  if (item.kind != ItemKind::kRequest && node(item.target).lives && node(item.target).is_stopped) return false;
  items_.erase(items_.begin() + static_cast<std::ptrdiff_t>(idx));
  if (item.kind == ItemKind::kRequest) {
    serve(item);
  } else if (node(item.target).lives) {
    deliver(item);
  }
  return true;
}

void World::deliver(const Item& item) {
  const int rank = item.target;
  Node& self = node(rank);
  switch (item.kind) {
    case ItemKind::kRequest: return;
    case ItemKind::kReply: {
      if (item.request != self.request) return;
      trace("rank", rank, "reads", item.word);
      if (self.meeting != 0 && !is_superseded(self)) return;
      Event event{.kind = Event::Kind::kWord, .word = item.word};
      if (item.word.state != RegisterState::kOpen) event.record = &item.record;
      return step(rank, event);
    }
    case ItemKind::kForgotten:
      if (item.request == self.request) step(rank, {.kind = Event::Kind::kForgotten, .epoch = item.epoch});
      return;
    case ItemKind::kLook: return step(rank, {.kind = Event::Kind::kLook});
    case ItemKind::kParcel: {
      trace("rank", rank, "has a parcel of rank", item.source, "for epoch", item.epoch, "stage", item.stage);
      self.parcels[{item.epoch, item.stage}].add(item.source);
      return look_at_parcels(rank);
    }
    case ItemKind::kAbort: return hear(rank, item);
    case ItemKind::kGone:
    case ItemKind::kProven: {
      const bool is_proven = item.kind == ItemKind::kProven;
      trace("rank", rank, "learns that rank", item.source, is_proven ? "has ended" : "is gone");
      self.told_gone.add(item.source);
      if (self.membership.active().contains(item.source)) self.is_broken = true;
      return step(rank, {.kind = is_proven ? Event::Kind::kProven : Event::Kind::kGone, .ranks = only(item.source)});
    }
    case ItemKind::kPrepared: {
      const bool is_known = self.membership.active().contains(item.source);
      if (is_known || !node(item.source).lives) return;
      trace("rank", rank, "is prepared for rank", item.source);
      self.told_gone.remove(item.source);
      self.prepared[item.source] = item.incarnation;
      return step(rank, {.kind = Event::Kind::kPrepared, .rank = item.source, .incarnation = item.incarnation});
    }
    case ItemKind::kCell: return step(rank, {.kind = Event::Kind::kCell, .rank = item.source, .cell = &item.cell});
  }
}

// Somebody who is waited for in the meeting will not come any more, or this rank is not wanted.
bool World::is_superseded(const Node& self) const {
  const auto had = self.parcels.find({self.meeting, self.is_renewing ? 1 : 0});
  RankSet needed = had == self.parcels.end() ? self.members : self.members - had->second;
  for (const auto& [key, sources] : self.parcels) {
    if (key.first > self.meeting && !(sources & needed).empty()) return true;
  }
  needed.add(self.membership.origin().rank);
  for (const auto& [epoch, record] : decided_) {
    if (epoch > self.meeting && !holds_all(record.active, needed)) return true;
  }
  return false;
}

void World::ask_register(int rank, uint32_t epoch, bool decides, const Action* action) {
  Item item{.kind = ItemKind::kRequest, .target = rank, .epoch = epoch, .request = ++num_requests_, .decides = decides};
  if (action != nullptr) {
    item.expected = action->expected;
    item.word = action->desired;
  }
  node(rank).request = item.request;
  items_.push_back(item);
}

// At the register, whether the asking rank still lives or not.
void World::serve(const Item& item) {
  Item reply = item;
  reply.kind = ItemKind::kReply;
  try {
    reply.word = item.decides ? register_.compare_set(item.expected, item.word) : register_.read(item.epoch);
  } catch (const Error& error) {
    check(error.code == ErrorCode::kInvalidState, item.target, "a register is asked for what it can't do");
    reply.kind = ItemKind::kForgotten;
  }
  if (reply.kind == ItemKind::kReply && reply.word.state != RegisterState::kOpen) {
    const MembershipRecord& record = records_[{reply.word.writer, reply.word.epoch % 64, reply.word.is_planned}];
    const std::string problem = record_problem(record, group_, reply.word.epoch);
    check(problem.empty(), item.target, "a register names a record that can't be believed");
    reply.record = record;
  }
  const bool has_changed = item.decides && reply.kind == ItemKind::kReply && reply.word == item.word;
  const bool takes_spares = reply.kind == ItemKind::kReply && reply.record.num_new > 0;
  if (has_changed && (reply.word.is_planned || reply.word.state != RegisterState::kCommitted || takes_spares)) ring();
  if (reply.kind == ItemKind::kReply && reply.word.state == RegisterState::kCommitted) {
    const MembershipRecord& record = reply.record;
    const auto [known, is_new] = decided_.try_emplace(reply.word.epoch, record);
    check(known->second.active == record.active, item.target, "two decisions for one epoch");
    if (is_new) trace("decided by rank", item.target, reply.word, record.active);
  }
  items_.push_back(reply);
}

// The bell of the page: all who map it look.
void World::ring() {
  for (int rank = 0; rank < num_ranks(); ++rank) {
    if (node(rank).lives) items_.push_back({.kind = ItemKind::kLook, .target = rank, .source = rank});
  }
}

// ---- what a machine wants

void World::step(int rank, const Event& event) {
  for (const Action& action : node(rank).membership.step(event)) {
    if (!node(rank).lives) return;
    perform(rank, action);
    if (chance(kill_rate_ / 4)) kill(rank);  // between any two actions
  }
}

void World::perform(int rank, const Action& action) {
  Node& self = node(rank);
  switch (action.kind) {
    case Action::Kind::kRead:
      self.meeting = 0;  // its last one, if there was one, has been left
      return ask_register(rank, action.epoch, false, nullptr);
    case Action::Kind::kDecide: {
      self.meeting = 0;
      MembershipRecord record = self.membership.draft();
      const bool is_planned = record.kind == ChangeKind::kPlanned;
      if (!is_planned) {
        const RankSet lost = members_of(action.epoch - 1) - record.active;
        check(record.active.contains(rank), rank, "a rank leaves itself out");
        check(holds_all(self.told_gone | self.unwanted, lost), rank, "a rank is left out for no reason");
      }
      seal_record(record);
      records_[{rank, action.epoch % 64, is_planned}] = record;
      return ask_register(rank, action.epoch, true, &action);
    }
    case Action::Kind::kMove: return ask_register(rank, action.epoch, true, &action);
    case Action::Kind::kShow:
      check_shown(rank);
      for (int other = 0; other < num_ranks(); ++other) {
        if (other == rank || !node(other).lives) continue;
        items_.push_back({.kind = ItemKind::kCell, .target = other, .source = rank, .cell = self.membership.cell()});
      }
      return;
    case Action::Kind::kPass: self.waits = false; return begin_operation(rank);
    case Action::Kind::kInstall:
      self.waits = false;
      check_installed(rank, action);
      self.has_left = !action.ranks.contains(rank);
      if (!(action.ranks & self.told_gone).empty()) self.is_broken = true;
      return self.has_left ? void() : begin_operation(rank);
    case Action::Kind::kChanged:
    case Action::Kind::kWithdrawn:
      trace("rank", rank, action.kind == Action::Kind::kChanged ? "has its change" : "has lost its change");
      self.is_wanted = false;
      return;
    case Action::Kind::kTell:
      for (const int other : action.ranks.ranks()) {
        items_.push_back({.kind = ItemKind::kLook, .target = other, .source = rank});
      }
      return;
    case Action::Kind::kMeet: return meet(rank, action);
    case Action::Kind::kRenew:
      check(holds_all(said_here_[action.epoch], action.ranks), rank, "memory is renewed before all have come");
      self.is_renewing = true;
      for (const int other : action.ranks.ranks()) {
        items_.push_back(
            {.kind = ItemKind::kParcel, .target = other, .source = rank, .epoch = action.epoch, .stage = 1});
      }
      return;
    case Action::Kind::kEnter: return enter(rank, action);
    case Action::Kind::kRaise: return raise(rank, action);
  }
}

void World::meet(int rank, const Action& action) {
  Node& self = node(rank);
  trace("rank", rank, "meets", action.ranks, "for epoch", action.epoch);
  check(action.ranks == members_of(action.epoch), rank, "a meeting is not that of the decision");
  check(self.met.insert(action.epoch).second, rank, "an epoch is tried twice");
  self.meeting = action.epoch;
  self.is_renewing = false;
  self.members = action.ranks;
  self.here = {};
  said_here_[action.epoch].add(rank);
  for (const int other : action.ranks.ranks()) {
    items_.push_back({.kind = ItemKind::kParcel, .target = other, .source = rank, .epoch = action.epoch});
  }
}

void World::look_at_parcels(int rank) {
  Node& self = node(rank);
  if (self.meeting == 0) return;
  const RankSet here = self.parcels[{self.meeting, 0}];
  if (!self.is_renewing && here != self.here) {
    self.here = here;
    step(rank, {.kind = Event::Kind::kHere, .epoch = self.meeting, .ranks = here});
  }
  if (self.meeting != 0 && self.is_renewing && holds_all(self.parcels[{self.meeting, 1}], self.members)) {
    step(rank, {.kind = Event::Kind::kRenewed, .epoch = self.meeting});
  }
}

void World::enter(int rank, const Action& action) {
  Node& self = node(rank);
  trace("rank", rank, "enters epoch", action.epoch, action.ranks);
  check(action.ranks == members_of(action.epoch), rank, "an epoch is not as it was decided");
  check(action.ranks.contains(rank), rank, "a rank enters an epoch that it is no member of");
  check(holds_all(said_here_[action.epoch], action.ranks), rank, "an epoch is entered before all have come");
  self.meeting = 0;
  self.is_calling = false;
  self.is_broken = !(action.ranks & self.told_gone).empty();
  std::vector<Item> early;
  early.swap(self.early);
  for (const Item& item : early) hear(rank, item);
}

void World::raise(int rank, const Action& action) {
  Node& self = node(rank);
  trace("rank", rank, "fails with", static_cast<int>(action.failure), action.ranks);
  const bool was_calling = self.is_calling || self.waits;
  self.meeting = 0;
  self.is_calling = false;
  self.waits = false;
  self.is_broken = true;
  switch (action.failure) {
    case Failure::kEvicted: {
      bool is_out = newest_decided() >= self.membership.newest() + 64;
      for (const auto& [epoch, record] : decided_)
        is_out |= epoch > self.membership.epoch() && !record.active.contains(rank);
      return check(is_out, rank, "a member is told that it was evicted");
    }
    case Failure::kPeersLost: {
      const RankSet left_out = RankSet::first(kSlots) - members_of(self.membership.newest());
      return check(holds_all(self.told_gone | left_out, action.ranks), rank, "a live rank is called lost");
    }
    case Failure::kPeersLate: return check(!action.ranks.contains(rank), rank, "a rank is late for itself");
    case Failure::kTooFew: return check(was_calling, rank, "an error comes without a call");
    case Failure::kControlLost: return check(was_calling, rank, "an error comes without a call");
    case Failure::kOvertaken: {
      const bool is_spare = self.is_joiner && self.membership.is_member() && action.ranks.contains(rank);
      return check(was_calling || is_spare, rank, "an error comes without a call");
    }
    case Failure::kOtherSet: return check(self.exactly != action.ranks, rank, "the set that was decided is refused");
    case Failure::kNone:
    case Failure::kLastEpoch:
    case Failure::kDamaged: fail(rank, "an error that can't be");
  }
}

// Who was a member of which epoch is known here, so what it must be taken for is known too.
void World::hear(int rank, const Item& item) {
  Node& self = node(rank);
  const Origin& origin = item.origin;
  const Hearing hearing = self.membership.hear(origin);
  trace("rank", rank, "hears an abort of rank", origin.rank, "in epoch", origin.epoch, static_cast<int>(hearing));
  const bool was_member = members_of(origin.epoch).contains(origin.rank) && !item.is_forged;
  const bool is_member = members_of(self.membership.epoch()).contains(origin.rank) && was_member;
  const bool is_of_this_era = origin.era == self.membership.era();
  bool is_right = true;
  if (hearing == Hearing::kCounts) is_right = was_member && is_of_this_era;
  if (is_member && is_of_this_era) is_right = hearing == Hearing::kCounts;
  if (is_member && origin.era > self.membership.era()) is_right = hearing == Hearing::kLater;
  if (origin.era < self.membership.era() || origin.group != group_) is_right = hearing == Hearing::kDropped;
  if (item.is_forged) is_right = hearing != Hearing::kCounts;
  check(is_right, rank, "an abort is taken for another one");
  if (hearing == Hearing::kCounts) self.is_broken = true;
  if (hearing == Hearing::kLater) self.early.push_back(item);
}

// ---- the end: no more faults, all that wait for ever are wrong

bool World::is_settled(uint32_t newest, const RankSet& set) {
  for (int rank = 0; rank < num_ranks(); ++rank) {
    const Node& self = node(rank);
    if (!set.contains(rank)) continue;
    if (!self.lives || self.is_calling || self.waits || self.is_broken || self.membership.epoch() != newest)
      return false;
  }
  return true;
}

void World::settle() {
  trace("no more faults");
  kill_rate_ = 0;
  register_is_away_ = false;
  for (Node& each : nodes_) each.is_stopped = false;
  for (int round = 0; round < 40; ++round) {
    while (deliver_one()) ++num_steps_;
    for (int rank = 0; rank < num_ranks(); ++rank) {  // what a waiting rank does now and then
      Node& self = node(rank);
      if (self.lives && self.meeting != 0) ask_register(rank, self.meeting + 1, false, nullptr);
      if (self.lives && self.waits) step(rank, {.kind = Event::Kind::kPatience});
    }
    while (deliver_one()) ++num_steps_;
    const RankSet set = members_of(newest_decided());
    if (round > 0 && is_settled(newest_decided(), set)) return check_end(set);
    bool has_members = false;
    for (int rank = 0; rank < num_ranks(); ++rank) has_members |= node(rank).lives && set.contains(rank);
    for (int rank = 0; rank < num_ranks(); ++rank) {
      Node& self = node(rank);
      const bool is_asked =
          self.lives && !self.is_calling && !self.membership.is_evicted() && self.membership.is_member();
      // Who was left out is told; but nobody tells a rank that has lost its connections, and knows that.
      const bool has_lost = !(self.membership.active() & self.told_gone).empty();
      if (is_asked && (set.contains(rank) || !has_members || has_lost)) call(rank, {});
    }
    if (!has_members && round > 2) return check_end(set);
  }
  fail(-1, "ranks wait for ever");
}

bool World::was_taken_in(int slot) {
  const uint64_t incarnation = node(slot).membership.origin().incarnation;
  return std::any_of(decided_.begin(), decided_.end(), [&](const auto& entry) {
    const auto& members = entry.second.new_members;
    return std::any_of(members.begin(), members.begin() + entry.second.num_new,
                       [&](const NewMember& member) { return member.nonce == incarnation; });
  });
}

void World::check_end(const RankSet& set) {
  RankSet living;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    if (node(rank).lives) living.add(rank);
  }
  RankSet were_active = founders_;
  for (const auto& [epoch, record] : decided_) were_active = were_active | record.active;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    Node& self = node(rank);
    if (!self.lives) continue;
    if (!self.membership.is_member()) {
      check(self.has_left || !set.contains(rank), rank, "a joiner was not told that it was taken in");
      continue;
    }
    const bool knows = self.membership.is_evicted() || self.membership.is_leaving();
    check(knows != set.contains(rank), rank, "an evicted rank was not told");
    if (!set.contains(rank)) continue;
    check(self.membership.active() == set, rank, "members differ");
    check((self.membership.safe_to_delete() & living).empty(), rank, "a live rank is called safe to delete");
    if (self.is_joiner) continue;  // it knows nothing of those before it
    RankSet forgotten;             // maybe: who was in a slot before a joiner that was not taken in
    for (int slot = 0; slot < num_ranks(); ++slot) {
      if (node(slot).is_joiner && !was_taken_in(slot)) forgotten.add(slot);
    }
    const RankSet left_out = were_active - set - forgotten;
    const RankSet listed = (self.membership.evicted() | self.membership.leaving()) - forgotten;
    check(listed == (left_out & living), rank, "an evicted rank is not listed");
    check(self.membership.safe_to_delete() - forgotten == left_out - living, rank, "a dead rank is not listed");
  }
}

}  // namespace weft::test
