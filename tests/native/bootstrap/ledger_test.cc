// Guards against two decisions for one epoch in a store, a rank that waits for a store that is gone, and values of a store or a peer
// that are believed though they are no decision.
#include "bootstrap/ledger.h"

#include <atomic>
#include <cstring>
#include <thread>

#include "bootstrap/ranks.h"

using namespace weft;        // NOLINT(google-build-using-namespace)
using namespace weft::test;  // NOLINT(google-build-using-namespace)

namespace {

const GroupId kGroup{1, 2, 3};
const std::function<void()> kNoPoll;

Wait wait_s(double seconds) { return {deadline_after_s(seconds), kNoPoll}; }

MembershipRecord record_of(uint32_t epoch, int first_rank) {
  MembershipRecord record;
  record.group = kGroup;
  record.epoch = record.era = epoch;
  record.active = RankSet::of({first_rank, first_rank + 1});
  seal_record(record);
  return record;
}

RegisterWord open_word(uint32_t epoch) { return {.epoch = epoch}; }
RegisterWord committed(uint32_t epoch, int writer) {
  return {.epoch = epoch, .state = RegisterState::kCommitted, .version = 1, .writer = static_cast<uint16_t>(writer)};
}

Decision decision_of(uint32_t epoch, int writer) {
  return {.word = committed(epoch, writer), .record = record_of(epoch, writer)};
}

ServedDecider::CompareSet in(const FileStore& store) {
  return [&store](const std::string& key, const std::string& expected, const std::string& desired) {
    return store.compare_set(key, expected, desired);
  };
}

}  // namespace

TEST(one_rank_wins_each_epoch) {
  constexpr int kRanks = 6;
  constexpr uint32_t kEpochs = 30;
  const FileStore store;
  std::vector<std::vector<int>> winners(kRanks, std::vector<int>(kEpochs + 1));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const ServedDecider served(in(store));
      StoreLedger ledger(kGroup, served.decider);
      for (uint32_t epoch = 2; epoch <= kEpochs; ++epoch) {
        const MembershipRecord draft = record_of(epoch, rank);
        Decision found = ledger.read(epoch, wait_s(kLongS));
        if (found.word.state == RegisterState::kOpen) {
          found = ledger.set(rank, &draft, found.word, committed(epoch, rank), wait_s(kLongS));
        }
        CHECK(found.word.state == RegisterState::kCommitted);
        CHECK(found.record && found.record->active.contains(found.word.writer));
        winners[static_cast<size_t>(rank)][epoch] = found.word.writer;
        CHECK(ledger.is_decided(epoch) && !ledger.is_decided(epoch + 1));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& each : winners) CHECK(each == winners.front());
}

TEST(what_was_decided_long_ago_is_forgotten_by_all) {
  const FileStore store;
  const ServedDecider served(in(store));
  StoreLedger ledger(kGroup, served.decider);
  int num_announced = 0;
  ledger.set_announce([&](const Decision&) { ++num_announced; });
  for (uint32_t epoch = 2; epoch <= 100; ++epoch) {
    const MembershipRecord draft = record_of(epoch, 1);
    CHECK(ledger.set(1, &draft, open_word(epoch), committed(epoch, 1), wait_s(kLongS)).word == committed(epoch, 1));
  }
  CHECK_EQ(num_announced, 99);
  StoreLedger late(kGroup, served.decider);
  CHECK(late.read(2, wait_s(kLongS)).is_forgotten);
  CHECK(!late.read(90, wait_s(kLongS)).is_forgotten);
  CHECK(late.find(50).is_forgotten);  // it lies before what is known
  CHECK(!late.find(91).is_forgotten && late.find(91).word == open_word(91));
  CHECK(!late.is_decided(91) && late.is_decided(90) && late.is_decided(3));
}

TEST(a_rank_learns_from_others_without_asking) {
  const auto nobody_serves = std::make_shared<Decider>();
  StoreLedger ledger(kGroup, nobody_serves);
  CHECK(!ledger.newest());
  CHECK(ledger.learn(decision_of(7, 3)));
  CHECK(!ledger.learn(decision_of(7, 3)));
  CHECK(!ledger.learn({.word = open_word(8)}));
  CHECK(ledger.newest()->word == committed(7, 3));
  CHECK(ledger.find(7).word == committed(7, 3));
  CHECK(ledger.read(7, wait_s(0)).record->active.contains(3));
  const MembershipRecord draft = record_of(7, 5);
  CHECK(ledger.set(5, &draft, committed(7, 3), committed(7, 5), wait_s(0)).word == committed(7, 3));
}

