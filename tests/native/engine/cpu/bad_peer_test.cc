// Guards against a peer whose words make no sense (R19): whatever it says, this rank writes and reads inside the memory
// it was given, raises InternalError naming the peer, and is broken afterwards. Run it with AddressSanitizer too.
#include <atomic>
#include <cstring>
#include <functional>
#include <thread>

#include "bootstrap/ranks.h"
#include "engine/cpu/pause.h"
#include "engine/engine_rank.h"
#include "memory/shared_memory.h"
#include "weft/ptx/memory.h"

using namespace weft;
using namespace weft::test;

namespace {

constexpr u64 kRoom = 1u << 20;
constexpr int kReal = 0, kFake = 1;

JobShape job_shape() {
  JobShape shape;
  shape.num_ranks = 2;
  shape.num_local = 3;
  shape.max_tokens = 16;
  shape.max_row_bytes = 256;
  return shape;
}

// What a peer may say in one dispatch. Each test changes something.
struct Words {
  i64 num_rows = 0;
  i32 counts[3] = {0, 0, 0};
  Placement placement;
  i32 starts[3] = {0, 0, 0};
  std::function<void(u8* heap, const Placement& granted)> write_rows = [](u8*, const Placement&) {};
};

// What a peer may say in the combine behind it.
struct SumWords {
  i64 more_rows = 0;  // than the real rank has sent
  u64 rows_in_heap = 1, rows_offset = 0;
  u64 landing_in_heap = 1, landing_offset = 0, landing_rows = 64;
  u32 num_landed = 0;  // records that it says it has pushed
};

// Rank 1: it makes a window as the engine does, and then writes what it is told to.
class FakeRank {
 public:
  FakeRank(ControlPlane& plane, const std::atomic<bool>& peer_has_left)
      : peer_has_left_(peer_has_left),
        control_(SharedMemory::create(where().total_bytes)),
        heap_(SharedMemory::create(kRoom)) {
    struct Offer {
      WindowShape shape;
      u64 heap_bytes, most_heap_bytes, refusal_code;
    };
    new (control_.data()) ControlWords();
    const Offer mine{shape(), heap_.bytes(), heap_.bytes(), 0};
    std::vector<std::byte> bytes(sizeof(mine));
    std::memcpy(bytes.data(), &mine, sizeof(mine));
    const u64 first_window = u64{1} << 61 | u64{1} << kTagNumberBits | 1;  // epoch 1, window 1
    auto parcels =
        plane.exchange({kReal, kFake}, first_window, bytes, {control_.fd(), heap_.fd()}, deadline_after_s(30), {});
    Offer other{};
    std::memcpy(&other, parcels[kReal].bytes.data(), sizeof(other));
    peer_control_ = SharedMemory::attach(std::move(parcels[kReal].fds[0]), where().total_bytes);
    peer_heap_ = SharedMemory::attach(std::move(parcels[kReal].fds[1]), other.heap_bytes);
    const u64 all_attached = first_window | u64{1} << 60;
    plane.exchange({kReal, kFake}, all_attached, {}, {}, deadline_after_s(30), {});
  }

  // Follows one dispatch as far as the real rank goes along; what of a combine, too.
  void dispatch(const Words& words) {
    const u64 header = wait_for(Phase::kCount);
    CountPayload count;
    num_rows_sent_ = at<CountPayload>(control_, where().payload(Phase::kCount, 1, kReal))->num_rows;
    count.config = at<CountPayload>(control_, where().payload(Phase::kCount, 1, kReal))->config;
    count.num_rows = words.num_rows;
    put(Phase::kCount, header, &count, sizeof(count), words.counts);
    if (wait_for(Phase::kNotify) == 0) return;
    const NotifyPayload granted = *at<NotifyPayload>(control_, where().payload(Phase::kNotify, 1, kReal));
    words.write_rows(reinterpret_cast<u8*>(peer_heap_.data()), granted.placement);
    const NotifyPayload notify{words.placement};
    put(Phase::kNotify, header, &notify, sizeof(notify), words.starts);
    put(Phase::kSend, header, nullptr, 0, nullptr);
    wait_for(Phase::kSend);
  }

