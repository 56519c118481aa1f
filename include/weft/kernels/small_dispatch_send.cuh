// Small-batch dispatch, the sending half: ids and weights to everyone, then rows to the slots of those who hold experts of
// theirs (docs/protocols/nvlink-small.md, "Dispatch", steps 1 and 2). Nothing is asked for before.
#pragma once

#include "weft/kernels/small_dispatch_state.cuh"
#include "weft/ptx/fp8_scale.h"

namespace weft::kernels {

template <SmallDispatchKernelConfig kConfig>
class SmallDispatchSend : public SmallDispatchState<kConfig> {
 public:
  using Base = SmallDispatchState<kConfig>;
  using Base::a, Base::flight, Base::lane, Base::rank;
  using Base::kRanks, Base::kTopk, Base::kExperts, Base::kLocal, Base::kRowBytes, Base::kScaleBytes, Base::kSteps,
      Base::kAll;
  using typename Base::Id;

  __device__ explicit SmallDispatchSend(const Base& base) : Base(base) {}

  // By block 0: ids, weights and how many tokens, to everyone.
  __device__ void send_routing() {
    send_ids();
    const i32 peer = static_cast<i32>(threadIdx.x);
    if (peer >= kRanks || !flight.is_active(peer)) return;
    u8* slot = a.view.control[peer] + a.view.layout.payload(flight.turn.sequence, rank());
    reinterpret_cast<GpuCountPayload*>(slot)->num_tokens = a.num_tokens;
  }

  __device__ void send_rows() {
    this->share(1, [&](i32, i32 nth, i32 first, i32 stride) {
      const i32 token = this->token_of(this->unit(nth));
      if (token >= a.num_tokens) return;
      const Picks picks = picks_of(token);
      if constexpr (kConfig.is_quantized()) {
        send_quantized(token, picks, first, stride);
      } else {
        send_plain(token, picks, first, stride);
      }
      if (first != 0) return;
      const u32 ranks = ranks_of(picks);
      if constexpr (!kConfig.is_quantized() && kScaleBytes > 0) send_scales(token, ranks);
      if constexpr (!kConfig.is_cached) {
        if (a.send_plan != nullptr) note_token(token, picks, ranks);
      }
    });
  }

 private:
  static constexpr i32 kHeld = 8;  // steps on their way together

  // What says where a token goes. Loaded before its row and looked at behind those loads, so that all are under way together.
  struct Picks {
    i64 id[kSteps];  // of picks lane, lane + 32, ..., -1: none; of a handle: the mask
  };

  __device__ GpuSendPlan<i32> plan() const {
    return {a.send_plan, a.num_tokens, kConfig.is_by_expert() ? kTopk : kRanks};
  }

  __device__ void send_ids() {
    const i32 num_picks = a.num_tokens * kTopk;
    for (i32 pick = static_cast<i32>(threadIdx.x); pick < num_picks; pick += Base::kThreads) {
      const i64 given = static_cast<const Id*>(a.topk_idx)[pick];
      if (given < -1 || given >= kExperts) note_bad_id(given, pick);
      const i32 id = is_sent(given) ? static_cast<i32>(given) : -1;
      const float weight = a.topk_weights == nullptr ? 1.0f : a.topk_weights[pick];
#pragma unroll 1
      for (i32 to = 0; to < kRanks; ++to) {
        if (!flight.is_active(to)) continue;
        this->slot_ids(to, rank(), 0)[pick] = id;
        this->slot_weights(to, rank(), 0)[pick] = weight;
      }
    }
  }

  __device__ bool is_sent(i64 id) const {
    return id >= 0 && id < kExperts && flight.is_active(static_cast<i32>(id) / kLocal);
  }

  __device__ void note_bad_id(i64 id, i32 pick) {
    transport::HostWords* host = a.view.host;
    // The one with the lowest position would need another round; any of them helps to find the mistake.
    if (atomicAdd_system(reinterpret_cast<u64*>(&host->num_bad_ids), u64{1}) != 0) return;
    host->first_bad_at = pick;
    host->first_bad_id = id;
  }

  __device__ Picks picks_of(i32 token) const {
    Picks picks;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      const i32 k = step * 32 + lane;
      if constexpr (kConfig.is_cached) {
        picks.id[step] = plan().mask()[token];
      } else {
        picks.id[step] = k < kTopk ? static_cast<const Id*>(a.topk_idx)[static_cast<i64>(token) * kTopk + k] : -1;
      }
    }
    return picks;
  }

