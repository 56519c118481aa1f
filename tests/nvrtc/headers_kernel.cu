// Every header of include/weft that kernels share with the host, used once: compiled by NVRTC and nvcc, and looked at.
#include "weft/config/base.h"
#include "weft/config/fail_point.h"
#include "weft/config/mutants.h"
#include "weft/config/operation.h"
#include "weft/layout/checked.h"
#include "weft/layout/payload.h"
#include "weft/layout/routing.h"
#include "weft/layout/window.h"
#include "weft/ptx/clock.h"
#include "weft/ptx/convert.h"
#include "weft/ptx/memory.h"
#include "weft/sync/header.h"
#include "weft/sync/operation.h"
#include "weft/sync/wait.h"

using namespace weft;

// Polls the abort word and the clock; what a GPU engine will do, less the broadcast to the block.
struct GlobaltimerPause {
  const ControlWords* words;

  __device__ sync::PauseResult turn() const {
    if (ptx::ld_relaxed_sys(&words->abort) != 0) return sync::PauseResult::kAbort;
    if (ptx::globaltimer_ns() >= words->deadline_ns) return sync::PauseResult::kDeadline;
    return sync::PauseResult::kLookAgain;
  }
};

struct Args {
  u8* own;
  u8* peer;
  WindowShape shape;
  OperationConfig config;
  i32 rank;
  i32 peer_rank;
  u32* result;
};

__device__ u64* word_at(u8* window, u64 offset) { return reinterpret_cast<u64*>(window + offset); }

// One phase with one peer: payload and header out, the peer's header in, its counts read and clamped.
extern "C" __global__ void exchange_counts(const Args args) {
  ControlWords* words = reinterpret_cast<ControlWords*>(args.own);
  const WindowLayout layout = WindowLayout::make(args.shape);
  if (threadIdx.x != 0 || !layout.ok) return;
  if (sync::begin_operation(words, 1 + blockIdx.x) != sync::BeginResult::kOk) return;
  const u64 sequence = words->sequence + 1;
  const sync::Turn turn{1, static_cast<u32>(sequence)};
  const u16 print = fingerprint(args.config);
  WEFT_FAIL_POINT("before_count");

  CountPayload* out = reinterpret_cast<CountPayload*>(args.peer + layout.payload(Phase::kCount, sequence, args.rank));
  sync::send_header(word_at(args.peer, layout.header(Phase::kCount, sequence, args.rank)),
                    sync::pack_header(turn, print), [&] { out->num_rows = args.rank + 1; });

  GlobaltimerPause pause{words};
  const u64* cell = word_at(args.own, layout.header(Phase::kCount, sequence, args.peer_rank));
  const sync::WaitResult result = sync::wait_header(cell, turn, pause);
  if (result != sync::WaitResult::kReady) {
    ErrorRecord reason;
    reason.code = static_cast<u32>(result);
    reason.culprit = args.peer_rank;
    sync::record_error(words, reason);
    sync::end_operation(words, false);
    return;
  }
  const auto* in =
      reinterpret_cast<const CountPayload*>(args.own + layout.payload(Phase::kCount, sequence, args.peer_rank));
  args.result[0] = static_cast<u32>(sync::classify_header(sync::load_header(cell), turn, print));
  args.result[1] = static_cast<u32>(clamp_count(in->num_rows, args.shape.max_tokens));
  sync::end_operation(words, true);
}

// The send routine and the wait routine alone, so that the order of their instructions can be read.
extern "C" __global__ void send_one(u64* cell, u64 header, u64* payload, u64 value) {
  sync::send_header(cell, header, [&] { payload[threadIdx.x] = value; });
}

extern "C" __global__ void wait_one(const ControlWords* words, const u64* cell, u64 epoch_and_sequence,
                                    const u64* payload, u64* result) {
  GlobaltimerPause pause{words};
  const sync::Turn turn{static_cast<u16>(epoch_and_sequence >> 32), static_cast<u32>(epoch_and_sequence)};
  if (sync::wait_header(cell, turn, pause) == sync::WaitResult::kReady) *result = *payload;
}

// Progress words of a ring.
extern "C" __global__ void follow_progress(const Args args, u32 target) {
  const WindowLayout layout = WindowLayout::make(args.shape);
  if (threadIdx.x != 0) return;
  const sync::Turn turn{1, target};
  GlobaltimerPause pause{reinterpret_cast<const ControlWords*>(args.own)};
  u64* landed = word_at(args.own, layout.progress_word(Channel::kLanded, args.peer_rank));
  if (sync::wait_progress(landed, turn, target, pause) != sync::WaitResult::kReady) return;
  const RecordLayout record = RecordLayout::make(4096, 128, 64);
  args.result[0] = args.own[layout.ring(args.peer_rank) + record.bytes * (target - 1) + record.meta];
  sync::post_progress(word_at(args.peer, layout.progress_word(Channel::kConsumed, args.rank)), turn, target);
}

// All narrow formats, one element a thread.
extern "C" __global__ void convert(const float* input, u16* bf16, u16* fp16, u8* e4m3, float* widened,
                                   u32 num_elements) {
  const u32 idx = blockIdx.x * blockDim.x + threadIdx.x;
  if (idx >= num_elements) return;
  bf16[idx] = ptx::float_to_bf16(input[idx]);
  fp16[idx] = ptx::float_to_fp16(input[idx]);
  e4m3[idx] = ptx::float_to_e4m3(input[idx]);
  widened[2 * idx] = ptx::bf16_to_float(bf16[idx]);
  widened[2 * idx + 1] = ptx::fp16_to_float(fp16[idx]);
}

extern "C" __global__ void place(const i32* counts, i32 num_ranks, i32 num_local_experts, u32 layout, i64 capacity,
                                 i64* starts, i64* offsets, i64* result) {
  if (threadIdx.x != 0) return;
  result[0] = place_by_expert(counts, num_ranks, num_local_experts, static_cast<Layout>(layout), 128, capacity, starts,
                              offsets);
  result[1] = place_by_rank(starts, num_ranks, offsets);
  result[2] = ExpertPlacement{num_ranks, num_local_experts}.rank_of(static_cast<i32>(result[0]));
}
