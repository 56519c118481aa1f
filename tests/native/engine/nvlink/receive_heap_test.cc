// Guards against heap memory that another stream gets too early, that is lost, or that is unmapped under a GPU at work.
#include "engine/nvlink/receive_heap.h"

#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/status.h"
#include "check.h"
#include "engine/nvlink/fake_cuda.h"

using namespace weft;
using namespace weft::nvlink;
using namespace weft::test;

namespace {

constexpr u64 kFirst = 4096;
constexpr u64 kBytes = 1 << 20;
constexpr u64 kOne = 101, kTwo = 102, kThree = 103;  // streams

std::shared_ptr<Gpu> make_gpu() {
  return std::make_shared<Gpu>(0, jit::CompilerPaths{WEFT_FAKE_CUDA, WEFT_INCLUDE, ""});
}

// Closed when it is let go, as windows do; blocks hold what is behind it.
std::shared_ptr<ReceiveHeap> make_heap(const std::shared_ptr<Gpu>& gpu) {
  auto heap = std::make_shared<ReceiveHeap>(gpu, DeviceMemory::create(gpu->device, kFirst + kBytes), kFirst, kBytes);
  return {heap.get(), [heap](ReceiveHeap*) { heap->close(); }};
}

bool has_waited(u64 stream, u64 for_stream) {
  for (const auto& [waiting, other] : fake_cuda::waits()) {
    if (waiting == stream && other == for_stream) return true;
  }
  return false;
}

}  // namespace

TEST(the_same_stream_does_not_wait_and_another_does) {
  const auto gpu = make_gpu();
  const auto heap = make_heap(gpu);
  fake_cuda::hold(kOne);
  auto block = heap->reserve(kBytes, kOne, false);
  CHECK(block.has_value());
  CHECK_EQ(block->offset, kFirst);
  CHECK(!heap->reserve(256, kOne, false).has_value());
  std::memset(block->data, 7, kBytes);  // it is real memory
  block.reset();
  CHECK_EQ(heap->used(), u64{0});
  fake_cuda::waits();
  block = heap->reserve(kBytes, kOne, false);
  CHECK(block.has_value());
  CHECK(fake_cuda::waits().empty());
  block.reset();
  block = heap->reserve(kBytes, kTwo, false);
  CHECK(has_waited(kTwo, kOne));
  block.reset();
  // What the second stream took over is behind it now: the third waits for that one alone.
  block = heap->reserve(kBytes, kThree, false);
  const auto waits = fake_cuda::waits();
  CHECK_EQ(waits.size(), size_t{1});
  CHECK(!waits.empty() && waits[0] == std::make_pair(kThree, kTwo));
  block.reset();
  fake_cuda::let_go(kOne);
}

TEST(what_was_let_go_is_behind_the_next_event_of_its_stream) {
  const auto gpu = make_gpu();
  const auto heap = make_heap(gpu);
  auto left = heap->reserve(kBytes / 2, kOne, false);
  auto right = heap->reserve(kBytes / 2, kTwo, false);
  fake_cuda::hold(kOne);
  left.reset();
  right.reset();
  const u64 marks[] = {fake_cuda::give_work(kOne), fake_cuda::give_work(kTwo)};
  const auto event = heap->record(kOne);
  const u64 later = fake_cuda::give_work(kOne);  // than the event
  left = heap->reserve(kBytes, kThree, false);
  CHECK(left.has_value());
  CHECK(fake_cuda::runs_after(kThree, kOne, marks[0]));
  CHECK(fake_cuda::runs_after(kThree, kTwo, marks[1]));
  CHECK(!fake_cuda::runs_after(kThree, kOne, later));
  fake_cuda::let_go(kOne);
}

