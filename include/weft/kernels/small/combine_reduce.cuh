// The owner's part of combine for small batches: a warp adds one part of the contributions to a token, in the order that is asked
// for, and writes it.
#pragma once

#include "weft/kernels/domains.cuh"
#include "weft/kernels/numbers.cuh"
#include "weft/kernels/small/combine_block.cuh"

namespace weft::kernels {

template <SmallCombineKernelConfig kConfig>
class SmallCombineReduce {
 public:
  using Block = SmallCombineBlock<kConfig>;
  using Row = Numbers<kConfig.dtype>;
  static constexpr i32 kRanks = kConfig.num_ranks;
  static constexpr i32 kTopk = kConfig.top_k;
  static constexpr i32 kWorkers = kConfig.kWorkers;
  static constexpr i32 kVector = Row::kVector;
  using Codes = Fp8Numbers<kVector>;

  // Asks for what the first job needs; nothing of it comes from a peer.
  __device__ SmallCombineReduce(const Block& block, i32 warp)
      : b_(block), warp_(warp), num_jobs_(block.num_units(block.a.num_tokens)) {
    read(warp);
  }

  // `hear(is_early)`: whether the contributions to the early units, or to all, are there; by every warp, before what it adds.
  template <class Hear>
  __device__ void run(const transport::Flight& flight, const Hear& hear) {
    if (b_.is_narrow()) return run_jobs<1>(flight, hear);
    run_jobs<kConfig.kVectors>(flight, hear);
  }

 protected:
  // Contributions whose vectors are loaded together.
  static constexpr i32 at_once(i32 num_vectors) {
    constexpr i32 kWideRows = 2;
    const i32 most = num_vectors > 1 ? kWideRows : kConfig.kNarrowRows;
    return kRanks < most ? kRanks : most;
  }

  // A vector of a contribution, as it lies in a slot.
  struct Part {
    Packed packed;
    typename Codes::Codes codes;
    float scale;
  };

  template <i32 kVectors, class Hear>
  __device__ void run_jobs(const transport::Flight& flight, const Hear& hear) {
    bool is_early = b_.num_early() > 0;
    if (!hear(is_early)) return;
    for (i32 idx = warp_;; idx += kWorkers) {
      if (is_early && idx >= min(b_.num_early(), num_jobs_)) {
        is_early = false;
        if (!hear(is_early)) return;
      }
      if (idx >= num_jobs_) return;
      const GpuRankMask from = next_from_ & flight.active & GpuRankMask::first(kRanks);
      read(idx + kWorkers);
      add<kVectors>(flight, b_.place(idx), from);
    }
  }

  __device__ void read(i32 idx) {
    const GpuSendPlan<const i32> plan{b_.a.send_plan, b_.a.num_tokens, 0};
    next_from_ = idx < num_jobs_ ? plan.ranks(b_.place(idx).token) : GpuRankMask::none();
  }

  template <i32 kVectors>
  __device__ void add(const transport::Flight& flight, const SmallPlace& place, const GpuRankMask& from) const {
    if constexpr (kConfig.order.has_domains()) return add_domains<kVectors>(flight, place, from.word);
    if constexpr (kConfig.is_by_pick()) return add_picks<kVectors>(flight, place);
    if constexpr (kConfig.order.is_by_last_pick()) return add_by_last_pick<kVectors>(flight, place, from.word);
    constexpr i32 kAtOnce = at_once(kVectors);
    const u8* first = b_.slot(flight, b_.a.view.rank, 0, place.token);
    const u64 stride = static_cast<u64>(b_.a.view.layout.small_tokens) * b_.a.view.layout.small_row_bytes;
    float total[kVectors][kVector] = {};
    for (u32 left = from.word; left != 0;) {
      Part part[kAtOnce][kVectors];
      bool is_there[kAtOnce];
#pragma unroll
      for (i32 idx = 0; idx < kAtOnce; ++idx) {
        is_there[idx] = left != 0;
        const u64 rank = static_cast<u64>(is_there[idx] ? __ffs(static_cast<i32>(left)) - 1 : 0);
        left &= left - 1;
        if (is_there[idx]) load(first + rank * stride, place, part[idx]);
      }
#pragma unroll
      for (i32 idx = 0; idx < kAtOnce; ++idx) {
        if (!is_there[idx]) break;
#pragma unroll
        for (i32 vector = 0; vector < kVectors; ++vector) add_part(part[idx][vector], total[vector]);
      }
    }
#pragma unroll
    for (i32 idx = 0; idx < kVectors; ++idx) write(place.token, b_.element(place, idx), place.end, total[idx]);
  }

