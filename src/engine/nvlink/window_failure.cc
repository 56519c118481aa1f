// Every way in which a call between GPUs can end badly, and what this rank tells the others (R9).
#include <algorithm>
#include <bit>
#include <cstring>

#include "base/log.h"
#include "engine/describe.h"
#include "engine/nvlink/host_wait.h"
#include "engine/nvlink/window.h"
#include "weft/ptx/memory.h"
#include "weft/sync/header.h"

namespace weft::nvlink {
namespace {

using transport::ErrorCause;

constexpr u64 kLastBlocksNs = 1'000'000'000;  // a kernel that has left a record ends long before

std::string rank_text(i32 rank) { return "rank " + std::to_string(rank); }

}  // namespace

// Code and phase of the record are one word; zero: no error.
u64* Window::error_word() const { return reinterpret_cast<u64*>(&host_->error.code); }

void Window::raise_found() {
  if (ptx::ld_acquire_sys(error_word()) != 0 && !has_need_at_work()) raise_error();
}

void Window::empty_record() {
  host_->error = ErrorRecord{};
  ptx::st_release_sys(&host_->num_errors_read, host_->num_errors_read + 1);
}

void Window::check() {
  if (closed_) throw_invalid_state("the window is closed");
  const cuda::ContextScope scope(gpu_->context);
  raise_found();
  if (last_event_ == nullptr) return;
  const cuda::Result state = last_event_->state();
  if (state != cuda::kSuccess && state != cuda::kNotReady) throw_gpu_failure(cuda::error_name(state));
}

std::optional<BadIds> Window::take_bad_ids() {
  if (closed_) return std::nullopt;
  if (__atomic_load_n(&host_->bad_ids, __ATOMIC_RELAXED) == 0) return std::nullopt;
  const u64 word = __atomic_exchange_n(&host_->bad_ids, 0, __ATOMIC_ACQUIRE);
  return BadIds{static_cast<i64>(word >> 32), host_->first_bad_id, static_cast<i64>(word & 0xffffffffu)};
}

void Window::raise_error() {
  const ErrorRecord record = host_->error;
  error_caller_ = host_->error_caller;
  AbortReason reason;
  reason.rank = record.culprit;
  reason.reporter = comm_->rank();
  reason.sequence = record.sequence;
  reason.phase = record.phase;
  const OperationConfig* call = call_of(record.expected, error_caller_);
  const OpKind kind = call == nullptr ? OpKind::kNone : call->kind;
  reason.op_kind = static_cast<u32>(kind);
  switch (static_cast<ErrorCause>(record.code)) {
    case ErrorCause::kMismatch:
    case ErrorCause::kNoRoom:
    case ErrorCause::kBusy:
    case ErrorCause::kMoved: raise_given_up(record, kind);
    case ErrorCause::kDeadline: reason.code = AbortCode::kPeerTimeout; break;
    case ErrorCause::kAborted: break;
    default: reason.code = AbortCode::kInternal; break;
  }
  reason.peers = RankSet::of_mask(report_left(record, kind));
  if (reason.rank < 0) reason.rank = reason.peers.empty() ? comm_->rank() : reason.peers.next(0);
  const bool is_told = reason.code == AbortCode::kNone;  // somebody else found out why
  if (!comm_->is_closed()) comm_->log_left(is_told ? comm_->reason() : reason, reason.op_kind);
  if (is_told) comm_->leave_broken();
  comm_->fail(reason);
}

// The call with the fingerprint of a header, of whatever object; null: this rank has made no such call.
const OperationConfig* Window::call_of(u64 header, u64 caller) const {
  const u64 bits = transport::caller_bits(static_cast<u32>(caller));
  for (const u64 print : {header ^ bits, header}) {  // the second: where a mark is avoided (print_with)
    const auto call = calls_.find(static_cast<u16>(print));
    if (call != calls_.end()) return &call->second;
  }
  return nullptr;
}

// The lowest sequence among the headers of each peer that this rank waited for in the phase; empty if the GPU can't be asked.
std::vector<u64> Window::sequences_seen(const ErrorRecord& record) noexcept try {
  const cuda::RelaxedCaptureScope relaxed;
  const auto phase = static_cast<Phase>(record.phase);
  const OperationConfig* call = call_of(record.expected, error_caller_);
  const i32 most = phase == Phase::kCount || call == nullptr ? 1 : std::max<i32>(call->mode, 1);
  const i32 num_blocks = std::min(most, shape_.num_blocks);
  const u64 first = layout_.header(phase, record.sequence, 0, 0);
  std::vector<u8> cells(static_cast<size_t>(shape_.num_ranks * shape_.num_blocks * kCacheLine));
  cuda::check(
      cuda::driver().copy_to_host_async(cells.data(), control_.address() + first, cells.size(), gpu_->house_keeping),
      "cuMemcpyDtoHAsync");
  gpu_->settle();
  std::vector<u64> seen(static_cast<size_t>(shape_.num_ranks), ~u64{0});
  for (i32 rank = 0; rank < shape_.num_ranks; ++rank) {
    for (i32 block = 0; block < num_blocks; ++block) {
      u64 word = 0;
      std::memcpy(&word, cells.data() + layout_.header(phase, record.sequence, rank, block) - first, sizeof(word));
      const bool is_of_epoch = word >> 48 == record.epoch;
      seen[static_cast<size_t>(rank)] =
          std::min(seen[static_cast<size_t>(rank)], is_of_epoch ? word >> 16 & 0xffffffffu : 0);
    }
  }
  return seen;
} catch (const std::exception&) {
  return {};
}

// Whether the header that is missing is that of a rank which is late itself. Those of other nodes come through a forwarder, in the
// count phase alone: if its own is missing, too, it is the one that is late.
static bool is_late_itself(const RailMap& map, i32 me, i32 peer, u32 phase, const std::vector<u64>& seen,
                           u64 sequence) {
  if (map.are_mates(me, peer)) return true;
  if (static_cast<Phase>(phase) != Phase::kCount) return false;
  const i32 forwarder = map.forwarder(peer, map.node(me));
  return forwarder == me || seen[static_cast<size_t>(forwarder)] == sequence;
}

// One line for the log, and who is late: the rank that was waited for, and all whose headers are not there either.
u64 Window::report_left(const ErrorRecord& record, OpKind kind) {
  const std::vector<u64> seen = sequences_seen(record);
  u64 late = record.culprit >= 0 ? u64{1} << record.culprit : 0;
  std::string cells;
  const RailMap map = rail_map(shape_, active_);
  const u64 expected = record.sequence & 0xffffffffu;
  for (int peer : comm_->active_ranks()) {
    if (seen.empty() || peer == comm_->rank()) continue;
    const u64 sequence = seen[static_cast<size_t>(peer)];
    cells += " rank " + std::to_string(peer) + ":" + std::to_string(sequence);
    if (sequence != expected && is_late_itself(map, comm_->rank(), peer, record.phase, seen, expected))
      late |= u64{1} << peer;
  }
  log_line(kLogDebug, rank_text(comm_->rank()) + " left " + op_name(static_cast<u32>(kind)) + ", epoch " +
                          std::to_string(comm_->epoch()) + ", sequence " + std::to_string(record.sequence) +
                          ", phase " + phase_name(record.phase) + "; sequences seen:" + cells);
  return late;
}

// The window goes on: every rank has given up this call. A kernel may leave several reasons, the first counts; so it should
// have ended before the record is emptied for the next call. Nobody notes when a replayed graph ends: a reason that its blocks
// still leave then is raised by a later call.
void Window::raise_given_up(const ErrorRecord& record, OpKind kind) {
  const Poll no_poll;
  wait_for_kernels(now_ns() + kLastBlocksNs, no_poll);
  const bool is_mismatch = static_cast<ErrorCause>(record.code) == ErrorCause::kMismatch;
  const u64 seen_caller = is_mismatch ? host_->seen_caller[record.culprit] : 0;
  const bool is_need = has_need();
  empty_record();
  const std::string culprit = rank_text(record.culprit);
  const std::string op = op_name(static_cast<u32>(kind));
  if (is_need) throw NeedOfRoom(need_of(record.sequence), false, op, record.sequence);
  const auto caller_of = [&](i32 rank, u64 header, u64 caller) {
    const OperationConfig* call = call_of(header, caller);
    if (call == nullptr) {
      return Caller{rank, "a call that this rank has not made (fingerprint " + std::to_string(header & 0xffff) + ")",
                    caller >> 16};
    }
    OperationConfig config = *call;
    config.handle = caller & 0xffff;
    return Caller{rank, describe(config), caller >> 16};
  };
  switch (static_cast<ErrorCause>(record.code)) {
    case ErrorCause::kMismatch:
      throw Error(ErrorCode::kInvalidArgument,
                  mismatch_text(caller_of(comm_->rank(), record.expected, error_caller_),
                                caller_of(record.culprit, record.seen, seen_caller)),
                  op, record.sequence, {record.culprit});
    case ErrorCause::kNoRoom:
      throw Error(ErrorCode::kCapacityExceeded,
                  culprit + " has no room for the rows of " + op + " (sequence " + std::to_string(record.sequence) +
                      "): neither in its heap nor in its landing, whose rows hold " +
                      std::to_string(shape_.landing_row_bytes) + " bytes; raise heap_bytes (here " +
                      std::to_string(heap_bytes_) + "). The call was given up on every rank",
                  op, record.sequence, {record.culprit});
    case ErrorCause::kBusy:
      throw Error(
          ErrorCode::kInvalidState,
          "two operations were in flight on this window: a captured graph ran beside " + op +
              " on another stream, or a staged call and its wait() are not in turn; order them by events, or use "
              "two windows (num_windows=2). Calls of the ranks may not match any more: comm.rebuild()",
          op, record.sequence, {});
    default:
      throw Error(ErrorCode::kInvalidState,
                  std::string("a graph that was captured before comm.rebuild() ran, but ") +
                      (has_nodes(shape_) ? "its handle is of other members, or " : "") +
                      "tensors that were alive then made the heap move; capture it again",
                  op, record.sequence, {});
  }
}

// Ours, not a peer's: the others are told, so that they don't wait.
void Window::throw_gpu_failure(const std::string& what) {
  AbortReason reason;
  reason.code = AbortCode::kInternal;
  reason.rank = reason.reporter = comm_->rank();
  comm_->give_up(reason);
  throw Error(ErrorCode::kCudaError, rank_text(comm_->rank()) + ": " + what);
}

bool Window::wait_for_kernels(u64 deadline_ns, const Poll& poll) {
  return last_event_ == nullptr || wait_on_host([&] { return last_event_->is_done(); }, deadline_ns, poll);
}

void Window::notice_closed(u64 ranks) { __atomic_fetch_or(&host_->abort, ranks, __ATOMIC_RELEASE); }

void Window::leave_waits() { ptx::st_release_sys(&host_->abort, ~u64{0}); }

void Window::record_error(const AbortReason&) { heap_->quarantine(); }

bool Window::is_busy() const {
  const cuda::QuietContextScope scope(gpu_->context);
  return last_event_ != nullptr && !is_broken() && !last_event_->is_done();
}

}  // namespace weft::nvlink
