// Guards against two cells of a window that overlap, lie outside of it, or share a cache line with another writer (R1, R17).
#include "weft/layout/window.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "check.h"
#include "weft/layout/payload.h"

using namespace weft;

namespace {

struct Cell {
  u64 begin;
  u64 bytes;
};

constexpr Phase kPhases[] = {Phase::kCount, Phase::kNotify, Phase::kSend, Phase::kReduce};

std::vector<Cell> all_cells(const WindowLayout& layout) {
  std::vector<Cell> cells = {{0, sizeof(ControlWords)}};
  for (i32 source = 0; source < layout.num_ranks; ++source) {
    for (u64 parity = 0; parity < kNumParities; ++parity) {
      for (const Phase phase : kPhases) {
        for (i32 block = 0; block < layout.num_blocks; ++block) {
          cells.push_back({layout.header(phase, parity, source, block), kCacheLine});
        }
      }
      cells.push_back({layout.payload(Phase::kCount, parity, source), layout.payload_bytes});
      cells.push_back({layout.payload(Phase::kNotify, parity, source), layout.payload_bytes});
    }
    cells.push_back({layout.progress_word(Channel::kLanded, source), kCacheLine});
    cells.push_back({layout.progress_word(Channel::kConsumed, source), kCacheLine});
    cells.push_back({layout.ring(source), layout.ring_bytes});
  }
  return cells;
}

void check_layout(const WindowShape& shape) {
  const WindowLayout layout = WindowLayout::make(shape);
  CHECK(layout.ok);
  std::vector<Cell> cells = all_cells(layout);
  std::sort(cells.begin(), cells.end(), [](const Cell& a, const Cell& b) { return a.begin < b.begin; });
  for (std::size_t idx = 0; idx < cells.size(); ++idx) {
    CHECK_EQ(cells[idx].begin % kCacheLine, 0u);
    const u64 end = cells[idx].begin + cells[idx].bytes;
    CHECK(end <= (idx + 1 < cells.size() ? cells[idx + 1].begin : layout.total_bytes));
  }
  CHECK_EQ(layout.staging % 4096, 0u);
  CHECK_EQ(layout.ring_bytes % 4096, 0u);
  CHECK(layout.payload_bytes >= sizeof(CountPayload) + sizeof(i32) * static_cast<u64>(shape.num_local_experts()));
  CHECK(layout.payload_bytes >= sizeof(NotifyPayload) + sizeof(i32) * static_cast<u64>(shape.num_local_experts()));
  // A ring that holds no whole row would never let a sender go on.
  const u64 scale_bytes = static_cast<u64>(shape.max_row_bytes) / 33;
  const RecordLayout record = RecordLayout::make(static_cast<u64>(shape.max_row_bytes) - scale_bytes, scale_bytes,
                                                 static_cast<u64>(shape.top_k) * 8);
  CHECK(layout.ring_bytes >= 4 * record.bytes);
}

TEST(cells_are_disjoint_aligned_and_inside) {
  for (const i32 num_ranks : {1, 2, 3, 5, 8, 17, 64}) {
    for (const i32 num_local_experts : {1, 3, 16, 257}) {
      for (const i32 num_blocks : {1, 2, 9}) {
        for (const i64 max_row_bytes : {0, 16, 7168, 28672, 1 << 20}) {
          WindowShape shape;
          shape.num_ranks = num_ranks;
          shape.num_experts = num_ranks * num_local_experts;
          shape.top_k = 1 + (num_ranks * 7 + num_local_experts) % kMaxTopk;
          shape.num_blocks = num_blocks;
          shape.max_tokens = 300;
          shape.max_row_bytes = max_row_bytes;
          shape.staging_bytes = num_blocks == 2 ? (3u << 20) + 5 : 0;
          check_layout(shape);
        }
      }
    }
  }
}

TEST(parity_alternates_and_is_the_only_thing_taken_from_the_sequence) {
  WindowShape shape;
  shape.num_ranks = 4;
  shape.num_experts = 8;
  shape.top_k = 2;
  const WindowLayout layout = WindowLayout::make(shape);
  for (const u64 sequence : {0ull, 1ull, 6ull, 0xfffffffeull, 0xffffffffull, 0x100000000ull}) {
    CHECK(layout.header(Phase::kSend, sequence, 1) != layout.header(Phase::kSend, sequence + 1, 1));
    CHECK_EQ(layout.header(Phase::kSend, sequence, 1), layout.header(Phase::kSend, sequence + 2, 1));
    CHECK(layout.payload(Phase::kCount, sequence, 3) != layout.payload(Phase::kCount, sequence + 1, 3));
    CHECK_EQ(layout.payload(Phase::kCount, sequence, 3), layout.payload(Phase::kCount, sequence + 2, 3));
  }
}

TEST(places_do_not_move_with_the_shape_of_a_call) {
  // Control words and headers of a window with larger rows lie where those of one with smaller rows do.
  WindowShape small;
  small.num_ranks = 6;
  small.num_experts = 24;
  small.top_k = 4;
  small.max_row_bytes = 64;
  WindowShape large = small;
  large.max_row_bytes = 1 << 20;
  large.max_tokens = 4096;
  const WindowLayout a = WindowLayout::make(small);
  const WindowLayout b = WindowLayout::make(large);
  CHECK_EQ(a.headers, b.headers);
  CHECK_EQ(a.progress, b.progress);
  CHECK_EQ(a.payloads, b.payloads);
  CHECK_EQ(a.staging, b.staging);
}

TEST(senseless_shapes_are_refused) {
  WindowShape good;
  good.num_ranks = 4;
  good.num_experts = 8;
  good.top_k = 2;
  good.max_tokens = 128;
  good.max_row_bytes = 1024;
  CHECK(WindowLayout::make(good).ok);
  const auto refused = [&](auto&& change) {
    WindowShape shape = good;
    change(shape);
    return !WindowLayout::make(shape).ok;
  };
  CHECK(!WindowLayout::make(WindowShape{}).ok);
  CHECK(refused([](WindowShape& s) { s.num_ranks = 0; }));
  CHECK(refused([](WindowShape& s) { s.num_ranks = -4; }));
  CHECK(refused([](WindowShape& s) { s.num_ranks = kMaxRanks + 1, s.num_experts = kMaxRanks + 1; }));
  CHECK(refused([](WindowShape& s) { s.num_experts = 9; }));
  CHECK(refused([](WindowShape& s) { s.num_experts = 0; }));
  CHECK(refused([](WindowShape& s) { s.top_k = 0; }));
  CHECK(refused([](WindowShape& s) { s.top_k = kMaxTopk + 1; }));
  CHECK(refused([](WindowShape& s) { s.num_blocks = 0; }));
  CHECK(refused([](WindowShape& s) { s.max_tokens = -1; }));
  CHECK(refused([](WindowShape& s) { s.max_tokens = kMaxRowsPerPair + 1; }));
  CHECK(refused([](WindowShape& s) { s.max_row_bytes = -1; }));
  CHECK(!refused([](WindowShape& s) { s.max_tokens = kMaxRowsPerPair; }));
}

TEST(sizes_that_overflow_are_refused) {
  WindowShape shape;
  shape.num_ranks = 64;
  shape.num_experts = 64;
  shape.top_k = 8;
  shape.max_tokens = 1;
  for (const u64 staging : {0ull, 1ull << 20, 1ull << 40, (1ull << 63) - 1}) {
    shape.staging_bytes = staging;
    for (const i64 row : {i64{1} << 57, i64{1} << 60, (i64{1} << 61) + 7, (i64{1} << 62) + 3,
                          (i64{1} << 62) + (i64{1} << 61), 0x7fffffffffffffff}) {
      shape.max_row_bytes = row;
      const WindowLayout layout = WindowLayout::make(shape);
      CHECK(!layout.ok);
    }
  }
  shape.max_row_bytes = 1024;
  for (const u64 staging : {1ull << 58, 1ull << 63, ~0ull - 4094, ~0ull}) {
    shape.staging_bytes = staging;
    CHECK(!WindowLayout::make(shape).ok);
  }
  shape.num_ranks = 1;
  shape.staging_bytes = 1ull << 62;
  CHECK(WindowLayout::make(shape).ok);
}

TEST(parts_of_a_record_are_aligned_and_disjoint) {
  for (u64 data = 0; data <= 96; ++data) {
    for (const u64 scale : {0, 1, 4, 56, 224}) {
      for (const u64 meta : {8, 64, 1024}) {
        const RecordLayout record = RecordLayout::make(data, scale, meta);
        CHECK(record.scales >= data && record.meta >= record.scales + scale && record.bytes >= record.meta + meta);
        CHECK_EQ((record.scales | record.meta | record.bytes) % 16, 0u);
        CHECK(record.bytes <= data + scale + meta + 45);
      }
    }
  }
}

TEST(words_that_peers_write_share_no_line_with_own_words) {
  CHECK_EQ(offsetof(ControlWords, doorbell) % kCacheLine, 0u);
  CHECK_EQ(offsetof(ControlWords, error) % kCacheLine, 0u);
  CHECK_EQ(alignof(ControlWords), static_cast<std::size_t>(kCacheLine));
}

}  // namespace

int main(int argc, char** argv) { return weft::test::run_tests(argc, argv); }
