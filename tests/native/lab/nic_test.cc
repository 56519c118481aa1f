// Guards against a software NIC that loses, mixes up or repeats what it carries, says that a put has settled before it has, or gets stuck
// beside a fault; rings of sync/rail.h over it, whose mistakes (tests/mutants/nic.toml) must show. Processes, threads, and a clock of steps.
#include "nic/nic.h"

#include <cstring>
#include <memory>

#include "base/status.h"
#include "check.h"
#include "lab/rings.h"

using namespace weft;
using namespace weft::nic;
using namespace weft::test;

namespace {

// Ranks of this thread, and a clock that counts what the test says.
class Steps {
 public:
  Steps(int num_ranks, const Model& model, u64 region_bytes, bool are_threads = false) : group_(num_ranks, model) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      memory.emplace_back(region_bytes / sizeof(u64), kPoison);
      Model own = model;
      own.seed += static_cast<u64>(rank);
      nics.push_back(std::make_unique<Nic>(rank, own, group_.segments(are_threads), copier_));
      nics.back()->add_region({reinterpret_cast<u8*>(memory.back().data()), region_bytes, Space::kHost});
    }
  }
  void step(u64 ns = 100) {
    now += ns;
    for (auto& nic : nics) nic->progress(now);
  }
  void run(int num_steps = 2000) {
    for (int idx = 0; idx < num_steps; ++idx) step();
  }

  std::vector<std::vector<u64>> memory;
  std::vector<std::unique_ptr<Nic>> nics;
  u64 now = 0;

 private:
  SharedSegments group_;
  Copier copier_;
};

constexpr u64 kFrame = 64;
Model small_frames(u64 seed) {
  Model model;
  model.seed = seed;
  model.frame_bytes = kFrame;
  return model;
}

// Puts of five frames from rank 0 to rank 1, each with a signal in front of them.
class Puts {
 public:
  static constexpr u64 kNumPuts = 8, kNumWords = 5 * kFrame / sizeof(u64),
                       kRegionBytes = (1 + 2 * kNumWords) * kNumPuts * 8;

  explicit Puts(Steps& steps) : steps_(steps) {
    for (u64 idx = 0; idx < kNumPuts; ++idx) {
      steps.memory[1][idx] = 0;
      for (u64 word = 0; word < kNumWords; ++word) steps.memory[0][from(idx) + word] = value(idx, word);
    }
  }
  void post() {
    for (u64 idx = 0; idx < kNumPuts; ++idx)
      tickets_.push_back(
          steps_.nics[0]->post({1, {0, from(idx) * 8}, {0, to(idx) * 8}, kNumWords * 8, {0, idx * 8}, 1}, steps_.now));
  }
  u64 signal(u64 idx) const { return steps_.memory[1][idx]; }
  bool is_done(u64 idx) const { return steps_.nics[0]->is_done(tickets_[tickets_.size() - kNumPuts + idx]); }
  u64 num_wrong(u64 idx) const {
    u64 count = 0;
    for (u64 word = 0; word < kNumWords; ++word) count += steps_.memory[1][to(idx) + word] != value(idx, word) ? 1 : 0;
    return count;
  }
  void check_settled(u64 expected = 1) const {
    for (u64 idx = 0; idx < kNumPuts; ++idx) {
      CHECK_EQ(signal(idx), expected);
      CHECK(is_done(idx));
      CHECK_EQ(num_wrong(idx), 0u);
    }
  }

 private:
  static u64 from(u64 idx) { return kNumPuts + idx * kNumWords; }
  static u64 to(u64 idx) { return kNumPuts + (kNumPuts + idx) * kNumWords; }
  static u64 value(u64 idx, u64 word) { return idx << 32 | (word + 1); }

  Steps& steps_;
  std::vector<u64> tickets_;
};

// In which order signals came; each is looked at with all its words.
std::vector<u64> order_of(Steps& steps, Puts& puts) {
  std::vector<u64> order;
  std::vector<bool> has_come(Puts::kNumPuts);
  for (int turn = 0; turn < 2000; ++turn) {
    steps.step(50);
    for (u64 idx = 0; idx < Puts::kNumPuts; ++idx) {
      if (puts.signal(idx) == 0) continue;
      CHECK_EQ(puts.num_wrong(idx), 0u);
      if (!has_come[idx]) order.push_back(idx);
      has_come[idx] = true;
    }
  }
  puts.check_settled();
  return order;
}

TEST(puts_overtake_each_other_and_each_signal_is_last_of_its_put) {
  for (const bool are_threads : {false, true}) {
    int num_shuffled = 0;
    for (u64 seed = 0; seed < 50; ++seed) {
      Steps steps(2, small_frames(seed), Puts::kRegionBytes, are_threads);
      Puts puts(steps);
      puts.post();
      const std::vector<u64> order = order_of(steps, puts);
      CHECK_EQ(order.size(), Puts::kNumPuts);
      num_shuffled += std::is_sorted(order.begin(), order.end()) ? 0 : 1;
    }
    CHECK(num_shuffled > 40);
  }
}

