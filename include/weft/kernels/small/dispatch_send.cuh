// Small-batch dispatch, the sending half: ids and weights to everyone, then rows to the slots of those who hold experts of
// theirs (docs/protocols/nvlink-small.md, "Dispatch", steps 1 and 2). Nothing is asked for before.
#pragma once

#include "weft/kernels/small/dispatch_nodes.cuh"
#include "weft/ptx/fp8_scale.h"

namespace weft::kernels {

template <SmallDispatchKernelConfig kConfig>
class SmallDispatchSend : public SmallDispatchState<kConfig> {
 public:
  using Base = SmallDispatchState<kConfig>;
  using Base::a, Base::flight, Base::lane, Base::rank;
  using Base::kRanks, Base::kTopk, Base::kExperts, Base::kLocal, Base::kRowBytes, Base::kScaleBytes, Base::kSteps,
      Base::kAll, Base::kPlacement;
  using typename Base::Id;
  using typename Base::Scales;

  __device__ explicit SmallDispatchSend(const Base& base) : Base(base) {}

  // In shared memory.
  __device__ static BadIds& bad_ids() {
    __shared__ BadIds bad;
    return bad;
  }

  // By block 0, behind a barrier since bad_ids() was emptied: picks, weights and how many tokens, to everyone.
  __device__ void send_routing() {
    const i32 thread = static_cast<i32>(threadIdx.x);
    send_picks(thread);
    if (thread >= kRanks || !direct().has(thread)) return;
    const auto slot = this->peers().control(thread) + a.view.layout.payload(flight.turn.sequence, rank());
    this->peers().put_field(slot, &GpuCountPayload::num_tokens, static_cast<i64>(a.num_tokens));
  }

  // Behind a barrier of the block that sent the routing, by one thread.
  __device__ void tell_bad_ids() const {
    const BadIds& bad = bad_ids();
    if (bad.count != 0) bad.template tell<Id>(a.view.host, a.topk_idx);
  }

  __device__ void send_rows() {
    this->share(1, [&](i32, i32 nth, i32 first, i32 stride) {
      const i32 token = this->token_of(this->unit(nth));
      if (token >= a.num_tokens) return;
      const Picks picks = picks_of(token);
      if constexpr (kConfig.has_nodes()) {
        if (!nodes().find_records(nth, record_)) return;
      }
      if constexpr (kConfig.is_quantized()) {
        send_quantized(token, picks, first, stride);
      } else {
        const i64 at = static_cast<i64>(token) * (a.scale_stride > 0 ? 4 : kScaleBytes);
        const Scales scales(a.scales + at, lane, kScaleBytes > 0 && first == 0, a.scale_stride);
        send_plain(token, picks, first, stride);
        if (kScaleBytes > 0 && first == 0) send_scales(token, ranks_of(picks), scales);
      }
      if (first != 0) return;
      if constexpr (kConfig.has_nodes()) nodes().write_weights(token, record_);
      const GpuRankMask ranks = ranks_of(picks);
      if constexpr (!kConfig.is_cached) {
        if (a.send_plan != nullptr) note_token(token, picks, ranks);
      }
    });
  }

 private:
  // Steps on their way together: what registers allow. For rows of just six sm_90 would spill, so they go in two turns, which a
  // row that several warps share does not notice.
  static constexpr i32 kRowSteps = (kConfig.row_bytes / 16 + 31) / 32;
  static constexpr i32 kHeld = kRowSteps == 6 ? 3 : 6;

  // What says where a token goes. Loaded before its row and looked at behind those loads, so that all are under way together.
  struct Picks {
    i64 id[kSteps];  // of picks lane, lane + 32, ..., -1: none; of a handle: the mask
  };

  __device__ SmallDispatchNodes<kConfig> nodes() const { return SmallDispatchNodes<kConfig>(*this); }
  // The ranks that this one writes to itself.
  __device__ GpuRankMask direct() const {
    if constexpr (kConfig.has_nodes()) return nodes().mates();
    return flight.active;
  }
  // `work(slot)` for each rank of the mask that this one writes to, and for each record of the token.
  template <class Work>
  __device__ void for_slots(const GpuRankMask& ranks, i32 token, const Work& work) const {
    if constexpr (kConfig.has_nodes()) {
      const auto nodes = this->nodes();
      nodes.for_records(record_, [&](i32 node, i32 record) { work(nodes.record_to(node, record)); });
      this->for_ranks(ranks & nodes.mates(), [&](i32 owner) { work(this->slot_row(owner, rank(), token)); });
    } else {
      this->for_ranks(ranks, [&](i32 owner) { work(this->slot_row(owner, rank(), token)); });
    }
  }

