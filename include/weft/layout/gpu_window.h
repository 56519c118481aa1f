// Where everything lies in the window of a GPU. Formulas only; docs/protocols/nvlink-window.md explains the words.
//
//   control memory   GpuControlWords | headers (phase, parity, source, block) | progress (source, block, channel) | payloads
//                    | queues (block) | picks (block, expert) | goers (group, part) | arrived (source, token)
//                    | small picks (parity, source, token, k)
//   heap memory      landing (rows, ids, weights, table) | small slots (rows, weights) | receive tensors
//
// Every cell has one writer, but for the landing, whose rows are dealt out by each operation anew, the queues, which the
// owner's blocks share, and what the owner's blocks tell each other, where the block depends on the call.
#pragma once

#include "weft/config/base.h"
#include "weft/config/route.h"
#include "weft/layout/checked.h"
#include "weft/layout/gpu_plan.h"
#include "weft/layout/window.h"

namespace weft {

constexpr i32 kNumProgress = 2;  // progress words of a block: rows, side values
constexpr u64 kGoersParts = 2;   // of a group of 32 tokens, since a progress word has 24 bits

// The word that says who takes part (R10): epoch:16 << 32 | mask of active ranks:32.
WEFT_HD constexpr u64 membership_word(u16 epoch, const GpuRankMask& active) { return u64{epoch} << 32 | active.word; }
WEFT_HD constexpr u16 epoch_in(u64 membership) { return static_cast<u16>(membership >> 32); }
WEFT_HD constexpr GpuRankMask active_in(u64 membership) { return GpuRankMask{static_cast<u32>(membership)}; }

// Words of the rank that owns the window; those of every call are in one cache line. Written by its own kernels and its host.
struct alignas(kCacheLine) GpuControlWords {
  u64 sequence = 0;         // of the last operation that ended well (R4)
  u64 membership = 0;       // membership_word(); the host writes it between operations
  u64 owner = 0;            // 1 while an operation is in flight (R5)
  u64 broken = 0;           // an ErrorCause: later launches see it and do nothing (R9)
  u32 num_ended = 0;        // blocks of the operation in flight that have ended; wraps around
  u32 next_chunk = 0;       // of tokens, for the block that comes for it; 0 between operations
  u32 heap_generation = 0;  // host: grows when a rebuild had to give the own heap other addresses
  u32 num_errors = 0;       // records of errors that were begun: HostWords.num_errors_read, or one more
  // By peer: for how long block 0 of all operations has waited for headers that then came.
  alignas(kCacheLine) u64 waited_ns[kMaxGpuRanks] = {};
};

// Where the rows of a dispatch go in the receiver's heap memory; byte offsets from its start. Every value is checked by the
// writer of the rows before it is used (R19).
struct GpuPlacement {
  u64 x = 0;         // row 0 of the result
  u64 scales = 0;    // row 0 of its scales
  u64 ids = 0;       // rank_major: ids [num_rows, top_k], of id_bytes each
  u64 weights = 0;   // rank_major: float [num_rows, top_k]; the others: float [num_rows], the receiver's own business
  u64 table = 0;     // receive plan (layout/gpu_plan.h)
  i64 num_rows = 0;  // rows that there is room for; fewer than the result needs: everything goes to the landing
  i64 id_bytes = 8;  // 8, or else 4: each rank has ids of the type that it gave
};

// First words of a payload slot of phase `count`, followed by int32 [num_experts] picks for each expert and
// int32 [num_ranks] rows for each rank (dispatch without a handle).
struct GpuCountPayload {
  GpuPlacement placement;  // dispatch: where the rows for the writer of this payload go
  i64 num_tokens = 0;      // of the writer
  u64 rows_in_heap = 0;    // combine: 1: the writer's rows lie in its heap, pull them; 0: it pushes sums to the landing
  u64 rows_offset = 0;     // combine: heap offset of row 0
  i64 num_rows = 0;        // combine
};
static_assert(sizeof(GpuCountPayload) == 88);

struct GpuWindowShape {
  i32 num_ranks = 0;
  i32 num_experts = 0;
  i32 top_k = 0;
  i32 num_blocks = 1;         // most blocks that a call may have
  i64 max_tokens = 0;         // a rank, a call
  i64 landing_row_bytes = 0;  // room for one row in the landing, and in a small slot
  i64 small_tokens = 0;       // most tokens of a rank in a small-batch call
  i64 node_ranks = 0;         // most ranks of a node; 0: all are one
  i64 network = 0;            // between nodes: 0 a block of each grid, 1 NCCL's

