// A rank of the real engine that runs calls of a job and compares every word with the model.
#pragma once

#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "engine/communicator.h"
#include "engine/cpu/plan.h"
#include "engine/cpu/window.h"
#include "engine/job.h"

namespace weft::test {

class EngineRank {
 public:
  EngineRank(std::unique_ptr<ControlPlane> plane, const JobShape& shape, u64 heap_bytes, u64 staging_bytes = 0,
             u32 first_epoch = 1)
      : EngineRank(Communicator::create(std::move(plane), first_epoch), shape, heap_bytes, staging_bytes) {}
  EngineRank(std::shared_ptr<Communicator> comm, const JobShape& shape, u64 heap_bytes, u64 staging_bytes = 0)
      : shape_(shape), comm_(std::move(comm)) {
    WindowShape window;
    window.num_ranks = shape.num_ranks;
    window.num_experts = static_cast<i32>(shape.num_experts());
    window.top_k = static_cast<i32>(shape.top_k);
    window.max_tokens = shape.max_tokens;
    window.max_row_bytes = shape.max_row_bytes;
    window.staging_bytes = staging_bytes;
    window.node_ranks = shape.node_ranks;
    const u64 until_ns = now_ns() + kConnectNs;
    window_ = comm_->is_solo()  // a newcomer: the members' first window
                  ? std::make_unique<cpu::Window>(comm_, window, heap_bytes, u64{1}, until_ns, Poll{}, 0)
                  : std::make_unique<cpu::Window>(comm_, window, heap_bytes, until_ns, Poll{});
  }

  Communicator& comm() { return *comm_; }
  cpu::Window& window() { return *window_; }
  const JobShape& shape() const { return shape_; }
  int rank() const { return comm_->rank(); }
  void set_timeout_s(double seconds) { timeout_ns_ = static_cast<u64>(seconds * 1e9); }

  void run(u64 id) {
    const Call call = Call::make(shape_, id);
    const Model model(shape_, call, comm_->active_ranks());
    Tensors tensors = make_inputs(call);
    DispatchResult result = dispatch(call, tensors, call.dtype, false, 0);
    check_dispatch(call, model, tensors, result);
    combine(call, model, tensors, result);
    if (!call.again) return;
    // The handle once more, with other values in another type.
    const Dtype other = call.dtype == Dtype::kFp32 ? Dtype::kBf16 : Dtype::kFp32;
    const DispatchResult repeated = dispatch(call, tensors, other, true, 1);
    check_rows(call, model, repeated, other, 1);
  }

  // Random calls first, first + 1, ...
  void run_many(u64 first, u64 num_calls) {
    for (u64 id = first; id < first + num_calls; ++id) run(id);
  }

  void barrier() { window_->barrier(timeout_ns_, {}); }

  void rebuild(const std::vector<int>& ranks) { comm_->rebuild(ranks, now_ns() + kConnectNs, {}); }

  void close() {
    window_.reset();
    comm_->close();
    comm_.reset();
  }

  // Arguments of a dispatch that is well formed, for tests that change something in them.
  struct Tensors {
    i64 num_tokens = 0;
    std::vector<i64> ids64;
    std::vector<i32> ids32;
    std::vector<float> weights;
    std::vector<i32> send_plan, recv_plan;
    std::vector<u8> x;
    std::vector<i32> sizes;  // counts, offsets, number of rows
    i64 overflow = 0;
  };

  Tensors make_inputs(const Call& call) const {
    Tensors t;
    t.num_tokens = call.num_tokens(shape_, comm_->rank());
    for (i64 token = 0; token < t.num_tokens; ++token) {
      for (i64 k = 0; k < shape_.top_k; ++k) {
        t.ids64.push_back(call.expert(shape_, comm_->rank(), token, k));
        t.ids32.push_back(static_cast<i32>(t.ids64.back()));
        t.weights.push_back(call.weight(comm_->rank(), token, k));
      }
    }
    t.send_plan.resize(static_cast<size_t>(cpu::send_plan_len(t.num_tokens, shape_.top_k, shape_.num_ranks)));
    const i64 num_groups = call.layout == Layout::kRankMajor ? shape_.num_ranks : shape_.num_local;
    t.sizes.assign(static_cast<size_t>(shape_.num_local + num_groups + 2), -1);
    return t;
  }