TEST(only_the_places_taken_are_waited_for) {
  const auto gpu = make_gpu();
  const auto heap = make_heap(gpu);
  fake_cuda::hold(kOne);
  auto left = heap->reserve(kBytes / 2, kOne, false);
  auto right = heap->reserve(kBytes / 2, kTwo, false);
  left.reset();
  right.reset();
  fake_cuda::waits();
  const auto first = heap->reserve(kBytes / 4, kThree, false);  // the lowest of equal holes: the first stream's
  CHECK_EQ(first->offset, kFirst);
  CHECK(has_waited(kThree, kOne));
  const auto second = heap->reserve(kBytes / 4, kThree, false);
  CHECK(has_waited(kThree, kOne));  // the rest of that place is still the first stream's
  const auto third = heap->reserve(kBytes / 4, kTwo, false);
  CHECK(fake_cuda::waits().empty());
  fake_cuda::let_go(kOne);
}

TEST(a_recorded_stream_is_waited_for) {
  const auto gpu = make_gpu();
  const auto heap = make_heap(gpu);
  auto block = heap->reserve(kBytes, kOne, false);
  const auto other_heap = make_heap(gpu);  // in which nothing lies there
  CHECK(ReceiveHeap::record_stream(reinterpret_cast<u64>(block->data) + kBytes - 1, kThree));
  CHECK(!ReceiveHeap::record_stream(reinterpret_cast<u64>(block->data) + kBytes, kThree));
  fake_cuda::hold(kThree);
  block.reset();
  fake_cuda::waits();
  block = heap->reserve(kBytes, kOne, false);
  CHECK(has_waited(kOne, kThree));
  fake_cuda::let_go(kThree);
}

TEST(what_no_work_was_given_for_is_free_again_in_a_capture) {
  const auto gpu = make_gpu();
  const auto heap = make_heap(gpu);
  for (const bool is_capturing : {true, false}) {
    for (int turn = 0; turn < 3; ++turn) {
      auto block = heap->reserve(kBytes, kOne, is_capturing);
      CHECK(block.has_value());
      if (block) heap->cancel(std::move(*block));
      CHECK_EQ(heap->used(), u64{0});
    }
  }
  CHECK(!heap->has_captured());
}

TEST(what_is_given_back_early_is_behind_its_event) {
  const auto gpu = make_gpu();
  const auto heap = make_heap(gpu);
  fake_cuda::hold(kOne);
  auto block = heap->reserve(kBytes, kOne, false);
  heap->shrink(*block, 1000, gpu->record(kOne));
  CHECK_EQ(heap->used(), u64{1024});
  CHECK_EQ(block->num_bytes, u64{1000});
  fake_cuda::waits();
  auto rest = heap->reserve(kBytes - 1024, kTwo, false);
  CHECK(rest.has_value());
  CHECK(has_waited(kTwo, kOne));
  rest.reset();
  const auto most = heap->reserve_up_to(u64{1} << 40, kTwo, false);
  CHECK(most.has_value());
  CHECK_EQ(most->num_bytes, kBytes - 1024);
  CHECK(!heap->reserve_up_to(16, kTwo, false).has_value());
  fake_cuda::let_go(kOne);
}

