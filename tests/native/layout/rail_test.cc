// Guards against ranks that don't agree on who forwards for whom, and slots, words and messages that lie on each other.
#include "weft/layout/rail.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "check.h"

using namespace weft;

namespace {

TEST(even_nodes_forward_for_their_own_index) {
  const RailMap map{12, 4};
  CHECK_EQ(map.num_nodes(), 3);
  for (i32 rank = 0; rank < 12; ++rank) {
    for (i32 node = 0; node < 3; ++node) CHECK_EQ(map.forwarder(rank, node), 4 * node + rank % 4);
  }
}

TEST(uneven_nodes_share_their_forwarders) {
  const RailMap map{6, 4};
  CHECK_EQ(map.num_nodes(), 2);
  CHECK_EQ(map.size(1), 2);
  const i32 for_first[] = {4, 5, 4, 5};
  for (i32 rank = 0; rank < 4; ++rank) CHECK_EQ(map.forwarder(rank, 1), for_first[rank]);
  CHECK_EQ(map.forwarder(4, 0), 0);
  CHECK_EQ(map.forwarder(5, 0), 1);
  CHECK_EQ(map.forwarder(5, 1), 5);
}

TEST(the_next_living_rank_stands_in) {
  RailMap map{8, 4};
  map.active = 0b10010110;  // ranks 1, 2, 4, 7
  CHECK_EQ(map.rail(0, 0), 1);
  CHECK_EQ(map.rail(0, 3), 1);
  CHECK_EQ(map.rail(1, 1), 7);
  CHECK_EQ(map.rail(1, 0), 4);
  map.active = 0b00000110;
  CHECK_EQ(map.rail(1, 0), -1);
  CHECK_EQ(map.forwarder(1, 0), 1);
}

TEST(one_node_has_no_rails) {
  for (const i32 node_ranks : {0, 4, 5}) {
    const RailMap map{4, node_ranks};
    CHECK(!map.has_rails());
    CHECK_EQ(map.num_nodes(), 1);
    CHECK(map.are_mates(0, 3));
  }
}

// [begin, end) of everything in a rank's rail memory.
std::vector<std::pair<u64, u64>> all_parts(const RailLayout& layout, i32 num_lanes) {
  std::vector<std::pair<u64, u64>> parts;
  const auto add = [&](u64 begin, u64 num_bytes) { parts.emplace_back(begin, begin + num_bytes); };
  for (i32 lane = 0; lane < num_lanes; ++lane) {
    for (i32 block = 0; block <= layout.num_blocks; ++block) {
      const bool is_message = block == layout.num_blocks;
      add(layout.num_put(lane, block), 8);
      add(layout.num_taken(lane, block), 8);
      add(layout.credits(lane, block), 8);
      for (i32 n = 0; n < (is_message ? RailLayout::kNumMessages : layout.num_slots); ++n) {
        const u64 at = static_cast<u64>(n);
        add(is_message ? layout.message_signal(lane, at) : layout.signal(lane, block, at), 8);
        add(is_message ? layout.message_out(lane, at) : layout.send_slot(lane, at, block),
            is_message ? layout.message_bytes : layout.slot_bytes);
        add(is_message ? layout.message_in(lane, at) : layout.receive_slot(lane, at, block),
            is_message ? layout.message_bytes : layout.slot_bytes);
      }
    }
  }
  return parts;
}

TEST(nothing_lies_on_anything_else) {
  for (const i32 num_blocks : {1, 3}) {
    for (const i64 row_bytes : {i64{16}, i64{14336}, i64{1} << 20}) {
      const RailShape shape{5, num_blocks, 4, 8, 6, 100, row_bytes};
      const RailLayout layout = RailLayout::make(shape);
      CHECK(layout.ok);
      std::vector<std::pair<u64, u64>> parts = all_parts(layout, shape.num_lanes);
      std::sort(parts.begin(), parts.end());
      for (size_t idx = 1; idx < parts.size(); ++idx) CHECK(parts[idx - 1].second <= parts[idx].first);
      CHECK(parts.back().second <= layout.total_bytes);
      CHECK(layout.slot_bytes >=
            static_cast<u64>(layout.chunk_rows) * RecordLayout::make(static_cast<u64>(row_bytes), 16, 24).bytes - 16);
      CHECK_EQ(layout.send_slot(2, 5), layout.send_slot(2, 5 + static_cast<u64>(layout.num_slots)));
    }
  }
}

TEST(rings_keep_to_their_memory) {
  const auto ring_bytes = [](const RailShape& shape, const RailLayout& layout) {
    return static_cast<u64>(shape.num_lanes) * static_cast<u64>(shape.num_blocks) * layout.slot_bytes *
           static_cast<u64>(layout.num_slots);
  };
  RailShape shape{1, 8, 8, 32, 8, 4096, 14336};  // EP16 of the design
  CHECK_EQ(RailLayout::make(shape).num_slots, 4);
  CHECK_EQ(RailLayout::make(shape).chunk_rows, 16);
  shape.num_lanes = 63;  // EP512
  const RailLayout layout = RailLayout::make(shape);
  CHECK_EQ(layout.chunk_rows, 4);
  CHECK_EQ(layout.num_slots, 2);
  CHECK(ring_bytes(shape, layout) <= RailLayout::kMostRingBytes);
}

TEST(a_message_has_room_for_every_token) {
  const RailShape shape{1, 1, 4, 8, 6, 1000, 16};
  const RailLayout layout = RailLayout::make(shape);
  CHECK(layout.counts(0) >= sizeof(RailMessage));
  CHECK(layout.tokens() >= layout.counts(3) + 9 * 4);
  CHECK(layout.experts(1000) >= layout.tokens() + 125);
  CHECK(layout.message_bytes >= layout.experts(1000) + 1000 * 6 * 2);
}

TEST(more_experts_than_a_message_can_name_are_refused) {
  CHECK(RailLayout::make({1, 1, 8, 8191, 6, 10, 16}).ok);
  CHECK(!RailLayout::make({1, 1, 8, 8192, 6, 10, 16}).ok);
  CHECK(!RailLayout::make({1, 1, 1, 8, 6, i64{1} << 60, i64{1} << 62}).ok);
}

}  // namespace

int main(int argc, char** argv) { return weft::test::run_tests(argc, argv); }
