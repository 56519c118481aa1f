// Guards against GPU windows that hang, lose memory, blame the wrong rank or go on after a failure. Ranks are threads; the
// driver is a fake one, whose kernels do what a test says: what they do on GPUs is tested there (tests/gpu).
// check: allow file-size: all cases use the same ranks on the same driver without a GPU
#include "engine/nvlink/window.h"
#include "engine/nvlink/dispatch_config.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>

#include "base/clock.h"
#include "base/status.h"
#include "bootstrap/control_plane.h"
#include "check.h"
#include "engine/nvlink/fake_cuda.h"
#include "weft/sync/header.h"

using namespace weft;
using namespace weft::nvlink;
using namespace weft::test;

namespace {

constexpr int kNumRanks = 3;
constexpr u64 kHeapBytes = u64{8} << 20;
constexpr u64 kTimeoutNs = 20'000'000'000;
const Poll kNoPoll;

GpuWindowShape window_shape() {
  GpuWindowShape shape;
  shape.num_ranks = kNumRanks;
  shape.num_experts = 6;
  shape.top_k = 2;
  shape.num_blocks = 40;
  shape.max_tokens = 16;
  shape.landing_row_bytes = 64;
  return shape;
}

u64 stream_of(int rank) { return 1000 + static_cast<u64>(rank); }
u64 in_seconds(double seconds) { return deadline_after_s(seconds); }

// Addresses of memory that no kernel here reads or writes.
constexpr u64 kSomewhere = 1 << 20;

void give_memory(DispatchArgs& args) {
  args.x = args.topk_idx = args.send_plan = args.recv_plan = args.overflow = args.sizes = kSomewhere;
  args.out_x = args.out_ids = args.out_weights = kSomewhere;
}

void give_memory(CombineArgs& args) {
  args.dtype = Dtype::kBf16;
  args.y = args.out = args.send_plan = args.recv_plan = kSomewhere;
}

struct Rank {
  int me;
  std::shared_ptr<Communicator> comm;
  std::shared_ptr<Gpu> gpu;
  std::barrier<>* barrier;
  std::unique_ptr<Window> window;

