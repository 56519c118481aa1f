// Where everything lies in a window's control memory. Formulas only; docs/protocols/headers.md explains the words.
//
//   ControlWords | headers (phase, parity, source, block) | progress (channel, source, owner) | starts (source) | payload slots |
//   staging rings
//
// Every cell has one writer. Cells are addressed only through WindowLayout, never by pointer arithmetic elsewhere (R1).
#pragma once

#include "weft/config/base.h"
#include "weft/config/mutants.h"
#include "weft/config/operation.h"
#include "weft/layout/checked.h"

namespace weft {

enum class Phase : u32 { kCount = 0, kNotify = 1, kSend = 2, kReduce = 3 };
constexpr i32 kNumPhases = 4;

enum class Channel : u32 { kLanded = 0, kConsumed = 1 };  // progress words of a staging ring or landing area
constexpr i32 kNumChannels = 2;

constexpr i32 kNumParities = 2;
constexpr i32 kMaxTopk = 128;
constexpr i64 kMaxRowsPerPair = (1 << 24) - 1;  // width of n in a progress word

// The first reason why an operation of this window broke (R9). Written once by the rank that owns the window.
struct ErrorRecord {
  u32 code = 0;
  u32 phase = 0;
  u32 op_kind = 0;
  i32 culprit = -1;
  i32 reporter = -1;
  u32 epoch = 0;
  u64 sequence = 0;
  u64 late_peers = 0;
  u64 expected = 0;
  u64 seen = 0;
};
static_assert(sizeof(ErrorRecord) == 56);

// Words of the rank that owns the window. Peers only ring the doorbell.
struct alignas(kCacheLine) ControlWords {
  u64 sequence = 0;                      // of the last operation that ended well or was refused (R4)
  u64 owner = 0;                         // non-zero while an operation is in flight (R5)
  u64 abort = 0;                         // non-zero: leave every wait that is not satisfied (R7)
  u64 deadline_ns = 0;                   // of the operation in flight, on the clock of ptx/clock.h (R4)
  u64 closed_peers = 0;                  // bit r: rank r has closed and sends nothing any more
  alignas(kCacheLine) u32 doorbell = 0;  // grows whenever a peer has written a signal
  u32 num_sleepers = 0;
  alignas(kCacheLine) ErrorRecord error = {};
};

// Where a rank that was taken in begins: one cell a member, in the memory of the new rank. docs/protocols/joining.md.
struct alignas(kCacheLine) StartCell {
  u64 sequence = 0;  // of the member's last operation, before `epoch` is there
  u64 epoch = 0;     // in which the new rank begins; release
};

// Largest shape that a window serves. Equal on every rank; its hash is part of every fingerprint.
struct WindowShape {
  i32 num_ranks = 0;
  i32 num_experts = 0;
  i32 top_k = 0;
  i32 num_blocks = 1;
  i64 max_tokens = 0;     // a rank, a call
  i64 max_row_bytes = 0;  // data and scales of one row
  u64 staging_bytes = 0;  // one ring; 0: chosen here
  i64 node_ranks = 0;     // ranks of a node (layout/rail.h); 0: all are one node

  WEFT_HD constexpr bool has_nodes() const { return node_ranks > 0 && node_ranks < num_ranks; }
  WEFT_HD constexpr i32 num_local_experts() const { return num_experts / num_ranks; }
};

// One row in transit: data, scales, then top_k local ids and top_k floats. Each part starts at a multiple of 16 bytes.
struct RecordLayout {
  u64 scales = 0;
  u64 meta = 0;
  u64 bytes = 0;

  WEFT_HD static constexpr RecordLayout make(u64 data_bytes, u64 scale_bytes, u64 meta_bytes) {
    RecordLayout record;
    record.scales = align_up(data_bytes, 16);
    record.meta = record.scales + align_up(scale_bytes, 16);
    record.bytes = record.meta + align_up(meta_bytes, 16);
    return record;
  }
};

struct WindowLayout {
  i32 num_ranks = 0;
  i32 num_blocks = 1;
  i32 num_owners =
      1;  // about which a rank has progress words of each other: with nodes those that it forwards for, too
  u64 headers = 0;
  u64 progress = 0;
  u64 starts = 0;
  u64 payloads = 0;
  u64 payload_bytes = 0;  // one slot
  u64 staging = 0;
  u64 ring_bytes = 0;  // one ring
  u64 total_bytes = 0;
  bool ok = false;  // false: the sizes do not fit 64 bits, or the shape is not sensible

