// Guards against ranks that decide on different pages, and against a record that is believed though the register names another one.
#include "bootstrap/group_page.h"

#include <fcntl.h>

#include <cstring>

#include "base/status.h"
#include "bootstrap/handshake.h"
#include "bootstrap/life_lock.h"
#include "bootstrap/ranks.h"
#include "check.h"

using namespace weft;        // NOLINT(google-build-using-namespace)
using namespace weft::test;  // NOLINT(google-build-using-namespace)

namespace {

constexpr int kNumRanks = 3;

std::shared_ptr<GroupPage> another_view(const GroupPage& page, int num_ranks = kNumRanks) {
  return GroupPage::attach(OwnedFd::duplicate(page.fd()), num_ranks);
}

MembershipRecord record_of(const GroupPage& page, uint32_t epoch, const std::vector<int>& active) {
  MembershipRecord record;
  record.group = page.group();
  record.epoch = record.era = epoch;
  record.active = RankSet::of(active);
  return record;
}

RegisterWord decide(GroupPage& page, int rank, uint32_t epoch, const std::vector<int>& active) {
  const RegisterWord open = page.words().read(epoch);
  const RegisterWord decided{epoch, RegisterState::kCommitted, static_cast<uint16_t>(open.version + 1),
                             static_cast<uint16_t>(rank)};
  page.put(rank, record_of(page, epoch, active));
  return page.words().compare_set(open, decided);
}

}  // namespace

TEST(what_one_rank_decides_all_find) {
  const auto page = GroupPage::create(kNumRanks);
  const auto other = another_view(*page);
  CHECK(page->group() == other->group());
  CHECK(page->group() != GroupPage::create(kNumRanks)->group());
  CHECK(!other->words().is_decided(2));
  const RegisterWord decided = decide(*page, 1, 2, {0, 1});
  CHECK(other->words().is_decided(2) && !other->words().is_decided(3));
  CHECK(other->words().read(2) == decided);
  CHECK(other->find(decided).value().active == RankSet::of({0, 1}));
  other->put(2, record_of(*other, 2, {2}));  // of a rank that comes too late
  CHECK(page->find(decided).value().active == RankSet::of({0, 1}));
  RegisterWord lost = decided;
  lost.writer = 2;
  CHECK(!page->find(lost));
}

TEST(a_record_that_nobody_has_written_or_that_is_damaged_is_not_found) {
  const auto page = GroupPage::create(kNumRanks);
  const RegisterWord decided = decide(*page, 1, 2, {0, 1});
  RegisterWord wrong = decided;
  wrong.writer = 2;
  CHECK(!page->find(wrong));
  wrong.writer = kNumRanks;
  CHECK(!page->find(wrong));
  MembershipRecord other_group = record_of(*page, 2, {0, 1});
  other_group.group[0] ^= 1;
  page->put(1, other_group);
  CHECK(!page->find(decided));
}

TEST(records_of_64_epochs_are_kept) {
  const auto page = GroupPage::create(kNumRanks);
  std::vector<RegisterWord> decided(2);
  for (uint32_t epoch = 2; epoch < 80; ++epoch) decided.push_back(decide(*page, 0, epoch, {0}));
  for (uint32_t epoch = 16; epoch < 80; ++epoch) CHECK_EQ(page->find(decided[epoch]).value().epoch, epoch);
  CHECK_ERROR(kInvalidState, {}, page->find(decided[15]));
  CHECK(page->words().is_decided(15) && !page->words().is_decided(0));
}

TEST(a_record_is_forgotten_once_its_place_is_used_again) {
  const auto page = GroupPage::create(kNumRanks);
  const RegisterWord decided = decide(*page, 1, 2, {0, 1});
  page->put(1, record_of(*page, 66, {0}));  // of a writer that dies before its word
  CHECK_ERROR(kInvalidState, {}, page->find(decided));
}

TEST(what_is_no_page_of_this_group_is_refused) {
  const auto page = GroupPage::create(kNumRanks);
  CHECK_ERROR(kInvalidArgument, {}, another_view(*page, kNumRanks + 1));
  CHECK_ERROR(kInvalidArgument, {}, another_view(*page, kNumRanks - 1));
  CHECK_ERROR(kInvalidArgument, {}, GroupPage::attach(OwnedFd(open("/dev/null", O_RDWR | O_CLOEXEC)), kNumRanks));
  const uint64_t bytes = GroupPage::bytes_for(kNumRanks);
  const SharedMemory empty = SharedMemory::create(bytes);
  CHECK_ERROR(kInvalidArgument, {}, GroupPage::attach(OwnedFd::duplicate(empty.fd()), kNumRanks));
  SharedMemory header = SharedMemory::attach(OwnedFd::duplicate(page->fd()), bytes);
  header.data()[4] ^= std::byte{1};  // its version
  CHECK_ERROR(kInvalidArgument, {}, another_view(*page));
}

// Rank 0 greets with the page of a larger group, or with memory that is none.
TEST(a_greeting_without_the_page_of_this_group_is_refused) {
  for (const bool has_page : {true, false}) {
    ForkedRanks ranks(2, [&](Rank& self) {
      if (self.rank == 1) {
        const int before = num_open_fds();
        CHECK_ERROR(kInvalidArgument, {}, self.connect());
        CHECK_EQ(num_open_fds(), before - 1);  // its listener is closed
        return;
      }
      const LifeLock life;
      const auto page = GroupPage::create(3);
      try {
        connect_mesh({0,
                      self.endpoints,
                      self.listener.fd(),
                      -1,
                      life.fd(),
                      has_page ? page->fd() : life.fd(),
                      deadline_after_s(kLongS),
                      {},
                      group_secret(self.endpoints, {})});
      } catch (const Error& error) {  // or it has both greetings before it is refused
        CHECK(error.code == ErrorCode::kInvalidArgument || error.code == ErrorCode::kPeerLost);
      }
      CHECK_EQ(self.parent.hear(), 1u);
    });
    ranks.join_all({0});
    ranks.pipe(0).tell(1);
    ranks.join(0);
  }
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