// Every byte knows what was done to it last, by which stream; whoever gets it must run after all that.
TEST(random_tensors_on_four_streams_never_meet) {
  const auto gpu = make_gpu();
  const auto heap = make_heap(gpu);
  constexpr u64 kUnits = kBytes / 256;
  struct Tensor {
    Block block;
    std::set<u64> streams;
  };
  std::vector<std::map<u64, u64>> uses(kUnits);  // by unit: counter of the last work, by stream
  std::mt19937_64 random(7);
  std::vector<Tensor> tensors;
  i64 num_checked = 0;
  for (u64 stream = 201; stream < 205; ++stream) fake_cuda::hold(stream);
  for (int step = 0; step < 20000; ++step) {
    const u64 stream = 201 + random() % 4;
    if (step % 500 == 499) {
      fake_cuda::let_go(stream);
      fake_cuda::hold(stream);
    }
    const auto units_of = [&](const Block& block) { return (block.offset - kFirst) / 256; };
    const auto use = [&](Tensor& tensor, u64 by) {
      const u64 mark = fake_cuda::give_work(by);
      for (u64 unit = units_of(tensor.block); unit < units_of(tensor.block) + (tensor.block.num_bytes + 255) / 256;
           ++unit)
        uses[unit][by] = mark;
    };
    if (tensors.size() < 40 && random() % 2 == 0) {
      std::optional<Block> block = heap->reserve(random() % (kBytes / 16) + 1, stream, false);
      if (!block) continue;
      for (u64 unit = units_of(*block); unit < units_of(*block) + (block->num_bytes + 255) / 256; ++unit) {
        for (const auto& [other, mark] : uses[unit]) {
          ++num_checked;
          if (!fake_cuda::runs_after(stream, other, mark))
            report_failure(__FILE__, __LINE__, "memory of another stream");
        }
      }
      tensors.push_back({std::move(*block), {stream}});
      use(tensors.back(), stream);
      if (random() % 3 == 0)
        heap->shrink(tensors.back().block, tensors.back().block.num_bytes / 2, gpu->record(stream));
    } else if (!tensors.empty()) {
      Tensor& tensor = tensors[random() % tensors.size()];
      if (random() % 3 != 0) {
        const u64 by = random() % 2 == 0 ? stream : *tensor.streams.begin();
        if (tensor.streams.insert(by).second) ReceiveHeap::record_stream(reinterpret_cast<u64>(tensor.block.data), by);
        use(tensor, by);
      } else {
        std::swap(tensor, tensors.back());
        tensors.pop_back();
      }
    }
  }
  CHECK(num_checked > 100000);
  tensors.clear();
  for (u64 stream = 201; stream < 205; ++stream) fake_cuda::let_go(stream);
  CHECK_EQ(heap->used(), u64{0});
  CHECK(heap->reserve(kBytes, kOne, false).has_value());
}

TEST(a_graph_takes_only_what_nobody_waits_for_and_keeps_it) {
  const auto gpu = make_gpu();
  const auto heap = make_heap(gpu);
  auto busy = heap->reserve(kBytes / 2, kOne, false);
  const u64 busy_offset = busy->offset;
  fake_cuda::hold(kOne);
  busy.reset();
  fake_cuda::begin_capture(kTwo, 5);
  auto mine = heap->reserve(kBytes / 2, kTwo, true);
  CHECK(mine.has_value());
  CHECK(mine && mine->offset != busy_offset);
  CHECK(!heap->reserve(kBytes / 2, kTwo, true).has_value());
  CHECK(!heap->has_captured() == false);
  mine.reset();
  fake_cuda::end_capture(kTwo);
  CHECK_EQ(heap->used(), kBytes / 2);
  fake_cuda::let_go(kOne);
  CHECK(heap->reserve(kBytes / 2, kThree, false).has_value());
  CHECK(!heap->reserve(kBytes / 2 + 256, kThree, false).has_value());
}

TEST(a_place_let_go_on_a_stream_that_records_waits_for_its_end) {
  const auto gpu = make_gpu();
  const auto heap = make_heap(gpu);
  auto block = heap->reserve(kBytes, kOne, false);
  fake_cuda::begin_capture(kOne, 6);
  block.reset();
  CHECK(!heap->reserve(kBytes, kTwo, false).has_value());
  CHECK(!heap->is_settled());
  fake_cuda::end_capture(kOne);
  fake_cuda::hold(kOne);
  fake_cuda::waits();
  CHECK(heap->reserve(kBytes, kTwo, false).has_value());
  fake_cuda::let_go(kOne);
}

TEST(fresh_memory_comes_to_the_same_place_only_if_nobody_is_there) {
  const auto gpu = make_gpu();
  const auto heap = make_heap(gpu);
  const u64 address = heap->memory().address();
  auto block = heap->reserve(4096, kOne, false);
  std::memset(block->data, 7, 4096);
  DeviceMemory fresh = DeviceMemory::create(gpu->device, kFirst + kBytes);
  CHECK(!heap->renew(fresh));  // a tensor
  CHECK_EQ(block->data[0], u8{7});
  fake_cuda::hold(kOne);
  u8* const place = block->data;
  block.reset();
  CHECK(!heap->renew(fresh));  // work on it
  fake_cuda::let_go(kOne);
  heap->quarantine();
  const i64 before = fake_cuda::physical_bytes();
  CHECK(heap->renew(fresh));
  CHECK_EQ(heap->memory().address(), address);
  CHECK_EQ(*place, u8{0});
  CHECK_EQ(fake_cuda::physical_bytes(), before - static_cast<i64>(heap->memory().bytes()));
  CHECK(heap->reserve(kBytes, kOne, false).has_value());
}

