#include "bootstrap/group_page.h"

#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "base/random.h"
#include "base/status.h"

namespace weft {
namespace {

constexpr uint32_t kMagic = 0x47504757;  // "WGPG"
constexpr uint32_t kVersion = 3;
constexpr size_t kHeaderBytes = 4096;
constexpr size_t kRecordsAt = kHeaderBytes + PageRegister::kBytes;

struct Header {
  uint32_t magic;
  uint32_t version;
  int32_t num_ranks;
  uint32_t reserved;
  GroupId group;
};

uint64_t slots_at(int num_ranks) noexcept {
  return kRecordsAt + static_cast<uint64_t>(num_ranks) * PageRegister::kNumWords * 2 * kRecordBytes;
}

}  // namespace

uint64_t GroupPage::bytes_for(int num_ranks) noexcept { return slots_at(num_ranks) + SlotTable::bytes_for(num_ranks); }

SlotTable GroupPage::slots() noexcept {
  return {{memory_.data() + slots_at(num_ranks_), SlotTable::bytes_for(num_ranks_)}, num_ranks_};
}

GroupPage::GroupPage(SharedMemory&& memory, int num_ranks)
    : memory_(std::move(memory)),
      num_ranks_(num_ranks),
      words_({memory_.data() + kHeaderBytes, PageRegister::kBytes}) {}

std::shared_ptr<GroupPage> GroupPage::create(int num_ranks) {
  SharedMemory memory = SharedMemory::create(bytes_for(num_ranks));
  const Header header{kMagic, kVersion, num_ranks, 0, random_bytes<sizeof(GroupId)>()};
  std::memcpy(memory.data(), &header, sizeof(header));
  return std::shared_ptr<GroupPage>(new GroupPage(std::move(memory), num_ranks));
}

std::shared_ptr<GroupPage> GroupPage::attach(OwnedFd fd, int num_ranks) {
  SharedMemory memory = SharedMemory::attach(std::move(fd), bytes_for(num_ranks));
  Header header{};
  std::memcpy(&header, memory.data(), sizeof(header));
  if (header.magic != kMagic || header.version != kVersion || header.num_ranks != num_ranks) {
    throw_invalid_argument("a page that is not one of a group of " + std::to_string(num_ranks) + " ranks");
  }
  return std::shared_ptr<GroupPage>(new GroupPage(std::move(memory), num_ranks));
}

const GroupId& GroupPage::group() const noexcept { return reinterpret_cast<const Header*>(memory_.data())->group; }

MembershipRecord* GroupPage::slot(int rank, uint32_t epoch, bool is_planned) noexcept {
  const size_t place = static_cast<size_t>(rank) * PageRegister::kNumWords + epoch % PageRegister::kNumWords;
  const size_t idx = place * 2 + (is_planned ? 1 : 0);
  return reinterpret_cast<MembershipRecord*>(memory_.data() + kRecordsAt + idx * kRecordBytes);
}

void GroupPage::put(int rank, const MembershipRecord& record) noexcept {
  MembershipRecord sealed = record;
  seal_record(sealed);
  MembershipRecord* place = slot(rank, record.epoch, record.kind == ChangeKind::kPlanned);
  // First its epoch, so that nobody believes half of the record that lay here to be damaged.
  std::atomic_ref<uint32_t>(place->epoch).store(record.epoch, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);  // pairs with the one in find()
  std::memcpy(place, &sealed, sizeof(sealed));
}

std::optional<MembershipRecord> GroupPage::find(const RegisterWord& word) {
  if (word.writer >= num_ranks_) return std::nullopt;
  MembershipRecord record;
  MembershipRecord* place = slot(word.writer, word.epoch, word.is_planned);
  std::memcpy(&record, place, sizeof(record));
  std::atomic_thread_fence(std::memory_order_acquire);       // what follows is looked at after the copy
  if (words_.read(word.epoch) != word) return std::nullopt;  // a committed word never changes: forgotten throws
  // The writer uses its place again before it tries the later word, which it may never set.
  const uint32_t later = std::atomic_ref<uint32_t>(place->epoch).load(std::memory_order_relaxed);
  if (later > word.epoch) {
    throw_invalid_state("the record of epoch " + std::to_string(word.epoch) + " is forgotten, that of epoch " +
                        std::to_string(later) + " has its place by now");
  }
  if (!record_problem(record, group(), word.epoch).empty()) return std::nullopt;
  if ((record.kind == ChangeKind::kPlanned) != word.is_planned) return std::nullopt;
  return record;
}

}  // namespace weft
