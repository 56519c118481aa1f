// Guards against a small-batch combine that adds, places or waits wrongly: the kernel's own source on simulated blocks, every
// bit against the contract (docs/semantics.md), without a GPU. Slots are full of garbage at first.
#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "simt.h"
#include "weft/kernels/small_combine.cuh"

using namespace weft;

namespace {

constexpr int kOperations = 3;  // both parities, and one of them again

struct Call {
  i32 num_blocks = 2;
  i32 max_tokens = 4;
  i32 granules = 0;  // of a part; 0: as the library chooses
  bool is_staged = false;
  bool has_weights = true;
  bool has_bias = false, bias_is_2d = false, bias_is_fp32 = false;
  u32 active_mask = 0xffff;
  i32 silent_rank = -1;  // takes no part
  i32 other_rank = -1;   // calls something else
};

constexpr SmallCombineKernelConfig half_of(SmallCombineKernelConfig config, bool sends, bool receives) {
  config.sends = sends;
  config.receives = receives;
  return config;
}

void store(Dtype dtype, u8* place, float value) {
  if (dtype == Dtype::kFp32) {
    std::memcpy(place, &value, 4);
  } else {
    const u16 narrow = dtype == Dtype::kBf16 ? ptx::float_to_bf16(value) : ptx::float_to_fp16(value);
    std::memcpy(place, &narrow, 2);
  }
}

float load(Dtype dtype, const u8* place) {
  float value = 0.0f;
  u16 narrow = 0;
  if (dtype == Dtype::kFp32) {
    std::memcpy(&value, place, 4);
    return value;
  }
  std::memcpy(&narrow, place, 2);
  return dtype == Dtype::kBf16 ? ptx::bf16_to_float(narrow) : ptx::fp16_to_float(narrow);
}

// A rank: its window, and what one operation reads and writes.
struct Rank {
  std::vector<GpuControlWords> control;  // for its alignment
  std::vector<u64> heap;
  transport::HostWords host;
  i32 num_tokens = 0;
  std::vector<i32> destination, send_plan, recv_plan;
  i32 num_rows = 0;
  std::vector<u8> rows, bias, out;
  std::vector<float> weights, side, side_out;
  kernels::SmallCombineKernelArgs args;

  const GpuControlWords& words() const { return control[0]; }
};

template <SmallCombineKernelConfig kConfig>
class World {
 public:
  static constexpr i32 kRanks = kConfig.num_ranks, kTopk = kConfig.top_k, kHidden = kConfig.hidden;
  static constexpr i32 kWidth = kConfig.plan_width(), kItem = dtype_bytes(kConfig.dtype);
  static constexpr bool kByExpert = kConfig.is_by_expert();

  explicit World(const Call& call) : call_(call) {
    GpuWindowShape shape;
    shape.num_ranks = shape.num_experts = kRanks;
    shape.top_k = kTopk;
    shape.num_blocks = call.num_blocks;
    shape.max_tokens = call.max_tokens + 5;
    shape.landing_row_bytes = kConfig.wire_row_bytes() + 40;
    shape.small_tokens = call.max_tokens + 2;
    layout_ = GpuWindowLayout::make(shape);
    plan_tokens_ = shape.max_tokens;
    CHECK(layout_.ok);
    for (Rank& rank : ranks_) {
      rank.control.resize(layout_.control_bytes / sizeof(GpuControlWords) + 1);
      rank.control[0].membership = u64{1} << 32 | (call.active_mask & ((1u << kRanks) - 1));
      rank.heap.assign(layout_.landing_bytes / 8, 0xeeeeeeeeeeeeeeeeull);
      rank.host.timeout_ns = 200'000'000'000ull;
    }
  }

  Rank& rank(i32 idx) { return ranks_[static_cast<std::size_t>(idx)]; }
  bool is_active(i32 idx) const { return (call_.active_mask >> idx & 1u) != 0; }

