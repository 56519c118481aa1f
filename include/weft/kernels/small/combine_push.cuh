// The contributor's part of combine for small batches: a warp makes one part of a token's contribution in registers and
// stores it into this rank's slot at the token's owner.
#pragma once

#include "weft/kernels/numbers.cuh"
#include "weft/kernels/small/combine_block.cuh"
#include "weft/ptx/fp8_scale.h"

namespace weft::kernels {

template <SmallCombineKernelConfig kConfig>
class SmallCombinePush {
 public:
  using Block = SmallCombineBlock<kConfig>;
  using Row = Numbers<kConfig.dtype>;
  static constexpr i32 kRanks = kConfig.num_ranks;
  static constexpr i32 kWorkers = kConfig.kWorkers;
  static constexpr i32 kVector = Row::kVector;
  static constexpr i32 kWidth = kConfig.plan_width();
  static constexpr i32 kWords = (kWidth + 31) / 32;  // entries of the plan that a lane has of a token

  // Asks for what the first job needs; nothing of it depends on the operation in flight.
  __device__ SmallCombinePush(const Block& block, i32 warp)
      : b_(block), plan_{block.a.recv_plan, block.a.recv_plan_tokens, kWidth}, warp_(warp) {
    num_jobs_ = b_.num_units(b_.a.max_tokens) * kRanks;
    num_tokens_ = b_.lane < kRanks ? plan_.num_tokens()[b_.lane] : 0;
    read(warp);
  }

  // `meet()` behind the jobs of the early units, and behind all.
  template <class Meet>
  __device__ void run(const transport::Flight& flight, const Meet& meet) {
    if (b_.is_narrow()) return run_jobs<1>(flight, meet);
    run_jobs<kConfig.kVectors>(flight, meet);
  }

 private:
  struct Job {
    SmallPlace place;
    i32 owner;
  };

  // Rows whose vectors are loaded together.
  static constexpr i32 at_once(i32 num_vectors) {
    return num_vectors > 1 ? 2 : kWidth < kConfig.kNarrowRows ? kWidth : kConfig.kNarrowRows;
  }

  template <i32 kVectors, class Meet>
  __device__ void run_jobs(const transport::Flight& flight, const Meet& meet) {
    bool is_early = b_.num_early() > 0;
    for (i32 idx = warp_;; idx += kWorkers) {
      if (is_early && idx >= b_.num_early() * kRanks) {
        meet();
        is_early = false;
      }
      if (idx >= num_jobs_) break;
      const Job job = job_of(idx);
      i32 row[kWords];
#pragma unroll
      for (i32 word = 0; word < kWords; ++word) row[word] = next_row_[word];
      read(idx + kWorkers);
      const bool is_there = job.place.token < __shfl_sync(0xffffffffu, num_tokens_, job.owner);
      if (is_there && flight.is_active(job.owner)) push<kVectors>(flight, job, row);
    }
    meet();
  }

  // Owners take turns, each rank beginning with another, so that all links are busy; in the next round of the warps the turns
  // have moved on by one, so that no warp has to do with one owner only.
  __device__ Job job_of(i32 idx) const {
    constexpr i32 kPerRound = kWorkers / kRanks > 0 ? kWorkers / kRanks : 1;
    const i32 unit = idx / kRanks;
    return {b_.place(unit), (b_.a.view.rank + 1 + idx % kRanks + unit / kPerRound) % kRanks};
  }

  __device__ void read(i32 idx) {
    const Job job = job_of(idx);
#pragma unroll
    for (i32 word = 0; word < kWords; ++word) {
      const i32 pick = word * 32 + b_.lane;
      const bool is_wanted = idx < num_jobs_ && pick < kWidth;
      next_row_[word] = is_wanted ? plan_.row(job.owner, job.place.token)[pick] : -1;
    }
  }