  __device__ GpuSendPlan<i32> plan() const {
    return {a.send_plan, a.num_tokens, kConfig.is_by_expert() ? kTopk : kRanks};
  }

  // Also of tokens that this rank does not have: nobody waits for their number before looking.
  __device__ void send_picks(i32 thread) {
    constexpr i32 kHere = 4, kThreads = kConfig.num_threads();
    const i32 num_picks = a.num_tokens * kTopk, num_words = a.max_tokens * kTopk;
    for (i32 first = thread; first < num_words; first += kThreads * kHere) {
      i64 given[kHere];
      float weight[kHere];
#pragma unroll
      for (i32 idx = 0; idx < kHere; ++idx) {
        const i32 pick = first + idx * kThreads;
        given[idx] = pick < num_picks ? static_cast<const Id*>(a.topk_idx)[pick] : -1;
        weight[idx] = pick < num_picks && a.topk_weights != nullptr ? a.topk_weights[pick] : 1.0f;
      }
#pragma unroll
      for (i32 idx = 0; idx < kHere; ++idx) {
        if (given[idx] < -1 || given[idx] >= kExperts) bad_ids().note(first + idx * kThreads);
      }
      this->for_ranks(direct(), [&](i32 to) {
        u64* words = this->slot_picks(to, rank(), 0);
        float* weights = this->slot_weights(to, rank(), 0);
#pragma unroll
        for (i32 idx = 0; idx < kHere; ++idx) {
          const i32 pick = first + idx * kThreads;
          if (pick >= num_words) continue;
          const u32 n = is_sent(given[idx]) ? Base::kFirstPick + static_cast<u32>(given[idx]) : Base::kNoPick;
          ptx::st_relaxed_sys(&words[pick], sync::pack_progress(flight.turn, n));
          if (pick < num_picks) weights[pick] = weight[idx];
        }
      });
    }
  }

  __device__ bool is_sent(i64 id) const {
    return id >= 0 && id < kExperts && flight.is_active(kPlacement.rank_of(static_cast<i32>(id)));
  }

  __device__ Picks picks_of(i32 token) const {
    Picks picks;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      const i32 k = step * 32 + lane;
      if constexpr (kConfig.is_cached) {
        picks.id[step] = static_cast<i64>(plan().ranks(token).word);
      } else {
        picks.id[step] = k < kTopk ? static_cast<const Id*>(a.topk_idx)[static_cast<i64>(token) * kTopk + k] : -1;
      }
    }
    return picks;
  }

