// Dispatch, second part: which tokens a block sends, and their rows on the way into its stages; one lane loads. What stores them
// from there is inherited, in a file for each way of placing rows: as an object beside this one it gets other machine code
// (docs/protocols/nvlink-dispatch.md, step 4).
#pragma once

#include "weft/kernels/dispatch/store_by_expert.cuh"
#include "weft/kernels/dispatch/store_by_rank.cuh"

namespace weft::kernels {

template <DispatchKernelConfig kConfig>
class DispatchSend : public DispatchStore<kConfig> {
 public:
  using Base = DispatchState<kConfig>;
  using Stages = DispatchStages<kConfig>;
  using Store = DispatchStore<kConfig>;
  using Base::a, Base::s;
  using Base::kPeriods, Base::kScaleBytes;
  using Stages::kByExpert, Stages::kQuantized, Stages::kAlignedScales, Stages::kStagedScales;

  __device__ explicit DispatchSend(const Base& base) : Store(base) {}

  // Item after item, as stages become free. The first need nothing but x: they go before the counts. Item n is for store warp
  // n % kStoreWarps and, when quantised, for warp n % num_quantize_warps; all get an end mark.
  __device__ void load_rows(bool is_early) {
    while (min(num_even_ends_, num_odd_ends_) < kEnds) {
      if (is_early && n_ == (kByExpert ? num_first(block()) : kConfig.num_stages)) return;
      const i32 token = take_token();
      if ((kConfig.has_nodes() ? token == kEndOfItems : token < 0) && count_end() > kEnds) {
        if (n_ < kConfig.num_stages) s.token[n_] = -1;
        ++n_;  // nobody listens any more
        continue;
      }
      const i32 idx = n_ % kConfig.num_stages;
      if (n_ >= kConfig.num_stages && !this->wait_local(&s.empty[idx], (n_ / kConfig.num_stages - 1) & 1)) return;
      s.token[idx] = token;
      if (kConfig.has_nodes() ? token == kEndOfItems : token < 0) {
        ptx::mbarrier_arrive(&s.full[idx]);
      } else if constexpr (kConfig.has_nodes()) {
        load_item(token, idx);
      } else {
        load_row(token, idx);
      }
      num_early_ = is_early ? n_ + 1 : num_early_;
      ++n_;
    }
  }
  static_assert(kStoreWarps == 2);

  // Loads in flight write into this block's memory: it must not end before them.
  __device__ void drain() {
    for (i32 idx = 0; idx < num_early_; ++idx) {
      if (s.token[idx] >= 0) sync::wait_barrier(&s.full[idx], 0);
    }
  }

 private:
  static constexpr i32 kEnds = kQuantized ? kConfig.num_quantize_warps / kStoreWarps : 1;  // marks for each store warp

  // First each block has its share of what the stages of all hold; then tokens are dealt out a few at a time, to the block that
  // comes for them: who gets more of the wire does more of the work. By expert a block comes for its own first.
  static constexpr i32 kChunkTokens = 4;

  __device__ static i32 block() { return static_cast<i32>(blockIdx.x); }

  __device__ i32 num_first() const {
    return min((a.num_tokens + kConfig.num_blocks - 1) / kConfig.num_blocks, kConfig.num_stages);
  }
  // By expert: of a block's queue.
  __device__ i32 num_first(i32 of) const { return min(this->queue_len(of, a.num_tokens), kConfig.num_stages); }

  // The first token of a chunk that nobody has yet.
  __device__ i32 take_chunk() const {
    const i32 chunk = static_cast<i32>(ptx::atom_inc_gpu(&a.view.words()->next_chunk));
    return num_first() * kConfig.num_blocks + chunk * kChunkTokens;
  }