  // Beside the communicator, which may be broken.
  void meet() const { barrier->arrive_and_wait(); }
  void make_window(const GpuWindowShape& shape = window_shape()) {
    window = std::make_unique<Window>(comm, gpu, shape, WindowMemory{kHeapBytes, {}}, in_seconds(20), kNoPoll);
  }
  DispatchResult dispatch(i64 capacity = kNoCapacity, i64 alignment = 1, const Poll& poll = kNoPoll,
                          bool makes_send_plan = false) {
    DispatchArgs args;
    give_memory(args);
    if (makes_send_plan) args.sizes = 0;
    args.capacity = capacity;
    args.alignment = alignment;
    args.max_tokens = args.num_tokens = 16;
    args.hidden = 32;
    args.row_bytes = 64;
    args.dtype = Dtype::kBf16;
    args.num_blocks = 4;
    args.timeout_ns = kTimeoutNs;
    args.stream = stream_of(me);
    return window->dispatch(args, poll);
  }
};

// Every rank in a thread; an exception of a body is a failure. All stay until the last one is done.
void with_ranks(const std::function<void(Rank&)>& body, bool makes_window = true) {
  fake_cuda::set_kernel({});
  auto hub = std::make_shared<LocalHub>(kNumRanks);
  auto gpu = std::make_shared<Gpu>(0, jit::CompilerPaths{WEFT_FAKE_CUDA, WEFT_INCLUDE, ""});
  std::barrier barrier(kNumRanks);
  std::vector<std::thread> threads;
  for (int me = 0; me < kNumRanks; ++me) {
    threads.emplace_back([&, me] {
      Rank rank{me, Communicator::create(connect_threads(hub, me)), gpu, &barrier, nullptr};
      try {
        if (makes_window) rank.make_window();
        body(rank);
        rank.meet();
      } catch (const std::exception& error) {
        report_failure("thread rank", me, std::string("unexpected exception: ") + error.what());
        barrier.arrive_and_drop();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  fake_cuda::set_kernel({});
  for (int rank = 0; rank < kNumRanks; ++rank) fake_cuda::let_go(stream_of(rank));
  CHECK_EQ(fake_cuda::physical_bytes_at_last(0), i64{0});
  CHECK_EQ(fake_cuda::num_mapped(), 0);
}

// A kernel that ends well with some rows.
void count_rows(void* args) {
  auto* dispatch = static_cast<kernels::DispatchKernelArgs*>(args);
  dispatch->view.host->num_rows = 3;
  dispatch->view.host->counted_ticket = dispatch->ticket;
}

// A kernel that leaves with a reason, which is the rank so many steps from its own.
auto leave(transport::ErrorCause cause, int steps, u64 seen = 0) {
  return [=](void* args) {
    auto* dispatch = static_cast<kernels::DispatchKernelArgs*>(args);
    ErrorRecord& record = dispatch->view.host->error;
    record.culprit = (dispatch->view.rank + steps) % kNumRanks;
    record.epoch = 1;
    record.sequence = 7;
    record.expected = dispatch->print;
    record.seen = seen;
    record.phase = static_cast<u32>(Phase::kCount);
    __atomic_store_n(&record.code, static_cast<u32>(cause), __ATOMIC_RELEASE);
  };
}

// What a refusal leaves with the host: rank 1 needs room for so many tokens in the operation `sequence`, and perhaps a record.
void leave_need(void* args, u32 sequence, i64 num_tokens, bool has_place) {
  auto* dispatch = static_cast<kernels::DispatchKernelArgs*>(args);
  transport::HostWords* host = dispatch->view.host;
  host->seen_caller[1] = transport::pack_need(sequence, num_tokens);
  if (!has_place) return;
  host->error.culprit = 1;
  host->error.epoch = 1;
  host->error.sequence = sequence;
  host->error.expected = dispatch->print;
  host->error.seen = sync::pack_header({1, sequence}, kRefusalFingerprint);
  host->error.phase = static_cast<u32>(Phase::kCount);
  __atomic_store_n(&host->error.code, static_cast<u32>(transport::ErrorCause::kMismatch), __ATOMIC_RELEASE);
}

void finish(void* args, u64 sequence) {
  static_cast<kernels::DispatchKernelArgs*>(args)->view.host->finished_sequence = sequence;
}

template <class Call>
Error error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return Error(ErrorCode::kInternalError, "nothing was raised");
}

bool says(const Error& error, const std::string& part) {
  if (error.text.find(part) != std::string::npos) return true;
  report_failure("text", 0, "'" + error.text + "' does not say '" + part + "'");
  return false;
}

transport::WindowView view_of(Rank& rank) {
  static thread_local transport::WindowView view;
  fake_cuda::set_kernel([](void* args) { view = static_cast<kernels::DispatchKernelArgs*>(args)->view; });
  rank.dispatch(4);
  return view;
}

}  // namespace

TEST(windows_are_mapped_by_all_and_say_who_is_a_member) {
  with_ranks([](Rank& rank) {
    const transport::WindowView view = view_of(rank);
    const GpuControlWords* words = view.words();
    CHECK_EQ(words->membership, u64{1} << 32 | 7);
    CHECK_EQ(words->sequence, u64{0});
    for (int peer = 0; peer < kNumRanks; ++peer) {
      u64* cell = reinterpret_cast<u64*>(view.control[peer] + view.layout.header(Phase::kSend, 1, rank.me, 2));
      *cell = 100 + static_cast<u64>(rank.me);
      view.heap[peer][static_cast<u64>(rank.me)] = static_cast<u8>(rank.me + 1);
      CHECK_EQ(view.heap_bytes[peer], align_up(rank.window->layout().landing_bytes + kHeapBytes, u64{2} << 20));
    }
    rank.meet();
    for (int peer = 0; peer < kNumRanks; ++peer) {
      CHECK_EQ(*reinterpret_cast<u64*>(view.control[rank.me] + view.layout.header(Phase::kSend, 1, peer, 2)),
               100 + static_cast<u64>(peer));
      CHECK_EQ(view.heap[rank.me][peer], static_cast<u8>(peer + 1));
    }
    rank.meet();
  });
}

TEST(exact_sizes_give_back_what_is_not_needed) {
  with_ranks([](Rank& rank) {
    fake_cuda::set_kernel(count_rows);
    const DispatchResult result = rank.dispatch();
    CHECK(result.in_heap);
    CHECK_EQ(result.result_rows, i64{3});
    CHECK_EQ(result.x.shape[0], i64{3});
    CHECK(rank.window->heap_used() < 4096);
    CHECK(rank.window->owns(reinterpret_cast<u64>(result.x.block.data)));
    CHECK_EQ(rank.window->stats().num_dispatches, u64{1});
    rank.meet();
  });
}

TEST(plans_lie_in_the_heap_or_nothing_has_begun) {
  with_ranks([](Rank& rank) {
    fake_cuda::set_kernel(count_rows);
    const auto dispatch = [&] { return rank.dispatch(kNoCapacity, 1, kNoPoll, true); };
    {
      const DispatchResult result = dispatch();
      CHECK(result.has_begun && result.in_heap);
      CHECK_EQ(result.send_plan.shape[0], gpu_send_plan_len(16, 2, kNumRanks, Layout::kRankMajor));
      CHECK_EQ(result.topk_idx.shape[1], i64{2});
      std::vector<std::pair<u64, u64>> places;
      for (const Array* each :
           {&result.x, &result.topk_weights, &result.topk_idx, &result.send_plan, &result.recv_plan}) {
        u64 bytes = each->is_int64 ? 8 : each == &result.x ? 2 : 4;
        for (const i64 length : each->shape) bytes *= static_cast<u64>(length);
        const u64 begin = reinterpret_cast<u64>(each->block.data);
        CHECK(rank.window->owns(begin) && begin % 256 == 0);
        places.emplace_back(begin, begin + bytes);
      }
      std::ranges::sort(places);
      for (size_t i = 1; i < places.size(); ++i) CHECK(places[i - 1].second <= places[i].first);
      CHECK(rank.window->heap_used() < 8192);
    }
    CHECK_EQ(rank.window->heap_used(), u64{0});
    const auto taken = rank.window->reserve(kHeapBytes, stream_of(rank.me));
    const DispatchResult refused = dispatch();
    CHECK(!refused.has_begun && refused.send_plan.block.owner == nullptr);
    CHECK_EQ(rank.window->stats().num_dispatches, u64{1});
    rank.meet();
  });
}

TEST(a_full_heap_goes_to_the_landing_and_is_unloaded) {
  with_ranks([](Rank& rank) {
    fake_cuda::set_kernel(count_rows);
    const auto taken = rank.window->reserve(kHeapBytes, stream_of(rank.me));
    CHECK(taken.has_value());
    CHECK_EQ(error_of([&] { rank.window->unload({}); }).code, ErrorCode::kInvalidState);
    const DispatchResult result = rank.dispatch();
    CHECK(!result.in_heap);
    CHECK_EQ(result.result_rows, i64{3});
    CHECK_EQ(rank.window->stats().num_staged, u64{1});
    rank.meet();
    std::vector<i64> ids(6, -5);
    std::vector<float> weights(6, -5.0f);
    std::vector<i32> plan(static_cast<size_t>(gpu_recv_plan_len(16, 2, kNumRanks, Layout::kRankMajor)), -5);
    fake_cuda::set_kernel({});
    DispatchBuffers args;
    args.out_ids = reinterpret_cast<u64>(ids.data());
    args.out_weights = reinterpret_cast<u64>(weights.data());
    args.recv_plan = reinterpret_cast<u64>(plan.data());
    rank.window->unload(args);
    CHECK_EQ(ids[5], i64{0});  // the landing is zeroed
    CHECK_EQ(weights[5], 0.0f);
    CHECK_EQ(plan.back(), 0);
    CHECK_EQ(error_of([&] { rank.window->unload(args); }).code, ErrorCode::kInvalidState);
    rank.meet();
  });
}

TEST(calls_come_behind_what_an_unload_of_no_rows_copies) {
  with_ranks([](Rank& rank) {
    fake_cuda::set_kernel([](void* args) {
      auto* dispatch = static_cast<kernels::DispatchKernelArgs*>(args);
      dispatch->view.host->counted_ticket = dispatch->ticket;
    });
    const auto taken = rank.window->reserve(kHeapBytes, stream_of(rank.me));
    CHECK_EQ(rank.dispatch().result_rows, i64{0});
    rank.meet();
    std::vector<i32> plan(static_cast<size_t>(gpu_recv_plan_len(16, 2, kNumRanks, Layout::kRankMajor)));
    DispatchBuffers args;
    args.recv_plan = reinterpret_cast<u64>(plan.data());
    const u64 own_stream = stream_of(rank.me);
    fake_cuda::hold(own_stream);
    const u64 before = fake_cuda::give_work(own_stream);
    rank.window->unload(args);
    const int me = std::exchange(rank.me, rank.me + 9);  // another stream
    rank.dispatch(4);
    CHECK(fake_cuda::runs_after(stream_of(rank.me), own_stream, before + 1));
    CHECK(!fake_cuda::runs_after(stream_of(rank.me), own_stream, fake_cuda::give_work(own_stream)));
    rank.me = me;
    fake_cuda::let_go(own_stream);
    rank.meet();
  });
}

TEST(row_numbers_beyond_32_bits_are_refused_with_a_capacity_too) {
  DispatchArgs args;
  give_memory(args);
  args.layout = Layout::kExpertMajor;
  args.max_tokens = 16;
  args.capacity = 4;
  CHECK_EQ(most_rows(window_shape(), args), i64{4});
  args.alignment = i64{1} << 31;
  const Error refused = error_of([&] { most_rows(window_shape(), args); });
  CHECK(refused.code == ErrorCode::kInvalidArgument && says(refused, "2147483647"));
}

TEST(calls_from_several_streams_are_ordered) {
  with_ranks([](Rank& rank) {
    fake_cuda::set_kernel(count_rows);
    rank.dispatch(4);
    rank.meet();
    if (rank.me == 0) {
      fake_cuda::waits();
      rank.dispatch(4);
      CHECK(fake_cuda::waits().empty());
      const int me = std::exchange(rank.me, 9);  // another stream
      rank.dispatch(4);
      const auto waits = fake_cuda::waits();
      CHECK(!waits.empty() && waits.front() == std::make_pair(stream_of(9), stream_of(me)));
      fake_cuda::begin_capture(stream_of(9), 77);
      rank.dispatch(4);
      CHECK(fake_cuda::waits().empty());
      CHECK(!rank.window->reserve(256, stream_of(9), Window::OnCapture::kNothing).has_value());
      CHECK(rank.window->reserve(256, stream_of(9)).has_value());
      fake_cuda::end_capture(stream_of(9));
      fake_cuda::destroy_graph(77);
      rank.me = me;
    }
    rank.meet();
  });
}

// The driver does not bear that (fake_cuda.cc refuses it): graphs of several threads crashed the process.
TEST(events_of_a_capture_are_not_recorded_by_other_threads) {
  with_ranks([](Rank& rank) {
    fake_cuda::set_kernel(count_rows);
    rank.dispatch(4);
    rank.meet();
    if (rank.me == 0) fake_cuda::begin_capture(stream_of(0), 78);
    if (rank.me == 0) rank.dispatch(4);
    if (rank.me == 0) rank.dispatch(4);
    rank.meet();
    for (int call = 0; call < 3 && rank.me != 0; ++call) rank.dispatch(4);
    rank.meet();
    if (rank.me == 0) fake_cuda::end_capture(stream_of(0));
    if (rank.me == 0) fake_cuda::destroy_graph(78);
  });
}

TEST(a_call_given_up_by_all_leaves_the_window_whole) {
  with_ranks([](Rank& rank) {
    const int culprit = (rank.me + 1) % kNumRanks;
    fake_cuda::set_kernel(count_rows);
    rank.dispatch();
    rank.meet();
    fake_cuda::set_kernel(leave(transport::ErrorCause::kMismatch, 1, 0x1234));
    const Error mismatch = error_of([&] { rank.dispatch(); });
    CHECK_EQ(mismatch.code, ErrorCode::kInvalidArgument);
    says(mismatch, "rank " + std::to_string(rank.me) + " dispatch(layout='rank_major'");
    says(mismatch, "rank " + std::to_string(culprit) + " a call that this rank has not made");
    CHECK(mismatch.peers == std::vector<int>{culprit});
    rank.meet();
    fake_cuda::set_kernel(leave(transport::ErrorCause::kNoRoom, 1));
    const Error full = error_of([&] { rank.dispatch(); });
    CHECK_EQ(full.code, ErrorCode::kCapacityExceeded);
    says(full, "rank " + std::to_string(culprit) + " has no room");
    says(full, "heap_bytes");
    rank.meet();
    fake_cuda::set_kernel(leave(transport::ErrorCause::kMoved, 0));
    rank.dispatch(4);  // nobody waits: the next look tells
    CHECK_EQ(error_of([&] { rank.window->check(); }).code, ErrorCode::kInvalidState);
    rank.meet();
    fake_cuda::set_kernel(leave(transport::ErrorCause::kBusy, 0));
    CHECK_EQ(error_of([&] { rank.dispatch(); }).code, ErrorCode::kInvalidState);
    rank.meet();
    fake_cuda::set_kernel(count_rows);
    CHECK_EQ(rank.dispatch().result_rows, i64{3});
    CHECK(!rank.comm->is_broken());
    rank.meet();
  });
}

TEST(who_needs_most_may_come_last) {  // or ranks would make windows of different sizes
  with_ranks([](Rank& rank) {
    transport::WindowView view = view_of(rank);
    rank.meet();
    fake_cuda::set_kernel([](void* args) { leave_need(args, 7, 600, true); });
    fake_cuda::hold(stream_of(rank.me));
    std::thread late([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // longer than any wait for blocks that leave
      view.host->seen_caller[2] = transport::pack_need(7, 1500);
      view.host->seen_caller[0] = transport::pack_need(6, 9000);  // of a call before
      view.host->finished_sequence = 7;
      fake_cuda::let_go(stream_of(rank.me));
    });
    const DispatchResult result = rank.dispatch();
    late.join();
    CHECK_EQ(result.needed_tokens, i64{1500});
    rank.meet();
    fake_cuda::set_kernel(count_rows);
    CHECK_EQ(rank.dispatch().result_rows, i64{3});
  });
}

TEST(a_need_of_an_earlier_call_is_told_by_one_that_sends_nothing) {
  with_ranks([](Rank& rank) {
    const transport::WindowView view = view_of(rank);
    rank.meet();
    fake_cuda::set_kernel([](void* args) {  // the record of a call with a capacity has just come
      leave_need(args, 7, 40, true);
      finish(args, 8);
      count_rows(args);
    });
    CHECK_EQ(rank.dispatch().result_rows, i64{3});
    rank.meet();
    fake_cuda::set_kernel(count_rows);
    const int num_launches = fake_cuda::num_launches();
    rank.meet();
    says(error_of([&] { rank.dispatch(); }), "a rank has 40 tokens");
    rank.meet();
    CHECK_EQ(fake_cuda::num_launches(), num_launches);
    CHECK_EQ(view.host->error.code, u32{0});
    rank.meet();
    CHECK_EQ(rank.dispatch().result_rows, i64{3});
  });
}

TEST(a_call_with_a_need_of_its_own_behind_one_that_was_not_read) {
  with_ranks([](Rank& rank) {
    fake_cuda::set_kernel([](void* args) {
      leave_need(args, 7, 40, true);
      leave_need(args, 8, 90, false);
      finish(args, 8);
    });
    CHECK_EQ(rank.dispatch().needed_tokens, i64{90});
    rank.meet();
    fake_cuda::set_kernel(count_rows);
    says(error_of([&] { rank.dispatch(); }), "a rank has more tokens");
    CHECK_EQ(rank.dispatch().result_rows, i64{3});
  });
}

TEST(a_need_whose_kernel_is_at_work_is_not_told_yet) {
  with_ranks([](Rank& rank) {
    fake_cuda::set_kernel([](void* args) { leave_need(args, 7, 40, true); });
    fake_cuda::hold(stream_of(rank.me));
    rank.dispatch(4);
    rank.window->check();
    rank.meet();
    fake_cuda::set_kernel([](void*) {});
    rank.dispatch(4);
    fake_cuda::let_go(stream_of(rank.me));
    says(error_of([&] { rank.window->check(); }), "a rank has 40 tokens");
    rank.window->check();
  });
}

TEST(a_need_does_not_hide_who_never_came) {
  with_ranks([](Rank& rank) {
    const transport::WindowView view = view_of(rank);
    rank.meet();
    view.words()->sequence = 6;
    const u64 header = sync::pack_header({1, 7}, kRefusalFingerprint);
    std::memcpy(view.control[rank.me] + view.layout.header(Phase::kCount, 7, 1, 0), &header, sizeof(header));
    rank.meet();
    fake_cuda::set_kernel([](void* args) {
      leave_need(args, 7, 40, true);
      finish(args, 6);
      static_cast<kernels::DispatchKernelArgs*>(args)->view.words()->broken =
          static_cast<u64>(transport::ErrorCause::kDeadline);
    });
    if (rank.me == 0) {
      const Error late = error_of([&] { rank.dispatch(); });
      CHECK_EQ(late.code, ErrorCode::kPeerTimeout);
      CHECK(late.peers == std::vector<int>{2});
    } else {
      while (!rank.comm->is_broken()) usleep(500);
    }
  });
}

TEST(calls_of_other_numbers_of_blocks_do_not_meet) {
  DispatchArgs args;
  give_memory(args);
  args.num_blocks = 4;
  const u16 four = fingerprint(dispatch_operation(args));
  args.num_blocks = 5;
  CHECK(fingerprint(dispatch_operation(args)) != four);
}

TEST(rows_that_fill_their_room_need_no_landing) {
  with_ranks([](Rank& rank) {
    const i64 most = kNumRanks * 16;
    fake_cuda::set_kernel([](void* args) {
      auto* dispatch = static_cast<kernels::DispatchKernelArgs*>(args);
      dispatch->view.host->num_rows = kNumRanks * 16;
      dispatch->view.host->counted_ticket = dispatch->ticket;
    });
    const DispatchResult result = rank.dispatch();
    CHECK(result.in_heap);
    CHECK_EQ(result.result_rows, most);
    CHECK_EQ(rank.window->stats().num_staged, u64{0});
    rank.meet();
  });
}

TEST(an_error_that_was_read_is_counted) {  // or a kernel that is late would think that nobody has read it
  with_ranks([](Rank& rank) {
    const transport::WindowView view = view_of(rank);
    rank.meet();
    CHECK_EQ(view.host->num_errors_read, u64{0});
    for (u64 number = 1; number < 3; ++number) {
      fake_cuda::set_kernel(leave(transport::ErrorCause::kNoRoom, 1));
      CHECK_EQ(error_of([&] { rank.dispatch(); }).code, ErrorCode::kCapacityExceeded);
      CHECK_EQ(view.host->num_errors_read, number);
      CHECK_EQ(view.host->error.code, u32{0});
      rank.meet();
    }
  });
}

TEST(a_header_of_another_epoch_is_that_of_a_late_peer) {
  with_ranks([](Rank& rank) {
    const transport::WindowView view = view_of(rank);
    rank.meet();
    view.words()->sequence = 5;
    const u64 old = sync::pack_header({9, 7}, 99);
    std::memcpy(view.control[rank.me] + view.layout.header(Phase::kCount, 7, 1, 0), &old, sizeof(old));
    rank.meet();
    fake_cuda::set_kernel(leave(transport::ErrorCause::kDeadline, 2));  // rank 0 has waited for rank 2
    if (rank.me == 0) {
      CHECK((error_of([&] { rank.dispatch(); }).peers == std::vector<int>{1, 2}));
    } else {
      while (!rank.comm->is_broken()) usleep(500);
    }
    rank.meet();
  });
}

TEST(closing_ends_the_waits_of_kernels) {
  with_ranks([](Rank& rank) {
    const transport::WindowView view = view_of(rank);
    rank.meet();
    if (rank.me == 1) {
      fake_cuda::hold(stream_of(1));
      rank.dispatch(4);
      std::atomic<bool> has_closed{false};
      std::thread kernel([&] {  // waits for a peer until the host ends that
        while (__atomic_load_n(&view.host->abort, __ATOMIC_ACQUIRE) == 0 && !has_closed) usleep(500);
        fake_cuda::let_go(stream_of(1));
      });
      rank.window->close();
      has_closed = true;
      kernel.join();
    }
    rank.meet();
  });
}

TEST(a_late_peer_breaks_all_and_rebuild_mends) {
  with_ranks([](Rank& rank) {
    const transport::WindowView before = view_of(rank);
    rank.meet();
    before.words()->sequence = 5;
    // Rank 1 has come to operation 7, rank 2 has not.
    const u64 header = sync::pack_header({1, 7}, 99);
    std::memcpy(before.control[rank.me] + before.layout.header(Phase::kCount, 7, 1, 0), &header, sizeof(header));
    rank.meet();
    fake_cuda::set_kernel(leave(transport::ErrorCause::kDeadline, 2));
    if (rank.me == 0) {
      const Error late = error_of([&] { rank.dispatch(); });
      CHECK_EQ(late.code, ErrorCode::kPeerTimeout);
      says(late, "rank 2 did not answer rank 0 in dispatch (sequence 7, phase count)");
      CHECK(late.peers == std::vector<int>{2});
    } else {
      while (!rank.comm->is_broken()) usleep(500);
      CHECK_EQ(before.host->abort, ~u64{0});
      CHECK_EQ(error_of([&] { rank.dispatch(); }).code, ErrorCode::kPeerTimeout);
    }
    CHECK(!rank.window->reserve(256, stream_of(rank.me)).has_value());  // R20
    rank.comm->rebuild({0, 1, 2}, in_seconds(20), kNoPoll);
    const transport::WindowView after = view_of(rank);
    CHECK(std::memcmp(before.control, after.control, sizeof(before.control)) == 0);
    CHECK(std::memcmp(before.heap, after.heap, sizeof(before.heap)) == 0);
    CHECK_EQ(after.heap_generation, u32{0});
    CHECK_EQ(after.words()->membership, u64{2} << 32 | 7);
    CHECK_EQ(after.words()->sequence, u64{0});
    CHECK_EQ(after.host->abort, u64{0});
    CHECK_EQ(after.host->timeout_ns, kTimeoutNs);
    rank.meet();
  });
}

TEST(blocks_that_do_not_run_are_no_late_peer) {
  with_ranks([](Rank& rank) {
    fake_cuda::set_kernel(count_rows);
    rank.meet();
    CHECK_EQ(rank.dispatch().result_rows, i64{3});
    rank.meet();
    fake_cuda::set_kernel(leave(transport::ErrorCause::kDeadline, 0));
    if (rank.me == 0) {
      const Error stuck = error_of([&] { rank.dispatch(); });
      CHECK_EQ(stuck.code, ErrorCode::kPeerTimeout);
      says(stuck, "the GPU of rank 0 did not get through its own part of dispatch (sequence 7, phase count)");
    } else {
      while (!rank.comm->is_broken()) usleep(500);
    }
  });
}

TEST(who_is_left_releases_the_memory_of_who_is_gone) {
  with_ranks([](Rank& rank) {
    rank.dispatch(4);
    rank.meet();
    if (rank.me == 1) {
      rank.window->close();
      rank.comm->close();
      rank.meet();
      rank.meet();
      rank.meet();
      return;
    }
    Error lost = error_of([&] {
      for (;;) rank.dispatch(4);
    });
    CHECK_EQ(lost.code, ErrorCode::kPeerLost);
    CHECK(lost.peers == std::vector<int>{1});
    rank.comm->rebuild({0, 2}, in_seconds(20), kNoPoll);
    rank.meet();
    const i64 one = static_cast<i64>(align_up(rank.window->layout().control_bytes, u64{2} << 20) +
                                     align_up(rank.window->layout().landing_bytes + kHeapBytes, u64{2} << 20));
    CHECK_EQ(fake_cuda::physical_bytes_at_last(2 * one), 2 * one);
    rank.meet();
    const transport::WindowView view = view_of(rank);
    CHECK_EQ(view.words()->membership, u64{2} << 32 | 5);
    rank.meet();
    rank.window->close();
    rank.comm->close();
  });
}

TEST(a_live_tensor_moves_the_heap_and_keeps_its_bytes) {
  with_ranks([](Rank& rank) {
    const transport::WindowView before = view_of(rank);
    auto held = rank.window->reserve(4096, stream_of(rank.me));
    std::memset(held->data, 9, 4096);
    rank.comm->rebuild({0, 1, 2}, in_seconds(20), kNoPoll);
    const transport::WindowView after = view_of(rank);
    CHECK(after.heap[rank.me] != before.heap[rank.me]);
    CHECK(after.heap[(rank.me + 1) % kNumRanks] == before.heap[(rank.me + 1) % kNumRanks]);
    CHECK_EQ(after.heap_generation, u32{1});
    CHECK_EQ(after.words()->heap_generation, u32{1});
    CHECK_EQ(held->data[4095], u8{9});
    CHECK(!rank.window->owns(reinterpret_cast<u64>(held->data)));
    CHECK(ReceiveHeap::record_stream(reinterpret_cast<u64>(held->data), stream_of(9)));
    rank.meet();
    held.reset();
    rank.comm->rebuild({0, 1, 2}, in_seconds(20), kNoPoll);
    CHECK(view_of(rank).heap[rank.me] == after.heap[rank.me]);
    rank.meet();
  });
}

TEST(a_rebuild_keeps_how_long_ranks_have_waited) {
  with_ranks([](Rank& rank) {
    GpuControlWords* words = view_of(rank).words();
    for (int peer = 0; peer < kNumRanks; ++peer) words->waited_ns[peer] = static_cast<u64>(10 * rank.me + peer);
    rank.meet();
    rank.comm->rebuild({0, 1, 2}, in_seconds(20), kNoPoll);
    const u64 first = static_cast<u64>(10 * rank.me);
    CHECK((rank.window->waited_ns() == std::vector<u64>{first, first + 1, first + 2}));
    std::vector<u64> copy(kNumRanks + 1, 5);
    rank.window->copy_waited_ns(reinterpret_cast<u64>(copy.data()), reinterpret_cast<u64>(stream_of(1)));
    CHECK((copy == std::vector<u64>{first, first + 1, first + 2, 5}));
    rank.meet();
    rank.window->close();
    CHECK(rank.window->waited_ns() == std::vector<u64>(kNumRanks));
    CHECK_THROWS(rank.window->copy_waited_ns(reinterpret_cast<u64>(copy.data()), 0), Error,
                 [](const Error& error) { CHECK_EQ(error.code, ErrorCode::kInvalidState); });
  });
}

TEST(rebuild_does_not_pull_memory_from_under_a_kernel) {
  with_ranks([](Rank& rank) {
    rank.dispatch(4);
    rank.meet();
    fake_cuda::hold(stream_of(1));
    if (rank.me == 1) {
      rank.dispatch(4);
      rank.window->leave_waits();
      const Error stuck = error_of([&] { rank.comm->rebuild({0, 1, 2}, in_seconds(4), kNoPoll); });
      CHECK_EQ(stuck.code, ErrorCode::kCudaError);
      fake_cuda::let_go(stream_of(1));
      rank.comm->rebuild({0, 1, 2}, in_seconds(20), kNoPoll);
    } else {
      rank.comm->rebuild({0, 1, 2}, in_seconds(20), kNoPoll);
    }
    rank.meet();
  });
}

TEST(an_interrupted_wait_ends_at_once_and_everywhere) {
  with_ranks([](Rank& rank) {
    rank.dispatch(4);
    rank.meet();
    if (rank.me != 0) {
      while (!rank.comm->is_broken()) usleep(500);
      const Error told = error_of([&] { rank.dispatch(); });
      CHECK_EQ(told.code, ErrorCode::kPeerTimeout);
      says(told, "rank 0 was interrupted in dispatch");
      return;
    }
    struct Interrupt {};
    fake_cuda::hold(stream_of(0));
    const u64 begin = now_ns();
    bool is_out = false;
    try {
      rank.dispatch(kNoCapacity, 1, [&] {
        if (now_ns() - begin > 50'000'000) throw Interrupt{};
      });
    } catch (const Interrupt&) {
      is_out = true;
    }
    CHECK(is_out);
    CHECK(now_ns() - begin < 5'000'000'000);  // on an idle machine 60 ms
    fake_cuda::let_go(stream_of(0));
  });
}

// By a kernel that waits for peers, and by one that waits for work before it on its stream.
TEST(an_abort_from_another_thread_ends_waits_here_and_everywhere) {
  for (const bool has_begun : {true, false}) {
    with_ranks([&](Rank& rank) {
      fake_cuda::set_kernel(count_rows);
      rank.dispatch(4);
      rank.meet();
      if (rank.me == 0) {
        fake_cuda::set_kernel([](void* args) {
          const auto* dispatch = static_cast<kernels::DispatchKernelArgs*>(args);
          while (ptx::ld_acquire_sys(&dispatch->view.host->abort) != ~u64{0}) usleep(500);
          leave(transport::ErrorCause::kAborted, 1)(args);
        });
        if (!has_begun) fake_cuda::set_kernel({});
        if (!has_begun) fake_cuda::hold(stream_of(0));
        std::thread watchdog([&] {
          usleep(50'000);
          rank.comm->abort("no progress");
        });
        const Error aborted = error_of([&] { rank.dispatch(); });
        watchdog.join();
        CHECK_EQ(aborted.code, ErrorCode::kAborted);
        CHECK_EQ(aborted.reason, "no progress");
        says(aborted, "rank 0: this rank aborted: no progress");
        CHECK(!rank.window->reserve(4096, stream_of(0)).has_value());
        fake_cuda::let_go(stream_of(0));
      } else {
        while (!rank.comm->is_broken()) usleep(500);
        const Error told = error_of([&] { rank.dispatch(); });
        CHECK_EQ(told.code, ErrorCode::kAborted);
        says(told, "rank 0 aborted: no progress; call rebuild");
      }
      rank.meet();
      if (rank.me == 0) fake_cuda::set_kernel(count_rows);
      rank.meet();
      rank.comm->rebuild({0, 1, 2}, in_seconds(20), kNoPoll);
      CHECK_EQ(rank.dispatch().result_rows, i64{3});
      rank.meet();
    });
  }
}

// By the counts of a kernel that has not begun.
TEST(a_wait_ends_when_the_others_go_on_without_this_rank) {
  std::atomic<bool> is_waiting{false};
  with_ranks([&](Rank& rank) {
    fake_cuda::set_kernel(count_rows);
    rank.dispatch(4);
    rank.meet();
    if (rank.me == 0) {
      fake_cuda::set_kernel({});
      fake_cuda::hold(stream_of(0));
      const Error left = error_of([&] { rank.dispatch(kNoCapacity, 1, [&] { is_waiting = true; }); });
      CHECK_EQ(left.code, ErrorCode::kEvicted);
      says(left, "rank 0: the others have gone on without this rank: epoch 2 was decided with ranks 1, 2");
      fake_cuda::let_go(stream_of(0));
    } else {
      while (!is_waiting) usleep(500);
      rank.comm->rebuild({1, 2}, in_seconds(20), kNoPoll);
    }
  });
}

TEST(a_wait_for_a_rank_that_refused_its_call_is_told_why) {
  with_ranks([&](Rank& rank) {
    fake_cuda::set_kernel(count_rows);
    rank.dispatch(4);
    rank.meet();
    if (rank.me == 1) rank.comm->note_refusal("InvalidArgument: x has dtype torch.int8");
    rank.meet();
    if (rank.me == 0) fake_cuda::set_kernel(leave(transport::ErrorCause::kDeadline, 1));
    rank.meet();
    if (rank.me == 0) {
      says(error_of([&] { rank.dispatch(); }),
           "; rank 1 refused its call: InvalidArgument: x has dtype torch.int8; call");
    }
    rank.meet();
    if (rank.me == 2) {
      CHECK(rank.comm->is_broken());
      says(error_of([&] { rank.dispatch(); }),
           "; rank 1 refused its call: InvalidArgument: x has dtype torch.int8; call");
    }
    rank.meet();
  });
}

// Signals carry the low 16 bits of the epoch.
TEST(an_epoch_beyond_16_bits_is_cut_in_the_words_of_the_gpu) {
  auto hub = std::make_shared<LocalHub>(1);
  auto gpu = std::make_shared<Gpu>(0, jit::CompilerPaths{WEFT_FAKE_CUDA, WEFT_INCLUDE, ""});
  auto comm = Communicator::create(connect_threads(hub, 0), 0xffff);
  GpuWindowShape shape = window_shape();
  shape.num_ranks = 1;
  Rank rank{0, comm, gpu, nullptr, nullptr};
  rank.make_window(shape);
  const auto membership = [&] {
    u64 word = 0;
    fake_cuda::set_kernel(
        [&](void* args) { word = static_cast<kernels::DispatchKernelArgs*>(args)->view.words()->membership; });
    rank.dispatch(4);
    fake_cuda::set_kernel({});
    return word;
  };
  CHECK_EQ(membership(), u64{0xffff} << 32 | 1);
  comm->rebuild({0}, in_seconds(20), kNoPoll);
  CHECK_EQ(comm->epoch(), u32{0x10000});
  CHECK_EQ(membership(), u64{1});
  rank.window->close();
}

TEST(a_failed_gpu_is_a_cuda_error_here_and_told_to_the_others) {
  with_ranks([](Rank& rank) {
    fake_cuda::set_kernel(count_rows);
    rank.dispatch(4);
    rank.meet();
    if (rank.me == 2) {
      fake_cuda::fail_gpu(719);
      const Error failed = error_of([&] { rank.dispatch(4); });
      CHECK_EQ(failed.code, ErrorCode::kCudaError);
      says(failed, "CUDA_ERROR_719");
    } else {
      while (!rank.comm->is_broken()) usleep(500);
    }
    rank.meet();
    fake_cuda::fail_gpu(0);
    rank.meet();
    if (rank.me != 2) CHECK_EQ(error_of([&] { rank.dispatch(4); }).code, ErrorCode::kInternalError);
  });
}

TEST(a_launch_that_fails_is_a_cuda_error_here_and_told_to_the_others) {
  with_ranks([](Rank& rank) {
    fake_cuda::set_kernel(count_rows);
    rank.dispatch(4);
    rank.meet();
    if (rank.me == 1) {
      fake_cuda::fail_next("cuLaunchKernelEx", 701);
      const Error failed = error_of([&] { rank.dispatch(4); });
      CHECK_EQ(failed.code, ErrorCode::kCudaError);
      says(failed, "cuLaunchKernelEx: CUDA_ERROR_701");
    } else {
      while (!rank.comm->is_broken()) usleep(500);
    }
    rank.meet();
    if (rank.me != 1) CHECK_EQ(error_of([&] { rank.dispatch(4); }).code, ErrorCode::kInternalError);
  });
}

TEST(a_kernel_that_ends_without_counts_is_no_endless_wait) {
  with_ranks([](Rank& rank) {
    rank.dispatch(4);
    rank.meet();
    if (rank.me == 0) {
      CHECK_EQ(error_of([&] { rank.dispatch(); }).code, ErrorCode::kCudaError);
    } else {
      while (!rank.comm->is_broken()) usleep(500);
    }
  });
}

// All that a rank makes but for its last piece is there then: that is a rail.
TEST(rails_that_one_rank_cannot_make_are_named) {
  GpuWindowShape shape = window_shape();
  shape.node_ranks = 1;
  with_ranks(
      [&](Rank& rank) {
        rank.meet();
        if (rank.me == 0) fake_cuda::fail_next("cuMemCreate", 2, 3 * kNumRanks - 1);
        rank.meet();
        const Error refused = error_of([&] { rank.make_window(shape); });
        CHECK_EQ(refused.code, ErrorCode::kInvalidArgument);
        says(refused, "(rail memory: " + std::to_string(rail_bytes(shape)) + " bytes");
        says(refused, "a smaller max_tokens_per_rank, top_k or hidden");
        rank.meet();
        rank.make_window(shape);
        rank.meet();
      },
      false);
}

TEST(a_window_that_one_rank_cannot_make_is_refused_everywhere) {
  for (const char* call : {"cuMemCreate", "cuMemMap", "cuMemImportFromShareableHandle"}) {
    with_ranks(
        [&](Rank& rank) {
          rank.meet();
          if (rank.me == 0) fake_cuda::fail_next(call, 2, 1);
          rank.meet();
          const Error refused = error_of([&] { rank.make_window(); });
          CHECK_EQ(refused.code, ErrorCode::kInvalidArgument);
          says(refused, "rank ");
          CHECK(!rank.comm->is_broken());
          rank.meet();
          if (rank.me == 0) {  // the pages of all three are idle
            const int before = fake_cuda::num_host_pages();
            std::vector<void*> pages;
            for (int each = 0; each < kNumRanks; ++each) pages.push_back(rank.gpu->take_host_page());
            CHECK_EQ(fake_cuda::num_host_pages(), before);
            for (void* page : pages) rank.gpu->give_back_host_page(page);
          }
          rank.meet();
          rank.make_window();
          rank.meet();
        },
        false);
  }
  with_ranks(
      [](Rank& rank) {
        GpuWindowShape shape = window_shape();
        shape.max_tokens += rank.me == 1 ? 1 : 0;
        says(error_of([&] { rank.make_window(shape); }), rank.me == 1 ? "rank 0 has another shape" : "rank ");
      },
      false);
}

TEST(a_staged_combine_is_two_launches_in_turn) {
  with_ranks(
      [](Rank& rank) {
        GpuWindowShape shape = window_shape();
        shape.small_tokens = 8;
        rank.make_window(shape);
        CombineArgs args;
        give_memory(args);
        args.is_small = true;
        args.max_tokens = args.num_tokens = 8;
        args.hidden = 32;
        args.num_blocks = 4;
        args.timeout_ns = kTimeoutNs;
        args.stream = stream_of(rank.me);
        const auto combine = [&](bool sends, bool receives) {
          args.sends = sends;
          args.receives = receives;
          rank.window->combine(args, kNoPoll);
        };
        const auto receive = [&] { rank.window->receive(stream_of(rank.me + 9), kNoPoll); };
        CHECK_EQ(error_of([&] { combine(false, true); }).code, ErrorCode::kInvalidState);
        says(error_of(receive), "has ended already");
        combine(true, false);
        says(error_of([&] { combine(true, false); }), "has not been received");
        says(error_of([&] { rank.dispatch(4); }), "has not been received");
        combine(false, true);
        combine(true, true);
        CHECK_EQ(rank.window->stats().num_combines, u64{2});
        combine(true, false);
        receive();  // what was given to the half that sent, on another stream
        says(error_of(receive), "has ended already");
        CHECK_EQ(rank.window->stats().num_combines, u64{3});
        args.max_tokens = 9;
        says(error_of([&] { combine(true, true); }), "allowed in a small-batch call: 0..8");
        args.max_tokens = 8;
        args.hidden = 64;
        says(error_of([&] { combine(true, true); }), "contributions of 128 bytes");
      },
      false);
}

TEST(windows_of_other_sizes_launch_the_same_code_with_their_own_shared_memory) {
  with_ranks(
      [](Rank& rank) {
        unsigned smaller = 0;
        for (const int tokens : {2, 16}) {
          GpuWindowShape shape = window_shape();
          shape.small_tokens = tokens;
          rank.make_window(shape);
          DispatchArgs args;
          give_memory(args);
          args.is_small = true;
          args.capacity = 64;
          args.max_tokens = args.num_tokens = 2;
          args.hidden = 32;
          args.row_bytes = 64;
          args.dtype = Dtype::kBf16;
          args.num_blocks = 1;
          args.timeout_ns = kTimeoutNs;
          args.stream = stream_of(rank.me);
          rank.window->dispatch(args, kNoPoll);
          rank.meet();
          CHECK(fake_cuda::last_shared_bytes() > smaller);
          smaller = fake_cuda::last_shared_bytes();
          rank.meet();
          rank.window.reset();
        }
      },
      false);
}

TEST(what_broke_a_window_is_told_before_a_half_that_was_not_received) {
  with_ranks(
      [](Rank& rank) {
        GpuWindowShape shape = window_shape();
        shape.small_tokens = 8;
        rank.make_window(shape);
        CombineArgs args;
        give_memory(args);
        args.is_small = true;
        args.max_tokens = args.num_tokens = 8;
        args.hidden = 32;
        args.num_blocks = 4;
        args.timeout_ns = kTimeoutNs;
        args.stream = stream_of(rank.me);
        args.receives = false;
        rank.window->combine(args, kNoPoll);
        rank.meet();
        fake_cuda::set_kernel(leave(transport::ErrorCause::kDeadline, 2));
        if (rank.me == 0) {
          args.sends = false;
          args.receives = true;
          rank.window->combine(args, kNoPoll);
          args.sends = true;
        } else {
          while (!rank.comm->is_broken()) usleep(500);
        }
        CHECK_EQ(error_of([&] {
                   while (true) {
                     rank.window->check();
                     if (rank.me != 0) rank.window->combine(args, kNoPoll);
                   }
                 }).code,
                 ErrorCode::kPeerTimeout);
        rank.comm->rebuild({0, 1, 2}, in_seconds(20), kNoPoll);
        fake_cuda::set_kernel({});
        rank.meet();
        rank.window->combine(args, kNoPoll);
      },
      false);
}

TEST(more_blocks_than_fit_are_refused) {
  with_ranks([](Rank& rank) {
    DispatchArgs args;
    give_memory(args);
    args.capacity = 4;
    args.max_tokens = 16;
    args.hidden = 32;
    args.row_bytes = 64;
    args.dtype = Dtype::kBf16;
    args.num_blocks = 45;
    args.timeout_ns = kTimeoutNs;
    args.stream = stream_of(rank.me);
    const Error refused = error_of([&] { rank.window->dispatch(args, kNoPoll); });
    CHECK_EQ(refused.code, ErrorCode::kInvalidArgument);
    says(refused, "num_sms is 45; allowed: 1..40");
    CHECK_EQ(rank.window->heap_used(), u64{0});
    rank.dispatch(4);
    rank.meet();
  });
}

TEST(closed_is_closed) {
  with_ranks([](Rank& rank) {
    rank.window->close();
    rank.window->close();
    CHECK_EQ(error_of([&] { rank.dispatch(4); }).code, ErrorCode::kInvalidState);
    CHECK_EQ(error_of([&] { rank.window->reserve(1, 1); }).code, ErrorCode::kInvalidState);
    CHECK(!rank.window->owns(4096));
    CHECK_EQ(rank.window->heap_used(), u64{0});
    CHECK(!rank.window->take_bad_ids().has_value());
  });
}

TEST(what_replays_may_use_is_given_back_when_their_graphs_are_gone) {
  with_ranks([](Rank& rank) {
    const u64 graph = 80 + static_cast<u64>(rank.me), other_graph = graph + kNumRanks;
    for (const u64 id : {graph, other_graph}) {
      fake_cuda::begin_capture(stream_of(rank.me), id);
      rank.dispatch(4);
      rank.dispatch(4);
      fake_cuda::end_capture(stream_of(rank.me));
      CHECK_EQ(fake_cuda::num_held_by(id), 1);
    }
    rank.meet();
    const int num_mapped = fake_cuda::num_mapped();
    static std::array<const void*, kNumRanks> pages;
    pages[static_cast<size_t>(rank.me)] = view_of(rank).host;
    rank.meet();
    fake_cuda::destroy_graph(graph);
    rank.window->close();  // comes back
    rank.meet();
    CHECK_EQ(fake_cuda::num_mapped(), num_mapped);
    std::vector<void*> others;  // would be the ranks' own, had they been given back
    for (int other = 0; other < kNumRanks && rank.me == 0; ++other) others.push_back(rank.gpu->take_host_page());
    for (void* other : others) {
      CHECK(std::find(pages.begin(), pages.end(), other) == pages.end());
      rank.gpu->give_back_host_page(other);
    }
    rank.meet();
    fake_cuda::destroy_graph(other_graph);  // then with_ranks sees it unmapped
  });
}

TEST(a_graph_that_cannot_keep_the_window_is_an_error_and_nothing_is_lost) {
  with_ranks([](Rank& rank) {
    rank.dispatch(4);
    rank.meet();
    if (rank.me != 0) return;
    for (const char* symbol : {"cuUserObjectCreate", "cuGraphRetainUserObject"}) {
      const u64 heap_used = rank.window->heap_used();
      fake_cuda::begin_capture(stream_of(0), 90);
      fake_cuda::fail_next(symbol, 2);
      CHECK_EQ(error_of([&] { rank.dispatch(4); }).code, ErrorCode::kCudaError);
      CHECK_EQ(rank.window->heap_used(), heap_used);
      fake_cuda::end_capture(stream_of(0));
      fake_cuda::destroy_graph(90);
    }
  });
}

TEST(a_graph_with_memory_of_the_heap_alone_keeps_it_too) {
  with_ranks([](Rank& rank) {
    const u64 graph = 110 + static_cast<u64>(rank.me);
    fake_cuda::begin_capture(stream_of(rank.me), graph);
    CHECK(rank.window->reserve(256, stream_of(rank.me)).has_value());
    fake_cuda::end_capture(stream_of(rank.me));
    CHECK_EQ(fake_cuda::num_held_by(graph), 1);
    rank.meet();
    rank.window->close();
    rank.meet();
    CHECK_EQ(fake_cuda::num_mapped(), kNumRanks * 2 * kNumRanks);
    rank.meet();
    fake_cuda::destroy_graph(graph);
  });
}

// The thread that gives the memory back may not ask streams of others, which record graphs by then.
TEST(what_was_let_go_before_close_was_asked_of_its_stream_then) {
  with_ranks([](Rank& rank) {
    const u64 graph = 120 + static_cast<u64>(rank.me), later = 130 + static_cast<u64>(rank.me);
    fake_cuda::begin_capture(stream_of(rank.me), graph);
    rank.dispatch(4);
    fake_cuda::end_capture(stream_of(rank.me));
    auto let_go = rank.window->reserve(4096, stream_of(rank.me));
    let_go.reset();
    auto held = rank.window->reserve(4096, stream_of(rank.me));
    rank.meet();
    rank.window->close();
    held.reset();
    fake_cuda::begin_capture(stream_of(rank.me), later);
    fake_cuda::destroy_graph(graph);
    CHECK_EQ(fake_cuda::physical_bytes_at_last(0), i64{0});
    fake_cuda::end_capture(stream_of(rank.me));
  });
}

TEST(rebuild_is_refused_while_a_stream_captures_and_goes_on_after_it) {
  with_ranks([](Rank& rank) {
    const u64 graph = 140 + static_cast<u64>(rank.me), spoilt = 150;
    const auto rebuild = [&] { rank.comm->rebuild({0, 1, 2}, in_seconds(20), kNoPoll); };
    rank.dispatch(4);
    rank.meet();
    if (rank.me == 0) {
      fake_cuda::begin_capture(stream_of(0), graph);
      rank.dispatch(4);
      fake_cuda::end_capture(stream_of(0));
      fake_cuda::begin_capture(stream_of(9), spoilt);
      const Error refused = error_of(rebuild);
      CHECK_EQ(refused.code, ErrorCode::kInvalidState);
      says(refused, "a stream of GPU 0 records a CUDA graph");
      fake_cuda::end_capture(stream_of(9));
    }
    rebuild();  // the others have waited
    rank.meet();
    if (rank.me == 0) {
      fake_cuda::destroy_graph(graph);
      fake_cuda::begin_capture(stream_of(9), spoilt);
    }
    rank.meet();
    Error last = error_of(rebuild);  // until it is seen that there is no graph, then nobody asks
    for (int tries = 0; tries < 1000 && last.code == ErrorCode::kInvalidState; ++tries) {
      usleep(1000);
      last = error_of(rebuild);
    }
    CHECK_EQ(last.text, std::string("nothing was raised"));
    if (rank.me == 0) fake_cuda::end_capture(stream_of(9));
  });
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
