// Guards against lost, mixed up or stuck messages, leaked descriptors, waits without an end and goodbyes taken for
// deaths, with ranks as processes and as threads.
#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <random>

#include "bootstrap/open_group.h"
#include "bootstrap/ranks.h"

using namespace weft;        // NOLINT(google-build-using-namespace)
using namespace weft::test;  // NOLINT(google-build-using-namespace)

namespace {

// Runs `body` on every rank of a LocalHub, each in its own thread.
void run_threads(int num_ranks, const std::function<void(Rank&)>& body) {
  auto hub = std::make_shared<LocalHub>(num_ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Rank self{rank, num_ranks, WordPipe(-1), Listener(), {}, connect_threads(hub, rank)};
        body(self);
      } catch (const std::exception& error) {
        report_failure("thread rank", rank, std::string("unexpected exception: ") + error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void run_processes(int num_ranks, const std::function<void(Rank&)>& body) {
  ForkedRanks ranks(num_ranks, [&](Rank& self) {
    self.connect();
    body(self);
  });
  ranks.join_all();
}

// The same body with both kinds of ranks.
void run_both(int num_ranks, const std::function<void(Rank&)>& body) {
  run_processes(num_ranks, body);
  run_threads(num_ranks, body);
}

bool socket_exists(const std::string& name) {
  std::ifstream file("/proc/net/unix");
  for (std::string line; std::getline(file, line);) {
    if (line.find("@" + name) != std::string::npos) return true;
  }
  return false;
}

// Files of ours in a folder that others use at the same time.
std::vector<std::string> weft_files_in(const char* path) {
  std::vector<std::string> names;
  DIR* folder = opendir(path);
  while (const dirent* entry = folder != nullptr ? readdir(folder) : nullptr) {
    if (std::string(entry->d_name).find("weft-") == 0) names.emplace_back(entry->d_name);
  }
  if (folder != nullptr) closedir(folder);
  std::sort(names.begin(), names.end());
  return names;
}

// What the descriptors of this process stand for that have a path in the file system.
std::vector<std::string> files_held() {
  std::vector<std::string> paths;
  for (int fd = 0; fd < 256; ++fd) {
    char target[256] = {};
    if (readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), target, sizeof(target) - 1) <= 0) continue;
    if (target[0] == '/' && std::string(target) != "/memfd:weft (deleted)") paths.emplace_back(target);
  }
  return paths;
}

OwnedFd memory_with(uint64_t word) {
  OwnedFd fd(memfd_create("test", MFD_CLOEXEC));
  CHECK_EQ(write(fd.get(), &word, sizeof(word)), ssize_t{sizeof(word)});
  return fd;
}

}  // namespace

TEST(one_rank_alone) {
  run_both(1, [](Rank& self) {
    self.exchange({0}, 1);
    CHECK(self.plane->dead_ranks().empty());
  });
}

TEST(many_exchanges_with_ranks_at_different_speeds) {
  run_both(4, [](Rank& self) {
    std::mt19937 random(static_cast<uint32_t>(self.rank));
    for (uint64_t tag = 0; tag < 300; ++tag) {
      if (random() % 16 == 0) usleep(static_cast<useconds_t>(random() % 2000));
      self.exchange({0, 1, 2, 3}, tag);
      if (self.rank % 2 == static_cast<int>(tag % 2)) {
        self.exchange(tag % 2 == 0 ? std::vector<int>{0, 2} : std::vector<int>{3, 1}, tag % 7 + 100000);
      }
    }
  });
}

TEST(exchanges_of_one_tag_match_in_order) {
  run_both(3, [](Rank& self) {
    for (uint64_t turn = 0; turn < 50; ++turn) {
      const auto parcels = self.plane->exchange({0, 1, 2}, 9, bytes_of(turn), {}, deadline_after_s(kLongS), {});
      for (const Parcel& parcel : parcels) CHECK(parcel.bytes == bytes_of(turn));
    }
  });
}

TEST(parcels_of_any_size_and_both_sides_at_once) {
  run_both(4, [](Rank& self) {
    uint64_t tag = 0;
    for (const size_t num_bytes : {0, 1, 32767, 32768, 32769, 65536, 1 << 20, 3000001}) {
      self.exchange({0, 1, 2, 3}, ++tag, kLongS, num_bytes);
    }
  });
  run_processes(2, [](Rank& self) { self.exchange({0, 1}, 1, kLongS, kMaxMessageBytes); });
}

TEST(file_descriptors_arrive_once_and_are_closed) {
  run_processes(3, [](Rank& self) {
    const int before = num_open_fds();  // no parcel is under way yet: nobody sends tag 2 before it has our tag 1
    self.exchange({0, 1, 2}, 1);
    for (uint64_t tag = 2; tag < 12; ++tag) {
      const OwnedFd first = memory_with(static_cast<uint64_t>(self.rank));
      const OwnedFd second = memory_with(tag);
      const auto parcels = self.plane->exchange({0, 1, 2}, tag, bytes_of(tag, 100000), {first.get(), second.get()},
                                                deadline_after_s(kLongS), {});
      for (uint64_t source = 0; source < 3; ++source) {
        CHECK_EQ(parcels[source].fds.size(), 2u);
        uint64_t words[2] = {99, 99};
        for (size_t idx = 0; idx < 2; ++idx) {
          const int fd = parcels[source].fds[idx].get();
          CHECK_EQ(fcntl(fd, F_GETFD), FD_CLOEXEC);
          CHECK_EQ(pread(fd, &words[idx], sizeof(uint64_t), 0), ssize_t{sizeof(uint64_t)});
        }
        CHECK_EQ(words[0], source);
        CHECK_EQ(words[1], tag);
      }
    }
    CHECK_EQ(num_open_fds(), before);
    self.exchange({0, 1, 2}, 12);  // who leaves takes its socket with it
  });
}

TEST(nothing_is_left_behind) {
  const auto shm = weft_files_in("/dev/shm");
  const auto tmp = weft_files_in("/tmp");
  ForkedRanks ranks(3, [&](Rank& self) {
    const int before = num_open_fds() - 1;  // its listener is still open
    const auto held_before = files_held();
    const Endpoint own = self.listener.endpoint();
    const std::string name(own.name.data(), own.name_bytes);
    CHECK(socket_exists(name));
    self.connect();
    CHECK(files_held() == held_before);
    CHECK(weft_files_in("/dev/shm") == shm);
    CHECK(weft_files_in("/tmp") == tmp);
    self.exchange({0, 1, 2}, 1);
    self.plane->close();
    self.plane->close();
    CHECK_ERROR(kInvalidState, {}, self.exchange({0, 1, 2}, 2));
    self.plane->publish_abort({});
    self.plane.reset();
    CHECK_EQ(num_open_fds(), before);
    self.parent.tell(1);
    CHECK_EQ(self.parent.hear(), 2u);  // accepted connections bear the name of the listener: until all are closed
    CHECK(!socket_exists(name));
  });
  for (int rank = 0; rank < 3; ++rank) CHECK_EQ(ranks.pipe(rank).hear(), 1u);
  for (int rank = 0; rank < 3; ++rank) ranks.pipe(rank).tell(2);
  ranks.join_all();
}

TEST(wrong_arguments_are_refused_and_change_nothing) {
  run_both(2, [](Rank& self) {
    CHECK_ERROR(kInvalidArgument, {}, self.exchange({0, 1, 2}, 1));
    CHECK_ERROR(kInvalidArgument, {}, self.exchange({-1, 0, 1}, 1));
    CHECK_ERROR(kInvalidArgument, {}, self.exchange({0, 0, 1}, 1));
    CHECK_ERROR(kInvalidArgument, {}, self.exchange({1 - self.rank}, 1));
    CHECK_ERROR(kInvalidArgument, {}, self.exchange({0, 1}, 1, kLongS, kMaxMessageBytes + 1));
    CHECK_ERROR(
        kInvalidArgument, {},
        self.plane->exchange({0, 1}, 1, {}, std::vector<int>(kMaxMessageFds + 1, 0), deadline_after_s(kLongS), {}));
    CHECK_ERROR(kInternalError, {}, self.plane->exchange({0, 1}, 1, {}, {-1}, deadline_after_s(kLongS), {}));
    self.exchange({0, 1}, 1);
  });
  auto hub = std::make_shared<LocalHub>(2);
  const auto taken = connect_threads(hub, 0);
  CHECK_ERROR(kInvalidArgument, {}, connect_threads(hub, 0));
  CHECK_ERROR(kInvalidArgument, {}, connect_threads(hub, 2));
  CHECK_ERROR(kInvalidArgument, {}, connect_threads(nullptr, 0));
  CHECK_ERROR(kInvalidArgument, {}, LocalHub(0));
}

TEST(a_late_rank_is_named_and_never_before_the_deadline) {
  run_both(3, [](Rank& self) {
    self.exchange({0, 1, 2}, 1);
    if (self.rank != 1) {
      const uint64_t start_ns = now_ns();
      CHECK_ERROR(kPeerTimeout, {1}, self.exchange({0, 1, 2}, 2, 4));  // the other one has come by then
      CHECK(now_ns() - start_ns >= 4'000'000'000u);
      CHECK_ERROR(kInvalidArgument, {}, self.exchange({0, 1, 2}, 2, 0.3));  // spent
    }
    CHECK(self.plane->dead_ranks().empty());
    self.exchange({0, 1, 2}, 3);
  });
}

TEST(poll_is_called_often_and_may_leave) {
  run_both(2, [](Rank& self) {
    self.exchange({0, 1}, 1);
    if (self.rank == 0) {
      std::vector<uint64_t> calls;
      const auto poll = [&] {
        calls.push_back(now_ns());
        if (calls.size() == 8) throw Error(ErrorCode::kInvalidState, "Ctrl-C");
      };
      CHECK_ERROR(kInvalidState, {}, self.plane->exchange({0, 1}, 2, {}, {}, deadline_after_s(kLongS), poll));
      CHECK_EQ(calls.size(), 8u);
      // Every 100 ms is promised; the rest is room for a machine that is busy with other things.
      CHECK((calls.back() - calls.front()) / 7 < 1'000'000'000u);
    }
    self.exchange({0, 1}, 3);
  });
}

TEST(published_reasons_reach_all_others_whole) {
  run_both(3, [](Rank& self) {
    Ear ear;
    self.plane->set_abort_handler(ear.handler());
    self.exchange({0, 1, 2}, 1);
    AbortReason told;
    told.code = AbortCode::kPeerTimeout;
    told.rank = 2;
    told.epoch = 7;
    told.era = 6;
    told.group = {1, 2, 3};
    told.incarnation = 8;
    told.sequence = 1ull << 40;
    told.phase = 3;
    told.op_kind = 4;
    told.peers = RankSet::of({0, 2, 1023});
    if (self.rank == 1) self.plane->publish_abort(told);
    if (self.rank != 1) {
      CHECK(ear.wait_for(1));
      const AbortReason heard = ear.heard().at(0);
      CHECK(heard.code == AbortCode::kPeerTimeout && heard.rank == 2 && heard.reporter == 1 && heard.epoch == 7 &&
            heard.sequence == 1ull << 40 && heard.phase == 3 && heard.op_kind == 4);
      CHECK(heard.peers == told.peers);
      CHECK(heard.era == 6 && heard.group == told.group && heard.incarnation == 8);
    }
    CHECK_EQ(ear.heard().size(), self.rank == 1 ? 0u : 1u);
    self.exchange({0, 1, 2}, 2);  // goes on whatever was published
    self.plane->set_abort_handler({});
  });
}

TEST(events_before_the_handler_are_delivered_when_it_is_set) {
  run_both(2, [](Rank& self) {
    self.exchange({0, 1}, 1);
    if (self.rank == 1) {
      AbortReason reason;
      reason.code = AbortCode::kInterrupted;
      self.plane->publish_abort(reason);
      return;  // closes
    }
    while (self.plane->dead_ranks().empty()) usleep(1000);
    usleep(50'000);
    Ear ear;
    self.plane->set_abort_handler(ear.handler());
    CHECK_EQ(ear.heard().size(), 2u);
    CHECK_EQ(ear.count(-1, AbortCode::kInterrupted), 1);
    CHECK_EQ(ear.count(1, AbortCode::kPeerClosed), 1);
    self.plane->set_abort_handler({});
  });
}

TEST(a_handler_may_publish_and_replace_itself) {
  run_both(2, [](Rank& self) {
    Ear ear;
    std::atomic<int> num_first{0};
    self.plane->set_abort_handler([&](const AbortReason& reason) {
      ++num_first;
      if (self.rank == 0) self.plane->publish_abort(reason);
      self.plane->set_abort_handler(ear.handler());
    });
    self.exchange({0, 1}, 1);
    AbortReason reason;
    reason.code = AbortCode::kInterrupted;
    if (self.rank == 1) {
      self.plane->publish_abort(reason);
      while (num_first == 0) usleep(200);  // the answer of rank 0
      self.plane->publish_abort(reason);
    }
    if (self.rank == 0) CHECK(ear.wait_for(1));
    CHECK_EQ(num_first.load(), 1);
    self.exchange({0, 1}, 2);
    self.plane->close();
  });
}

// The last parcels of a rank that closes right after its last exchange must still count.
TEST(notes_and_goodbyes_bring_their_text) {
  run_both(2, [](Rank& self) {
    Ear ear;
    self.plane->set_abort_handler(ear.handler());
    self.exchange({0, 1}, 1);
    const auto note_of_peer_becomes = [&](const std::string& text) {
      const uint64_t deadline_ns = deadline_after_s(kLongS);
      while (text_of(self.plane->note_of(0)) != text && now_ns() < deadline_ns) usleep(500);
      return text_of(self.plane->note_of(0)) == text;
    };
    CHECK(text_of(self.plane->note_of(1)).empty());
    if (self.rank == 0) {
      for (const std::string text : {"first", "second\nline", ""}) {
        Note note;
        note.epoch = 7;
        set_text(note, text);
        self.plane->publish_note(note);
        self.exchange({0, 1}, 2);
      }
      self.plane->close("ValueError: " + std::string(1000, 'y'));
      return;
    }
    for (const std::string text : {"first", "second line", ""}) {
      CHECK(note_of_peer_becomes(text));
      CHECK_EQ(self.plane->note_of(0).epoch, 7u);
      self.exchange({0, 1}, 2);
    }
    CHECK(ear.wait_for(1));
    CHECK_EQ(ear.count(0, AbortCode::kPeerClosed), 1);
    const std::string why = "ValueError: " + std::string(AbortReason::kTextBytes - 12, 'y');
    CHECK_EQ(text_of(ear.heard().at(0)), why);
    try {
      self.exchange({0, 1}, 3);
      CHECK(false);
    } catch (const Error& error) {
      CHECK_EQ(error.text, "rank 0 closed its communicator after " + why);
    }
    self.plane->set_abort_handler({});
  });
}

TEST(goodbye_right_after_an_exchange_loses_nothing) {
  for (int turn = 0; turn < 15; ++turn) {
    run_both(3, [&](Rank& self) {
      Ear ear;
      self.plane->set_abort_handler(ear.handler());
      self.exchange({0, 1, 2}, 1, kLongS, 200'000);
      if (self.rank == turn % 3) return;
      CHECK(ear.wait_for(1));
      CHECK_EQ(ear.count(turn % 3, AbortCode::kPeerClosed), 1);
      CHECK_EQ(ear.count(turn % 3, AbortCode::kPeerLost), 0);
      CHECK_ERROR(kPeerLost, ({turn % 3}), self.exchange({0, 1, 2}, 2));
      self.exchange(all_but(3, {turn % 3}), 3);
      const Detection first = self.plane->detections().at(0);
      CHECK(first.rank == turn % 3 && first.channel == DetectionChannel::kGoodbye);
      for (const Detection& seen : self.plane->detections()) CHECK(seen.channel == DetectionChannel::kGoodbye);
      self.plane->close();
    });
  }
}

TEST(close_in_another_thread_ends_an_exchange) {
  run_both(2, [](Rank& self) {
    self.exchange({0, 1}, 1);
    if (self.rank == 0) {
      std::thread closer([&] {
        usleep(100'000);
        self.plane->close();
      });
      CHECK_ERROR(kInvalidState, {}, self.exchange({0, 1}, 2));
      closer.join();
    } else {
      CHECK_ERROR(kPeerLost, {0}, self.exchange({0, 1}, 3));
    }
  });
}

TEST(a_forked_child_that_drops_the_plane_tells_nobody) {
  run_processes(2, [](Rank& self) {
    self.exchange({0, 1}, 1);
    if (self.rank == 0) {
      const pid_t child = fork();
      if (child == 0) {
        self.plane->close();
        self.plane.reset();
        _exit(0);
      }
      waitpid(child, nullptr, 0);
    }
    self.exchange({0, 1}, 2);
    usleep(20'000);
    CHECK(self.plane->dead_ranks().empty());
    self.exchange({0, 1}, 3);
  });
}

// Rank 0 speaks as soon as it is connected; rank 1 listens when the message has come.
TEST(a_message_that_comes_before_the_listener_is_heard) {
  ForkedRanks ranks(2, [](Rank& self) {
    self.plane = connect_processes(self.rank, self.endpoints, std::move(self.listener), deadline_after_s(kLongS), {},
                                   {}, Capacity{2});
    OpenGroup& group = *self.plane->open_group();
    if (self.rank == 0) {
      for (const uint64_t number : {5, 6}) group.send(1, kDirectTag | number, bytes_of(number), {});
    }
    self.exchange({0, 1}, 1);  // behind them
    std::vector<uint64_t> heard;
    if (self.rank == 1) {
      group.set_listener([&](const OpenGroup::Sender& sender, uint64_t tag, Parcel&& parcel) {
        CHECK_EQ(sender.slot, 0);
        CHECK(parcel.bytes == bytes_of(tag & ~kDirectTag));
        heard.push_back(tag & ~kDirectTag);
      });
      CHECK(heard == std::vector<uint64_t>({5, 6}));
      group.set_listener({});
    }
    self.exchange({0, 1}, 2);
    if (self.rank == 0) group.send(1, kDirectTag | 7, {}, {});
    self.exchange({0, 1}, 3);
    group.set_listener([](const OpenGroup::Sender&, uint64_t, Parcel&&) { CHECK(false); });  // nobody listened any more
    self.plane->close();
  });
  ranks.join_all();
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
