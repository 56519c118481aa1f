// What ranks let each other know in waits that are long: that one has refused its call, and whom each waits for.
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "engine/communicator.h"

namespace weft {

void Communicator::note_refusal(const std::string& text) {
  Note note;
  set_origin(note, origin());
  set_text(note, text);
  plane_->publish_note(note);
}

void Communicator::note_awaited(const RankSet& late) {
  Note note;
  set_origin(note, origin());
  note.awaited = late;
  plane_->publish_note(note);
}

RankSet Communicator::to_blame(const RankSet& late) const {
  const GroupId group = plane_->ledger().group();
  RankSet blamed, open = late, seen = late;
  seen.add(rank_);
  for (int rank = open.next(0); rank >= 0; rank = open.next(0)) {
    open.remove(rank);
    const Note note = plane_->note_of(rank);
    const bool waits = note.epoch == epoch_ && note.group == group && now_ns() - note.heard_ns < WaitNote::kFreshNs;
    const RankSet awaited = waits ? note.awaited & active_set_ : RankSet();
    if (awaited.empty()) blamed.add(rank);
    open = open | (awaited - seen);
    seen = seen | awaited;
  }
  return blamed.empty() ? late : blamed;
}

std::map<int, std::string> Communicator::refusals(const RankSet& ranks) const {
  std::map<int, std::string> all;
  const GroupId group = plane_->ledger().group();
  for (const int rank : (ranks & active_set_).ranks()) {
    const Note note = plane_->note_of(rank);
    const std::string text = text_of(note);
    if (text.empty() || note.epoch != epoch_ || note.group != group) continue;
    all.emplace(rank, text);
  }
  return all;
}

void WaitLog::look(const RankSet& late) {
  constexpr u64 kPatienceNs = 1'000'000'000;
  const u64 now = now_ns();
  if (start_ns_ == 0) start_ns_ = now;
  if (now - start_ns_ < kPatienceNs) return;
  for (const auto& [rank, text] : comm_.refusals(late)) {
    if (std::exchange(logged_[rank], text) == text) continue;
    log_line(kLogWarning, "rank " + std::to_string(comm_.rank()) + ": waiting for rank " + std::to_string(rank) +
                              ", which refused its call: " + text);
  }
}

void WaitNote::look(const RankSet& late) {
  const u64 now = now_ns();
  if (next_ns_ == 0) next_ns_ = now + kPeriodNs;
  if (now < next_ns_) return;
  next_ns_ = now + kPeriodNs;
  comm_.note_awaited(late);
  has_told_ = true;
}

WaitNote::~WaitNote() {
  if (has_told_) comm_.note_awaited({});
}

}  // namespace weft