  template <i32 kVectors>
  __device__ void push(const transport::Flight& flight, const Job& job, const i32 (&row)[kWords]) const {
    u8* slot = b_.own_slot(flight, job.owner, job.place.token);
    if constexpr (!kConfig.is_by_expert()) {
      const i32 only = __shfl_sync(0xffffffffu, row[0], 0);
      const bool is_row = only >= 0 && only < b_.a.num_rows;  // R19
      if (!is_row && only != kGpuDroppedRow) return;
      Packed packed[kVectors] = {};
      if (is_row) load(only, job.place, packed);
      if constexpr (kConfig.wire_is_fp8) {
        float total[kVectors][kVector];
#pragma unroll
        for (i32 idx = 0; idx < kVectors; ++idx) Row::unpack(packed[idx], total[idx]);
        quantize(total, job.place, slot);
      } else {
        store(packed, job.place, slot);
      }
    } else if constexpr (kConfig.is_by_pick()) {
#pragma unroll
      for (i32 word = 0; word < kWords; ++word) push_picks<kVectors>(flight, job, row[word], word * 32);
    } else {
      float total[kVectors][kVector] = {};
      bool is_awaited = false;
#pragma unroll
      for (i32 word = 0; word < kWords; ++word) is_awaited |= add_picks(job.place, row[word], total);
      if (!is_awaited) return;
      if constexpr (kConfig.wire_is_fp8) {
        quantize(total, job.place, slot);
      } else {
        Packed packed[kVectors];
#pragma unroll
        for (i32 idx = 0; idx < kVectors; ++idx) packed[idx] = Row::pack(total[idx]);
        store(packed, job.place, slot);
      }
    }
  }

  // Lane k has the row of pick first + k. Each goes out as it is; of picks that a capacity has dropped zeros.
  template <i32 kVectors>
  __device__ void push_picks(const transport::Flight& flight, const Job& job, i32 row, i32 first) const {
    constexpr i32 kAtOnce = at_once(kVectors);
    const u32 rows = __ballot_sync(0xffffffffu, row >= 0 && row < b_.a.num_rows);  // R19
    u32 left = rows | __ballot_sync(0xffffffffu, row == kGpuDroppedRow);
    while (left != 0) {
      Packed packed[kAtOnce][kVectors];
      i32 pick[kAtOnce];
#pragma unroll
      for (i32 idx = 0; idx < kAtOnce; ++idx) {
        pick[idx] = __ffs(static_cast<i32>(left)) - 1;  // -1: no more
        left &= left - 1;
        const i32 next = __shfl_sync(0xffffffffu, row, max(pick[idx], 0));
#pragma unroll
        for (i32 vector = 0; vector < kVectors; ++vector) packed[idx][vector] = Packed{};
        if (pick[idx] >= 0 && (rows >> pick[idx] & 1u) != 0) load(next, job.place, packed[idx]);
      }
#pragma unroll
      for (i32 idx = 0; idx < kAtOnce; ++idx) {
        if (pick[idx] < 0) break;
        store(packed[idx], job.place, b_.pick_slot(flight, job.owner, job.place.token, first + pick[idx]));
      }
    }
  }

  // Lane k has the row of pick k. Whether the owner waits for any of them: also for those that a capacity has dropped, of which it
  // does not know.
  template <i32 kVectors>
  __device__ bool add_picks(const SmallPlace& place, i32 row, float (&total)[kVectors][kVector]) const {
    static_assert(kConfig.order.has_contributions_by_pick());
    constexpr i32 kAtOnce = at_once(kVectors);
    const bool is_row = row >= 0 && row < b_.a.num_rows;  // R19
    const float weight = is_row && b_.a.weights != nullptr ? b_.a.weights[row] : 1.0f;
    const bool is_awaited = __any_sync(0xffffffffu, is_row || row == kGpuDroppedRow) != 0;
    u32 left = __ballot_sync(0xffffffffu, is_row);
    while (left != 0) {
      Packed packed[kAtOnce][kVectors];
      i32 source[kAtOnce];
#pragma unroll
      for (i32 idx = 0; idx < kAtOnce; ++idx) {
        source[idx] = __ffs(static_cast<i32>(left)) - 1;  // -1: no more
        left &= left - 1;
        const i32 next = __shfl_sync(0xffffffffu, row, max(source[idx], 0));
        if (source[idx] >= 0) load(next, place, packed[idx]);
      }
#pragma unroll
      for (i32 idx = 0; idx < kAtOnce; ++idx) {
        if (source[idx] < 0) break;
        const float factor = __shfl_sync(0xffffffffu, weight, source[idx]);
#pragma unroll
        for (i32 vector = 0; vector < kVectors; ++vector) {
          float values[kVector];
          Row::unpack(packed[idx][vector], values);
#pragma unroll
          for (i32 at = 0; at < kVector; ++at) total[vector][at] += factor * values[at];
        }
      }
    }
    return is_awaited;
  }