  // Bit r: the token has a pick on rank r. For the whole warp.
  __device__ u32 ranks_of(const Picks& picks) const {
    if constexpr (kConfig.is_cached) return static_cast<u32>(picks.id[0]) & flight.active_mask;
    u32 mask = 0;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      const i64 id = picks.id[step];
      mask |= __reduce_or_sync(kAll, is_sent(id) ? 1u << (static_cast<i32>(id) / kLocal) : 0u);
    }
    return mask;
  }

  // Mask and destinations in the send plan. Which picks a capacity drops, the receiver alone knows: it sends zeros for them.
  __device__ void note_token(i32 token, const Picks& picks, u32 ranks) {
    if (lane == 0) plan().mask()[token] = static_cast<i32>(ranks);
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      const i32 k = step * 32 + lane;
      const i64 id = picks.id[step];
      if (k >= kTopk) continue;
      plan().destination()[static_cast<i64>(token) * kTopk + k] = is_sent(id) ? static_cast<i32>(id) / kLocal : -1;
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
      for (u32 rest = ranks_of(picks); rest != 0; rest &= rest - 1) {
        Unit* to = reinterpret_cast<Unit*>(this->slot_row(__ffs(static_cast<i32>(rest)) - 1, rank(), token));
#pragma unroll
        for (i32 idx = 0; idx < kHeld; ++idx) {
          const i32 unit = (step + idx * stride) * 32 + lane;
          if (unit < kUnits) to[unit] = held[idx];
        }
      }
    }
  }

  __device__ void send_scales(i32 token, u32 ranks) {
    for (u32 rest = ranks; rest != 0; rest &= rest - 1) {
      u8* to = this->slot_row(__ffs(static_cast<i32>(rest)) - 1, rank(), token) + kConfig.scales_at();
      copy_short<kScaleBytes>(to, a.scales + static_cast<i64>(token) * kScaleBytes, lane);
    }
  }

  // A step is 8 elements a lane; 16 lanes share a scale.
  __device__ void send_quantized(i32 token, const Picks& picks, i32 first, i32 stride) {
    constexpr i32 kElements = 8;
    constexpr i32 kBytes = dtype_bytes(kConfig.dtype);
    constexpr i32 kHere = kHeld / kBytes;
    const u8* from = a.x + static_cast<i64>(token) * kConfig.row_bytes;
    for (i32 step = first; step * 32 * kElements < kConfig.hidden; step += stride * kHere) {
      float values[kHere][kElements];
#pragma unroll
      for (i32 idx = 0; idx < kHere; ++idx) {
        const i32 column = ((step + idx * stride) * 32 + lane) * kElements;
#pragma unroll
        for (i32 element = 0; element < kElements; ++element) values[idx][element] = 0.0f;
        if (column < kConfig.hidden) load_floats<kConfig.dtype>(from + column * kBytes, values[idx]);
      }
      const u32 ranks = ranks_of(picks);
#pragma unroll
      for (i32 idx = 0; idx < kHere; ++idx) {
        if ((step + idx * stride) * 32 * kElements >= kConfig.hidden) break;
        send_group(token, ranks, ((step + idx * stride) * 32 + lane) * kElements, values[idx]);
      }
    }
  }

  __device__ void send_group(i32 token, u32 ranks, i32 column, const float (&values)[8]) {
    constexpr i32 kGroupLanes = kQuantizeGroup / 8;
    u32 largest = 0;
#pragma unroll
    for (i32 idx = 0; idx < 8; ++idx) largest = max(largest, ptx::float_bits(values[idx]) & 0x7fffffffu);
#pragma unroll
    for (i32 step = 1; step < kGroupLanes; step *= 2) largest = max(largest, __shfl_xor_sync(kAll, largest, step));
    const ptx::Fp8Scale scale = ptx::fp8_scale(largest, kConfig.quantize);
    if (column >= kConfig.hidden) return;
    struct alignas(8) Packed {
      u16 pair[4];
    } packed;
#pragma unroll
    for (i32 idx = 0; idx < 4; ++idx) {
      packed.pair[idx] = ptx::floats_to_e4m3(values[2 * idx] * scale.factor, values[2 * idx + 1] * scale.factor);
    }
    for (u32 rest = ranks; rest != 0; rest &= rest - 1) {
      u8* to = this->slot_row(__ffs(static_cast<i32>(rest)) - 1, rank(), token);
      *reinterpret_cast<Packed*>(to + column) = packed;
      if (lane % kGroupLanes != 0) continue;
      if constexpr (kConfig.quantize == Quantize::kFp8) {
        reinterpret_cast<u32*>(to + kConfig.scales_at())[column / kQuantizeGroup] = scale.bits;
      } else {
        to[kConfig.scales_at() + column / kQuantizeGroup] = static_cast<u8>(scale.bits);
      }
    }
  }
};

}  // namespace weft::kernels