TEST(nothing_is_unmapped_while_the_gpu_is_at_work) {
  const auto gpu = make_gpu();
  auto heap = make_heap(gpu);
  auto block = heap->reserve(4096, kOne, false);
  heap.reset();  // the tensor holds it
  CHECK_EQ(fake_cuda::num_mapped(), 1);
  fake_cuda::hold(kOne);
  gpu->has_thread_ranks = true;  // then the clean-up waits elsewhere
  block.reset();
  CHECK_EQ(fake_cuda::num_mapped(), 1);
  fake_cuda::let_go(kOne);
  CHECK_EQ(fake_cuda::physical_bytes_at_last(0), i64{0});
  CHECK_EQ(fake_cuda::num_mapped(), 0);
}

TEST(a_stream_recorded_when_the_window_is_gone_is_waited_for) {
  const auto gpu = make_gpu();
  auto heap = make_heap(gpu);
  auto block = heap->reserve(4096, kOne, false);
  heap.reset();  // as a window that is closed, or rebuilt around tensors
  fake_cuda::hold(kThree);
  gpu->has_thread_ranks = true;  // then the clean-up waits elsewhere
  CHECK(ReceiveHeap::record_stream(reinterpret_cast<u64>(block->data), kThree));
  const auto data = reinterpret_cast<u64>(block->data);
  block.reset();
  CHECK(!ReceiveHeap::record_stream(data, kTwo));
  CHECK_EQ(fake_cuda::num_mapped(), 1);
  fake_cuda::let_go(kThree);
  CHECK_EQ(fake_cuda::physical_bytes_at_last(0), i64{0});
}

TEST(a_place_that_can_not_be_waited_for_is_given_back) {
  const auto gpu = make_gpu();
  const auto heap = make_heap(gpu);
  auto block = heap->reserve(kBytes, kOne, false);
  fake_cuda::hold(kOne);
  block.reset();
  fake_cuda::fail_next("cuStreamWaitEvent", 2);
  CHECK_THROWS(heap->reserve(kBytes, kTwo, false), Error,
               [](const Error& error) { CHECK_EQ(error.code, ErrorCode::kCudaError); });
  CHECK_EQ(heap->used(), u64{0});
  fake_cuda::waits();
  block = heap->reserve(kBytes, kTwo, false);
  CHECK(block.has_value());
  CHECK(has_waited(kTwo, kOne));  // it is still known who was there
  fake_cuda::let_go(kOne);
}

TEST(tensors_die_quietly_when_the_context_is_gone) {
  const auto gpu = make_gpu();
  auto heap = make_heap(gpu);
  auto block = heap->reserve(4096, kOne, false);
  fake_cuda::fail_next("cuCtxPushCurrent", 4);
  block.reset();
  CHECK_EQ(heap->used(), u64{0});
  heap.reset();
  CHECK_EQ(fake_cuda::num_mapped(), 0);
}

// The last one: its memory stays. Nobody may wait for the capture's end, which may wait for whoever lets go.
TEST(what_is_let_go_under_capture_when_the_window_is_gone_is_left_to_the_end) {
  const auto gpu = make_gpu();
  auto heap = make_heap(gpu);
  auto block = heap->reserve(4096, kOne, false);
  heap.reset();
  fake_cuda::begin_capture(kOne, 9);
  block.reset();
  fake_cuda::end_capture(kOne);
  CHECK_EQ(fake_cuda::num_mapped(), 1);
}

int main(int argc, char** argv) { return weft::test::run_tests(argc, argv); }