  void combine(const SumWords& words) {
    sequence_ = 2;
    const u64 header = wait_for(Phase::kCount);
    if (header == 0) return;
    constexpr i32 kNoCounts[3] = {};
    CountPayload count;
    count.config = at<CountPayload>(control_, where().payload(Phase::kCount, 2, kReal))->config;
    count.num_rows = num_rows_sent_ + words.more_rows;
    count.rows_in_heap = words.rows_in_heap;
    count.rows_offset = words.rows_offset;
    count.landing_in_heap = words.landing_in_heap;
    count.landing_offset = words.landing_offset;
    count.landing_rows = words.landing_rows;
    put(Phase::kCount, header, &count, sizeof(count), kNoCounts);
    put(Phase::kReduce, header, nullptr, 0, nullptr);
    wait_for(Phase::kReduce);
  }

 private:
  static WindowShape shape() {
    const JobShape job = job_shape();
    WindowShape shape;
    shape.num_ranks = job.num_ranks;
    shape.num_experts = static_cast<i32>(job.num_experts());
    shape.top_k = static_cast<i32>(job.top_k);
    shape.max_tokens = job.max_tokens;
    shape.max_row_bytes = job.max_row_bytes;
    return shape;
  }
  static WindowLayout where() { return WindowLayout::make(shape()); }

  template <class T>
  static T* at(const SharedMemory& memory, u64 offset) {
    return reinterpret_cast<T*>(reinterpret_cast<u8*>(memory.data()) + offset);
  }

  // The header of this operation, or 0 if the real rank has left without one.
  u64 wait_for(Phase phase) const {
    const u64* cell = at<u64>(control_, where().header(phase, sequence_, kReal));
    while (ptx::ld_acquire_sys(cell) == 0 && !peer_has_left_) usleep(100);
    return ptx::ld_acquire_sys(cell);
  }

  void put(Phase phase, u64 header, const void* payload, size_t num_bytes, const i32* counts) {
    if (num_bytes > 0) {
      u8* slot = at<u8>(peer_control_, where().payload(phase, sequence_, kFake));
      std::memcpy(slot, payload, num_bytes);
      std::memcpy(slot + WindowLayout::kPayloadFixedBytes, counts, 3 * sizeof(i32));
    }
    ptx::st_release_sys(at<u64>(peer_control_, where().header(phase, sequence_, kFake)), header);
    cpu::ring_doorbell(at<ControlWords>(peer_control_, 0));
  }

  const std::atomic<bool>& peer_has_left_;
  u64 sequence_ = 1;
  i64 num_rows_sent_ = 0;  // by the real rank in the dispatch
  SharedMemory control_, heap_, peer_control_, peer_heap_;
};

// One dispatch of the real rank against `words`; `verify` gets the rank before the call.
void against(Layout layout, const Words& words, const std::function<void(const std::function<void()>&)>& verify) {
  auto hub = std::make_shared<LocalHub>(2);
  auto fake_plane = connect_threads(hub, kFake);
  std::atomic<bool> has_left{false};
  std::thread fake([&] { FakeRank(*fake_plane, has_left).dispatch(words); });
  {
    EngineRank rank(connect_threads(hub, kReal), job_shape(), kRoom);
    rank.set_timeout_s(20);
    Call call;
    call.id = 6;  // 13 tokens
    call.hidden = 64;
    call.routing = 5;
    call.layout = layout;
    EngineRank::Tensors tensors = rank.make_inputs(call);
    CHECK(tensors.num_tokens > 4);
    verify([&] { rank.dispatch(call, tensors, call.dtype, false, 0); });
    has_left = true;
  }
  fake.join();
}

// A dispatch of sensible words, and the combine behind it.
void sum_against(Layout layout, i64 capacity, const Words& words, const SumWords& sum_words,
                 const std::function<void(const std::function<void()>&)>& verify) {
  auto hub = std::make_shared<LocalHub>(2);
  auto fake_plane = connect_threads(hub, kFake);
  std::atomic<bool> has_left{false};
  std::thread fake([&] {
    FakeRank rank(*fake_plane, has_left);
    rank.dispatch(words);
    rank.combine(sum_words);
  });
  {
    EngineRank rank(connect_threads(hub, kReal), job_shape(), kRoom);
    rank.set_timeout_s(20);
    Call call;
    call.id = 6;
    call.hidden = 64;
    call.routing = 5;
    call.layout = layout;
    call.capacity = capacity;
    EngineRank::Tensors tensors = rank.make_inputs(call);
    const DispatchResult result = rank.dispatch(call, tensors, call.dtype, false, 0);
    verify([&] { rank.sum_zeros(call, tensors, result); });
    has_left = true;
  }
  fake.join();
}

Words two_rows();

void check_sum_refused(const std::function<void(SumWords&)>& change) {
  for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor}) {
    SumWords words;
    change(words);
    sum_against(layout, kNoCapacity, two_rows(), words, [](const std::function<void()>& call) {
      CHECK_ERROR(kInternalError, {1}, call());
      CHECK_ERROR(kInternalError, {1}, call());  // broken
    });
  }
}