  DispatchArgs dispatch_args(const Call& call, Tensors& t, Dtype dtype, bool cached, u64 turn) const {
    const i64 element = dtype_bytes(dtype);
    t.x.resize(static_cast<size_t>(t.num_tokens * call.hidden * element));
    for (i64 at = 0; at < t.num_tokens * call.hidden; ++at) {
      store_number(dtype, call.x(comm_->rank(), at / call.hidden, at % call.hidden, turn),
                   &t.x[static_cast<size_t>(at * element)]);
    }
    DispatchArgs args;
    args.x = address_of(t.x.data());
    args.num_tokens = t.num_tokens;
    args.topk_is_int64 = call.ids_are_int64;
    args.topk_idx = address_of(call.ids_are_int64 ? static_cast<const void*>(t.ids64.data()) : t.ids32.data());
    args.topk_weights = address_of(t.weights.data());
    args.send_plan = address_of(t.send_plan.data());
    args.recv_plan = address_of(t.recv_plan.data());
    args.recv_plan_len = static_cast<i64>(t.recv_plan.size());
    args.cached = cached;
    args.dtype = dtype;
    args.layout = call.layout;
    args.row_bytes = call.hidden * element;
    args.hidden = call.hidden;
    args.alignment = call.alignment;
    args.capacity = call.capacity;
    args.max_tokens = shape_.max_tokens;
    args.timeout_ns = timeout_ns_;
    args.sizes = address_of(t.sizes.data());
    args.overflow = address_of(&t.overflow);
    return args;
  }

  DispatchResult dispatch(const Call& call, Tensors& t, Dtype dtype, bool cached, u64 turn) {
    DispatchResult result = window_->dispatch(dispatch_args(call, t, dtype, cached, turn), {});
    if (!cached) {
      const auto* plan = reinterpret_cast<const i32*>(result.recv_plan.block.data);
      t.recv_plan.assign(plan, plan + result.recv_plan.shape[0]);
    }
    return result;
  }

  // A combine of zeros, whose sums nobody looks at. Not from the heap: sums are pushed.
  void sum_zeros(const Call& call, Tensors& t, const DispatchResult& result) {
    i64 num_rows = 1;
    for (size_t at = 0; at + 1 < result.x.shape.size(); ++at) num_rows *= result.x.shape[at];
    const auto row_bytes = static_cast<size_t>(call.hidden * dtype_bytes(call.dtype));
    const std::vector<u8> y(static_cast<size_t>(num_rows) * row_bytes);
    std::vector<u8> out(static_cast<size_t>(t.num_tokens) * row_bytes);
    CombineArgs args;
    args.y = address_of(y.data());
    args.num_rows = num_rows;
    args.out = address_of(out.data());
    args.num_tokens = t.num_tokens;
    args.send_plan = address_of(t.send_plan.data());
    args.recv_plan = address_of(t.recv_plan.data());
    args.recv_plan_len = static_cast<i64>(t.recv_plan.size());
    args.dtype = call.dtype;
    args.layout = call.layout;
    args.capacity = call.capacity;
    args.hidden = call.hidden;
    args.alignment = call.alignment;
    args.max_tokens = shape_.max_tokens;
    args.timeout_ns = timeout_ns_;
    args.sum_domain = shape_.node_ranks;
    window_->combine(args, {});
  }

 private:
  static constexpr u64 kConnectNs = 30'000'000'000;

  void check_dispatch(const Call& call, const Model& model, const Tensors& t, const DispatchResult& result) {
    const Received& expected = model.received(rank());
    const i32 *counts = t.sizes.data(), *offsets = counts + shape_.num_local;
    CHECK_EQ(i64{t.sizes.back()}, expected.num_rows);
    CHECK_EQ(result.num_rows, expected.num_rows);
    CHECK_EQ(t.overflow, expected.num_dropped);
    for (size_t idx = 0; idx < expected.offsets.size(); ++idx) CHECK_EQ(i64{offsets[idx]}, expected.offsets[idx]);
    for (size_t idx = 0; idx < expected.counts.size(); ++idx) CHECK_EQ(i64{counts[idx]}, expected.counts[idx]);
    i64 num_bad = 0;
    for (i64 id : t.ids64) num_bad += id < -1 || id >= shape_.num_experts() ? 1 : 0;
    CHECK_EQ(result.num_bad_ids, num_bad);
    check_rows(call, model, result, call.dtype, 0);
    const auto* weights = reinterpret_cast<const float*>(result.topk_weights.block.data);
    for (size_t row = 0; row < expected.rows.size(); ++row) {
      const Pick& pick = expected.rows[row];
      if (call.layout == Layout::kRankMajor) {
        if (pick.source >= 0) check_topk(call, model, result, row, pick);
      } else if (pick.source >= 0) {
        CHECK_EQ(weights[row], call.weight(pick.source, pick.token, pick.k));
      } else if (call.layout == Layout::kExpertMajor && static_cast<i64>(row) < expected.num_rows) {
        CHECK_EQ(weights[row], 0.0f);
      }
    }
  }