TEST(one_port_without_spread_keeps_the_order) {
  Model model = small_frames(1);
  model.num_ports = 1;
  model.spread_ns = 0;
  model.port_bytes_per_s = 1e9;
  Steps steps(2, model, Puts::kRegionBytes);
  Puts puts(steps);
  puts.post();
  const std::vector<u64> order = order_of(steps, puts);
  CHECK(std::is_sorted(order.begin(), order.end()));
}

TEST(rate_and_latency_bound_arrivals) {
  Model model = small_frames(1);
  model.port_bytes_per_s = 1e9;  // a frame in 64 ns
  model.latency_ns = 5000;
  model.spread_ns = 0;
  Steps steps(2, model, Puts::kRegionBytes);
  Puts puts(steps);
  puts.post();
  u64 first_ns = 0, last_ns = 0;
  for (int turn = 0; turn < 10000; ++turn) {
    steps.step(1);
    u64 num_come = 0;
    for (u64 idx = 0; idx < Puts::kNumPuts; ++idx) num_come += puts.signal(idx);
    if (num_come > 0 && first_ns == 0) first_ns = steps.now;
    if (num_come == Puts::kNumPuts && last_ns == 0) last_ns = steps.now;
  }
  // Three of five frames by one port; all forty by two.
  CHECK_EQ(first_ns, 5000u + 3 * 64);
  CHECK_EQ(last_ns, 5000u + 20 * 64);
  puts.check_settled();
}

TEST(two_ports_carry_equal_bytes) {
  Model model;
  std::mt19937_64 random(7);
  for (const double rate : {0.0, 1e9}) {
    model.port_bytes_per_s = rate;
    Egress egress(2, model);
    u64 now = 0;
    for (int idx = 0; idx < 2000; ++idx) {
      now += random() % 200'000;
      egress.post({1, {}, {}, u64{8} << random() % 20, {}, 1}, now);
    }
    const double one = static_cast<double>(egress.port_bytes(0)), other = static_cast<double>(egress.port_bytes(1));
    CHECK(one > 1e8 && one < 1.05 * other && other < 1.05 * one);
  }
}

TEST(a_call_ends_right_on_the_other_port) {
  u64 num_again = 0, num_in_flight = 0;
  for (u64 seed = 0; seed < 200; ++seed) {
    Steps steps(2, small_frames(seed), Puts::kRegionBytes);
    Puts puts(steps);
    puts.post();
    steps.run(static_cast<int>(seed));
    const int lost = static_cast<int>(seed % 2);
    u64 num_signals = 0;
    for (u64 idx = 0; idx < Puts::kNumPuts; ++idx) num_signals += puts.signal(idx);
    num_in_flight += num_signals < Puts::kNumPuts ? 1 : 0;
    steps.nics[0]->lose_port(lost, steps.now);
    const u64 carried = steps.nics[0]->port_bytes(lost);
    steps.run();
    puts.check_settled();
    num_again += steps.nics[1]->num_again();
    puts.post();
    steps.run();
    puts.check_settled(2);
    CHECK_EQ(steps.nics[0]->port_bytes(lost), carried);
  }
  CHECK(num_in_flight > 50);
  CHECK(num_again > 100);  // frames came twice, and counted once
}

TEST(without_a_port_nothing_settles) {
  Steps steps(2, small_frames(1), Puts::kRegionBytes);
  Puts puts(steps);
  for (const int port : {0, 1}) steps.nics[0]->lose_port(port, 0);
  puts.post();
  steps.run();
  for (u64 idx = 0; idx < Puts::kNumPuts; ++idx) CHECK(puts.signal(idx) == 0 && !puts.is_done(idx));
}

TEST(a_dark_card_neither_sends_nor_takes) {
  for (const size_t dark : {0u, 1u}) {
    Steps steps(2, small_frames(1), Puts::kRegionBytes);
    Puts puts(steps);
    steps.nics[dark]->set_dark(true);
    puts.post();
    steps.run();
    for (u64 idx = 0; idx < Puts::kNumPuts; ++idx) CHECK(puts.signal(idx) == 0 && !puts.is_done(idx));
    steps.nics[dark]->set_dark(false);
    steps.run();
    puts.check_settled();
  }
}