  void run() {
    route();
    for (i32 idx = 0; idx < kRanks; ++idx) fill(idx);
    if (call_.is_staged) {
      launch<half_of(kConfig, true, false)>();
      launch<half_of(kConfig, false, true)>();
    } else {
      launch<kConfig>();
    }
  }

  // Errors of one operation that should have ended well.
  int num_wrong(u64 sequence) {
    int wrong = 0;
    for (i32 idx = 0; idx < kRanks; ++idx) {
      Rank& owner = rank(idx);
      if (!is_active(idx)) continue;
      const GpuControlWords& words = owner.words();
      wrong += words.sequence != sequence || words.owner != 0 || words.broken != 0 || words.num_ended != 0;
      wrong += owner.host.error.code != 0 || owner.host.finished_sequence != sequence;
      for (i32 token = 0; token < owner.num_tokens; ++token) wrong += num_wrong_of(idx, token);
      wrong += owner.out.back() != kUntouched;
    }
    return wrong;
  }

 private:
  static constexpr u8 kUntouched = 0xab;

  std::size_t at(i64 row, i64 width, i64 column = 0) const { return static_cast<std::size_t>(row * width + column); }
  i32 below(i32 end) { return static_cast<i32>(random_() % static_cast<u32>(end)); }
  float number() { return below(20) == 0 ? 0.0f : std::normal_distribution<float>()(random_); }

  i32& entry(i32 at_rank, i32 source, i32 token, i32 k) {
    return *(GpuRecvPlan<i32>{rank(at_rank).recv_plan.data(), plan_tokens_, kWidth}.row(source, token) + k);
  }

  // Picks, and rows for them in any order; a capacity drops some.
  void route() {
    for (i32 idx = 0; idx < kRanks; ++idx) {
      Rank& source = rank(idx);
      source.num_tokens = !is_active(idx) ? 0 : idx == 1 ? call_.max_tokens : below(call_.max_tokens + 1);
      source.num_rows = 0;
      source.destination.resize(at(source.num_tokens, kTopk));
      for (i32& to : source.destination) {
        to = below(kRanks + 1) - 1;
        if (to >= 0 && !is_active(to)) to = -1;
      }
      source.recv_plan.resize(static_cast<std::size_t>(kGpuPlanHeader + kRanks * plan_tokens_ * kWidth));
      for (i32& undefined : source.recv_plan) undefined = below(2) == 0 ? below(9) : static_cast<i32>(random_());
    }
    std::vector<std::pair<i32, i32*>> picks;
    for (i32 to = 0; to < kRanks; ++to) {
      for (i32 source = 0; source < kRanks; ++source) place(to, source, picks);
    }
    std::shuffle(picks.begin(), picks.end(), random_);
    for (auto& [to, row] : picks) *row = below(6) == 0 ? kGpuDroppedRow : rank(to).num_rows++;
  }

  void place(i32 to, i32 from, std::vector<std::pair<i32, i32*>>& picks) {
    const Rank& source = rank(from);
    rank(to).recv_plan[static_cast<std::size_t>(from)] = source.num_tokens;
    for (i32 token = 0; token < source.num_tokens; ++token) {
      const i32* first = source.destination.data() + token * kTopk;
      for (i32 k = 0; k < kWidth; ++k) {
        const bool is_here = kByExpert ? first[k] == to : std::count(first, first + kTopk, to) > 0;
        entry(to, from, token, k) = -1;
        if (is_here) picks.emplace_back(to, &entry(to, from, token, k));
      }
    }
  }