  void check_topk(const Call& call, const Model& model, const DispatchResult& result, size_t row, const Pick& pick) {
    const auto* weights = reinterpret_cast<const float*>(result.topk_weights.block.data);
    for (i64 k = 0; k < shape_.top_k; ++k) {
      const size_t at = row * static_cast<size_t>(shape_.top_k) + static_cast<size_t>(k);
      const i64 id = model.expert(pick.source, pick.token, k);
      const bool is_here = id >= 0 && model.rank_of(id) == rank();
      const void* ids = result.topk_idx.block.data;
      const i64 seen = call.ids_are_int64 ? static_cast<const i64*>(ids)[at] : static_cast<const i32*>(ids)[at];
      CHECK_EQ(seen, is_here ? id % shape_.num_local : -1);
      CHECK_EQ(weights[at], is_here ? call.weight(pick.source, pick.token, k) : 0.0f);
    }
  }

  void check_rows(const Call& call, const Model& model, const DispatchResult& result, Dtype dtype, u64 turn) {
    const Received& expected = model.received(rank());
    const i64 element = dtype_bytes(dtype);
    i64 num_elements = 1;
    for (i64 size : result.x.shape) num_elements *= size;
    if (!check_equal(num_elements, static_cast<i64>(expected.rows.size()) * call.hidden, __FILE__, __LINE__, "x"))
      return;
    for (size_t row = 0; row < expected.rows.size(); ++row) {
      const Pick& pick = expected.rows[row];
      const bool is_hole = pick.source < 0;
      // Rows past num_rows and tails of masked are undefined, holes between the groups are zero.
      if (is_hole && (call.layout != Layout::kExpertMajor || static_cast<i64>(row) >= expected.num_rows)) continue;
      const u8* data = result.x.block.data + static_cast<i64>(row) * call.hidden * element;
      for (i64 column = 0; column < call.hidden; ++column) {
        const float value = is_hole ? 0.0f : round_to(dtype, call.x(pick.source, pick.token, column, turn));
        if (load_number(dtype, data + column * element) == value) continue;
        wrong_word("dispatch", call, static_cast<i64>(row), column, load_number(dtype, data + column * element), value);
        return;
      }
    }
  }

