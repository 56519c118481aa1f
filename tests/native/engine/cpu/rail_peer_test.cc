// Guards against a message of another node whose words make no sense (R19): what ranks were told and what rows say must be one, else
// the forwarder raises InternalError naming the source, and stores nothing. Run it with AddressSanitizer too.
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
constexpr int kReal = 0, kFake = 1;  // each is a node
constexpr i64 kMaxTokens = 16;

JobShape job_shape() {
  JobShape shape;
  shape.num_ranks = 2;
  shape.num_local = 3;
  shape.max_tokens = kMaxTokens;
  shape.max_row_bytes = 256;
  shape.node_ranks = 1;
  return shape;
}

WindowShape window_shape() {
  const JobShape job = job_shape();
  WindowShape shape;
  shape.num_ranks = job.num_ranks;
  shape.num_experts = static_cast<i32>(job.num_experts());
  shape.top_k = static_cast<i32>(job.top_k);
  shape.max_tokens = job.max_tokens;
  shape.max_row_bytes = job.max_row_bytes;
  shape.node_ranks = job.node_ranks;
  return shape;
}

// Tokens 3 and 7 with three picks of expert 1, all of the real rank's.
struct Words {
  i32 num_rows = 2;
  i32 counts[3] = {0, 3, 0};
  u32 tokens = 1u << 3 | 1u << 7;
  u16 experts[4 * kMaxTokens] = {1, kNoRailExpert, kNoRailExpert, kNoRailExpert, kNoRailExpert, 1, 1, kNoRailExpert};
};

// Rank 1: it makes a window as the engine does, and then writes what it is told to.
class FakeRank {
 public:
  FakeRank(ControlPlane& plane, const std::atomic<bool>& peer_has_left)
      : peer_has_left_(peer_has_left), where_(WindowLayout::make(window_shape())) {
    RailShape rails{2, 1, 1, 3, 4, kMaxTokens, 256};
    rails_ = RailLayout::make(rails);
    const u64 control_bytes = where_.total_bytes + rails_.total_bytes;
    control_ = SharedMemory::create(control_bytes);
    heap_ = SharedMemory::create(kRoom);
    struct Offer {
      WindowShape shape;
      u64 heap_bytes, most_heap_bytes, refusal_code;
    };
    new (control_.data()) ControlWords();
    const Offer mine{window_shape(), heap_.bytes(), heap_.bytes(), 0};
    std::vector<std::byte> bytes(sizeof(mine));
    std::memcpy(bytes.data(), &mine, sizeof(mine));
    const u64 first_window = u64{1} << 61 | u64{1} << kTagNumberBits | 1;  // epoch 1, window 1
    auto parcels =
        plane.exchange({kReal, kFake}, first_window, bytes, {control_.fd(), heap_.fd()}, deadline_after_s(30), {});
    peer_control_ = SharedMemory::attach(std::move(parcels[kReal].fds[0]), control_bytes);
    plane.exchange({kReal, kFake}, first_window | u64{1} << 60, {}, {}, deadline_after_s(30), {});
  }

  void dispatch(const Words& words) {
    const u64* signal = at<u64>(control_, rails_.message_signal(kReal, 0));
    while (ptx::ld_acquire_sys(signal) == 0 && !peer_has_left_) usleep(100);
    if (ptx::ld_acquire_sys(signal) == 0) return;
    RailMessage message =
        *at<RailMessage>(control_, rails_.message_in(kReal, 0));  // header and configuration are its own
    u8* place = at<u8>(peer_control_, rails_.message_in(kFake, 0));
    std::memcpy(place, &message, sizeof(message));
    std::memcpy(place + rails_.counts(0), &words.num_rows, sizeof(i32));
    std::memcpy(place + rails_.counts(0) + sizeof(i32), words.counts, sizeof(words.counts));
    std::memcpy(place + rails_.tokens(), &words.tokens, sizeof(u32));
    std::memcpy(place + rails_.experts(kMaxTokens), words.experts, sizeof(words.experts));
    tell(rails_.message_signal(kFake, 0));
    tell(rails_.signal(kFake, 0, 0));  // a chunk of whatever lies there
  }

 private:
  template <class T>
  T* at(const SharedMemory& memory, u64 offset) const {
    return reinterpret_cast<T*>(reinterpret_cast<u8*>(memory.data()) + where_.total_bytes + offset);
  }
  void tell(u64 signal) const {
    ptx::add_release_sys(at<u64>(peer_control_, signal), 1);
    cpu::ring_doorbell(reinterpret_cast<ControlWords*>(peer_control_.data()));
  }

  const std::atomic<bool>& peer_has_left_;
  const WindowLayout where_;
  RailLayout rails_;
  SharedMemory control_, heap_, peer_control_;
};

void against(Layout layout, const Words& words, const std::function<void(const std::function<i64()>&)>& verify) {
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
    call.routing = 1;  // all to rank 0
    call.layout = layout;
    EngineRank::Tensors tensors = rank.make_inputs(call);
    verify([&] { return rank.dispatch(call, tensors, call.dtype, false, 0).num_rows; });
    has_left = true;
  }
  fake.join();
}

void check_refused(const std::function<void(Words&)>& change) {
  for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor}) {
    Words words;
    change(words);
    against(layout, words, [&](const std::function<i64()>& call) {
      CHECK_THROWS(call(), Error, [&](const Error& error) {
        CHECK(error.code == ErrorCode::kInternalError && error.peers == std::vector<int>{1});
        CHECK(error.text.find("phase count") != std::string::npos);
      });
      CHECK_ERROR(kInternalError, {1}, call());  // broken
    });
  }
}

TEST(sensible_words_are_taken) {  // or the rest of this file would prove nothing
  i64 num_rows = 0;
  against(Layout::kRankMajor, {}, [&](const std::function<i64()>& call) { num_rows = call(); });
  CHECK(num_rows >= 2);
  against(Layout::kExpertMajor, {}, [&](const std::function<i64()>& call) { num_rows = call(); });
  CHECK(num_rows >= 3);
}

TEST(other_rows_than_ranks_were_told_of) {
  check_refused([](Words& words) { words.num_rows = 3; });
  check_refused([](Words& words) { words.tokens |= 1u << 9; });
  check_refused([](Words& words) { words.tokens = 1u << 3; });
  check_refused([](Words& words) { words.tokens = ~0u; });  // more than max_tokens
}

TEST(other_picks_of_an_expert_than_ranks_were_told_of) {
  check_refused([](Words& words) { words.experts[1] = 1; });
  check_refused([](Words& words) { words.experts[0] = 2; });
  check_refused([](Words& words) { words.experts[5] = kNoRailExpert; });
}

TEST(experts_that_the_node_has_not) {
  for (const u16 bad : {u16{3}, u16{1000}, u16{0xfffe}}) check_refused([&](Words& words) { words.experts[2] = bad; });
}

TEST(counts_without_sense) {
  check_refused([](Words& words) { words.num_rows = -1; });
  check_refused([](Words& words) { words.num_rows = 17, words.counts[1] = 17; });
  check_refused([](Words& words) { words.counts[0] = -1; });
}

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv); }
