#include "simulator/world.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <iterator>

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
  std::vector<uint64_t> incarnations;
  for (int rank = 0; rank < num_ranks; ++rank) incarnations.push_back(random_() | 1);
  for (int rank = 0; rank < num_ranks; ++rank) nodes_.emplace_back(Membership(rank, incarnations, group_, kFirstEpoch));
  // Each kind of fault is rare in some runs and common in others.
  kill_rate_ = pick(2) * pick(25);
  stop_rate_ = pick(2) * pick(40);
  cut_rate_ = pick(3) == 0 ? pick(15) : 0;
  away_rate_ = pick(2) * pick(20);
  call_rate_ = 20 + pick(400);
  deadline_rate_ = pick(2) * pick(40);
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
  if (epoch == kFirstEpoch) return RankSet::first(num_ranks());
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
  if (self.is_calling || self.membership.is_evicted() || !chance(call_rate_)) return;
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

RecoverWish World::random_wish(int rank) {
  RecoverWish wish;
  const Membership& self = node(rank).membership;
  if (chance(250)) wish.evict.add(pick(num_ranks()));
  if (chance(150)) {
    wish.exactly = self.active() - node(rank).told_gone - wish.evict;
    wish.exactly.add(rank);
  }
  if (chance(50)) wish.min_ranks = 1 + pick(num_ranks());
  wish.evict.remove(rank);
  return wish;
}

void World::call(int rank, const RecoverWish& wish) {
  Node& self = node(rank);
  trace("rank", rank, "calls recover: evict", wish.evict, "exactly", wish.exactly, "at least", wish.min_ranks);
  self.is_calling = true;
  self.exactly = wish.exactly;
  self.unwanted = self.unwanted | wish.evict;
  if (!wish.exactly.empty()) self.unwanted = self.unwanted | (RankSet::first(num_ranks()) - wish.exactly);
  step(rank, {.kind = Event::Kind::kRecover, .wish = wish});
}

// A deadline of an operation, nobody is dead; all members are told, and so are those that are none.
void World::give_up_operation(int rank) {
  trace("rank", rank, "gives up an operation of epoch", node(rank).membership.epoch());
  node(rank).is_broken = true;
  Origin origin = node(rank).membership.origin();
  if (chance(30)) origin.group[3] ^= 1;
  if (chance(30)) origin.incarnation ^= 2;
  for (int other = 0; other < num_ranks(); ++other) {
    if (other == rank) continue;
    items_.push_back({.kind = ItemKind::kAbort, .target = other, .source = rank, .origin = origin});
  }
}

bool World::deliver_one() {
  if (items_.empty()) return false;
  size_t idx = static_cast<size_t>(pick(static_cast<int>(items_.size())));
  const auto is_message = [](const Item& item) {
    return item.kind == ItemKind::kLook || item.kind == ItemKind::kParcel || item.kind == ItemKind::kAbort;
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
      if (item.word.state == RegisterState::kCommitted) event.record = &decided_.at(item.word.epoch);
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
    case ItemKind::kAbort: return hear(rank, item.origin);
    case ItemKind::kGone:
    case ItemKind::kProven: {
      const bool is_proven = item.kind == ItemKind::kProven;
      trace("rank", rank, "learns that rank", item.source, is_proven ? "has ended" : "is gone");
      self.told_gone.add(item.source);
      if (self.membership.active().contains(item.source)) self.is_broken = true;
      return step(rank, {.kind = is_proven ? Event::Kind::kProven : Event::Kind::kGone, .ranks = only(item.source)});
    }
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
  if (reply.kind == ItemKind::kReply && reply.word.state == RegisterState::kCommitted) {
    const MembershipRecord& record = records_[{reply.word.writer, reply.word.epoch % 64}];
    const std::string problem = record_problem(record, group_, reply.word.epoch);
    check(problem.empty(), item.target, "a register names a record that can't be believed");
    const auto [known, is_new] = decided_.try_emplace(reply.word.epoch, record);
    check(known->second.active == record.active, item.target, "two decisions for one epoch");
    if (is_new) trace("decided by rank", item.target, reply.word, record.active);
  }
  items_.push_back(reply);
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
      const RankSet lost = members_of(action.epoch - 1) - record.active;
      check(record.active.contains(rank), rank, "a rank leaves itself out");
      check(holds_all(self.told_gone | self.unwanted, lost), rank, "a rank is left out for no reason");
      seal_record(record);
      records_[{rank, action.epoch % 64}] = record;
      return ask_register(rank, action.epoch, true, &action);
    }
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
  std::vector<Origin> early;
  early.swap(self.early);
  for (const Origin& origin : early) hear(rank, origin);
}