  WEFT_HD static WindowLayout make(const WindowShape& shape) {
    constexpr u64 kMinRingBytes = 256 * 1024;
    WindowLayout layout;
    if (shape.num_ranks < 1 || shape.num_ranks > kMaxRanks || shape.top_k < 1 || shape.top_k > kMaxTopk) return layout;
    if (shape.num_experts < 1 || shape.num_experts % shape.num_ranks != 0 || shape.num_blocks < 1) return layout;
    if (shape.max_tokens < 0 || shape.max_tokens > kMaxRowsPerPair || shape.max_row_bytes < 0) return layout;
    if (shape.node_ranks < 0) return layout;
    const u64 ranks = static_cast<u64>(shape.num_ranks);
    const u64 blocks = static_cast<u64>(shape.num_blocks);
    const CheckedSize header_cells = CheckedSize(kNumPhases * kNumParities) * ranks * blocks;
    const u64 num_local = static_cast<u64>(shape.num_local_experts());
    const u64 num_owners = shape.has_nodes() ? ranks : 1;
    // With nodes a rank tells its mates where the rows of every source begin: of each first row, then first rows by expert.
    const CheckedSize payload_ints =
        shape.has_nodes() ? CheckedSize(ranks) * CheckedSize(num_local + 1) : CheckedSize(num_local + ranks);
    const CheckedSize payload =
        (CheckedSize(kPayloadFixedBytes) + CheckedSize(sizeof(i32)) * payload_ints).aligned(kCacheLine);
    const CheckedSize record = CheckedSize(static_cast<u64>(shape.max_row_bytes)) + CheckedSize(64) +
                               CheckedSize(static_cast<u64>(shape.top_k) * 8);
    CheckedSize ring = record * CheckedSize(num_owners > 4 ? num_owners : 4);
    if (ring.ok && ring.value < kMinRingBytes) ring = CheckedSize(kMinRingBytes);
    if (ring.ok && shape.staging_bytes > ring.value) ring = CheckedSize(shape.staging_bytes);
    ring = ring.aligned(4096);

    const CheckedSize headers = CheckedSize(sizeof(ControlWords));
    const CheckedSize progress = headers + header_cells * kCacheLine;
    const CheckedSize starts = progress + CheckedSize(kNumChannels) * ranks * num_owners * kCacheLine;
    const CheckedSize payloads = starts + CheckedSize(sizeof(StartCell)) * ranks;
    const CheckedSize staging = (payloads + payload * CheckedSize(2 * kNumParities) * ranks).aligned(4096);
    const CheckedSize total = staging + ring * ranks;
    layout.num_ranks = shape.num_ranks;
    layout.num_blocks = shape.num_blocks;
    layout.num_owners = static_cast<i32>(num_owners);
    layout.headers = headers.value;
    layout.progress = progress.value;
    layout.starts = starts.value;
    layout.payloads = payloads.value;
    layout.payload_bytes = payload.value;
    layout.staging = staging.value;
    layout.ring_bytes = ring.value;
    layout.total_bytes = total.value;
    layout.ok = total.ok;
    return layout;
  }

  WEFT_HD static constexpr u64 parity(u64 sequence) { return mutants::kOneBuffer ? 0 : sequence & 1; }

  // The cell that `source` writes and the owner of the window waits for.
  WEFT_HD constexpr u64 header(Phase phase, u64 sequence, i32 source, i32 block = 0) const {
    const u64 row = (static_cast<u64>(phase) * kNumParities + parity(sequence)) * static_cast<u64>(num_ranks);
    return headers +
           ((row + static_cast<u64>(source)) * static_cast<u64>(num_blocks) + static_cast<u64>(block)) * kCacheLine;
  }
  // `owner`: whose rows they are; without nodes the writer's or the reader's own.
  WEFT_HD constexpr u64 progress_word(Channel channel, i32 source, i32 owner = 0) const {
    const u64 row = static_cast<u64>(channel) * static_cast<u64>(num_ranks) + static_cast<u64>(source);
    const u64 column = num_owners == 1 ? 0 : static_cast<u64>(owner);
    return progress + (row * static_cast<u64>(num_owners) + column) * kCacheLine;
  }
  WEFT_HD constexpr u64 start(i32 source) const { return starts + static_cast<u64>(source) * sizeof(StartCell); }
  // Payload slots exist for the phases `count` and `notify`.
  WEFT_HD constexpr u64 payload(Phase phase, u64 sequence, i32 source) const {
    const u64 row = (static_cast<u64>(phase) * kNumParities + parity(sequence)) * static_cast<u64>(num_ranks);
    return payloads + (row + static_cast<u64>(source)) * payload_bytes;
  }
  WEFT_HD constexpr u64 ring(i32 source) const { return staging + static_cast<u64>(source) * ring_bytes; }

  static constexpr u64 kPayloadFixedBytes =
      192;  // CountPayload or NotifyPayload before their arrays (layout/payload.h)
};

}  // namespace weft