  void combine(const Call& call, const Model& model, Tensors& t, const DispatchResult& result) {
    const Received& received = model.received(rank());
    const i64 element = dtype_bytes(call.dtype);
    const auto num_rows = static_cast<i64>(received.rows.size());
    const u64 num_bytes = static_cast<u64>(num_rows * call.hidden * element);
    std::vector<u8> ordinary;
    std::optional<Block> block;
    if (call.output_in_heap) block = window_->reserve(num_bytes, 0);
    if (!block) ordinary.resize(num_bytes);
    u8* y = block ? block->data : ordinary.data();
    std::fill_n(y, num_bytes, u8{0xff});  // NaN: what must not be read shows
    const bool by_rank = call.layout == Layout::kRankMajor;
    const i64 sides_a_row = by_rank ? shape_.top_k : 1;
    std::vector<float> side(static_cast<size_t>(num_rows * sides_a_row), -12345.0f);
    for (i64 row = 0; row < num_rows; ++row) {
      const Pick& pick = received.rows[static_cast<size_t>(row)];
      if (pick.source < 0) continue;
      for (i64 column = 0; column < call.hidden; ++column) {
        store_number(call.dtype, call.y(rank(), pick, column), y + (row * call.hidden + column) * element);
      }
      for (i64 idx = 0; idx < sides_a_row; ++idx) {
        const i64 k = by_rank ? idx : pick.k;
        side[static_cast<size_t>(row * sides_a_row + idx)] = call.side(rank(), {pick.source, pick.token, -1}, k);
      }
    }
    std::vector<u8> bias = make_bias(call, t.num_tokens);
    std::vector<u8> out(static_cast<size_t>(t.num_tokens * call.hidden * element), 0xee);
    std::vector<float> side_out(static_cast<size_t>(t.num_tokens * shape_.top_k), -1.0f);
    std::vector<float> owner_weights;
    for (i64 pick = 0; call.weighted_by_owner && pick < t.num_tokens * shape_.top_k; ++pick)
      owner_weights.push_back(call.owner_weight(rank(), pick / shape_.top_k, pick % shape_.top_k));
    CombineArgs args;
    args.order = call.order;
    args.owner_weights = address_of(call.weighted_by_owner ? owner_weights.data() : nullptr);
    args.y = address_of(y);
    args.num_rows = num_rows;
    args.weights = address_of(call.weighted && !by_rank ? reinterpret_cast<const float*>(result.topk_weights.block.data)
                                                        : nullptr);
    args.has_side = call.has_side;
    args.side = address_of(call.has_side ? side.data() : nullptr);
    args.bias = address_of(call.has_bias ? bias.data() : nullptr);
    args.bias_is_2d = call.bias_is_2d;
    args.bias_is_fp32 = call.bias_is_fp32;
    args.out = address_of(out.data());
    args.side_out = address_of(call.has_side ? side_out.data() : nullptr);
    args.num_tokens = t.num_tokens;
    args.send_plan = address_of(t.send_plan.data());
    args.recv_plan = address_of(t.recv_plan.data());
    args.recv_plan_len = static_cast<i64>(t.recv_plan.size());
    args.dtype = call.dtype;
    args.layout = call.layout;
    args.capacity = call.capacity;
    args.hidden = call.hidden;
    args.alignment = call.alignment;
    args.max_tokens = shape_.max_tokens;
    args.timeout_ns = timeout_ns_;
    args.sum_domain = shape_.node_ranks;
    window_->combine(args, {});
    check_combine(call, model, t.num_tokens, out, side_out);
  }

  std::vector<u8> make_bias(const Call& call, i64 num_tokens) const {
    const Dtype dtype = call.bias_is_fp32 ? Dtype::kFp32 : call.dtype;
    const i64 num_rows = call.bias_is_2d ? num_tokens : 1;
    std::vector<u8> bias(static_cast<size_t>(num_rows * call.hidden * dtype_bytes(dtype)));
    for (i64 at = 0; at < num_rows * call.hidden; ++at) {
      store_number(dtype, call.bias(rank(), at / call.hidden, at % call.hidden),
                   &bias[static_cast<size_t>(at * dtype_bytes(dtype))]);
    }
    return bias;
  }

  void check_combine(const Call& call, const Model& model, i64 num_tokens, const std::vector<u8>& out,
                     const std::vector<float>& side_out) {
    const i64 element = dtype_bytes(call.dtype);
    for (i64 token = 0; token < num_tokens; ++token) {
      const std::vector<float> expected = model.combined(rank(), token);
      for (i64 column = 0; column < call.hidden; ++column) {
        const float seen = load_number(call.dtype, &out[static_cast<size_t>((token * call.hidden + column) * element)]);
        const float wanted = expected[static_cast<size_t>(column)];
        if (seen == wanted) continue;
        return wrong_word("combine", call, token, column, seen, wanted);
      }
      for (i64 k = 0; k < shape_.top_k && call.has_side; ++k) {
        CHECK_EQ(side_out[static_cast<size_t>(token * shape_.top_k + k)], model.combined_side(rank(), token, k));
      }
    }
  }

  void wrong_word(const char* what, const Call& call, i64 row, i64 column, float seen, float expected) const {
    report_failure(what, rank(),
                   "wrong word: row " + std::to_string(row) + ", column " + std::to_string(column) + ", got " +
                       std::to_string(seen) + ", expected " + std::to_string(expected) + " (layout " +
                       to_text(call.layout) + ", dtype " + to_text(call.dtype) + ", hidden " +
                       std::to_string(call.hidden) + ", alignment " + std::to_string(call.alignment) + ", capacity " +
                       std::to_string(call.capacity) + ", call " + std::to_string(call.id) + ")");
  }

  const JobShape shape_;
  u64 timeout_ns_ = 60'000'000'000;
  std::shared_ptr<Communicator> comm_;
  std::unique_ptr<cpu::Window> window_;
};

}  // namespace weft::test