TEST(a_store_that_does_not_answer_is_control_lost) {
  const auto nobody_serves = std::make_shared<Decider>();
  StoreLedger ledger(kGroup, nobody_serves);
  const uint64_t start_ns = now_ns();
  CHECK_ERROR(kControlLost, {}, ledger.read(2, wait_s(0.2)));
  CHECK(now_ns() - start_ns >= 200'000'000);
  int num_polls = 0;
  const std::function<void()> leave = [&] {
    if (++num_polls == 3) throw_invalid_state("left");
  };
  CHECK_ERROR(kInvalidState, {}, ledger.read(2, {deadline_after_s(kLongS), leave}));
  nobody_serves->close();
  CHECK_ERROR(kInvalidState, {}, ledger.read(2, wait_s(kLongS)));
}

TEST(a_store_that_comes_back_is_asked_again) {
  const FileStore store;
  std::atomic<int> num_failures_left{3};
  const ServedDecider served([&](const std::string& key, const std::string& expected, const std::string& desired) {
    if (num_failures_left-- > 0) throw_internal("no route to the store");
    return store.compare_set(key, expected, desired);
  });
  StoreLedger ledger(kGroup, served.decider);
  CHECK(ledger.read(2, wait_s(kLongS)).word == open_word(2));
  num_failures_left = 1 << 30;
  try {
    ledger.read(3, wait_s(0.5));
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.code == ErrorCode::kControlLost && error.text.find("no route to the store") != std::string::npos);
  }
}

// A call that has ended left a request behind: its answer is nobody's.
TEST(late_answers_are_dropped) {
  Decider decider;
  CHECK_ERROR(kControlLost, {}, decider.compare_set("first", "", "", {deadline_after_s(0), {}}));
  std::atomic<int> num_looks = 0;
  std::atomic<bool> has_answer = false;
  std::thread server([&] {
    const auto request = decider.next();
    CHECK_EQ(request->key, std::string("second"));  // the first was taken back
    decider.answer(request->number - 1, "of the first");
    // The caller has looked since: once may have begun before.
    for (const int before = num_looks; num_looks < before + 2 && !has_answer;) std::this_thread::yield();
    decider.answer(request->number, "of the second");
  });
  const std::string answer = decider.compare_set("second", "", "", {deadline_after_s(kLongS), [&] { ++num_looks; }});
  has_answer = true;
  server.join();
  CHECK_EQ(answer, std::string("of the second"));
}

TEST(values_are_read_back_as_written) {
  const Decision decision = decision_of(9, 4);
  const Decision found = read_value(write_value(decision), kGroup, 9);
  CHECK(found.word == decision.word && !found.is_forgotten);
  CHECK(std::memcmp(&*found.record, &*decision.record, sizeof(MembershipRecord)) == 0);
  CHECK(read_value("", kGroup, 9).word == open_word(9));
  CHECK(read_value(kForgottenValue, kGroup, 9).is_forgotten);
  const auto packed = pack_decision(decision);
  CHECK(read_decision(packed, kGroup)->word == decision.word);
}

// Nobody decides over what can't be read: it may be a decision of a newer Weft.
TEST(damaged_values_count_as_decided_by_nobody_knows_whom) {
  const std::string good = write_value(decision_of(9, 4));
  const auto check_damaged = [&](const std::string& value, uint32_t epoch = 9) {
    const Decision found = read_value(value, kGroup, epoch);
    CHECK(found.word.state == RegisterState::kCommitted && found.word.epoch == epoch && !found.record);
  };
  check_damaged("x");
  check_damaged(good.substr(1));
  check_damaged(good + "0");
  check_damaged(good, 10);
  for (const size_t at : {size_t{3}, size_t{20}, size_t{200}, good.size() - 1}) {
    std::string value = good;
    value[at] = value[at] == '0' ? '1' : '0';
    if (at != 20) check_damaged(value);
    value[at] = 'Z';
    check_damaged(value);
  }
  auto packed = pack_decision(decision_of(9, 4));
  packed[200] ^= std::byte{1};
  CHECK(!read_decision(packed, kGroup));
  CHECK(!read_decision(pack_decision(decision_of(9, 4)), GroupId{9}));
  CHECK(!read_decision(pack_decision({.word = open_word(9), .record = record_of(9, 4)}), kGroup));
  CHECK(!read_decision({}, kGroup));
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