  WEFT_HD constexpr i32 num_local_experts() const { return num_experts / num_ranks; }
};

struct GpuWindowLayout {
  i32 num_ranks = 0;
  i32 num_experts = 0;
  i32 num_blocks = 1;
  i64 max_tokens = 0;
  u64 headers = 0;
  u64 progress = 0;
  u64 payloads = 0;
  u64 payload_bytes = 0;  // one slot
  u64 queues = 0;
  u64 picks = 0;
  u64 goers = 0;
  u64 arrived = 0;
  u64 small_picks = 0;  // [2 parities, num_ranks, small_tokens, top_k] progress words
  u64 control_bytes = 0;
  // Offsets from the start of the heap memory.
  u64 landing_rows = 0;     // [num_ranks * max_tokens] rows
  u64 landing_ids = 0;      // [num_ranks * max_tokens, top_k] int32 or int64
  u64 landing_weights = 0;  // [num_ranks, max_tokens, top_k] float
  u64 landing_table = 0;    // as a receive plan (layout/gpu_plan.h)
  i64 small_tokens = 0;
  u64 small_row_bytes = 0;  // from row to row
  u64 small_rows = 0;       // [2 parities, num_ranks, small_tokens] rows
  u64 small_weights = 0;    // [2, num_ranks, small_tokens, top_k] float
  i32 top_k = 0;
  u64 landing_bytes = 0;  // all of these; receive tensors begin here
  bool ok = false;        // false: the sizes do not fit 64 bits, or the shape is not sensible

  // `most_ranks`: more than kMaxGpuRanks asks what a domain would take that no kernel serves yet.
  WEFT_HD static GpuWindowLayout make(const GpuWindowShape& shape, i32 most_ranks = kMaxGpuRanks) {
    GpuWindowLayout layout;
    if (shape.num_ranks < 1 || shape.num_ranks > most_ranks || shape.top_k < 1 || shape.top_k > kMaxTopk) return layout;
    if (shape.num_experts < 1 || shape.num_experts % shape.num_ranks != 0 || shape.num_blocks < 1) return layout;
    if (shape.max_tokens < 0 || shape.max_tokens > kMaxRowsPerPair || shape.landing_row_bytes < 0) return layout;
    if (shape.small_tokens < 0 || shape.small_tokens > shape.max_tokens) return layout;
    constexpr u64 kAlign = 256;
    const u64 ranks = static_cast<u64>(shape.num_ranks);
    const CheckedSize cells = CheckedSize(ranks) * static_cast<u64>(shape.num_blocks);
    const CheckedSize headers = CheckedSize(sizeof(GpuControlWords));
    const CheckedSize progress = headers + cells * static_cast<u64>(kNumPhases * kNumParities * kCacheLine);
    const CheckedSize payloads = progress + cells * static_cast<u64>(kNumProgress) * static_cast<u64>(kCacheLine);
    const CheckedSize payload =
        (CheckedSize(sizeof(GpuCountPayload)) + CheckedSize(static_cast<u64>(shape.num_experts) + ranks) * u64{4})
            .aligned(kCacheLine);
    const CheckedSize queues = payloads + payload * (ranks * static_cast<u64>(kNumParities));
    const CheckedSize blocks = CheckedSize(static_cast<u64>(shape.num_blocks));
    const CheckedSize block_picks = queues + blocks * static_cast<u64>(kCacheLine);
    const CheckedSize goers =
        (block_picks + blocks * (static_cast<u64>(shape.num_experts) + 1) * u64{8}).aligned(kCacheLine);
    const CheckedSize groups = CheckedSize((static_cast<u64>(shape.max_tokens) + 31) / 32);
    const CheckedSize arrived = (goers + groups * (ranks * kGoersParts) * u64{8}).aligned(kCacheLine);
    const CheckedSize rows = CheckedSize(ranks) * static_cast<u64>(shape.max_tokens);
    const CheckedSize slots =
        CheckedSize(ranks * static_cast<u64>(kNumParities)) * static_cast<u64>(shape.small_tokens);
    const CheckedSize slot_picks = slots * static_cast<u64>(shape.top_k);
    const CheckedSize small_picks = arrived + rows * u64{8};
    const CheckedSize control = (small_picks + slot_picks * u64{8}).aligned(kCacheLine);
    const CheckedSize picks = rows * static_cast<u64>(shape.top_k);
    const CheckedSize ids = (rows * static_cast<u64>(shape.landing_row_bytes)).aligned(kAlign);
    const CheckedSize weights = (ids + picks * u64{8}).aligned(kAlign);
    const CheckedSize table = (weights + picks * u64{4}).aligned(kAlign);
    const CheckedSize small = (table + CheckedSize(u64{kGpuPlanHeader * 4}) + picks * u64{4}).aligned(kAlign);
    const CheckedSize small_row = CheckedSize(static_cast<u64>(shape.landing_row_bytes)).aligned(16);
    const CheckedSize small_weights = (small + slots * small_row).aligned(kAlign);
    const CheckedSize total = (small_weights + slot_picks * u64{4}).aligned(4096);
    layout.num_ranks = shape.num_ranks;
    layout.num_experts = shape.num_experts;
    layout.num_blocks = shape.num_blocks;
    layout.max_tokens = shape.max_tokens;
    layout.headers = headers.value;
    layout.progress = progress.value;
    layout.payloads = payloads.value;
    layout.payload_bytes = payload.value;
    layout.queues = queues.value;
    layout.picks = block_picks.value;
    layout.goers = goers.value;
    layout.arrived = arrived.value;
    layout.small_picks = small_picks.value;
    layout.control_bytes = control.value;
    layout.landing_ids = ids.value;
    layout.landing_weights = weights.value;
    layout.landing_table = table.value;
    layout.small_tokens = shape.small_tokens;
    layout.small_row_bytes = small_row.value;
    layout.small_rows = small.value;
    layout.small_weights = small_weights.value;
    layout.top_k = shape.top_k;
    layout.landing_bytes = total.value;
    layout.ok = control.ok && total.ok;
    return layout;
  }

