// What a test asks of the engine, and what must come out: a call of which every rank can compute every value, and a model
// of dispatch and combine that goes over lists of picks and shares nothing with the engine but the number formats.
#pragma once

#include <algorithm>
#include <cstring>
#include <unordered_set>
#include <vector>

#include "weft/config/operation.h"
#include "weft/config/order.h"
#include "weft/ptx/convert.h"

namespace weft::test {

struct JobShape {
  int num_ranks = 4;
  i64 num_local = 3;
  i64 top_k = 4;
  i64 max_tokens = 60;
  i64 max_row_bytes = 2048;
  u64 seed = 1;
  int node_ranks = 0;  // ranks of a node; 0: all are one

  i64 num_experts() const { return num_ranks * num_local; }
};

inline u64 mix(u64 x) {  // the finalizer of splitmix64 (Steele, Lea, Flood 2014)
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

template <class... Rest>
u64 mix(u64 first, u64 second, Rest... rest) {
  return mix(mix(first) + second, static_cast<u64>(rest)...);
}

inline void store_number(Dtype dtype, float value, void* place) {
  const u16 half = dtype == Dtype::kBf16 ? ptx::float_to_bf16(value) : ptx::float_to_fp16(value);
  std::memcpy(place, dtype == Dtype::kFp32 ? static_cast<const void*>(&value) : &half, dtype == Dtype::kFp32 ? 4 : 2);
}

inline float load_number(Dtype dtype, const void* place) {
  if (dtype == Dtype::kFp32) {
    float value;
    std::memcpy(&value, place, 4);
    return value;
  }
  u16 half;
  std::memcpy(&half, place, 2);
  return dtype == Dtype::kBf16 ? ptx::bf16_to_float(half) : ptx::fp16_to_float(half);
}

inline float round_to(Dtype dtype, float value) {
  u8 place[4];
  store_number(dtype, value, place);
  return load_number(dtype, place);
}

// A pick, or a whole (token, destination) pair if k is -1, or nothing if source is -1.
struct Pick {
  int source = -1;
  i64 token = 0;
  i64 k = -1;
};

// One dispatch and one combine, the same on all ranks.
struct Call {
  u64 id = 0;
  Layout layout = Layout::kRankMajor;
  Dtype dtype = Dtype::kBf16;
  i64 hidden = 8;
  i64 alignment = 1;
  i64 capacity = kNoCapacity;
  bool weighted = false, has_side = false, has_bias = false, bias_is_2d = false, bias_is_fp32 = false;
  bool output_in_heap = false, again = false, ids_are_int64 = false;
  u64 routing = 0;  // how ids are drawn
  SumOrder order = SumOrder::kRank;
  bool weighted_by_owner = false;

  static Call make(const JobShape& shape, u64 id) {
    const auto draw = [&](u64 salt, u64 range) { return mix(shape.seed, id, salt) % range; };
    Call call;
    call.id = mix(shape.seed, id);
    call.layout = static_cast<Layout>(draw(1, 3));
    call.dtype = static_cast<Dtype>(1 + draw(2, 3));
    const i64 most = shape.max_row_bytes / 4 / 8;
    call.hidden = 8 * (1 + static_cast<i64>(draw(3, static_cast<u64>(most))));
    const i64 alignments[] = {1, 1, 8, 16, 5};
    call.alignment = call.layout == Layout::kExpertMajor ? alignments[draw(4, 5)] : 1;
    const auto limit = static_cast<u64>(shape.max_tokens * 2);
    if (call.layout == Layout::kMasked || draw(5, 3) == 0) call.capacity = static_cast<i64>(draw(6, limit));
    call.weighted = draw(7, 2) != 0;
    call.has_side = draw(8, 3) == 0;
    call.has_bias = draw(9, 3) == 0;
    call.bias_is_2d = draw(10, 2) != 0;
    call.bias_is_fp32 = draw(11, 2) != 0;
    call.output_in_heap = draw(12, 2) != 0;
    call.again = draw(13, 3) == 0;
    call.ids_are_int64 = draw(14, 2) != 0;
    call.routing = draw(15, 6);
    call.order = static_cast<SumOrder>(draw(16, call.layout == Layout::kRankMajor ? 2 : 3));
    if (shape.node_ranks > 0 && call.order == SumOrder::kPick) call.order = SumOrder::kLastPick;
    call.weighted_by_owner = call.order == SumOrder::kPick && draw(17, 2) != 0;
    return call;
  }

  i64 num_tokens(const JobShape& shape, int rank) const {
    const u64 value = mix(id, 100, rank);
    return value % 5 == 0 ? 0 : static_cast<i64>((value >> 8) % static_cast<u64>(shape.max_tokens + 1));
  }
  // As the caller gives it: -1 means none, some are out of range.
  i64 expert(const JobShape& shape, int rank, i64 token, i64 k) const {
    const u64 value = mix(id, 200, rank, token, k);
    const auto num_experts = static_cast<u64>(shape.num_experts());
    if (routing == 0) return static_cast<i64>(id % num_experts);                                 // all to one expert
    if (routing == 1) return static_cast<i64>(value % static_cast<u64>(shape.num_local));        // all to rank 0
    if (routing == 2 && value % 16 == 0) return value % 32 == 0 ? -7 : shape.num_experts() + 3;  // bad ids
    if (value % 8 == 1) return -1;
    return static_cast<i64>((value >> 8) % num_experts);
  }
  float weight(int rank, i64 token, i64 k) const { return number(mix(id, 300, rank, token, k)); }
  float owner_weight(int rank, i64 token, i64 k) const {  // one in four is 0: the pick is absent
    const u64 value = mix(id, 800, rank, token, k);
    return value % 4 == 0 ? 0.0f : number(value >> 8);
  }
  float x(int rank, i64 token, i64 column, u64 turn) const {
    return number(mix(id, 400 + turn, rank, token * 100000 + column));
  }
  float y(int rank, const Pick& pick, i64 column) const {  // what the experts of `rank` make of a row
    return number(mix(id, 500, rank, pick.source, pick.token * 1000 + pick.k, column));
  }
  float side(int rank, const Pick& pick, i64 k) const { return number(mix(id, 600, rank, pick.source, pick.token, k)); }
  float bias(int rank, i64 token, i64 column) const {
    return number(mix(id, 700, rank, bias_is_2d ? token : 0, column));
  }

 private:
  static float number(u64 value) { return static_cast<float>(static_cast<int>(value % 8192) - 4096) / 512.0f; }
};

// What one rank must receive.
struct Received {
  std::vector<Pick> rows;    // of the result; masked: expert * capacity + row. Holes have source -1
  std::vector<i64> offsets;  // as given to the caller
  std::vector<i64> counts;   // kept picks by local expert
  i64 num_rows = 0;          // that hold data, holes between groups included
  i64 num_dropped = 0;       // picks
};

class Model {
 public:
  Model(const JobShape& shape, const Call& call, const std::vector<int>& active)
      : shape_(shape), call_(call), active_(active) {
    for (int rank = 0; rank < shape.num_ranks; ++rank)
      received_.push_back(is_active(rank) ? receive(rank) : Received{});
  }

  const Received& received(int rank) const { return received_[static_cast<size_t>(rank)]; }

  // The global expert of a pick, -1 if there is none, it is out of range, or its rank is gone.
  i64 expert(int rank, i64 token, i64 k) const {
    const i64 id = call_.expert(shape_, rank, token, k);
    return id >= 0 && id < shape_.num_experts() && is_active(rank_of(id)) ? id : -1;
  }
  int rank_of(i64 id) const { return static_cast<int>(id / shape_.num_local); }
  bool is_kept(int rank, i64 token, i64 k) const { return kept_.count(key({rank, token, k})) != 0; }
  bool is_active(int rank) const { return std::find(active_.begin(), active_.end(), rank) != active_.end(); }

  // What combine gives the owner for a token: [hidden].
  std::vector<float> combined(int owner, i64 token) const {
    std::vector<Pick> kept;  // source: the rank of the expert
    for (i64 k = 0; k < shape_.top_k; ++k) {
      const i64 id = expert(owner, token, k);
      if (id >= 0 && is_kept(owner, token, k)) kept.push_back({rank_of(id), token, k});
    }
    std::vector<float> result;
    for (i64 column = 0; column < call_.hidden; ++column) {
      float sum = 0.0f, bias = 0.0f;
      if (call_.has_bias) {
        bias = call_.bias(owner, token, column);
        bias = call_.bias_is_fp32 ? bias : round_to(call_.dtype, bias);
      }
      if (call_.order != SumOrder::kRank) sum = sum + bias;
      if (call_.order == SumOrder::kPick) {
        for (const Pick& pick : kept) sum = add_pick(sum, owner, pick, column);
      } else {
        sum = add_parts(sum, owner, kept, column);
      }
      if (call_.order == SumOrder::kRank) sum = sum + bias;
      result.push_back(round_to(call_.dtype, sum));
    }
    return result;
  }

  float combined_side(int owner, i64 token, i64 k) const {
    const i64 id = expert(owner, token, k);
    if (id < 0 || !is_kept(owner, token, k)) return 0.0f;
    return call_.side(rank_of(id), {owner, token, -1}, k);
  }

 private:
  // Ranks in the order of their contributions.
  std::vector<int> contributors(const std::vector<Pick>& kept) const {
    if (call_.order == SumOrder::kRank) return active_;
    std::vector<int> ranks;
    for (size_t at = 0; at < kept.size(); ++at) {
      const auto comes_later = [&](const Pick& pick) { return pick.source == kept[at].source; };
      if (std::none_of(kept.begin() + static_cast<i64>(at) + 1, kept.end(), comes_later))
        ranks.push_back(kept[at].source);
    }
    return ranks;
  }

  // Of all ranks; with nodes those of a node first, rounded.
  float add_parts(float sum, int owner, const std::vector<Pick>& kept, i64 column) const {
    const std::vector<int> ranks = contributors(kept);
    const int size = shape_.node_ranks == 0 ? shape_.num_ranks : shape_.node_ranks;
    for (int first = 0; first < shape_.num_ranks; first += size) {
      float part = shape_.node_ranks == 0 ? sum : 0.0f;
      for (int rank : ranks) {
        if (rank >= first && rank < first + size) part = add_part(part, owner, rank, kept, column);
      }
      sum = shape_.node_ranks == 0 ? part : sum + round_to(call_.dtype, part);
    }
    return sum;
  }

  float add_pick(float sum, int owner, const Pick& pick, i64 column) const {
    const float value = round_to(call_.dtype, call_.y(pick.source, {owner, pick.token, pick.k}, column));
    if (call_.weighted_by_owner) {
      const float weight = call_.owner_weight(owner, pick.token, pick.k);
      return weight == 0.0f ? sum : sum + weight * value;
    }
    return sum + (call_.weighted ? call_.weight(owner, pick.token, pick.k) * value : value);
  }

  // sum, plus what `rank` contributes to the token if any of its picks was kept there.
  float add_part(float sum, int owner, int rank, const std::vector<Pick>& kept, i64 column) const {
    float part = 0.0f;
    bool has_part = false;
    for (const Pick& pick : kept) {
      if (pick.source != rank) continue;
      has_part = true;
      if (call_.layout == Layout::kRankMajor) {
        part = call_.y(rank, {owner, pick.token, -1}, column);
      } else {
        const float value = round_to(call_.dtype, call_.y(rank, {owner, pick.token, pick.k}, column));
        part = part + (call_.weighted ? call_.weight(owner, pick.token, pick.k) * value : value);
      }
    }
    return has_part ? sum + round_to(call_.dtype, part) : sum;
  }

  static u64 key(const Pick& pick) {
    return static_cast<u64>(pick.source) << 40 | static_cast<u64>(pick.token) << 16 | static_cast<u64>(pick.k);
  }

  Received receive(int rank) {
    Received result;
    result.counts.assign(static_cast<size_t>(shape_.num_local), 0);
    if (call_.layout == Layout::kRankMajor) {
      by_rank(rank, result);
    } else {
      by_expert(rank, result);
    }
    return result;
  }

  void by_rank(int rank, Received& result) {
    const i64 limit = call_.capacity >= 0 ? call_.capacity : i64{1} << 40;
    i64 row = 0;
    for (int source = 0; source < shape_.num_ranks; ++source) {
      result.offsets.push_back(std::min(row, limit));
      if (!is_active(source)) continue;
      for (i64 token = 0; token < call_.num_tokens(shape_, source); ++token) {
        bool comes = false;
        for (i64 k = 0; k < shape_.top_k; ++k) {
          const i64 id = expert(source, token, k);
          if (id < 0 || rank_of(id) != rank) continue;
          comes = true;
          count(result, {source, token, k}, id, row < limit);
        }
        if (comes && row++ < limit) result.rows.push_back({source, token, -1});
      }
    }
    result.offsets.push_back(std::min(row, limit));
    result.num_rows = std::min(row, limit);
    if (call_.capacity >= 0) result.rows.resize(static_cast<size_t>(call_.capacity));
  }

  void by_expert(int rank, Received& result) {
    const bool is_masked = call_.layout == Layout::kMasked;
    const i64 limit = call_.capacity >= 0 ? call_.capacity : i64{1} << 40;
    for (i64 local = 0; local < shape_.num_local; ++local) {
      const i64 first = static_cast<i64>(result.rows.size());
      result.offsets.push_back(is_masked ? local * limit : std::min(first, limit));
      for (int source = 0; source < shape_.num_ranks; ++source) {
        if (!is_active(source)) continue;
        for (i64 token = 0; token < call_.num_tokens(shape_, source); ++token) {
          for (i64 k = 0; k < shape_.top_k; ++k) {
            const i64 id = expert(source, token, k);
            if (id != rank * shape_.num_local + local) continue;
            const i64 row = static_cast<i64>(result.rows.size()) - (is_masked ? first : 0);
            count(result, {source, token, k}, id, row < limit);
            if (!is_masked || row < limit) result.rows.push_back({source, token, k});
          }
        }
      }
      if (is_masked) result.rows.resize(static_cast<size_t>((local + 1) * limit));
      while (!is_masked && static_cast<i64>(result.rows.size()) % call_.alignment != 0) result.rows.emplace_back();
    }
    const i64 total = static_cast<i64>(result.rows.size());
    result.offsets.push_back(is_masked ? total : std::min(total, limit));
    result.num_rows = std::min(total, limit);
    if (is_masked) {
      result.num_rows = 0;
      for (i64 kept : result.counts) result.num_rows += kept;
    } else if (call_.capacity >= 0) {
      result.rows.resize(static_cast<size_t>(call_.capacity));
    }
  }

  void count(Received& result, const Pick& pick, i64 id, bool is_kept) {
    if (!is_kept) {
      ++result.num_dropped;
      return;
    }
    ++result.counts[static_cast<size_t>(id % shape_.num_local)];
    kept_.insert(key(pick));
  }

  const JobShape& shape_;
  const Call& call_;
  std::vector<int> active_;
  std::vector<Received> received_;
  std::unordered_set<u64> kept_;
};

}  // namespace weft::test