// `place`: what the error says; a word without sense is found where it is read, not by what follows from it.
void check_refused(const std::function<void(Words&)>& change, const char* place = "") {
  for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor}) {
    Words words;
    change(words);
    against(layout, words, [&](const std::function<void()>& call) {
      CHECK_THROWS(call(), Error, [&](const Error& error) {
        CHECK(error.code == ErrorCode::kInternalError && error.peers == std::vector<int>{1});
        CHECK_EQ(error.text.find(place) == std::string::npos ? error.text : place, place);
      });
      CHECK_ERROR(kInternalError, {1}, call());  // broken
    });
  }
}

// Room for all rows of the real rank in the fake one's heap.
Placement good_placement() {
  Placement placement;
  placement.in_heap = 1;
  placement.num_rows = 64;
  placement.num_meta_rows = 16;
  placement.scales = 0;
  placement.meta_idx = 512 * 1024;
  placement.meta_weights = 768 * 1024;
  return placement;
}

// Two rows of the fake rank with three picks of expert 1.
Words two_rows() {
  Words words;
  words.placement = good_placement();
  words.num_rows = 2;
  words.counts[1] = 3;
  words.write_rows = [](u8* heap, const Placement& granted) {
    i32* ids = reinterpret_cast<i32*>(heap + granted.meta_idx) + granted.meta_start * 4;
    const i32 sensible[8] = {1, -1, -1, -1, -1, 1, 1, -1};
    std::memcpy(ids, sensible, sizeof(sensible));
  };
  return words;
}

TEST(sensible_words_are_taken) {  // or the rest of this file would prove nothing
  for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor}) {
    Words words;
    words.placement = good_placement();
    against(layout, words, [](const std::function<void()>& call) { call(); });
    against(layout, two_rows(), [](const std::function<void()>& call) { call(); });
    sum_against(layout, kNoCapacity, two_rows(), {}, [](const std::function<void()>& call) { call(); });
    SumWords pushed;
    pushed.rows_in_heap = 0;
    pushed.landing_in_heap = 0;
    pushed.landing_rows = 8;
    sum_against(layout, kNoCapacity, two_rows(), pushed,
                [](const std::function<void()>&) {});  // its records don't come
  }
}

TEST(sums_of_another_number_of_rows) {
  check_sum_refused([](SumWords& words) { words.more_rows = 1; });
  check_sum_refused([](SumWords& words) { words.more_rows = -1; });
  check_sum_refused([](SumWords& words) { words.more_rows = i64{1} << 40; });
}

TEST(rows_outside_of_the_heap_that_a_sum_would_read) {
  check_sum_refused([](SumWords& words) { words.rows_offset = kRoom - 16; });
  check_sum_refused([](SumWords& words) { words.rows_offset = kRoom; });
  check_sum_refused([](SumWords& words) { words.rows_offset = ~u64{0} - 63; });
}

// With a capacity a sum reads no row beyond it: so many may lie at the end of the heap.
TEST(rows_beyond_the_capacity_are_not_read) {
  constexpr u64 kRowBytes = 64 * 2;
  SumWords words;
  words.rows_offset = kRoom - 2 * kRowBytes;
  Words placed = two_rows();
  placed.placement.num_rows = 2;
  sum_against(Layout::kRankMajor, 2, placed, words, [](const std::function<void()>& call) { call(); });
  words.rows_offset += 16;
  sum_against(Layout::kRankMajor, 2, placed, words,
              [](const std::function<void()>& call) { CHECK_ERROR(kInternalError, {1}, call()); });
}