void World::raise(int rank, const Action& action) {
  Node& self = node(rank);
  trace("rank", rank, "fails with", static_cast<int>(action.failure), action.ranks);
  const bool was_calling = self.is_calling;
  self.meeting = 0;
  self.is_calling = false;
  self.is_broken = true;
  switch (action.failure) {
    case Failure::kEvicted: {
      bool is_out = newest_decided() >= self.membership.newest() + 64;
      for (const auto& [epoch, record] : decided_)
        is_out |= epoch > self.membership.epoch() && !record.active.contains(rank);
      return check(is_out, rank, "a member is told that it was evicted");
    }
    case Failure::kPeersLost: {
      const RankSet left_out = RankSet::first(num_ranks()) - members_of(self.membership.newest());
      return check(holds_all(self.told_gone | left_out, action.ranks), rank, "a live rank is called lost");
    }
    case Failure::kPeersLate: return check(!action.ranks.contains(rank), rank, "a rank is late for itself");
    case Failure::kTooFew: return check(was_calling, rank, "an error comes without a call");
    case Failure::kControlLost: return check(was_calling, rank, "an error comes without a call");
    case Failure::kOtherSet: return check(self.exactly != action.ranks, rank, "the set that was decided is refused");
    case Failure::kNone:
    case Failure::kLastEpoch:
    case Failure::kDamaged: fail(rank, "an error that can't be");
  }
}

// Of what rank says what it says is known here, so what it must be taken for is known too.
void World::hear(int rank, const Origin& origin) {
  Node& self = node(rank);
  const uint32_t epoch = self.membership.epoch();
  const Hearing hearing = self.membership.hear(origin);
  trace("rank", rank, "hears an abort of rank", origin.rank, "in epoch", origin.epoch, static_cast<int>(hearing));
  const bool is_forged =
      origin.group != group_ || origin.incarnation != node(origin.rank).membership.origin().incarnation;
  const bool is_member = members_of(epoch).contains(origin.rank) && !is_forged;
  Hearing right = Hearing::kDropped;
  if (is_member && origin.epoch == epoch) right = Hearing::kCounts;
  if (is_member && origin.epoch > epoch) right = Hearing::kLater;
  check(hearing == right, rank, "an abort is taken for another one");
  if (hearing == Hearing::kCounts) self.is_broken = true;
  if (hearing == Hearing::kLater) self.early.push_back(origin);
}

// ---- the end: no more faults, all that wait for ever are wrong

bool World::is_settled(uint32_t newest, const RankSet& set) {
  for (int rank = 0; rank < num_ranks(); ++rank) {
    const Node& self = node(rank);
    if (!set.contains(rank)) continue;
    if (!self.lives || self.is_calling || self.is_broken || self.membership.epoch() != newest) return false;
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
    }
    while (deliver_one()) ++num_steps_;
    const RankSet set = members_of(newest_decided());
    if (round > 0 && is_settled(newest_decided(), set)) return check_end(set);
    bool has_members = false;
    for (int rank = 0; rank < num_ranks(); ++rank) has_members |= node(rank).lives && set.contains(rank);
    for (int rank = 0; rank < num_ranks(); ++rank) {
      Node& self = node(rank);
      const bool is_asked = self.lives && !self.is_calling && !self.membership.is_evicted();
      // Who was left out is told; but nobody tells a rank that has lost its connections, and knows that.
      const bool has_lost = !(self.membership.active() & self.told_gone).empty();
      if (is_asked && (set.contains(rank) || !has_members || has_lost)) call(rank, {});
    }
    if (!has_members && round > 2) return check_end(set);
  }
  fail(-1, "ranks wait for ever");
}

void World::check_end(const RankSet& set) {
  RankSet living;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    if (node(rank).lives) living.add(rank);
  }
  for (int rank = 0; rank < num_ranks(); ++rank) {
    Node& self = node(rank);
    if (!self.lives) continue;
    check(self.membership.is_evicted() != set.contains(rank), rank, "an evicted rank was not told");
    if (!set.contains(rank)) continue;
    check(self.membership.active() == set, rank, "members differ");
    check((self.membership.safe_to_delete() & living).empty(), rank, "a live rank is called safe to delete");
    const RankSet left_out = RankSet::first(num_ranks()) - set;
    check(self.membership.evicted() == (left_out & living), rank, "an evicted rank is not listed");
    check(self.membership.safe_to_delete() == left_out - living, rank, "a dead rank is not listed");
  }
}

}  // namespace weft::test