  template <i32 kVectors>
  __device__ void load(i32 row, const SmallPlace& place, Packed (&packed)[kVectors]) const {
    const u8* from = b_.a.rows + static_cast<i64>(row) * kConfig.row_bytes();
#pragma unroll
    for (i32 idx = 0; idx < kVectors; ++idx) {
      const i32 element = b_.element(place, idx);
      packed[idx] = element < place.end ? Row::load(from, element) : Packed{};
    }
  }

  template <i32 kVectors>
  __device__ void store(const Packed (&packed)[kVectors], const SmallPlace& place, u8* slot) const {
#pragma unroll
    for (i32 idx = 0; idx < kVectors; ++idx) {
      const i32 element = b_.element(place, idx);
      if (element < place.end) *reinterpret_cast<Packed*>(slot + element * Row::kBytes) = packed[idx];
    }
  }

  // Group g of 128 elements lies in vector g / kGroups of kGroupLanes lanes. Lane g works out its scale: those of a job are stored
  // side by side.
  template <i32 kVectors>
  __device__ void quantize(float (&total)[kVectors][kVector], const SmallPlace& place, u8* slot) const {
    constexpr i32 kGroupLanes = kQuantizeGroup / kVector;
    constexpr i32 kGroups = 32 / kGroupLanes;
    float mine = 0.0f;
#pragma unroll
    for (i32 idx = 0; idx < kVectors; ++idx) {
      float largest = Row::magnitude(total[idx]);  // 0 behind the end
#pragma unroll
      for (i32 step = 1; step < kGroupLanes; step *= 2) {
        largest = ptx::max_nan(largest, __shfl_xor_sync(0xffffffffu, largest, step));
      }
      largest = __shfl_sync(0xffffffffu, largest, b_.lane % kGroups * kGroupLanes);
      if (b_.lane / kGroups == idx) mine = largest;
    }
    const ptx::Fp8WireScale scale = ptx::fp8_wire_scale(ptx::float_bits(mine));
#pragma unroll
    for (i32 idx = 0; idx < kVectors; ++idx) {
      const float factor = __shfl_sync(0xffffffffu, scale.factor, idx * kGroups + b_.lane / kGroupLanes);
      const i32 element = b_.element(place, idx);
      if (element >= place.end) continue;
#pragma unroll
      for (i32 at = 0; at < kVector; ++at) total[idx][at] *= factor;
      Fp8Numbers<kVector>::store(slot, element, total[idx]);
    }
    const i32 group = place.column / kQuantizeGroup + b_.lane;
    if (b_.lane < kVectors * kGroups && group * kQuantizeGroup < place.end) {
      *reinterpret_cast<float*>(slot + kConfig.scales_at() + group * 4) = scale.scale;
    }
  }

  const Block& b_;
  const GpuRecvPlan<const i32> plan_;
  const i32 warp_;
  i32 num_jobs_;
  i32 num_tokens_;        // of rank `lane`
  i32 next_row_[kWords];  // of picks `lane`, `lane` + 32, ... of the next job; -1: none
};

}  // namespace weft::kernels