TEST(a_dropped_peer_is_told_nothing_and_not_heard) {
  for (const size_t who : {0u, 1u}) {
    Steps steps(3, small_frames(1), Puts::kRegionBytes);
    Puts puts(steps);
    puts.post();
    steps.nics[who]->drop_peer(1 - static_cast<int>(who));
    steps.memory[2][0] = 0;
    const u64 to_other = steps.nics[0]->post({2, {0, 8}, {0, 8}, 128, {0, 0}, 1}, 0);
    steps.run();
    for (u64 idx = 0; idx < Puts::kNumPuts; ++idx) CHECK(puts.signal(idx) == 0 && !puts.is_done(idx));
    CHECK(steps.nics[0]->is_done(to_other));
    CHECK_EQ(steps.memory[2][0], 1u);
  }
}

TEST(memory_that_is_not_registered_is_not_touched) {
  struct Bad {
    Place to, signal;
    const char* text;
  };
  constexpr u64 kBytes = 1024;
  for (const Bad& bad : {Bad{{0, kBytes - 56}, {0, 0}, "a put into"}, Bad{{1, 0}, {0, 0}, "a put into"},
                         Bad{{0, 0}, {0, kBytes}, "a signal in"}, Bad{{0, 0}, {0, 4}, "a signal in"},
                         Bad{{0, ~u64{0} - 7}, {0, 0}, "a put into"}, Bad{{2, 0}, {0, 0}, "a put into"}}) {
    Steps steps(2, small_frames(1), kBytes);
    steps.nics[1]->remove_region(
        steps.nics[1]->add_region({reinterpret_cast<u8*>(steps.memory[1].data()), kBytes, Space::kHost}));
    const u64 ticket = steps.nics[0]->post({1, {0, 0}, bad.to, kFrame, bad.signal, 1}, 0);
    steps.run();
    CHECK(steps.nics[1]->error().find(bad.text) == 0);
    CHECK(steps.nics[0]->error().empty());
    CHECK(!steps.nics[0]->is_done(ticket));
    for (u64 word = bad.to.offset == 0 ? kFrame / 8 : 0; word < kBytes / 8; ++word)
      CHECK_EQ(steps.memory[1][word], kPoison);
  }
  Steps steps(2, small_frames(1), kBytes);
  const auto is_refused = [](const Error& error) { CHECK(error.code == ErrorCode::kInvalidArgument); };
  CHECK_THROWS(steps.nics[0]->post({1, {0, kBytes - 56}, {0, 0}, kFrame, {}, 0}, 0), Error, is_refused);
  CHECK_THROWS(steps.nics[0]->post({2, {0, 0}, {0, 0}, kFrame, {}, 0}, 0), Error, is_refused);
}

// ---- rings between ranks, by the real clock

RingJob job_of(int num_ranks, u64 num_chunks, u64 most_bytes, Fault fault = Fault::kNone) {
  RingJob job;
  job.num_ranks = num_ranks;
  job.num_chunks = num_chunks;
  job.most_bytes = most_bytes;
  job.fault = fault;
  job.model.seed = static_cast<u64>(num_ranks) * 1000 + most_bytes;
  return job;
}

#if !defined(__SANITIZE_THREAD__)
TEST(rings_of_processes) {
  for (const int num_ranks : {2, 3, 5, 8}) run_processes(job_of(num_ranks, 60, 32u << 10));
}
TEST(rings_of_processes_small_chunks) { run_processes(job_of(4, 600, 64)); }
TEST(rings_of_processes_large_chunks) { run_processes(job_of(2, 24, 4u << 20)); }
TEST(rings_of_processes_slow_ports) {
  RingJob job = job_of(2, 30, 256u << 10);
  job.model.port_bytes_per_s = 200e6;
  job.model.latency_ns = 50'000;
  run_processes(job);
}
TEST(rings_of_processes_that_lose_a_port) {
  for (const int num_ranks : {2, 4, 8}) run_processes(job_of(num_ranks, 60, 512u << 10 >> num_ranks, Fault::kPort));
}
TEST(rings_of_processes_one_is_dropped) { run_processes(job_of(4, 60, 32u << 10, Fault::kDroppedPeer)); }
TEST(rings_of_processes_one_goes_dark) { run_processes(job_of(4, 60, 32u << 10, Fault::kDark)); }
TEST(rings_of_processes_one_dies) { run_processes(job_of(4, 60, 32u << 10, Fault::kDeath)); }
#endif
TEST(rings_of_threads) { run_threads(job_of(4, 60, 32u << 10)); }
TEST(rings_of_threads_large_chunks) { run_threads(job_of(2, 12, 4u << 20)); }
TEST(rings_of_threads_that_lose_a_port) { run_threads(job_of(3, 60, 128u << 10, Fault::kPort)); }
TEST(rings_of_threads_one_goes_dark) { run_threads(job_of(3, 60, 32u << 10, Fault::kDark)); }
TEST(rings_of_threads_one_is_dropped) { run_threads(job_of(3, 60, 32u << 10, Fault::kDroppedPeer)); }

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv); }
