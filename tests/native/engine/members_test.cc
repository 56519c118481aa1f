// Guards against what belongs to no member being believed or kept (aborts of strangers, parcels of ranks that were left out),
// against groups that split, evicted ranks that are not told, a rebuild that is left though it is complete, and epochs that wrap.
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <thread>

#include "base/log.h"
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

// As the communicator of `rank` would say it in `epoch`, one that a recovery has made.
AbortReason late(const ControlPlane& plane, int rank, u32 epoch) {
  AbortReason reason;
  reason.code = AbortCode::kPeerTimeout;
  reason.rank = rank;
  reason.epoch = reason.era = epoch;
  reason.group = plane.ledger().group();
  reason.incarnation = plane.incarnations()[static_cast<size_t>(plane.rank())];
  return reason;
}

// A rank that speaks the messages of a meeting without an engine: one without windows.
void take_part_in_meeting(ControlPlane& plane, const std::vector<int>& ranks, u32 epoch) {
  const std::array<u64, 2> proposal{1, 0};  // next window, number of windows
  std::vector<std::byte> bytes(sizeof(proposal));
  std::memcpy(bytes.data(), proposal.data(), sizeof(proposal));
  plane.exchange(ranks, u64{1} << 62 | u64{epoch} << 12, bytes, {}, deadline_after_s(kLongS), {});
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
    if (rank == 1) take_part_in_meeting(*plane, {0, 1}, 2);
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
    if (rank == 1 && is_rebuilt) plane.publish_abort(late(plane, 0, 2));
  }));
}

// Rank 1 may be in the new epoch already, and have left it broken, when rank 0 enters it.
TEST(an_abort_that_comes_before_its_epoch_breaks_it) {
  CHECK(is_broken_after([](int rank, ControlPlane& plane, bool is_rebuilt) {
    if (rank == 1 && !is_rebuilt) plane.publish_abort(late(plane, 0, 2));
  }));
}

// Two ranks find two others late at the same time: who was second says to all what it raises itself.
TEST(who_gives_up_tells_the_first_reason) {
  std::atomic<int> told{-1};
  std::atomic<bool> is_listening{false}, is_done{false};
  with_planes(3, [&](int rank, std::unique_ptr<ControlPlane> plane) {
    if (rank == 0) {
      auto comm = Communicator::create(std::move(plane));
      CHECK(comes_true([&] { return comm->is_broken(); }));
      AbortReason own;
      own.code = AbortCode::kPeerTimeout;
      own.rank = 1;
      own.peers = RankSet::of({1});
      comm->give_up(own);
      CHECK(comes_true([&] { return told != -1; }));
      is_done = true;
      comm->close();
      return;
    }
    if (rank == 2) {
      plane->set_abort_handler([&](const AbortReason& reason) {
        if (reason.reporter == 0 && reason.code == AbortCode::kPeerTimeout) told = reason.rank;
      });
      is_listening = true;
    } else {
      CHECK(comes_true([&] { return is_listening.load(); }));
      plane->publish_abort(late(*plane, 2, 1));
    }
    CHECK(comes_true([&] { return is_done.load(); }));
    plane->set_abort_handler({});
  });
  CHECK_EQ(told.load(), 2);
}

TEST(an_abort_of_a_rank_that_was_left_out_breaks_nobody) {
  for (const bool says_late : {false, true}) {
    CHECK(!is_broken_after([&](int rank, ControlPlane& plane, bool is_rebuilt) {
      if (rank == 2 && is_rebuilt == says_late) plane.publish_abort(late(plane, 0, 2));
      if (rank == 2 && is_rebuilt == says_late) plane.publish_abort(late(plane, 0, 3));
    }));
  }
}

// What is heard of the old epoch at the very moment in which the new one is entered is not taken over into it.
TEST(an_abort_of_the_old_epoch_does_not_slip_into_the_new_one) {
  for (int trial = 0; trial < 1500; ++trial) {
    std::atomic<int> num_in{0}, num_broken{0};
    with_planes(3, [&](int rank, std::unique_ptr<ControlPlane> plane) {
      if (rank == 2) {
        const AbortReason old = late(*plane, 0, 1);
        while (num_in < 2) plane->publish_abort(old);
        return;
      }
      auto comm = Communicator::create(std::move(plane));
      rebuild(*comm, {0, 1});
      ++num_in;
      CHECK(comes_true([&] { return num_in == 2; }));
      if (comm->is_broken()) ++num_broken;
      comm->close();
    });
    CHECK_EQ(num_broken.load(), 0);
  }
}