  // Of pick first + lane: the rank that has it, or -1.
  __device__ i32 destination(i32 token, i32 first) const {
    const GpuSendPlan<const i32> plan{b_.a.send_plan, b_.a.num_tokens, kConfig.is_by_expert() ? kTopk : kRanks};
    return first + b_.lane < kTopk ? plan.destination()[static_cast<i64>(token) * kTopk + first + b_.lane] : -1;
  }

  // What the sum begins with.
  template <i32 kVectors>
  __device__ void begin_with_bias(const SmallPlace& place, float (&total)[kVectors][kVector]) const {
    if (b_.a.bias == nullptr) return;
#pragma unroll
    for (i32 idx = 0; idx < kVectors; ++idx) {
      const i32 element = b_.element(place, idx);
      if (element < place.end) add_bias(b_.a.bias + place.token * b_.a.bias_row_bytes, element, total[idx]);
    }
  }

  // The bias, then ranks by their last pick of the token, one at a time.
  template <i32 kVectors>
  __device__ void add_by_last_pick(const transport::Flight& flight, const SmallPlace& place, u32 from) const {
    const u8* first = b_.slot(flight, b_.a.view.rank, 0, place.token);
    const u64 stride = static_cast<u64>(b_.a.view.layout.small_tokens) * b_.a.view.layout.small_row_bytes;
    float total[kVectors][kVector] = {};
    begin_with_bias(place, total);
#pragma unroll 1
    for (i32 begin = 0; begin < kTopk; begin += 32) {
      const i32 to = destination(place.token, begin);
      u32 later = 0;  // ranks that have picks behind these
#pragma unroll 1
      for (i32 next = begin + 32; next < kTopk; next += 32) later |= ranks_of(destination(place.token, next));
      const bool is_from = to >= 0 && to < kRanks && (from >> to & 1u) != 0;
      const u32 same = ptx::match_any(is_from ? to : -1);
      u32 left = __ballot_sync(0xffffffffu, is_from && (same >> b_.lane) == 1u && (later >> to & 1u) == 0);
#pragma unroll 1
      for (; left != 0; left &= left - 1) {
        const i32 rank = __shfl_sync(0xffffffffu, to, __ffs(static_cast<i32>(left)) - 1);
        Part part[kVectors];
        load(first + static_cast<u64>(rank) * stride, place, part);
#pragma unroll
        for (i32 idx = 0; idx < kVectors; ++idx) add_part(part[idx], total[idx]);
      }
    }
#pragma unroll
    for (i32 idx = 0; idx < kVectors; ++idx) write(place.token, b_.element(place, idx), place.end, total[idx]);
  }

  // Those that all lanes name.
  __device__ static u32 ranks_of(i32 to) {
    u32 ranks = to >= 0 && to < kRanks ? 1u << to : 0;
#pragma unroll
    for (i32 step = 1; step < 32; step *= 2) ranks |= __shfl_xor_sync(0xffffffffu, ranks, step);
    return ranks;
  }

  // The bias, then the row of each pick times its weight. One of weight 0 is not read.
  template <i32 kVectors>
  __device__ void add_picks(const transport::Flight& flight, const SmallPlace& place) const {
    constexpr i32 kAtOnce = at_once(kVectors);
    float total[kVectors][kVector] = {};
    begin_with_bias(place, total);
#pragma unroll 1
    for (i32 begin = 0; begin < kTopk; begin += 32) {
      const i32 to = destination(place.token, begin);
      const bool has_weight = begin + b_.lane < kTopk && b_.a.owner_weights != nullptr;
      const i64 pick = static_cast<i64>(place.token) * kTopk + begin + b_.lane;
      const bool has_id = has_weight && b_.a.owner_ids != nullptr;
      const bool is_gone = has_id && b_.a.owner_ids[pick * b_.a.owner_id_words] < 0;
      const float weight = is_gone ? 0.0f : has_weight ? b_.a.owner_weights[pick] : 1.0f;
      const bool is_there = to >= 0 && to < kRanks && flight.is_active(to) && weight != 0.0f;
      for (u32 left = __ballot_sync(0xffffffffu, is_there); left != 0;) {
        Part part[kAtOnce][kVectors];
        i32 k[kAtOnce];
#pragma unroll
        for (i32 idx = 0; idx < kAtOnce; ++idx) {
          k[idx] = __ffs(static_cast<i32>(left)) - 1;  // -1: no more
          left &= left - 1;
          if (k[idx] >= 0) load(b_.pick_slot(flight, b_.a.view.rank, place.token, begin + k[idx]), place, part[idx]);
        }
#pragma unroll
        for (i32 idx = 0; idx < kAtOnce; ++idx) {
          if (k[idx] < 0) break;
          const float factor = __shfl_sync(0xffffffffu, weight, k[idx]);
#pragma unroll
          for (i32 vector = 0; vector < kVectors; ++vector) {
            float values[kVector];
            Row::unpack(part[idx][vector].packed, values);
#pragma unroll
            for (i32 at = 0; at < kVector; ++at) total[vector][at] += factor * values[at];
          }
        }
      }
    }
#pragma unroll
    for (i32 idx = 0; idx < kVectors; ++idx) write(place.token, b_.element(place, idx), place.end, total[idx]);
  }