  void fill(i32 idx) {
    Rank& self = rank(idx);
    const i64 width = kByExpert ? kTopk : kRanks;
    self.send_plan.assign(at(self.num_tokens, 1 + width + kTopk) + 1, -1);
    const GpuSendPlan<i32> plan{self.send_plan.data(), self.num_tokens, static_cast<i32>(width)};
    std::copy(self.destination.begin(), self.destination.end(), plan.destination());
    for (i32 token = 0; token < self.num_tokens; ++token) {
      u32 mask = 0;
      for (i32 k = 0; k < kTopk; ++k) {
        const i32 to = self.destination[at(token, kTopk, k)];
        if (to >= 0) mask |= 1u << to;
      }
      plan.mask()[token] = static_cast<i32>(mask);
    }
    self.rows.resize(at(self.num_rows, kHidden * kItem) + 16);
    for (std::size_t byte = 0; byte + 16 < self.rows.size(); byte += kItem)
      store(kConfig.dtype, &self.rows[byte], number());
    const auto fill_floats = [&](std::vector<float>& values, std::size_t count) {
      values.resize(count);
      for (float& value : values) value = number();
    };
    fill_floats(self.weights, at(self.num_rows, 1) + 1);
    fill_floats(self.side, at(self.num_rows, kByExpert ? 1 : kTopk) + 1);
    const Dtype bias_dtype = call_.bias_is_fp32 ? Dtype::kFp32 : kConfig.dtype;
    const i32 bias_item = dtype_bytes(bias_dtype);
    self.bias.resize(at(call_.bias_is_2d ? self.num_tokens : 1, kHidden * bias_item) + 16);
    for (std::size_t byte = 0; byte + 16 < self.bias.size(); byte += static_cast<std::size_t>(bias_item)) {
      store(bias_dtype, &self.bias[byte], number());
    }
    self.out.assign(at(self.num_tokens, kHidden * kItem) + 1, kUntouched);
    self.side_out.assign(at(self.num_tokens, kTopk) + 1, -77.0f);
    set_arguments(idx);
  }

  void set_arguments(i32 idx) {
    Rank& self = rank(idx);
    kernels::SmallCombineKernelArgs& args = self.args;
    args.view.layout = layout_;
    args.view.rank = idx;
    args.view.num_ranks = kRanks;
    args.view.host = &self.host;
    for (i32 peer = 0; peer < kRanks; ++peer) {
      args.view.control[peer] = reinterpret_cast<u8*>(rank(peer).control.data());
      args.view.heap[peer] = reinterpret_cast<u8*>(rank(peer).heap.data());
      args.view.heap_bytes[peer] = layout_.landing_bytes;
    }
    args.print = idx == call_.other_rank ? 77 : 7;
    args.num_tokens = self.num_tokens;
    args.max_tokens = call_.max_tokens;
    args.split = SmallSplit::make(kConfig, call_.max_tokens, call_.num_blocks);
    if (call_.granules > 0) {
      args.split.part = call_.granules * SmallSplit::granule(kConfig.dtype);
      args.split.num_parts = (kHidden + args.split.part - 1) / args.split.part;
    }
    args.rows = self.rows.data();
    args.num_rows = self.num_rows;
    args.weights = call_.has_weights && kByExpert ? self.weights.data() : nullptr;
    args.side = self.side.data();
    args.send_plan = self.send_plan.data();
    args.recv_plan = self.recv_plan.data();
    args.recv_plan_tokens = plan_tokens_;
    args.bias = call_.has_bias ? self.bias.data() : nullptr;
    args.bias_is_fp32 = call_.bias_is_fp32;
    args.bias_row_bytes = call_.bias_is_2d ? kHidden * (call_.bias_is_fp32 ? 4 : kItem) : 0;
    args.out = self.out.data();
    args.side_out = self.side_out.data();
  }

  template <SmallCombineKernelConfig kPart>
  void launch() {
    std::vector<std::thread> blocks;
    for (i32 idx = 0; idx < kRanks; ++idx) {
      if (!is_active(idx) || idx == call_.silent_rank) continue;
      for (i32 block = 0; block < call_.num_blocks; ++block) {
        blocks.emplace_back([this, idx, block] {
          const kernels::SmallCombineKernelArgs* args = &rank(idx).args;
          simt::run_block(static_cast<unsigned>(block), static_cast<unsigned>(call_.num_blocks), kPart.num_threads(),
                          [args] { kernels::small_combine<kPart>(*args); });
        });
      }
    }
    for (std::thread& block : blocks) block.join();
  }