TEST(landings_without_room) {
  check_sum_refused([](SumWords& words) { words.landing_rows = 0; });
  check_sum_refused([](SumWords& words) { words.landing_offset = kRoom - 64; });
  check_sum_refused([](SumWords& words) { words.landing_offset = ~u64{0} - 63; });
  check_sum_refused([](SumWords& words) { words.landing_rows = u64{1} << 60; });
  check_sum_refused([](SumWords& words) { words.landing_in_heap = 0, words.landing_rows = 1u << 20; });
}

TEST(more_picks_of_an_expert_than_were_counted) {
  Words words = two_rows();
  words.write_rows = [](u8* heap, const Placement& granted) {
    i32* ids = reinterpret_cast<i32*>(heap + granted.meta_idx) + granted.meta_start * 4;
    const i32 four[8] = {1, -1, -1, 1, -1, 1, 1, -1};
    std::memcpy(ids, four, sizeof(four));
  };
  against(Layout::kExpertMajor, words,
          [](const std::function<void()>& call) { CHECK_ERROR(kInternalError, {1}, call()); });
}

TEST(counts_without_sense) {
  const auto counted = [](const std::function<void(Words&)>& change) { check_refused(change, "phase count"); };
  counted([](Words& words) { words.num_rows = -1; });
  counted([](Words& words) { words.num_rows = i64{1} << 40; });
  counted([](Words& words) { words.num_rows = 17, words.counts[0] = 17; });  // more than max_tokens
  counted([](Words& words) { words.num_rows = 1; });                         // a row without a pick
  counted([](Words& words) { words.counts[2] = 1; });                        // a pick without a row
  check_refused([](Words& words) { words.num_rows = 4, words.counts[0] = -4, words.counts[1] = 8; });
  check_refused([](Words& words) { words.num_rows = 4, words.counts[0] = 0x7fffffff, words.counts[1] = -0x7ffffff0; });
  counted([](Words& words) { words.num_rows = 2, words.counts[0] = 9; });  // more picks than top_k a row
}

TEST(places_outside_of_its_heap) {
  const auto placed = [](const std::function<void(Placement&)>& change) {
    check_refused([&](Words& words) {
      words.placement = good_placement();
      change(words.placement);
    });
  };
  placed([](Placement& p) { p.x = kRoom - 128; });
  placed([](Placement& p) { p.x = ~u64{0} - 63; });
  placed([](Placement& p) { p.num_rows = i64{1} << 40; });
  placed([](Placement& p) { p.num_rows = -1; });
  placed([](Placement& p) { p.num_meta_rows = i64{1} << 60; });
  placed([](Placement& p) { p.num_meta_rows = -1; });
  placed([](Placement& p) { p.num_meta_rows = 1; });  // less than this rank sends
  placed([](Placement& p) { p.meta_start = -1; });
  placed([](Placement& p) { p.meta_start = 12; });
  placed([](Placement& p) { p.in_heap = 0, p.meta_start = -1; });  // rows of a result that has no place in the heap
  placed([](Placement& p) { p.meta_idx = kRoom - 16; });
  placed([](Placement& p) { p.meta_weights = ~u64{0}; });
}

TEST(ids_that_no_expert_has) {
  for (const i32 bad : {3, -2, 0x7fffffff, 1000000, static_cast<i32>(0x80000000)}) {
    check_refused([&](Words& words) {
      words.placement = good_placement();
      words.num_rows = 2;
      words.counts[1] = 3;
      words.write_rows = [bad](u8* heap, const Placement& granted) {
        i32* ids = reinterpret_cast<i32*>(heap + granted.meta_idx) + granted.meta_start * 4;
        const i32 ids_of_two_rows[8] = {1, -1, -1, bad, -1, 1, 1, -1};
        std::memcpy(ids, ids_of_two_rows, sizeof(ids_of_two_rows));
      };
    });
  }
}

// Rows that start anywhere within the heap that was named are harmless to this rank.
TEST(starts_without_sense_stay_inside) {
  for (const i32 start : {-1, 63, 64, 0x7fffffff, -0x7fffffff}) {
    Words words;
    words.placement = good_placement();
    for (i32& one : words.starts) one = start;
    against(Layout::kExpertMajor, words, [](const std::function<void()>& call) { call(); });
  }
}

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv); }
