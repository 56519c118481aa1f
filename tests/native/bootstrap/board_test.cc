// Guards against a board that loses what is complete, keeps what nobody will take, or waits for those that are gone.
#include "bootstrap/board.h"

#include "bootstrap/ranks.h"

using namespace weft;        // NOLINT(google-build-using-namespace)
using namespace weft::test;  // NOLINT(google-build-using-namespace)

namespace {

constexpr int kNumRanks = 3;
constexpr uint64_t kPrefix = 0x100, kMask = ~uint64_t{0xff};
const std::vector<int> kAll = {0, 1, 2};

Parcel parcel(uint64_t value = 7) { return {bytes_of(value), {}}; }

struct Left {};  // what a poll throws

std::vector<Parcel> collect(Board& board, uint64_t tag, double timeout_s, const ControlPlane::Poll& poll = {},
                            const std::vector<int>& unsent = {}) {
  return board.collect({kAll, tag, deadline_after_s(timeout_s), poll, [&] { return unsent; }});
}

}  // namespace

TEST(what_is_complete_is_taken_before_a_poll_may_leave) {
  Board board(0, kNumRanks);
  board.put(1, 5, parcel(11));
  board.put(2, 5, parcel(22));
  const auto parcels = collect(board, 5, 0, [] { throw Left{}; });
  CHECK(parcels[1].bytes == bytes_of(11));
  CHECK(parcels[2].bytes == bytes_of(22));
  board.put(1, 6, parcel());
  CHECK_THROWS(collect(board, 6, kLongS, [] { throw Left{}; }), Left, [](const Left&) {});
}

// Rank 1 is ahead and has given all that it owes: it does not end the exchange; rank 2 owes something and is ahead: it does.
TEST(only_a_member_that_owes_something_is_left_for_a_later_tag) {
  Board board(0, kNumRanks);
  const auto newest = [&] { return board.newest_silent_tag(kPrefix, kMask); };
  board.put(1, kPrefix + 5, parcel());
  board.put(1, kPrefix + 6, parcel());
  CHECK_EQ(newest(), 0u);  // no exchange is under way
  int num_polls = 0;
  const auto look = [&] {
    if (++num_polls == 1) {
      CHECK_EQ(newest(), 0u);
      board.put(2, kPrefix + 7, parcel());
    } else {
      CHECK_EQ(newest(), kPrefix + 7);
      board.put(2, kPrefix + 5, parcel());
      CHECK_EQ(newest(), 0u);
    }
  };
  collect(board, kPrefix + 5, kLongS, look);
  CHECK_EQ(num_polls, 2);
  CHECK_EQ(newest(), 0u);
}

TEST(what_comes_for_an_exchange_that_failed_is_dropped) {
  Board board(0, kNumRanks);
  board.put(2, kPrefix, parcel());
  CHECK_ERROR(kPeerTimeout, {1}, collect(board, kPrefix, 0));
  CHECK_EQ(board.num_parcels(1) + board.num_parcels(2), 0u);
  board.put(1, kPrefix, parcel());
  board.put(2, kPrefix, parcel());
  CHECK_EQ(board.num_parcels(1) + board.num_parcels(2), 0u);
  CHECK_ERROR(kInvalidArgument, {}, board.check(kAll, kPrefix, 8, 0));
}

// One that said goodbye after it gave its parcel takes none any more: our own need not leave.
TEST(nothing_need_reach_a_peer_that_is_gone) {
  for (const bool is_gone : {true, false}) {
    Board board(0, kNumRanks);
    board.put(1, 5, parcel());
    board.put(2, 5, parcel());
    if (is_gone) board.gone(1, DetectionChannel::kGoodbye, "closed");
    if (is_gone) collect(board, 5, 0, {}, {1});
    if (!is_gone) CHECK_ERROR(kPeerTimeout, {1}, collect(board, 5, 0, {}, {1}));
  }
}

TEST(parcels_of_ranks_that_were_left_out_are_dropped) {
  Board board(0, kNumRanks);
  board.put(1, kPrefix + 1, parcel());
  board.put(2, kPrefix + 2, parcel());
  board.keep_members({0, 1});
  CHECK_EQ(board.num_parcels(1), 1u);
  CHECK_EQ(board.num_parcels(2), 0u);
  board.put(2, kPrefix + 3, parcel());
  CHECK_EQ(board.num_parcels(1), 1u);
  CHECK_EQ(board.num_parcels(2), 0u);
  CHECK_ERROR(kInvalidArgument, {}, board.check(kAll, 9, 8, 0));
  board.check({0, 1}, 9, 8, 0);
  CHECK(board.is_watched(1) && board.is_watched(2));
  board.gone(2, DetectionChannel::kRefused, "sent nonsense");
  board.gone(1, DetectionChannel::kSocketEnd, "died");
  CHECK(board.is_watched(1) && !board.is_watched(2));
}

// A member that tries again and again without us must not fill our memory, nor push out what it sent last.
TEST(of_parcels_without_end_the_latest_are_kept) {
  Board board(0, 2);
  constexpr uint64_t kMany = 5000;
  for (uint64_t tag = 1; tag <= kMany; ++tag) board.put(1, tag, parcel(tag));
  const std::vector<int> both = {0, 1};
  const auto take = [&](uint64_t tag) {
    return board.collect({both, tag, deadline_after_s(0), {}, [] { return std::vector<int>(); }});
  };
  CHECK(take(kMany)[1].bytes == bytes_of(kMany));
  CHECK(take(kMany - 1000)[1].bytes == bytes_of(kMany - 1000));
  CHECK_ERROR(kPeerTimeout, {1}, take(1));
  CHECK_ERROR(kPeerTimeout, {1}, take(kMany - 1100));
  // What is taken or forgotten makes room again.
  board.forget_tags(0, 0, kMany + 1);
  for (uint64_t tag = kMany + 1; tag <= kMany + 1024; ++tag) board.put(1, tag, parcel(tag));
  CHECK(take(kMany + 1)[1].bytes == bytes_of(kMany + 1));
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
