#include "engine/cpu/operation.h"

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "base/log.h"
#include "weft/layout/routing.h"

namespace weft::cpu {
namespace {

u64 deadline_of(u64 timeout_ns) {
  const u64 now = now_ns();
  return timeout_ns > ~u64{0} - now ? ~u64{0} : now + timeout_ns;
}

}  // namespace

Operation::Operation(Window& window, const OperationConfig& config, u64 timeout_ns, const Poll& poll)
    : window_(window),
      config_(config),
      fingerprint_(fingerprint(config)),
      poll_(poll),
      rank_(window.comm_->rank()),
      rails_(window) {
  Communicator& comm = *window.comm_;
  if (window.closed_) throw_invalid_state("the window is closed");
  if (window.is_retired_) {
    throw_invalid_state(
        "another rank closed this window before the last rebuild; make a new ExpertParallel on every rank");
  }
  comm.raise_if_unusable();
  ControlWords* words = window.words();
  const sync::BeginResult begun = sync::begin_operation(words, 1);
  if (begun == sync::BeginResult::kBusy) {
    throw_invalid_state(
        "an operation is in flight on this window; use one thread at a time, or two windows (num_windows=2)");
  }
  if (begun == sync::BeginResult::kBroken) comm.leave_broken();
  turn_ = {static_cast<u16>(comm.epoch()), static_cast<u32>(words->sequence + 1)};
  deadline_ns_ = deadline_of(timeout_ns);
  ptx::st_relaxed_sys(&words->deadline_ns, deadline_ns_);
  for (int step = 1; step < comm.num_ranks(); ++step) {
    const int peer = (rank_ + step) % comm.num_ranks();
    if (!comm.is_active(peer)) continue;
    others_[num_others_++] = peer;
    if (map().are_mates(rank_, peer)) {
      peers_[num_peers_++] = peer;
    } else if (forwarder(peer) == rank_) {
      to_relay_ |= u64{1} << peer;
    }
  }
}

Operation::~Operation() {
  if (!ended_) sync::end_operation(window_.words(), false);
}

void Operation::finish() {
  sync::end_operation(window_.words(), true);
  ended_ = true;
}

u64 Operation::header_from(Phase phase, int peer) const {
  return sync::load_header(
      reinterpret_cast<const u64*>(window_.control_of(rank_) + window_.layout_.header(phase, turn_.sequence, peer)));
}

bool Operation::has_header(Phase phase, int peer) const {
  return sync::classify_header(header_from(phase, peer), turn_, fingerprint_) != sync::HeaderState::kNotYet;
}

void Operation::relay_messages() {
  rails_.settle_some();
  for (int source : others()) {
    if ((to_relay_ >> source & 1) == 0) continue;
    const RailMessage* message = rails_.take_message(source);
    if (message == nullptr) continue;
    to_relay_ &= ~(u64{1} << source);
    if (sync::classify_header(message->header, turn_, fingerprint_) == sync::HeaderState::kNotYet)
      fail_internal(Phase::kCount, source);
    messages_[static_cast<size_t>(source)] = message;
    relay(source, *message);
  }
}

// Each rank of this node finds in its own cells what the source would have written there on one machine.
void Operation::relay(int source, const RailMessage& message) {
  const auto print = static_cast<u16>(message.header & 0xffff);
  CountPayload payload;
  std::memcpy(&payload, message.payload, sizeof(payload));
  const bool has_counts =
      print != kRefusalFingerprint && payload.config.kind == OpKind::kDispatch && payload.config.is_cached == 0;
  const auto* begin = reinterpret_cast<const u8*>(&message);
  const auto tell = [&](int rank) {
    u8* control = window_.control_of(rank);
    u8* place = control + window_.layout_.payload(Phase::kCount, turn_.sequence, source);
    auto* cell = reinterpret_cast<u64*>(control + window_.layout_.header(Phase::kCount, turn_.sequence, source));
    sync::send_header(cell, message.header, [&] {
      std::memcpy(place, message.payload, sizeof(message.payload));
      if (!has_counts) return;
      const auto* counts = reinterpret_cast<const i32*>(begin + rails_.layout().counts(map().index(rank)));
      reinterpret_cast<CountPayload*>(place)->num_rows = counts[0];
      std::memcpy(place + WindowLayout::kPayloadFixedBytes, counts + 1,
                  static_cast<size_t>(window_.shape_.num_local_experts()) * sizeof(i32));
    });
    ring_doorbell(reinterpret_cast<ControlWords*>(control));
  };
  for (int peer : peers()) tell(peer);
  tell(rank_);
}

void Operation::post(int peer, Channel channel, int owner, u32 n) {
  sync::post_progress(progress_at(peer, channel, owner), turn_, n);
  ring_doorbell(reinterpret_cast<ControlWords*>(window_.control_of(peer)));
}

// The wait for each peer counts from here until a look first finds its header; for one that is there already it is nothing.
void Operation::wait_headers(Phase phase) {
  const auto is_late = [&](int peer) {
    return (phase == Phase::kCount || map().are_mates(rank_, peer)) && !has_header(phase, peer);
  };
  relay_messages();
  u64 late_peers = 0;
  for (int peer : senders(phase)) late_peers |= is_late(peer) ? u64{1} << peer : 0;
  const u64 start_ns = now_ns();
  const auto note_arrivals = [&] {
    for (int peer : senders(phase)) {
      if ((late_peers >> peer & 1) == 0 || is_late(peer)) continue;
      window_.stats_.waited_ns[peer] += now_ns() - start_ns;
      late_peers &= ~(u64{1} << peer);
    }
    return late_peers == 0;
  };
  wait(phase, note_arrivals, is_late);
}

void Operation::wait_all(Phase phase) {
  wait_headers(phase);
  raise_disagreement(phase, false);
}

// Everybody has everybody's header now, so all ranks come to the same verdict.
void Operation::raise_disagreement(Phase phase, bool allows_needs) {
  int refusing = -1, differing = -1;
  for (int peer : senders(phase)) {
    const sync::HeaderState state = state_of(phase, peer);
    const bool is_need = needs_room(phase, peer);
    const bool differs = state == sync::HeaderState::kMismatch ||
                         ((state == sync::HeaderState::kMatch || is_need) && is_of_other_call(phase, peer));
    const bool refuses = state == sync::HeaderState::kRefusal && !differs && !(is_need && allows_needs);
    if (refuses && (refusing < 0 || peer < refusing)) refusing = peer;
    if (differs && (differing < 0 || peer < differing)) differing = peer;
  }
  if (refusing >= 0) raise_refusal(phase, refusing);
  if (differing >= 0) raise_mismatch(differing);
}

sync::HeaderState Operation::state_of(Phase phase, int peer) const {
  return sync::classify_header(header_from(phase, peer), turn_, fingerprint_);
}

bool Operation::needs_room(Phase phase, int peer) const {
  return phase == Phase::kCount && state_of(phase, peer) == sync::HeaderState::kRefusal &&
         payload_from<NeedPayload>(phase, peer)->error_code == kNeedOfRoom;
}

OperationConfig Operation::config_from(int peer) const {
  if (needs_room(Phase::kCount, peer)) return payload_from<NeedPayload>(Phase::kCount, peer)->config;
  return payload_from<CountPayload>(Phase::kCount, peer)->config;
}

// Two calls may have one fingerprint; the first payload says the rest.
bool Operation::is_of_other_call(Phase phase, int peer) const {
  if (phase != Phase::kCount) return false;
  const OperationConfig other = config_from(peer);
  return std::memcmp(&other, &config_, sizeof(config_)) != 0;
}

void Operation::raise_mismatch(int peer) {
  const OperationConfig other = config_from(peer);
  finish();
  throw Error(ErrorCode::kInvalidArgument,
              mismatch_text({rank_, describe(config_), config_.object}, {peer, describe(other), other.object}),
              op_name(static_cast<u32>(config_.kind)), turn_.sequence, {peer});
}

void Operation::raise_refusal(Phase phase, int peer) {
  RefusalPayload refusal = *payload_from<RefusalPayload>(phase, peer);
  refusal.text[sizeof(refusal.text) - 1] = '\0';
  const bool is_known = refusal.error_code >= 1 && refusal.error_code <= static_cast<u32>(ErrorCode::kInternalError);
  ErrorCode code = is_known ? static_cast<ErrorCode>(refusal.error_code) : ErrorCode::kInternalError;
  std::string text = refusal.text;
  if (needs_room(phase, peer)) {
    code = ErrorCode::kInvalidArgument;
    text = "it needs room for " + std::to_string(payload_from<NeedPayload>(phase, peer)->num_tokens) + " tokens";
  }
  finish();
  throw Error(
      code, "rank " + std::to_string(peer) + " could not take part: " + text + "; the call was given up on every rank",
      op_name(static_cast<u32>(config_.kind)), turn_.sequence, {peer});
}

void Operation::refuse(Phase phase, ErrorCode code, const std::string& text) {
  if (phase != Phase::kCount && has_rails()) {  // too late for ranks of other nodes, who may send rows
    window_.comm_->abort("rank " + std::to_string(rank_) + " could not take part: " + text);
    window_.comm_->leave_broken();
  }
  if (has_rails()) {
    RefusalPayload refusal;
    refusal.error_code = static_cast<u32>(code);
    text.copy(refusal.text, sizeof(refusal.text) - 1);
    put_refusals(&refusal, sizeof(refusal));
  }
  for (int peer : peers()) {
    send_header(phase, peer, kRefusalFingerprint, [&] {
      auto* refusal = payload_to<RefusalPayload>(phase, peer);
      refusal->error_code = static_cast<u32>(code);
      const size_t length = std::min(text.size(), sizeof(refusal->text) - 1);
      std::memcpy(refusal->text, text.data(), length);
      refusal->text[length] = '\0';
    });
  }
  wait_headers(phase);
  finish();
  throw Error(
      code, "rank " + std::to_string(rank_) + " could not take part: " + text + "; the call was given up on every rank",
      op_name(static_cast<u32>(config_.kind)), turn_.sequence, {rank_});
}

i64 Operation::wait_for_need(i64 mine) {
  for (int peer : peers()) {
    if (mine == 0) break;
    send_header(Phase::kCount, peer, kRefusalFingerprint,
                [&] { *payload_to<NeedPayload>(Phase::kCount, peer) = {kNeedOfRoom, mine, config_}; });
  }
  if (mine != 0) {
    const NeedPayload need{kNeedOfRoom, mine, config_};
    put_refusals(&need, sizeof(need));
  }
  wait_headers(Phase::kCount);
  raise_disagreement(Phase::kCount, true);
  i64 most = mine;
  for (int peer : others()) {
    if (!needs_room(Phase::kCount, peer)) continue;
    most = std::max(most, clamp_count(payload_from<NeedPayload>(Phase::kCount, peer)->num_tokens, kMaxRowsPerPair));
  }
  if (most > 0) finish();
  return most;
}

AbortReason Operation::reason(AbortCode code, Phase phase, int culprit) const {
  AbortReason reason;
  reason.code = code;
  reason.rank = culprit;
  reason.reporter = rank_;
  reason.sequence = turn_.sequence;
  reason.phase = static_cast<u32>(phase);
  reason.op_kind = static_cast<u32>(config_.kind);
  return reason;
}

void Operation::fail_internal(Phase phase, int culprit) {
  window_.comm_->fail(reason(AbortCode::kInternal, phase, culprit));
}

void Operation::give_up(Phase phase) { window_.comm_->give_up(reason(AbortCode::kInterrupted, phase, rank_)); }

// By which rails what `late` owes would have come to this node.
std::string Operation::rails_text(const RankSet& late) const {
  std::string text;
  for (int peer : late.ranks()) {
    if (map().are_mates(rank_, peer)) continue;
    text += (text.empty() ? " (rank " : ", rank ") + std::to_string(peer) + ": node " +
            std::to_string(map().node(peer)) + ", rail " + std::to_string(map().index(peer));
  }
  return text.empty() ? text : text + ")";
}

void Operation::break_off(sync::WaitResult result, Phase phase, u64 late_peers) {
  ErrorRecord& record = window_.words()->error;
  record.expected = sync::pack_header(turn_, fingerprint_);
  std::string cells;
  for (int peer : others()) {
    if ((late_peers >> peer & 1) != 0) record.seen = header_from(phase, peer);
    cells += " rank " + std::to_string(peer) + ":" + std::to_string(header_from(phase, peer) >> 16 & 0xffffffffu);
  }
  log_line(kLogDebug, "rank " + std::to_string(rank_) + " left " + op_name(static_cast<u32>(config_.kind)) +
                          ", epoch " + std::to_string(window_.comm_->epoch()) + ", sequence " +
                          std::to_string(turn_.sequence) + ", phase " + phase_name(static_cast<u32>(phase)) +
                          "; sequences seen:" + cells);
  const auto kind = static_cast<u32>(config_.kind);
  if (result == sync::WaitResult::kAborted) {
    if (!window_.comm_->is_closed()) window_.comm_->log_left(window_.comm_->reason(), kind);
    window_.comm_->leave_broken();
  }
  AbortReason timeout = reason(AbortCode::kPeerTimeout, phase, -1);
  timeout.peers = RankSet::of_mask(late_peers);
  if (has_rails()) {
    timeout.peers = window_.comm_->to_blame(timeout.peers);
    set_text(timeout, rails_text(timeout.peers));
  }
  timeout.rank = timeout.peers.next(0);
  window_.comm_->log_left(timeout, kind);
  window_.comm_->fail(timeout);
}

}  // namespace weft::cpu