  // Domain by domain, one contribution at a time: a second sum takes the registers of more.
  template <i32 kVectors>
  __device__ void add_domains(const transport::Flight& flight, const SmallPlace& place, u32 left) const {
    using Sums = Domains<kConfig.order, kConfig.dtype>;
    const u8* first = b_.slot(flight, b_.a.view.rank, 0, place.token);
    const u64 stride = static_cast<u64>(b_.a.view.layout.small_tokens) * b_.a.view.layout.small_row_bytes;
    float total[kVectors][kVector] = {};
    while (left != 0) {
      u32 domain = Sums::first_of(left);
      left &= ~domain;
      float sum[kVectors][kVector] = {};
      for (; domain != 0; domain &= domain - 1) {
        Part part[kVectors];
        load(first + static_cast<u64>(__ffs(static_cast<i32>(domain)) - 1) * stride, place, part);
#pragma unroll
        for (i32 idx = 0; idx < kVectors; ++idx) add_part(part[idx], sum[idx]);
      }
#pragma unroll
      for (i32 idx = 0; idx < kVectors; ++idx) Sums::add(sum[idx], total[idx]);
    }
#pragma unroll
    for (i32 idx = 0; idx < kVectors; ++idx) write(place.token, b_.element(place, idx), place.end, total[idx]);
  }

  template <i32 kVectors>
  __device__ void load(const u8* slot, const SmallPlace& place, Part (&part)[kVectors]) const {
#pragma unroll
    for (i32 idx = 0; idx < kVectors; ++idx) {
      const i32 element = b_.element(place, idx);
      part[idx] = {};
      if (element >= place.end) continue;
      if constexpr (kConfig.wire_is_fp8) {
        part[idx].codes = Codes::load(slot, element);
        part[idx].scale = *reinterpret_cast<const float*>(slot + kConfig.scales_at() + element / kQuantizeGroup * 4);
      } else {
        part[idx].packed = Row::load(slot, element);
      }
    }
  }

  __device__ static void add_part(const Part& part, float (&total)[kVector]) {
    float values[kVector];
    if constexpr (kConfig.wire_is_fp8) {
      Codes::unpack(part.codes, values);
#pragma unroll
      for (i32 at = 0; at < kVector; ++at) total[at] = ptx::add_exact_product(total[at], values[at], part.scale);
    } else {
      Row::unpack(part.packed, values);
#pragma unroll
      for (i32 at = 0; at < kVector; ++at) total[at] += values[at];
    }
  }

  __device__ void write(i64 token, i32 element, i32 end, float (&total)[kVector]) const {
    if (element >= end) return;
    constexpr bool kBiasFirst = kConfig.order.has_bias_first();
    if (!kBiasFirst && b_.a.bias != nullptr) add_bias(b_.a.bias + token * b_.a.bias_row_bytes, element, total);
    *reinterpret_cast<Packed*>(b_.a.out + token * kConfig.row_bytes() + element * Row::kBytes) = Row::pack(total);
  }

  __device__ void add_bias(const u8* bias, i32 element, float (&total)[kVector]) const {
    float values[kVector];
    if (b_.a.bias_is_fp32) {
#pragma unroll
      for (i32 at = 0; at < kVector; ++at) values[at] = reinterpret_cast<const float*>(bias)[element + at];
    } else {
      Row::unpack(Row::load(bias, element), values);
    }
#pragma unroll
    for (i32 at = 0; at < kVector; ++at) total[at] += values[at];
  }

  const Block& b_;
  const i32 warp_;
  const i32 num_jobs_;
  GpuRankMask next_from_;  // ranks that contribute to the next job
};

}  // namespace weft::kernels