  // ---- what the contract says

  std::vector<float> contribution(i32 contributor, i32 owner, i32 token) {
    const Rank& from = rank(contributor);
    std::vector<float> sum(kHidden, 0.0f);
    for (i32 k = 0; k < kWidth; ++k) {
      const i32 row = entry(contributor, owner, token, k);
      if (row < 0) continue;
      const float weight = call_.has_weights && kByExpert ? from.weights[at(row, 1)] : 1.0f;
      for (i32 h = 0; h < kHidden; ++h) {
        sum[at(h, 1)] += weight * load(kConfig.dtype, &from.rows[at(row, kHidden * kItem, h * kItem)]);
      }
    }
    if constexpr (kConfig.wire_is_fp8) {
      for (i32 group = 0; group < kHidden; group += kQuantizeGroup) {
        const i32 end = std::min(group + kQuantizeGroup, kHidden);
        float largest = 1e-4f;
        for (i32 h = group; h < end; ++h) largest = std::max(largest, std::fabs(sum[at(h, 1)]));
        for (i32 h = group; h < end; ++h) {
          const u8 code = ptx::float_to_e4m3(sum[at(h, 1)] * (448.0f / largest));
          sum[at(h, 1)] = ptx::e4m3_to_float(code) * (largest / 448.0f);
        }
      }
    } else {
      u8 wire[4];
      for (float& value : sum) {
        store(kConfig.dtype, wire, value);
        value = load(kConfig.dtype, wire);
      }
    }
    return sum;
  }

  int num_wrong_of(i32 idx, i32 token) {
    Rank& owner = rank(idx);
    std::vector<float> total(kHidden, 0.0f);
    for (i32 contributor = 0; contributor < kRanks; ++contributor) {
      if ((owner.send_plan[at(token, 1)] >> contributor & 1) == 0) continue;
      const std::vector<float> part = contribution(contributor, idx, token);
      for (i32 h = 0; h < kHidden; ++h) total[at(h, 1)] += part[at(h, 1)];
    }
    const Dtype bias_dtype = call_.bias_is_fp32 ? Dtype::kFp32 : kConfig.dtype;
    int wrong = 0;
    for (i32 h = 0; h < kHidden; ++h) {
      float value = total[at(h, 1)];
      if (call_.has_bias) {
        const i64 item = dtype_bytes(bias_dtype);
        value += load(bias_dtype, &owner.bias[at(call_.bias_is_2d ? token : 0, kHidden * item, h * item)]);
      }
      u8 wanted[4];
      store(kConfig.dtype, wanted, value);
      wrong += std::memcmp(wanted, &owner.out[at(token, kHidden * kItem, h * kItem)], kItem) != 0;
    }
    for (i32 k = 0; k < kTopk && kConfig.has_side; ++k)
      wrong += side_of(idx, token, k) != owner.side_out[at(token, kTopk, k)];
    return wrong;
  }

  float side_of(i32 idx, i32 token, i32 k) {
    const i32 to = rank(idx).destination[at(token, kTopk, k)];
    const i32 row = to < 0 ? -1 : entry(to, idx, token, kByExpert ? k : 0);
    return row < 0 ? 0.0f : 0.0f + rank(to).side[kByExpert ? at(row, 1) : at(row, kTopk, k)];
  }