// Of another group, of another life of the same rank, or of an epoch whose pages are no more.
TEST(an_abort_of_a_stranger_or_of_old_pages_breaks_nobody) {
  for (const int what : {0, 1, 2}) {
    for (const bool says_late : {false, true}) {
      CHECK(!is_broken_after([&](int rank, ControlPlane& plane, bool is_rebuilt) {
        AbortReason reason = late(plane, 1, what == 2 ? 1 : 2);
        if (what == 0) reason.group[0] ^= 1;
        if (what == 1) reason.incarnation ^= 1;
        if (what == 2 && !is_rebuilt) return;  // then it is of the epoch that is broken by it
        if (rank == 1 && is_rebuilt == says_late) plane.publish_abort(reason);
      }));
    }
  }
}

TEST(nobody_is_believed_to_be_this_ranks_own_control_plane) {
  CHECK(!is_broken_after([](int rank, ControlPlane& plane, bool is_rebuilt) {
    AbortReason reason = late(plane, 1, 0);
    reason.code = AbortCode::kPeerLost;
    reason.is_ours = 1;
    if (rank == 1 && is_rebuilt) plane.publish_abort(reason);
  }));
}

// Of lists that share no rank one is decided; the others are told at once, and neither side breaks the other.
TEST(lists_that_differ_don_t_split_a_group) {
  for (int trial = 0; trial < 20; ++trial) {
    std::atomic<int> num_in{0}, num_evicted{0}, num_done{0};
    with_planes(4, [&](int rank, std::unique_ptr<ControlPlane> plane) {
      auto comm = Communicator::create(std::move(plane));
      const int first = rank / 2 * 2;
      try {
        rebuild(*comm, {first, first + 1});
        ++num_in;
      } catch (const Error& error) {
        CHECK(error.code == ErrorCode::kEvicted);
        CHECK_EQ(error.sequence, u64{2});
        ++num_evicted;
      }
      CHECK(comes_true([&] { return num_in + num_evicted == 4; }));
      if (comm->active_ranks().size() == 2) {
        comm->exchange(u64{1} << 60 | 1, {}, {}, deadline_after_s(kLongS), {});
        CHECK(!comm->is_broken());
        CHECK_EQ(comm->evicted_ranks().size() + comm->safe_to_delete().size(), size_t{2});
      } else {
        CHECK_ERROR(kEvicted, {rank}, comm->recover({}, 1, deadline_after_s(kLongS), {}));
        CHECK_ERROR(kEvicted, {rank}, comm->exchange(u64{1} << 60 | 1, {}, {}, deadline_after_s(kLongS), {}));
      }
      ++num_done;
      CHECK(comes_true([&] { return num_done == 4; }));
      comm->close();
    });
    CHECK_EQ(num_in.load(), 2);
    CHECK_EQ(num_evicted.load(), 2);
  }
}

TEST(a_rank_is_told_that_another_set_was_decided) {
  std::atomic<int> stage{0};
  with_planes(3, [&](int rank, std::unique_ptr<ControlPlane> plane) {
    auto comm = Communicator::create(std::move(plane));
    if (rank == 0) {
      CHECK(comes_true([&] { return comm->is_broken(); }));  // rank 2 is broken, too, before it is told
      rebuild(*comm, {0, 1});
    }
    if (rank == 1) {
      CHECK(comes_true([&] { return stage == 1; }));
      CHECK_ERROR(kPeerLost, {2}, rebuild(*comm, {0, 1, 2}));
      CHECK_ERROR(kInvalidArgument, {}, rebuild(*comm, {1, 2}));
      rebuild(*comm, {0, 1});
    }
    if (rank == 2) {
      comm->abort("broken already");
      CHECK(comes_true([&] { return comm->reason().code == AbortCode::kEvicted; }));  // told, without a call
      CHECK_ERROR(kEvicted, {2}, comm->raise_if_broken());
      stage = 1;
    } else {
      CHECK_EQ(comm->epoch(), u32{2});
    }
    comm->close();
  });
}