  // The ranks that hold a pick of the token. For the whole warp.
  __device__ GpuRankMask ranks_of(const Picks& picks) const {
    if constexpr (kConfig.is_cached) return GpuRankMask{static_cast<u32>(picks.id[0])} & flight.active;
    GpuRankMask mask = GpuRankMask::none();
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      const i64 id = picks.id[step];
      mask |=
          over_warp(is_sent(id) ? GpuRankMask::only(kPlacement.rank_of(static_cast<i32>(id))) : GpuRankMask::none());
    }
    return mask;
  }

  // Mask and destinations in the send plan. Which picks a capacity drops, the receiver alone knows: it sends zeros for them.
  __device__ void note_token(i32 token, const Picks& picks, const GpuRankMask& ranks) {
    if (lane == 0) plan().set_ranks(token, ranks);
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      const i32 k = step * 32 + lane;
      const i64 id = picks.id[step];
      if (k >= kTopk) continue;
      plan().destination()[static_cast<i64>(token) * kTopk + k] =
          is_sent(id) ? kPlacement.rank_of(static_cast<i32>(id)) : -1;
    }
  }

  __device__ void send_plain(i32 token, const Picks& picks, i32 first, i32 stride) {
    using Unit = Piece<16>;
    constexpr i32 kUnits = kConfig.row_bytes / 16;
    const Unit* from = reinterpret_cast<const Unit*>(a.x + static_cast<i64>(token) * kConfig.row_bytes);
    for (i32 step = first; step * 32 < kUnits; step += stride * kHeld) {
      Unit held[kHeld];
#pragma unroll
      for (i32 idx = 0; idx < kHeld; ++idx) {
        const i32 unit = (step + idx * stride) * 32 + lane;
        if (unit < kUnits) held[idx] = from[unit];
      }
      if constexpr (kConfig.has_nodes()) {
        for_slots(ranks_of(picks), token, [&](u8* slot) { store_held(held, slot, step, stride); });
      } else {
        this->for_ranks(ranks_of(picks),
                        [&](i32 owner) { store_held(held, this->slot_row(owner, rank(), token), step, stride); });
      }
    }
  }
  __device__ void store_held(const Piece<16> (&held)[kHeld], u8* slot, i32 step, i32 stride) const {
    auto* to = reinterpret_cast<Piece<16>*>(slot);
#pragma unroll
    for (i32 idx = 0; idx < kHeld; ++idx) {
      const i32 unit = (step + idx * stride) * 32 + lane;
      if (unit < kConfig.row_bytes / 16) to[unit] = held[idx];
    }
  }

  __device__ void send_scales(i32 token, const GpuRankMask& ranks, const Scales& scales) {
    for_slots(ranks, token, [&](u8* slot) { scales.store(slot + kConfig.scales_at()); });
  }

  // A step is 16 elements a lane, so that a lane stores as much as an access can; 8 lanes share a scale.
  static constexpr i32 kElements = 16, kGroupLanes = kQuantizeGroup / kElements;
  struct alignas(16) Elements {
    Piece<16> piece[kConfig.is_quantized() ? dtype_bytes(kConfig.dtype) : 1];
  };
  struct Codes {
    Piece<16> packed;
    u32 scale;
  };

  __device__ void send_quantized(i32 token, const Picks& picks, i32 first, i32 stride) {
    constexpr i32 kBytes = dtype_bytes(kConfig.dtype) * kElements;
    constexpr i32 kHere = 96 / kBytes;  // what registers allow
    const u8* from = a.x + static_cast<i64>(token) * kConfig.row_bytes;
    for (i32 step = first; step * 32 * kElements < kConfig.hidden; step += stride * kHere) {
      Elements held[kHere];
#pragma unroll
      for (i32 idx = 0; idx < kHere; ++idx) {
        const i32 at = (step + idx * stride) * 32 + lane;
        held[idx] = {};
        if (at * kElements < kConfig.hidden) held[idx] = reinterpret_cast<const Elements*>(from)[at];
      }
      const GpuRankMask ranks = ranks_of(picks);
      Codes codes[kHere];
#pragma unroll
      for (i32 idx = 0; idx < kHere; ++idx) codes[idx] = quantized(held[idx]);
      for_slots(ranks, token, [&](u8* to) {
#pragma unroll
        for (i32 idx = 0; idx < kHere; ++idx) store_codes(to, (step + idx * stride) * 32 + lane, codes[idx]);
      });
    }
  }

  // Of 16 elements, as they lie in x; the lanes of a group together.
  __device__ Codes quantized(const Elements& elements) const {
    float values[2][8];
    u32 largest = 0;
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
      load_floats<kConfig.dtype>(reinterpret_cast<const u8*>(&elements) + half * (sizeof(Elements) / 2), values[half]);
#pragma unroll
      for (i32 idx = 0; idx < 8; ++idx) largest = max(largest, ptx::float_bits(values[half][idx]) & 0x7fffffffu);
    }
#pragma unroll
    for (i32 step = 1; step < kGroupLanes; step *= 2) largest = max(largest, __shfl_xor_sync(kAll, largest, step));
    const ptx::Fp8Scale scale = ptx::fp8_scale(largest, kConfig.quantize);
    Codes codes;
    codes.scale = scale.bits;
#pragma unroll
    for (i32 word = 0; word < 4; ++word) {
      const float* four = values[word / 2] + word % 2 * 4;
      const u32 low = ptx::floats_to_e4m3(four[0] * scale.factor, four[1] * scale.factor);
      const u32 high = ptx::floats_to_e4m3(four[2] * scale.factor, four[3] * scale.factor);
      codes.packed.word[word] = low | high << 16;
    }
    return codes;
  }

  // `at`: which 16 elements of the row.
  __device__ void store_codes(u8* to, i32 at, const Codes& codes) const {
    if (at * kElements >= kConfig.hidden) return;
    reinterpret_cast<Piece<16>*>(to)[at] = codes.packed;
    if (lane % kGroupLanes != 0) return;
    if constexpr (scales_are_floats(kConfig.quantize)) {
      reinterpret_cast<u32*>(to + kConfig.scales_at())[at / kGroupLanes] = codes.scale;
    } else {
      to[kConfig.scales_at() + at / kGroupLanes] = static_cast<u8>(codes.scale);
    }
  }

  // With nodes: in lane n, the record of the token at hand in the ring to node n; -1: it does not go there.
  i32 record_ = -1;
};

}  // namespace weft::kernels
