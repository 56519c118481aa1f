// Guards against wrong words: random dispatches and combines through the real engine, every word compared with the model.
#include <thread>

#include "bootstrap/ranks.h"
#include "engine/engine_rank.h"

using namespace weft;
using namespace weft::test;

namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr u64 kNumCalls = 40;
#else
constexpr u64 kNumCalls = 100;
#endif

constexpr u64 kHeapBytes = 32u << 20;

using HeapOf = u64 (*)(int rank);
u64 room_everywhere(int) { return kHeapBytes; }
u64 room_nowhere(int) { return 0; }
u64 no_room_on_rank_1(int rank) { return rank == 1 ? 0 : kHeapBytes; }
u64 little_room(int rank) { return 20000u << rank; }

void run_processes(const JobShape& shape, HeapOf heap_of) {
  ForkedRanks ranks(shape.num_ranks, [&](Rank& self) {
    self.connect();
    EngineRank rank(std::move(self.plane), shape, heap_of(self.rank));
    rank.run_many(0, kNumCalls);
    rank.barrier();
    CHECK_EQ(rank.window().heap_used(), 0u);  // nothing that was given out is still held
    rank.close();
  });
  ranks.join_all();
}

void run_threads(const JobShape& shape, HeapOf heap_of) {
  auto hub = std::make_shared<LocalHub>(shape.num_ranks);
  std::vector<std::thread> threads;
  for (int me = 0; me < shape.num_ranks; ++me) {
    threads.emplace_back([&, me] {
      try {
        EngineRank rank(connect_threads(hub, me), shape, heap_of(me));
        rank.run_many(0, kNumCalls);
        rank.barrier();
        rank.close();
      } catch (const std::exception& error) {
        report_failure("thread rank", me, std::string("unexpected exception: ") + error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

JobShape shape_of(int num_ranks, i64 num_local, i64 top_k, u64 seed, int node_ranks = 0) {
  JobShape shape;
  shape.node_ranks = node_ranks;
  shape.num_ranks = num_ranks;
  shape.num_local = num_local;
  shape.top_k = top_k;
  shape.seed = seed;
  return shape;
}

#if !defined(__SANITIZE_THREAD__)
TEST(four_processes) { run_processes(shape_of(4, 3, 4, 1), room_everywhere); }
TEST(one_process) { run_processes(shape_of(1, 5, 3, 2), room_everywhere); }
TEST(two_processes_top_1) { run_processes(shape_of(2, 4, 1, 3), room_everywhere); }
TEST(eight_processes_top_9) { run_processes(shape_of(8, 2, 9, 4), room_everywhere); }
TEST(heap_exhausted_on_one_rank_only) { run_processes(shape_of(4, 3, 4, 5), no_room_on_rank_1); }
TEST(heap_exhausted_everywhere) { run_processes(shape_of(3, 3, 4, 6), room_nowhere); }
TEST(heap_exhausted_now_and_then) { run_processes(shape_of(4, 3, 4, 7), little_room); }
TEST(large_rows_through_small_rings) {
  JobShape shape = shape_of(3, 2, 2, 8);
  shape.max_row_bytes = 32768;  // eight to a ring
  shape.max_tokens = 30;
  run_processes(shape, no_room_on_rank_1);
}
TEST(nodes_of_four_and_two) { run_processes(shape_of(6, 2, 4, 11, 4), room_everywhere); }
TEST(nodes_of_two_where_little_fits) { run_processes(shape_of(6, 2, 5, 12, 2), little_room); }
TEST(nodes_without_heap) { run_processes(shape_of(5, 3, 4, 13, 3), room_nowhere); }
TEST(nodes_with_large_rows) {
  JobShape shape = shape_of(4, 2, 2, 14, 2);
  shape.max_row_bytes = 32768;
  run_processes(shape, no_room_on_rank_1);
}
#endif
TEST(nodes_of_threads) { run_threads(shape_of(5, 2, 4, 15, 2), room_everywhere); }
TEST(nodes_of_threads_one_without_heap) { run_threads(shape_of(4, 3, 4, 16, 3), no_room_on_rank_1); }
TEST(four_threads) { run_threads(shape_of(4, 3, 4, 9), room_everywhere); }
TEST(three_threads_one_without_heap) { run_threads(shape_of(3, 3, 4, 10), no_room_on_rank_1); }

}  // namespace

#if defined(WEFT_FAIL_POINTS)
namespace weft {
void fail_point(const char*) {}
}  // namespace weft
#endif

int main(int argc, char** argv) { return run_tests(argc, argv); }
