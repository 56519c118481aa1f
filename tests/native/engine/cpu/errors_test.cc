// Guards against wrong use that hangs or harms: ranks that call different things, bad arguments, calls in the wrong state,
// handles of another time, two threads in one window, a wait that can't be interrupted.
#include <functional>
#include <latch>
#include <thread>

#include "bootstrap/ranks.h"
#include "engine/cpu/operation.h"
#include "engine/engine_rank.h"

using namespace weft;
using namespace weft::test;

namespace {

constexpr int kNumRanks = 3;
constexpr u64 kRoom = 8u << 20;

JobShape job_shape(u64 seed) {
  JobShape shape;
  shape.num_ranks = kNumRanks;
  shape.seed = seed;
  return shape;
}

// Ranks as threads: nothing here depends on processes. All stay until the last one is done.
void with_ranks(u64 seed, const std::function<void(EngineRank&)>& body) {
  auto hub = std::make_shared<LocalHub>(kNumRanks);
  std::atomic<int> num_done{0};
  std::vector<std::thread> threads;
  for (int me = 0; me < kNumRanks; ++me) {
    threads.emplace_back([&, me] {
      try {
        EngineRank rank(connect_threads(hub, me), job_shape(seed), kRoom);
        try {
          body(rank);
        } catch (const std::exception& error) {
          report_failure("thread rank", me, std::string("unexpected exception: ") + error.what());
        }
        ++num_done;
        while (num_done < kNumRanks) usleep(500);
      } catch (const std::exception& error) {
        report_failure("thread rank", me, std::string("unexpected exception: ") + error.what());
        ++num_done;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

Call plain_call(u64 id) {
  Call call;
  call.id = id;
  call.hidden = 64;
  call.routing = 5;
  return call;
}

// Dispatch as `change` says; the result is thrown away.
void dispatch_with(EngineRank& rank, const std::function<void(Call&, DispatchArgs&)>& change) {
  Call call = plain_call(7);
  EngineRank::Tensors tensors = rank.make_inputs(call);
  DispatchArgs args = rank.dispatch_args(call, tensors, call.dtype, false, 0);
  change(call, args);
  rank.window().dispatch(args, {});
}

// One rank differs: everyone raises, names a rank that differs from itself, and the next call works.
TEST(ranks_that_call_different_things) {
  using Change = std::function<void(Call&, DispatchArgs&)>;
  const Change changes[] = {
      [](Call&, DispatchArgs& args) { args.layout = Layout::kExpertMajor; },
      [](Call&, DispatchArgs& args) { args.capacity = 17; },
      [](Call&, DispatchArgs& args) { args.dtype = Dtype::kFp16; },
      [](Call&, DispatchArgs& args) { args.hidden = 32, args.row_bytes = 64; },
      [](Call&, DispatchArgs& args) { args.quantize = Quantize::kFp8; },
      [](Call&, DispatchArgs& args) { args.max_tokens -= 1; },
      [](Call&, DispatchArgs& args) { args.layout = Layout::kExpertMajor, args.alignment = 8; },
  };
  with_ranks(1, [&](EngineRank& rank) {
    const int odd_one = 1;
    u64 id = 0;
    for (const Change& change : changes) {
      const bool is_odd = rank.rank() == odd_one;
      const std::vector<int> named = {is_odd ? 0 : odd_one};
      CHECK_ERROR(kInvalidArgument, (named), dispatch_with(rank, is_odd ? change : [](Call&, DispatchArgs&) {}));
      rank.run(id++);
    }
  });
}

TEST(dispatch_against_barrier_against_combine) {
  with_ranks(2, [](EngineRank& rank) {
    Call call = plain_call(3);
    EngineRank::Tensors tensors = rank.make_inputs(call);
    const DispatchResult result = rank.dispatch(call, tensors, call.dtype, false, 0);
    const auto combine = [&] {
      CombineArgs args;
      args.y = address_of(result.x.block.data);
      args.num_rows = result.x.shape[0];
      args.num_tokens = tensors.num_tokens;
      args.send_plan = address_of(tensors.send_plan.data());
      args.recv_plan = address_of(tensors.recv_plan.data());
      args.recv_plan_len = static_cast<i64>(tensors.recv_plan.size());
      args.dtype = call.dtype;
      args.layout = call.layout;
      args.hidden = call.hidden;
      args.max_tokens = rank.shape().max_tokens;
      args.timeout_ns = 30'000'000'000;
      std::vector<u8> out(static_cast<size_t>(tensors.num_tokens * call.hidden * 2));
      args.out = address_of(out.data());
      rank.window().combine(args, {});
    };
    const std::vector<int> named = {rank.rank() == 0 ? 1 : 0};
    if (rank.rank() == 0) CHECK_ERROR(kInvalidArgument, (named), rank.barrier());
    if (rank.rank() == 1) CHECK_ERROR(kInvalidArgument, (named), combine());
    if (rank.rank() == 2) CHECK_ERROR(kInvalidArgument, (named), dispatch_with(rank, [](Call&, DispatchArgs&) {}));
    combine();  // the handle is still good
    rank.run(11);
  });
}

// Refused before anything is sent: the others wait meanwhile, and the call may be repeated.
TEST(bad_arguments_are_refused_locally_and_may_be_corrected) {
  using Change = std::function<void(Call&, DispatchArgs&)>;
  const Change changes[] = {
      [](Call&, DispatchArgs& args) { args.num_tokens = args.max_tokens + 1; },
      [](Call&, DispatchArgs& args) { args.num_tokens = -1; },
      [](Call&, DispatchArgs& args) { args.max_tokens = 1 << 20; },
      [](Call&, DispatchArgs& args) { args.capacity = -2; },
      [](Call&, DispatchArgs& args) { args.layout = Layout::kMasked; },  // without a capacity
      [](Call&, DispatchArgs& args) { args.alignment = 0; },
      [](Call&, DispatchArgs& args) { args.row_bytes = 24; },
      [](Call&, DispatchArgs& args) { args.row_bytes = 1 << 20; },
      [](Call&, DispatchArgs& args) { args.scale_row_bytes = -4; },
      [](Call&, DispatchArgs& args) { args.quantize = Quantize::kFp8, args.dtype = Dtype::kBytes; },
  };
  with_ranks(3, [&](EngineRank& rank) {
    for (const Change& change : changes) {
      if (rank.rank() == 0) CHECK_ERROR(kInvalidArgument, {}, dispatch_with(rank, change));
      dispatch_with(rank, [](Call&, DispatchArgs&) {});
    }
    rank.run(5);
  });
}

TEST(handles_of_another_shape_time_or_content) {
  with_ranks(4, [](EngineRank& rank) {
    Call call = plain_call(3);
    EngineRank::Tensors tensors = rank.make_inputs(call);
    rank.dispatch(call, tensors, call.dtype, false, 0);
    EngineRank::Tensors other = rank.make_inputs(call);
    rank.dispatch(call, other, call.dtype, false, 0);
    const auto cached_with = [&](const std::function<void(EngineRank::Tensors&)>& damage) {
      EngineRank::Tensors copy = tensors;
      damage(copy);
      rank.dispatch(call, copy, call.dtype, true, 0);
    };
    CHECK_ERROR(kInvalidState, {}, cached_with([](auto& t) { t.send_plan[0] ^= 1; }));
    CHECK_ERROR(kInvalidState, {}, cached_with([](auto& t) { t.recv_plan[0] ^= 1; }));
    CHECK_ERROR(kInvalidState, {}, cached_with([&](auto& t) { t.recv_plan = other.recv_plan; }));
    CHECK_ERROR(kInvalidState, {}, cached_with([](auto& t) { t.recv_plan.pop_back(); }));
    CHECK_ERROR(kInvalidState, {}, cached_with([](auto& t) { t.recv_plan.clear(); }));
    CHECK_ERROR(kInvalidArgument, {}, cached_with([](auto& t) { t.num_tokens += t.num_tokens > 0 ? -1 : 1; }));
    rank.dispatch(call, tensors, call.dtype, true, 0);
    rank.rebuild(all_but(kNumRanks));
    CHECK_ERROR(kInvalidState, {}, cached_with([](auto&) {}));  // of the epoch before
    rank.run(8);
  });
}

TEST(closed_windows_and_communicators) {
  with_ranks(5, [](EngineRank& rank) {
    rank.run(0);
    rank.window().close();
    CHECK_ERROR(kInvalidState, {}, rank.barrier());
    rank.window().close();
    rank.comm().close();
    rank.comm().close();
    CHECK_ERROR(kInvalidState, {}, rank.barrier());
    CHECK_ERROR(kInvalidState, {}, rank.rebuild({rank.rank()}));
  });
}

// Ranks leave their last call one by one: who is done may close while others still wait for a third.
TEST(a_goodbye_ends_only_what_needs_its_sender) {
  for (int trial = 0; trial < 20; ++trial) {
    with_ranks(20, [&](EngineRank& rank) {
      rank.run(0);
      if (rank.rank() == trial % kNumRanks) usleep(4000);
      rank.barrier();
      if (trial % 2 != 0) rank.run(static_cast<u64>(trial));
      rank.comm().close();
    });
  }
}

TEST(a_rank_that_closes_instead_of_calling_is_named) {
  with_ranks(21, [](EngineRank& rank) {
    rank.run(0);
    if (rank.rank() == 1) return rank.comm().close();
    CHECK_ERROR(kPeerLost, {1}, rank.run(1));
    CHECK_ERROR(kPeerLost, {1}, rank.run(2));
    rank.rebuild({0, 2});
    rank.run(3);
  });
}

TEST(a_second_thread_is_turned_away) {
  std::atomic<bool> is_waiting{false};
  std::latch has_turned_away(1);
  with_ranks(6, [&](EngineRank& rank) {
    rank.run(0);
    if (rank.rank() != 0) {
      has_turned_away.wait();  // until then the first thread stays inside
      return rank.barrier();
    }
    std::thread waiting([&] { rank.window().barrier(30'000'000'000, [&] { is_waiting = true; }); });
    while (!is_waiting) usleep(500);
    CHECK_ERROR(kInvalidState, {}, rank.barrier());
    CHECK_ERROR(kInvalidState, {}, rank.rebuild(all_but(kNumRanks)));
    has_turned_away.count_down();
    waiting.join();
  });
}

// Ctrl-C: the poll throws. Its rank gets its own exception within 0.2 s, the others an error that names it.
TEST(an_interrupted_wait_ends_everyone) {
  struct Interrupt {};
  with_ranks(7, [](EngineRank& rank) {
    rank.run(0);
    if (rank.rank() == 2) {
      while (!rank.comm().is_broken()) usleep(500);  // one that has come lets rank 0 through without a wait
      CHECK_ERROR(kPeerTimeout, {0}, rank.barrier());
    } else if (rank.rank() == 1) {
      CHECK_ERROR(kPeerTimeout, {0}, rank.barrier());
    } else {
      const uint64_t start_ns = now_ns();
      bool has_thrown = false;
      try {
        rank.window().barrier(30'000'000'000, [] { throw Interrupt{}; });
      } catch (const Interrupt&) {
        has_thrown = true;
      }
      CHECK(has_thrown);
      CHECK(now_ns() - start_ns < 5'000'000'000);
    }
    rank.rebuild(all_but(kNumRanks));
    rank.run(1);
  });
}

// Whichever a rank sees first: else ranks raise different errors for one call.
TEST(of_two_ranks_that_refuse_the_lower_one_is_named) {
  with_ranks(9, [](EngineRank& rank) {
    OperationConfig config;
    config.kind = OpKind::kBarrier;
    const Poll no_poll;
    const auto call = [&] {
      cpu::Operation op(rank.window(), config, 30'000'000'000, no_poll);
      if (rank.rank() != 0) op.refuse(Phase::kCount, ErrorCode::kCapacityExceeded, "no room");
      for (int peer : op.peers()) op.send(Phase::kCount, peer, [] {});
      op.wait_all(Phase::kCount);
    };
    const std::vector<int> named = {std::max(rank.rank(), 1)};
    CHECK_ERROR(kCapacityExceeded, (named), call());
    rank.run(12);
  });
}

TEST(an_abort_from_another_thread_ends_a_wait_and_everyone_s_next_call) {
  with_ranks(10, [](EngineRank& rank) {
    rank.run(13);
    std::thread watchdog;
    if (rank.rank() == 0) {
      watchdog = std::thread([&] {
        usleep(100'000);
        rank.comm().abort("no progress");
      });
    } else {
      while (!rank.comm().is_broken()) usleep(500);  // calls nothing until then
    }
    const uint64_t start_ns = now_ns();
    CHECK_ERROR(kAborted, {0}, rank.barrier());
    CHECK(now_ns() - start_ns < 20'000'000'000);  // its deadline is later
    if (rank.rank() == 0) watchdog.join();
    CHECK_ERROR(
        kAborted, {0}, try { rank.barrier(); } catch (const Error& error) {
          CHECK_EQ(error.reason, std::string("no progress"));
          throw;
        });
    rank.rebuild({0, 1, 2});
    rank.run(14);
  });
}

TEST(rebuild_refuses_senseless_lists) {
  std::latch has_made_its_calls(1);
  with_ranks(8, [&](EngineRank& rank) {
    const int me = rank.rank();
    CHECK_ERROR(kInvalidArgument, {}, rank.rebuild({}));
    CHECK_ERROR(kInvalidArgument, {}, rank.rebuild({me, me}));
    CHECK_ERROR(kInvalidArgument, {}, rank.rebuild({me, 7}));
    CHECK_ERROR(kInvalidArgument, {}, rank.rebuild({-1, me}));
    CHECK_ERROR(kInvalidArgument, {}, rank.rebuild({(me + 1) % kNumRanks}));  // without itself
    rank.run(0);
    rank.rebuild(all_but(kNumRanks));  // a whole communicator may be rebuilt too
    rank.run(1);
    if (me == 2) return has_made_its_calls.count_down();
    has_made_its_calls.wait();
    rank.rebuild({0, 1});
    rank.run(2);
    CHECK_ERROR(kInvalidArgument, {}, rank.rebuild({0, 1, 2}));  // who was left out does not come back
  });
}

TEST(windows_of_different_shapes_are_refused) {
  auto hub = std::make_shared<LocalHub>(2);
  std::vector<std::thread> threads;
  for (int me = 0; me < 2; ++me) {
    threads.emplace_back([&, me] {
      JobShape shape = job_shape(9);
      shape.num_ranks = 2;
      shape.top_k = 2 + me;
      CHECK_THROWS(EngineRank(connect_threads(hub, me), shape, kRoom), Error,
                   [](const Error& error) { CHECK_EQ(error.code, ErrorCode::kInvalidArgument); });
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv); }