  // The token of item n_, -1: there is none any more.
  __device__ i32 take_token() {
    if constexpr (kConfig.has_nodes()) {
      if (n_ == 0) token_ = this->queue_begin(block(), a.num_tokens);
      return DispatchNodes<kConfig>(*this).take_item(token_, source_);
    } else if constexpr (kByExpert) {
      if (n_ == 0) {
        token_ = 0;
        end_ = num_first(block());
      }
      if (token_ == end_ && owner_ >= 0) {
        if (next_owner_ < 0) take_items();
        owner_ = next_owner_;
        token_ = next_;
        end_ = owner_ >= 0 ? min(token_ + kChunkTokens, this->queue_len(owner_, a.num_tokens)) : 0;
        if (owner_ >= 0) take_items();  // known when they are needed
      }
      return owner_ >= 0 ? this->queue_begin(owner_, a.num_tokens) + token_++ : -1;
    } else {
      if (n_ == 0) {
        token_ = static_cast<i32>(blockIdx.x) * num_first();
        end_ = token_ + num_first();
        next_ = -1;
      }
      if (token_ == end_ && token_ < a.num_tokens) {
        token_ = next_ >= 0 ? next_ : take_chunk();
        end_ = token_ + kChunkTokens;
        next_ = take_chunk();  // known when it is needed
      }
      return token_ < a.num_tokens ? token_++ : -1;
    }
  }

  // By expert: the next items of the queue at hand, or when it is empty of the one with most left; next_owner_ -1: all are empty.
  __device__ void take_items() {
    next_owner_ = -1;
    while (queue_ >= 0) {
      const i32 first = num_first(queue_), end = this->queue_len(queue_, a.num_tokens);
      if (first < end) {
        const u32 num_taken = static_cast<u32>(ptx::atom_add_gpu(this->queue_word(queue_), 1));
        next_ = first + static_cast<i32>(num_taken) * kChunkTokens;
        if (next_ < end) {
          next_owner_ = queue_;
          return;
        }
      }
      queue_ = longest_queue();
    }
  }

  // Of those whose chunks are all planned: no block waits for another. -1: none has anything left.
  __device__ i32 longest_queue() const {
    i32 longest = -1, most = 0;
#pragma unroll 4
    for (i32 other = 0; other < kConfig.num_blocks; ++other) {
      const u64 word = ptx::ld_relaxed_sys(this->queue_word(other));
      const i32 num_taken = static_cast<i32>(word & 0xffffffffu) * kChunkTokens;
      const i32 num_left = this->queue_len(other, a.num_tokens) - num_first(other) - num_taken;
      if (num_left > most && (kConfig.is_cached || word / Base::kOnePlanned == kPeriods)) {
        longest = other;
        most = num_left;
      }
    }
    if (longest >= 0) static_cast<void>(ptx::ld_acquire_sys(this->queue_word(longest)));  // its plan can be read
    return longest;
  }

  // How many marks item n_'s warps have then. Two members, since an array indexed at run time would lie in local memory.
  __device__ i32 count_end() { return n_ % kStoreWarps == 0 ? ++num_even_ends_ : ++num_odd_ends_; }

  // With nodes.
  __device__ void load_item(i32 token, i32 idx) {
    DispatchNodes<kConfig> nodes(*this);
    if (token == kArrivedRow) {
      nodes.load_arrived(source_, idx, this->stage(idx));
    } else {
      nodes.deal_records(token, idx);
      load_row(token, idx);
    }
  }

  __device__ void load_row(i64 token, i32 idx) {
    constexpr i32 kScalesHere = kQuantized || !kAlignedScales || !kStagedScales ? 0 : kScaleBytes;
    ptx::mbarrier_arrive_expect(&s.full[idx], kConfig.row_bytes + kScalesHere);
    ptx::bulk_load(this->stage(idx), a.x + token * kConfig.row_bytes, kConfig.row_bytes, &s.full[idx]);
    if constexpr (kScalesHere > 0) {
      ptx::bulk_load(this->stage(idx) + kConfig.scales_at(), a.scales + token * kScaleBytes, kScaleBytes, &s.full[idx]);
    }
  }

  i32 n_ = 0;       // next item
  i32 source_ = 0;  // with nodes: of an arrived row
  i32 num_early_ = 0;
  i32 num_even_ends_ = 0, num_odd_ends_ = 0;
  i32 token_ = 0, end_ = 0, next_ = -1;  // of the chunk at hand, and the chunk after it; by expert: items of a queue
  i32 owner_ = static_cast<i32>(blockIdx.x), next_owner_ = -1;  // by expert: whose they are; -1: there are no more
  i32 queue_ = static_cast<i32>(blockIdx.x);                    // by expert: that items are taken from
};

}  // namespace weft::kernels
