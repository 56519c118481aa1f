// Guards against what belongs to no member being believed or kept: aborts of strangers and of groups that split and count
// alike, parcels of ranks that were left out, a rebuild that is left though it is complete, and epochs that wrap.
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <thread>

#include "bootstrap/ranks.h"
#include "engine/engine_rank.h"

using namespace weft;
using namespace weft::test;

namespace {

constexpr double kSoonS = 10;

// Every rank of a hub in a thread of its own, with its control plane.
void with_planes(int num_ranks, const std::function<void(int rank, std::unique_ptr<ControlPlane> plane)>& body) {
  auto hub = std::make_shared<LocalHub>(num_ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank, connect_threads(hub, rank));
      } catch (const std::exception& error) {
        report_failure("thread rank", rank, std::string("unexpected exception: ") + error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

bool comes_true(const std::function<bool()>& what) {
  const uint64_t deadline_ns = deadline_after_s(kSoonS);
  while (!what() && now_ns() < deadline_ns) usleep(500);
  return what();
}

void rebuild(Communicator& comm, const std::vector<int>& ranks) { comm.rebuild(ranks, deadline_after_s(kLongS), {}); }

AbortReason late(int rank, u32 epoch, const std::vector<int>& members) {
  AbortReason reason;
  reason.code = AbortCode::kPeerTimeout;
  reason.rank = rank;
  reason.epoch = epoch;
  reason.members = mask_of(members);
  return reason;
}

// A rank that speaks the messages of rebuild without an engine: one with the same members in `epoch`, without windows.
void take_part_in_rebuild(ControlPlane& plane, const std::vector<int>& ranks, u32 epoch, u64 attempt = 0) {
  struct Proposal {
    u64 mask, next_window_id;
    u32 epoch, num_windows;
  } proposal{mask_of(ranks), 1, epoch, 0};
  const u64 hash = hash_bytes(&proposal.mask, sizeof(proposal.mask)) & 0x3ffff;
  const u64 tag = u64{1} << 62 | hash << 44 | attempt << 12;
  std::vector<std::byte> bytes(sizeof(proposal));
  std::memcpy(bytes.data(), &proposal, sizeof(proposal));
  plane.exchange(ranks, tag, bytes, {}, deadline_after_s(kLongS), {});
  plane.exchange(ranks, tag + 1, {}, {}, deadline_after_s(kLongS), {});
}

// Rank 0 has a communicator in epoch 1 that is rebuilt with rank 1; what rank 1 and rank 2 publish before and after that is
// given. Returns whether rank 0 broke.
bool is_broken_after(const std::function<void(int rank, ControlPlane& plane, bool is_rebuilt)>& publish) {
  bool is_broken = false;
  std::atomic<int> num_published{0}, stage{0};
  with_planes(3, [&](int rank, std::unique_ptr<ControlPlane> plane) {
    if (rank == 0) {
      auto comm = Communicator::create(std::move(plane));
      CHECK(comes_true([&] { return num_published == 2; }));
      rebuild(*comm, {0, 1});
      CHECK_EQ(comm->epoch(), u32{2});
      stage = 1;
      CHECK(comes_true([&] { return num_published == 4; }));
      is_broken = comm->is_broken();  // among threads what was published has been heard
      stage = 2;
      comm->close();
      return;
    }
    publish(rank, *plane, false);
    ++num_published;
    if (rank == 1) take_part_in_rebuild(*plane, {0, 1}, 1);
    CHECK(comes_true([&] { return stage == 1; }));
    publish(rank, *plane, true);
    ++num_published;
    CHECK(comes_true([&] { return stage == 2; }));
  });
  return is_broken;
}

}  // namespace

TEST(an_abort_of_a_member_breaks_its_epoch) {
  CHECK(is_broken_after([](int rank, ControlPlane& plane, bool is_rebuilt) {
    if (rank == 1 && is_rebuilt) plane.publish_abort(late(0, 2, {0, 1}));
  }));
}

// Rank 1 may be in the new epoch already, and have left it broken, when rank 0 enters it.
TEST(an_abort_that_comes_before_its_epoch_breaks_it) {
  CHECK(is_broken_after([](int rank, ControlPlane& plane, bool is_rebuilt) {
    if (rank == 1 && !is_rebuilt) plane.publish_abort(late(0, 2, {0, 1}));
  }));
}

TEST(an_abort_of_a_rank_that_was_left_out_breaks_nobody) {
  for (const bool says_late : {false, true}) {
    CHECK(!is_broken_after([&](int rank, ControlPlane& plane, bool is_rebuilt) {
      if (rank == 2 && is_rebuilt == says_late) plane.publish_abort(late(0, 2, {0, 1}));
      if (rank == 2 && is_rebuilt == says_late) plane.publish_abort(late(0, 2, {0, 2}));
    }));
  }
}

// A member that gave up the rebuild may be in an epoch with the same number and other members.
TEST(an_abort_of_another_group_with_the_same_epoch_breaks_nobody) {
  for (const bool says_late : {false, true}) {
    CHECK(!is_broken_after([&](int rank, ControlPlane& plane, bool is_rebuilt) {
      if (rank == 1 && is_rebuilt == says_late) plane.publish_abort(late(1, 2, {1, 2}));
    }));
  }
}

TEST(nobody_is_believed_to_be_this_ranks_own_control_plane) {
  CHECK(!is_broken_after([](int rank, ControlPlane& plane, bool is_rebuilt) {
    AbortReason reason = late(1, 0, {});
    reason.code = AbortCode::kPeerLost;
    reason.is_ours = 1;
    if (rank == 1 && is_rebuilt) plane.publish_abort(reason);
  }));
}

TEST(groups_that_split_don_t_hear_of_each_others_deaths) {
  ForkedRanks ranks(4, [](Rank& self) {
    self.connect();
    auto comm = Communicator::create(std::move(self.plane));
    const int first = self.rank / 2 * 2;
    rebuild(*comm, {first, first + 1});
    self.parent.tell(1);
    if (self.rank == 3) pause();
    if (self.rank == 2) {
      CHECK_ERROR(kPeerLost, {3}, comm->exchange(u64{1} << 60 | 1, {}, {}, deadline_after_s(kLongS), {}));
      CHECK(comes_true([&] { return comm->is_broken(); }));         // the exchange may know of the death first
      CHECK_ERROR(kPeerLost, {3}, comm->fail(late(3, 2, {2, 3})));  // tells everyone
      self.parent.tell(2);
      CHECK_EQ(self.parent.hear(), 3u);
    } else {
      CHECK_EQ(self.parent.hear(), 3u);
      CHECK(comes_true([&] { return comm->detections().size() >= 1; }));
      comm->exchange(u64{1} << 60 | 1, {}, {}, deadline_after_s(kLongS), {});
      CHECK(!comm->is_broken());
    }
    self.parent.tell(4);
    CHECK_EQ(self.parent.hear(), 5u);
  });
  for (int rank = 0; rank < 4; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
  ranks.signal(3, SIGKILL);
  ranks.join(3, SIGKILL);
  CHECK_EQ(ranks.pipe(2).hear(), 2u);
  for (int rank = 0; rank < 3; ++rank) ranks.pipe(rank).tell(3);
  for (int rank = 0; rank < 3; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 4u);
  for (int rank = 0; rank < 3; ++rank) ranks.pipe(rank).tell(5);
  ranks.join_all({3});
}

// A rank that has ended an attempt begins the next one at once: nobody may leave the one that is complete.
TEST(no_rebuild_is_swallowed_by_the_next_one) {
  constexpr u32 kRebuilds = 3000;
  for (const int num_ranks : {2, 3}) {
    ForkedRanks ranks(num_ranks, [&](Rank& self) {
      self.connect();
      auto comm = Communicator::create(std::move(self.plane));
      for (u32 turn = 0; turn < kRebuilds; ++turn) rebuild(*comm, all_but(num_ranks));
      CHECK_EQ(comm->epoch(), kRebuilds + 1);
      self.parent.tell(1);
      CHECK_EQ(self.parent.hear(), 2u);
    });
    for (int rank = 0; rank < num_ranks; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
    for (int rank = 0; rank < num_ranks; ++rank) ranks.pipe(rank).tell(2);
    ranks.join_all();
  }
}

TEST(a_rebuild_begins_above_the_highest_epoch_of_its_members) {
  with_planes(3, [](int rank, std::unique_ptr<ControlPlane> plane) {
    auto comm = Communicator::create(std::move(plane), rank == 1 ? 70'000 : 3);
    rebuild(*comm, {0, 1, 2});
    CHECK_EQ(comm->epoch(), u32{70'001});
    comm->exchange(u64{1} << 60 | 1, {}, {}, deadline_after_s(kLongS), {});
    comm->close();
  });
}

TEST(epochs_go_on_beyond_16_bits) {
  JobShape shape;
  shape.num_ranks = 2;
  shape.num_local = 2;
  shape.max_tokens = 16;
  shape.max_row_bytes = 256;
  with_planes(2, [&](int, std::unique_ptr<ControlPlane> plane) {
    EngineRank rank(std::move(plane), shape, 1 << 20, 0, 0xfffe);
    const Call call = Call::make(shape, 1);
    EngineRank::Tensors old = rank.make_inputs(call);
    const DispatchResult result = rank.dispatch(call, old, call.dtype, false, 0);
    for (u32 epoch = 0xffff; epoch < 0x10003; ++epoch) {
      rank.rebuild({0, 1});
      CHECK_EQ(rank.comm().epoch(), epoch);
      rank.run_many(epoch, 3);
      CHECK_ERROR(kInvalidState, {}, rank.dispatch(call, old, call.dtype, true, 1));
    }
    rank.barrier();
    rank.close();
  });
}

// The 16 bits that signals carry are those of the handle's epoch again.
TEST(a_handle_of_65536_epochs_ago_is_refused) {
  JobShape shape;
  shape.num_ranks = 1;
  shape.num_local = 2;
  shape.max_tokens = 16;
  shape.max_row_bytes = 256;
  with_planes(1, [&](int, std::unique_ptr<ControlPlane> plane) {
    EngineRank rank(std::move(plane), shape, 1 << 20, 0, 0xffff'0000);
    const Call call = Call::make(shape, 1);
    EngineRank::Tensors old = rank.make_inputs(call);
    rank.dispatch(call, old, call.dtype, false, 0);
    for (auto* plan : {&old.send_plan, &old.recv_plan}) {
      CHECK_EQ((*plan)[1], static_cast<i32>(0xffff'0000));
      (*plan)[1] -= 0x10000;
    }
    CHECK_ERROR(kInvalidState, {}, rank.dispatch(call, old, call.dtype, true, 1));
    rank.close();
  });
}

TEST(the_last_epoch_is_the_last) {
  with_planes(2, [](int, std::unique_ptr<ControlPlane> plane) {
    auto comm = Communicator::create(std::move(plane), std::numeric_limits<u32>::max() - 1);
    rebuild(*comm, {0, 1});
    CHECK_EQ(comm->epoch(), std::numeric_limits<u32>::max());
    CHECK_ERROR(kInvalidState, {}, rebuild(*comm, {0, 1}));
    CHECK_EQ(comm->epoch(), std::numeric_limits<u32>::max());
    comm->close();
  });
}

TEST(an_exchange_with_too_large_a_number_is_refused) {
  with_planes(1, [](int, std::unique_ptr<ControlPlane> plane) {
    auto comm = Communicator::create(std::move(plane));
    const auto exchange = [&](u64 number) {
      comm->exchange(u64{1} << 60 | number, {}, {}, deadline_after_s(kLongS), {});
    };
    exchange((u64{1} << kTagNumberBits) - 1);
    CHECK_ERROR(kInternalError, {}, exchange(u64{1} << kTagNumberBits));
  });
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