  const Call call_;
  GpuWindowLayout layout_;
  i64 plan_tokens_ = 0;
  std::array<Rank, kRanks> ranks_;
  std::mt19937 random_{7};
};

// With parts as the library chooses them, and of one granule and of four.
template <SmallCombineKernelConfig kConfig>
void check_bits(Call call) {
  for (const i32 granules : {0, 1, 4}) {
    call.granules = granules;
    const auto world = std::make_unique<World<kConfig>>(call);
    for (int operation = 1; operation <= kOperations; ++operation) {
      world->run();
      CHECK_EQ(world->num_wrong(static_cast<u64>(operation)), 0);
    }
  }
}

constexpr SmallCombineKernelConfig kSums{.num_ranks = 3, .top_k = 4, .hidden = 2056, .layout = Layout::kExpertMajor};

}  // namespace

TEST(sums_in_bf16_with_bias_for_each_token) { check_bits<kSums>({.has_bias = true, .bias_is_2d = true}); }

TEST(rows_in_fp16_without_weights) {
  check_bits<SmallCombineKernelConfig{.num_ranks = 3, .top_k = 4, .hidden = 16, .dtype = Dtype::kFp16}>({});
}

TEST(fp8_sums_and_side_values_in_two_launches) {
  check_bits<SmallCombineKernelConfig{.num_ranks = 2,
                                      .top_k = 8,
                                      .hidden = 1032,
                                      .layout = Layout::kExpertMajor,
                                      .wire_is_fp8 = true,
                                      .has_side = true}>({.is_staged = true, .has_bias = true, .bias_is_fp32 = true});
}

TEST(fp8_rows_in_fp32) {
  check_bits<SmallCombineKernelConfig{
      .num_ranks = 2, .top_k = 3, .hidden = 272, .dtype = Dtype::kFp32, .wire_is_fp8 = true, .has_side = true}>(
      {.num_blocks = 3, .has_bias = true, .bias_is_2d = true, .bias_is_fp32 = true});
}

TEST(more_picks_than_a_warp_has_lanes) {
  check_bits<SmallCombineKernelConfig{
      .num_ranks = 2, .top_k = 40, .hidden = 520, .dtype = Dtype::kFp32, .layout = Layout::kExpertMajor}>(
      {.has_weights = false});
}

TEST(a_rank_that_is_no_member) { check_bits<kSums>({.active_mask = 0b011}); }

TEST(no_tokens) { check_bits<kSums>({.max_tokens = 0}); }

TEST(a_rank_that_calls_something_else_is_told_by_all) {
  World<kSums> world({.other_rank = 1});
  world.run();
  for (i32 idx = 0; idx < 3; ++idx) {
    CHECK_EQ(world.rank(idx).host.error.code, static_cast<u32>(transport::ErrorCause::kMismatch));
    CHECK_EQ(world.rank(idx).words().sequence, 1u);  // given up by all, who go on with the next
    CHECK_EQ(world.rank(idx).words().owner, 0u);
    CHECK_EQ(world.rank(idx).words().broken, 0u);
  }
}

TEST(a_rank_that_does_not_come_is_named) {
  World<kSums> world({.silent_rank = 2});
  for (i32 idx = 0; idx < 2; ++idx) world.rank(idx).host.timeout_ns = 100'000'000;
  world.run();
  for (i32 idx = 0; idx < 2; ++idx) {
    const Rank& rank = world.rank(idx);
    CHECK_EQ(rank.host.error.code, static_cast<u32>(transport::ErrorCause::kDeadline));
    CHECK_EQ(rank.host.error.culprit, 2);
    CHECK_EQ(rank.words().broken, static_cast<u64>(transport::ErrorCause::kDeadline));
    CHECK_EQ(rank.words().sequence, 0u);  // R9: not advanced
  }
}

TEST(a_half_that_receives_what_was_not_sent_does_nothing) {
  constexpr SmallCombineKernelConfig kReceives = half_of(kSums, false, true);
  World<kReceives> world({});
  world.run();
  CHECK_EQ(world.rank(0).host.error.code, static_cast<u32>(transport::ErrorCause::kBusy));
  CHECK_EQ(world.rank(0).words().sequence, 0u);
}

int main(int argc, char** argv) { return weft::test::run_tests(argc, argv); }
