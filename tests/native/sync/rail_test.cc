// Guards against a ring that reads a chunk which has not come, fills a slot that is still read, or never ends. The network settles puts
// and credits in any order; the four mistakes that tests/models/rail.pml knows are among tests/mutants.
#include "weft/sync/rail.h"

#include <random>
#include <thread>
#include <vector>

#include "check.h"

using namespace weft;
using namespace weft::sync;

namespace {

// One ring: a sender, a network that settles what it likes, a receiver.
class Ring {
 public:
  Ring(u32 num_slots, u64 seed, u64 num_chunks)
      : random_(seed),
        num_chunks_(num_chunks),
        sent_(num_slots),
        got_(num_slots),
        signals_(num_slots),
        is_in_flight_(num_slots),
        source_(&num_put_, &credits_, num_slots),
        sink_(&num_taken_, signals_.data(), num_slots) {}

  bool run() {
    const u64 most_steps = 500 * num_chunks_;
    for (u64 step = 0; num_read_ < num_chunks_; ++step) {
      if (step == most_steps || is_wrong_) return false;
      switch (random_() % 4) {
        case 0: send(); break;
        case 1: settle(); break;
        case 2: settle_credit(); break;
        default: receive();
      }
    }
    return !is_wrong_;
  }

 private:
  u64 slot(u64 n) const { return n % sent_.size(); }

  void send() {
    if (source_.next() == num_chunks_ || !source_.has_place()) return;
    const u64 at = slot(source_.next());
    if (is_in_flight_[at]) is_wrong_ = true;  // posting would have to wait for the network
    sent_[at] = source_.next() + 1;
    source_.post([&](u64 n) {
      is_in_flight_[slot(n)] = true;
      in_flight_.push_back(slot(n));
    });
  }

  // The receiver may look while the data are copied.
  void settle() {
    if (in_flight_.empty()) return;
    const size_t idx = random_() % in_flight_.size();
    const u64 at = in_flight_[idx];
    in_flight_.erase(in_flight_.begin() + static_cast<i64>(idx));
    const auto copy = [&] {
      if (random_() % 2 == 0) receive();
      got_[at] = sent_[at];
    };
    settle_put(copy, &signals_[at]);
    is_in_flight_[at] = false;
  }

  void settle_credit() {
    if (num_credits_in_flight_ == 0) return;
    --num_credits_in_flight_;
    ptx::add_release_sys(&credits_, 1);
  }

  // A chunk is read in two halves, between which everything else may happen.
  void receive() {
    if (num_read_ == num_chunks_ || !sink_.has_arrived()) return;
    const auto read = [&](u64 n) {
      if (n != num_read_ || got_[slot(n)] != n + 1) is_wrong_ = true;
      is_half_read_ = !is_half_read_;
      return !is_half_read_;
    };
    if (sink_.take(read, [&] { ++num_credits_in_flight_; })) ++num_read_;
  }

  std::mt19937_64 random_;
  const u64 num_chunks_;
  std::vector<u64> sent_, got_, signals_;
  std::vector<bool> is_in_flight_;
  std::vector<u64> in_flight_;
  u64 num_put_ = 0, num_taken_ = 0, credits_ = 0;
  u64 num_read_ = 0;
  u64 num_credits_in_flight_ = 0;
  bool is_half_read_ = false;
  bool is_wrong_ = false;
  RailSource source_;
  RailSink sink_;
};

TEST(any_order_of_puts_and_credits) {
  for (u64 seed = 0; seed < 6000; ++seed) CHECK(Ring(static_cast<u32>(1 + seed % 4), seed, 24).run());
}

TEST(a_chunk_is_there_when_its_slot_was_filled_that_often) {
  u64 taken = 0, signals[2] = {0, 0};
  const RailSink sink(&taken, signals, 2);
  signals[1] = 5;  // of another slot: says nothing
  CHECK(!sink.has_arrived());
  signals[0] = 1;
  CHECK(sink.has_arrived());
  taken = 2;
  CHECK(!sink.has_arrived());
  signals[0] = 2;
  CHECK(sink.has_arrived());
}

TEST(a_place_is_free_as_long_as_credits_and_slots_allow) {
  u64 put = 3, credits = 0;
  const RailSource source(&put, &credits, 3);
  CHECK(!source.has_place());
  credits = 1;
  CHECK(source.has_place());
  source.post([&](u64 n) { CHECK_EQ(n, 3u); });
  CHECK(!source.has_place());
}

struct StopAt {
  int turns_left;
  PauseResult verdict;
  PauseResult turn() { return turns_left-- > 0 ? PauseResult::kLookAgain : verdict; }
};

TEST(waits_end_and_say_for_whom) {
  u64 put = 4, credits = 0, taken = 7, signals[2] = {0, 0};
  StopAt late{3, PauseResult::kDeadline};
  const RailLate place = RailSource(&put, &credits, 4).wait_place(5, late);
  CHECK_EQ(place.result, WaitResult::kDeadline);
  CHECK_EQ(place.what, RailWait::kPlace);
  CHECK_EQ(place.rank, 5);
  CHECK_EQ(place.n, 4u);
  StopAt aborted{0, PauseResult::kAbort};
  const RailLate chunk = RailSink(&taken, signals, 2).wait_chunk(6, aborted);
  CHECK_EQ(chunk.result, WaitResult::kAborted);
  CHECK_EQ(chunk.what, RailWait::kChunk);
  CHECK_EQ(chunk.n, 7u);
  signals[1] = 4;
  CHECK_EQ(RailSink(&taken, signals, 2).wait_chunk(6, aborted).result, WaitResult::kReady);
}

// For ThreadSanitizer: data, signals and credits between threads.
TEST(threads_hand_chunks_over) {
  constexpr u32 kSlots = 3;
  constexpr u64 kChunks = 20000;
  u64 sent[kSlots] = {}, got[kSlots] = {}, signals[kSlots] = {};
  u64 put = 0, taken = 0, credits = 0;
  std::thread sender([&] {
    const RailSource source(&put, &credits, kSlots);
    while (source.next() < kChunks) {
      if (!source.has_place()) {
        std::this_thread::yield();
        continue;
      }
      sent[source.next() % kSlots] = source.next() * 3;
      source.post([&](u64 n) { settle_put([&] { got[n % kSlots] = sent[n % kSlots]; }, &signals[n % kSlots]); });
    }
  });
  const RailSink sink(&taken, signals, kSlots);
  while (sink.next() < kChunks) {
    if (!sink.has_arrived()) {
      std::this_thread::yield();
      continue;
    }
    const auto read = [&](u64 n) {
      CHECK_EQ(got[n % kSlots], n * 3);
      return true;
    };
    sink.take(read, [&] { ptx::add_release_sys(&credits, 1); });
  }
  sender.join();
}

}  // namespace

int main(int argc, char** argv) { return weft::test::run_tests(argc, argv); }