  // The cell that `source` writes and the owner of the window waits for.
  WEFT_HD constexpr u64 header(Phase phase, u64 sequence, i32 source, i32 block) const {
    const u64 row =
        (static_cast<u64>(phase) * kNumParities + WindowLayout::parity(sequence)) * static_cast<u64>(num_ranks);
    return headers +
           ((row + static_cast<u64>(source)) * static_cast<u64>(num_blocks) + static_cast<u64>(block)) * kCacheLine;
  }
  // How far warp `channel` of the source's block has come (sync/header.h, progress words).
  WEFT_HD constexpr u64 progress_word(i32 source, i32 block, i32 channel) const {
    const u64 cell = static_cast<u64>(source) * static_cast<u64>(num_blocks) + static_cast<u64>(block);
    return progress + (cell * kNumProgress + static_cast<u64>(channel)) * kCacheLine;
  }
  // By expert, of the tokens that a block of the owner has to send: the number of runs that some block has taken, and, times
  // 2^32, of chunks that are planned. 0 between operations.
  WEFT_HD constexpr u64 queue(i32 block) const { return queues + static_cast<u64>(block) * kCacheLine; }
  // What the blocks of one dispatch have counted, for each other: progress words whose n is written once.
  // 1 + the picks of the block's tokens for the expert; of expert `num_experts`: 2 if an id of them is bad, else 1.
  WEFT_HD constexpr u64 picks_word(i32 block, i32 expert) const {
    const u64 first = static_cast<u64>(block) * (static_cast<u64>(num_experts) + 1);
    return picks + (first + static_cast<u64>(expert)) * sizeof(u64);
  }
  // rank_major: 2^16 + which of 16 tokens go to a rank; part 2 * rank is the first half of the group of 32, the next the other.
  WEFT_HD constexpr u64 goers_word(i32 group, i32 part) const {
    const u64 first = static_cast<u64>(group) * static_cast<u64>(num_ranks) * kGoersParts;
    return goers + (first + static_cast<u64>(part)) * sizeof(u64);
  }
  // A progress word: 1 when the source's row of this token is at its place (by expert).
  WEFT_HD constexpr u64 arrived_word(i32 source, i64 token) const {
    return arrived + (static_cast<u64>(source) * static_cast<u64>(max_tokens) + static_cast<u64>(token)) * sizeof(u64);
  }
  // Of token 0 of `source`; only this operation and those of its parity write there.
  WEFT_HD constexpr u64 small_slot(u64 sequence, i32 source) const {
    const u64 row = WindowLayout::parity(sequence) * static_cast<u64>(num_ranks) + static_cast<u64>(source);
    return row * static_cast<u64>(small_tokens);
  }
  WEFT_HD constexpr u64 small_row(u64 sequence, i32 source, i64 token) const {
    return small_rows + (small_slot(sequence, source) + static_cast<u64>(token)) * small_row_bytes;
  }
  // Pick 0 of the token, counted in words from small_picks or in floats from small_weights.
  WEFT_HD constexpr u64 small_pick(u64 sequence, i32 source, i64 token) const {
    return (small_slot(sequence, source) + static_cast<u64>(token)) * static_cast<u64>(top_k);
  }
  WEFT_HD constexpr u64 payload(u64 sequence, i32 source) const {
    const u64 row = WindowLayout::parity(sequence) * static_cast<u64>(num_ranks) + static_cast<u64>(source);
    return payloads + row * payload_bytes;
  }
};

}  // namespace weft