TEST(a_recovery_needs_no_lists_that_agree) {
  constexpr int kRanks = 5;
  for (int trial = 0; trial < 20; ++trial) {
    ForkedRanks ranks(kRanks, [&](Rank& self) {
      self.connect();
      auto comm = Communicator::create(std::move(self.plane));
      self.parent.tell(1);
      if (self.rank == trial % kRanks || self.rank == (trial + 2) % kRanks) pause();
      const std::vector<int> gone = trial % kRanks < (trial + 2) % kRanks
                                        ? std::vector<int>{trial % kRanks, (trial + 2) % kRanks}
                                        : std::vector<int>{(trial + 2) % kRanks, trial % kRanks};
      while (comm->active_ranks() != all_but(kRanks, gone)) comm->recover({}, 1, deadline_after_s(kLongS), {});
      comm->exchange(u64{1} << 60 | 1, {}, {}, deadline_after_s(kLongS), {});
      CHECK(comes_true([&] { return comm->safe_to_delete() == gone; }));
      CHECK(comm->evicted_ranks().empty());
      self.parent.tell(comm->epoch());
      CHECK_EQ(self.parent.hear(), 5u);
    });
    for (int rank = 0; rank < kRanks; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
    const std::vector<int> victims{trial % kRanks, (trial + 2) % kRanks};
    for (const int victim : victims) ranks.signal(victim, SIGKILL);
    for (const int victim : victims) ranks.join(victim, SIGKILL);
    std::vector<u64> epochs;
    for (const int rank : all_but(kRanks, victims)) epochs.push_back(ranks.pipe(rank).hear());
    for (const u64 epoch : epochs) CHECK_EQ(epoch, epochs.front());
    for (const int rank : all_but(kRanks, victims)) ranks.pipe(rank).tell(5);
    ranks.join_all(victims);
  }
}

// Rank 1 alone has found rank 2 lost. Rank 0 has that from it, and decides first.
TEST(a_loss_that_another_rank_has_found_counts_in_a_recovery) {
  std::atomic<bool> has_ended{false};
  with_planes(3, [&](int rank, std::unique_ptr<ControlPlane> plane) {
    if (rank == 0) {
      auto comm = Communicator::create(std::move(plane));
      CHECK(comes_true([&] { return comm->is_broken(); }));
      comm->recover({}, 1, deadline_after_s(kSoonS), {});
      CHECK_EQ(comm->epoch(), u32{2});
      CHECK(comm->active_ranks() == (std::vector<int>{0, 1}));
      has_ended = true;
      comm->close();
      return;
    }
    if (rank == 1) {
      AbortReason lost = late(*plane, 2, 1);
      lost.code = AbortCode::kPeerLost;
      plane->publish_abort(lost);
      take_part_in_meeting(*plane, {0, 1}, 2);
    }
    CHECK(comes_true([&] { return has_ended.load(); }));
  });
}

std::string line_of_a_dispatch(const Communicator& comm) {
  std::string line;
  set_log_sink([&](int, const std::string& text) { line = text; });
  comm.log_left(comm.reason(), static_cast<u32>(OpKind::kDispatch));
  set_log_sink({});
  return line;
}

// A stopped rank is late, and evicted; when it runs on it is told, and has disturbed nobody.
TEST(an_evicted_rank_that_wakes_up_is_told) {
  ForkedRanks ranks(3, [](Rank& self) {
    self.connect();
    const ControlPlane* plane = self.plane.get();
    auto comm = Communicator::create(std::move(self.plane));
    self.parent.tell(1);
    if (self.rank == 2) {
      const uint64_t start_ns = now_ns();
      CHECK_ERROR(kEvicted, {2}, comm->exchange(u64{1} << 60 | 1, {}, {}, deadline_after_s(kLongS), {}));
      CHECK(now_ns() - start_ns < deadline_after_s(kLongS) - now_ns());  // long before its deadline
      CHECK_ERROR(kEvicted, {2}, rebuild(*comm, {0, 1, 2}));
      CHECK_EQ(line_of_a_dispatch(*comm),
               std::string("the others have gone on without rank 2; seen in dispatch by rank 2"));
      CHECK_ERROR(kEvicted, {2}, comm->leave_broken());  // as a call does that was waiting
      comm->abort("I am still here");
      comm->note_refusal("not cut off");
      self.parent.tell(3);
    } else {
      CHECK_EQ(self.parent.hear(), 2u);
      CHECK_ERROR(kPeerTimeout, {2}, comm->rebuild({0, 1, 2}, deadline_after_s(4), {}));  // both are there by then
      self.parent.tell(7);  // a rank that still waits would hear that rank 2 is out
      CHECK_EQ(self.parent.hear(), 8u);
      while (comm->active_ranks().size() != 2) comm->recover({2}, 1, deadline_after_s(kLongS), {});
      CHECK(comm->evicted_ranks() == std::vector<int>{2});
      self.parent.tell(3);
    }
    CHECK_EQ(self.parent.hear(), 4u);
    if (self.rank != 2) {
      comm->exchange(u64{1} << 60 | 2, {}, {}, deadline_after_s(kLongS), {});
      CHECK(!comm->is_broken());
      CHECK(comes_true([&] { return text_of(plane->note_of(2)) == "not cut off"; }));
    }
    self.parent.tell(5);
    CHECK_EQ(self.parent.hear(), 6u);
  });
  for (int rank = 0; rank < 3; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
  ranks.signal(2, SIGSTOP);
  for (const int rank : {0, 1}) ranks.pipe(rank).tell(2);
  for (const int rank : {0, 1}) CHECK_EQ(ranks.pipe(rank).hear(), 7u);
  for (const int rank : {0, 1}) ranks.pipe(rank).tell(8);
  for (const int rank : {0, 1}) CHECK_EQ(ranks.pipe(rank).hear(), 3u);
  ranks.signal(2, SIGCONT);
  CHECK_EQ(ranks.pipe(2).hear(), 3u);
  for (int rank = 0; rank < 3; ++rank) ranks.pipe(rank).tell(4);
  for (int rank = 0; rank < 3; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 5u);
  for (int rank = 0; rank < 3; ++rank) ranks.pipe(rank).tell(6);
  ranks.join_all();
}

// It is lost by its sockets, and lives on: that it has ended is known when its process has.
TEST(the_end_of_a_rank_that_was_left_out_is_proven) {
  ForkedRanks ranks(3, [](Rank& self) {
    const std::set<int> before = open_fds();
    self.connect();
    auto comm = Communicator::create(std::move(self.plane));
    self.parent.tell(1);
    CHECK_EQ(self.parent.hear(), 2u);
    for (const int fd : self.rank == 2 ? open_fds() : before) {
      if (!before.contains(fd)) shutdown(fd, SHUT_RDWR);
    }
    if (self.rank == 2) pause();
    CHECK(comes_true([&] { return comm->is_broken(); }));
    while (comm->active_ranks().size() != 2) comm->recover({}, 1, deadline_after_s(kLongS), {});
    comm->exchange(u64{1} << 60 | 1, {}, {}, deadline_after_s(kLongS), {});
    CHECK(comm->evicted_ranks() == std::vector<int>{2} && comm->safe_to_delete().empty());
    self.parent.tell(3);
    CHECK(comes_true([&] { return comm->safe_to_delete() == std::vector<int>{2}; }));
    CHECK(comm->evicted_ranks().empty());
    self.parent.tell(4);
    CHECK_EQ(self.parent.hear(), 5u);
  });
  for (const int rank : all_but(3)) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
  for (const int rank : all_but(3)) ranks.pipe(rank).tell(2);
  for (const int rank : {0, 1}) CHECK_EQ(ranks.pipe(rank).hear(), 3u);
  ranks.signal(2, SIGKILL);
  ranks.join(2, SIGKILL);
  for (const int rank : {0, 1}) CHECK_EQ(ranks.pipe(rank).hear(), 4u);
  for (const int rank : {0, 1}) ranks.pipe(rank).tell(5);
  ranks.join_all({2});
}

TEST(with_too_few_ranks_nothing_is_decided) {
  std::atomic<int> num_refused{0};
  with_planes(3, [&](int rank, std::unique_ptr<ControlPlane> plane) {
    auto comm = Communicator::create(std::move(plane));
    if (rank == 2) return comm->close();
    CHECK(comes_true([&] { return !comm->detections().empty(); }));
    CHECK_ERROR(kPeerLost, {2}, comm->recover({}, 3, deadline_after_s(kLongS), {}));
    CHECK_ERROR(kInvalidArgument, {}, comm->recover({3}, 1, deadline_after_s(kLongS), {}));
    CHECK_EQ(comm->epoch(), u32{1});
    ++num_refused;
    CHECK(comes_true([&] { return num_refused == 2; }));
    comm->recover({}, 2, deadline_after_s(kLongS), {});
    CHECK_EQ(comm->epoch(), u32{2});
    CHECK(comm->safe_to_delete() == std::vector<int>{2});
    comm->exchange(u64{1} << 60 | 1, {}, {}, deadline_after_s(kLongS), {});
    comm->close();
  });
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
