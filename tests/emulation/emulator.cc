// What is the same for all kernels: see emulator.h.
#include "emulator.h"

#include <algorithm>
#include <fstream>
#include <utility>

#include "run_block.h"

namespace emulation {

void fail(const char* format, ...) {
  char text[400];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof(text), format, values);
  va_end(values);
  throw Failed{"block " + std::to_string(blockIdx.x) + " thread " + std::to_string(threadIdx.x) + ": " + text};
}

// ---- bulk copies

void Store::read() {
  if (!is_read) held.assign(from, from + num_bytes);
  is_read = true;
}

void Store::write() {
  read();
  memcpy(to, held.data(), num_bytes);
}

void Fiber::store(u8* to, const u8* from, u32 num_bytes) { stores.push_back({to, from, num_bytes, group}); }

void Fiber::fetch(u8* to, const u8* from, u32 num_bytes) {
  memset(to, poison, num_bytes);
  fetches.push_back({to, from, num_bytes, fetch_group});
}

void Fiber::read_stores(u32 num_pending) {
  for (Store& store : stores) {
    if (store.group + num_pending < group) store.read();
  }
}

static void write_due(std::list<Store>& copies, u32 num_pending, u32 group) {
  copies.remove_if([&](Store& copy) {
    const bool is_due = copy.group + num_pending < group;
    if (is_due) copy.write();
    return is_due;
  });
}

void Fiber::write_stores(u32 num_pending) { write_due(stores, num_pending, group); }

void Fiber::write_fetches(u32 num_pending) { write_due(fetches, num_pending, fetch_group); }

void check_copy(const void* shared, const void* global, u32 num_bytes) {
  const u8* begin = static_cast<const u8*>(shared);
  const u8* place = static_cast<const u8*>(global);
  const bool is_shared = begin >= dynamic_shared && begin + num_bytes <= dynamic_shared + dynamic_shared_bytes;
  const bool is_global = place >= global_begin && place + num_bytes <= global_end;
  const bool is_aligned = (reinterpret_cast<u64>(shared) | reinterpret_cast<u64>(global) | num_bytes) % 16 == 0;
  if (!is_shared || !is_global || !is_aligned || num_bytes == 0) {
    fail("bulk copy of %u bytes between shared %p and global %p", num_bytes, shared, global);
  }
}

void check_prefetch(const void* global, u32 num_bytes) {
  const u8* place = static_cast<const u8*>(global);
  const bool is_aligned = (reinterpret_cast<u64>(global) | num_bytes) % 16 == 0;
  if (place < global_begin || place + num_bytes > global_end || !is_aligned) {
    fail("prefetch of %u bytes of global %p", num_bytes, global);
  }
}

void arrive_expect(Barrier* barrier, u32 num_bytes) {
  if (barrier->pending == 0) fail("more arrive at a barrier than it counts");
  barrier->num_bytes += static_cast<i32>(num_bytes);
  barrier->pending -= 1;
  block->settle(barrier);
  block->maybe_yield();
}

bool try_wait(const Barrier* barrier, u32 parity) {
  while (barrier->parity == parity) {
    block->expect(barrier);
    block->poll("mbarrier_try_wait", false);
    if (random_below(8) != 0) break;
  }
  return barrier->parity != parity;
}

// ---- the threads of a block

Block::~Block() {
  if (stacks_ != nullptr) munmap(stacks_, kStackBytes * fibers_.size());
}

void Block::run(u32 num_threads, Body body, void* argument) {
  body_ = body;
  argument_ = argument;
  warps_.resize((num_threads + 31) / 32);
  void* stacks = mmap(nullptr, kStackBytes * num_threads, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) fail("no memory for stacks");
  stacks_ = stacks;
  for (u32 idx = 0; idx < num_threads; ++idx) {
    fibers_.push_back(std::make_unique<Fiber>());
    Fiber* fiber = fibers_.back().get();
    fiber->index = idx;
    getcontext(&fiber->start);
    fiber->start.uc_stack.ss_sp = static_cast<u8*>(stacks) + kStackBytes * idx;
    fiber->start.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber->start, &Block::enter, 0);
    ready_.push_back(fiber);
  }
  while (num_ended_ < num_threads) step();
  if (!loads_.empty()) fail("the block has ended while %zu bulk loads were under way", loads_.size());
}

void Block::meet(Meeting& meeting, const char* what, u32 num_expected) {
  if (arrive(meeting, what, num_expected)) return;
  meeting.waiting.push_back(self_);
  self_->waits_for = what;
  leave();
}

bool Block::arrive(Meeting& meeting, const char* what, u32 num_expected) {
  if (meeting.num_arrived == 0) {
    meeting.what = what;
    meeting.num_expected = num_expected;
  } else if (strcmp(meeting.what, what) != 0 || meeting.num_expected != num_expected) {
    fail("%s of %u threads, where others are in %s of %u", what, num_expected, meeting.what, meeting.num_expected);
  }
  if (++meeting.num_arrived < num_expected) return false;
  meeting.num_arrived = 0;
  memcpy(meeting.result, meeting.value, sizeof(meeting.value));
  meeting.either_result = meeting.either;
  meeting.either = 0;
  note_change();
  ready_.insert(ready_.end(), meeting.waiting.begin(), meeting.waiting.end());
  meeting.waiting.clear();
  maybe_yield();
  return true;
}

Meeting& Block::lanes(u32 mask) {
  if ((mask >> (self_->index % 32) & 1u) == 0) fail("not in its own mask %x", mask);
  std::vector<std::unique_ptr<Meeting>>& known = warps_[self_->index / 32];
  for (const auto& meeting : known) {
    if (meeting->mask == mask) return *meeting;
  }
  known.push_back(std::make_unique<Meeting>());
  known.back()->mask = mask;
  return *known.back();
}

Meeting& Block::barrier(u32 number) {
  if (number >= 16) fail("barrier %u: there are 16", number);
  return barriers_[number];
}

void Block::poll(const char* what, bool is_remote) {
  if (is_remote && lets_next_begin_) fail("%s: a wait for another block behind let_next_kernel_begin", what);
  if (given_up != nullptr && __atomic_load_n(given_up, __ATOMIC_RELAXED) != 0) fail("given up with another block");
  self_->waits_for = what;
  polls_remote_ = polls_remote_ || is_remote;
  polling_.push_back(self_);
  leave();
}

void Block::yield() {
  ready_.push_back(self_);
  leave();
}

void Block::start_load(const Load& load) {
  memset(load.to, poison, load.num_bytes);
  loads_.push_back(load);
}

void Block::expect(const Barrier* barrier) { expected_.insert(barrier); }

void Block::settle(Barrier* barrier) {
  if (barrier->pending != 0 || barrier->num_bytes != 0) return;
  expected_.erase(barrier);
  barrier->parity ^= 1u;
  barrier->pending = barrier->num_arrivals;
  note_change();
}

void Block::step() {
  if (ready_.empty()) {
    wake_pollers();
  } else if (random_below(64) == 0) {
    end_one_load(holds_loads_);
  }
  if (ready_.empty()) return;
  const u32 idx = random_below(static_cast<u32>(ready_.size()));
  self_ = ready_[idx];
  ready_[idx] = ready_.back();
  ready_.pop_back();
  threadIdx.x = self_->index;
  if (_setjmp(scheduler_) != 0) {
    if (!found_.empty()) throw Failed{found_};
    return;
  }
  if (self_->has_started) _longjmp(self_->context, 1);
  self_->has_started = true;
  setcontext(&self_->start);
}

void Block::leave() {
  if (_setjmp(self_->context) == 0) _longjmp(scheduler_, 1);
}

// Nobody can go on but those that look again and again.
void Block::wake_pollers() {
  constexpr u32 kMostIdleRounds = 8;
  const bool has_loaded = end_one_load(holds_loads_ && polls_remote_);
  num_idle_rounds_ = has_loaded || has_changed_ || polls_remote_ ? 0 : num_idle_rounds_ + 1;
  if (polling_.empty() && !has_loaded) fail_stuck();
  if (num_idle_rounds_ > kMostIdleRounds) fail_stuck();
  if (polls_remote_ && !has_loaded && !has_changed_) usleep(random_below(100));
  has_changed_ = polls_remote_ = false;
  ready_.swap(polling_);
}

// `needed`: only one that a thread waits for.
bool Block::end_one_load(bool needed) {
  std::vector<u32> chosen;
  for (u32 idx = 0; idx < loads_.size(); ++idx) {
    if (!needed || expected_.count(loads_[idx].barrier) != 0) chosen.push_back(idx);
  }
  if (chosen.empty()) return false;
  const u32 idx = chosen[random_below(static_cast<u32>(chosen.size()))];
  const Load load = loads_[idx];
  loads_.erase(loads_.begin() + idx);
  memcpy(load.to, load.from, load.num_bytes);
  load.barrier->num_bytes -= static_cast<i32>(load.num_bytes);
  settle(load.barrier);
  return true;
}

void Block::fail_stuck() {
  std::vector<std::pair<const char*, u32>> counts;
  for (const auto& fiber : fibers_) {
    if (counts.empty() || strcmp(counts.back().first, fiber->waits_for) != 0) counts.emplace_back(fiber->waits_for, 0);
    ++counts.back().second;
  }
  std::string all;
  for (const auto& [what, count] : counts) all += std::string(", ") + std::to_string(count) + ": " + what;
  fail("no thread can go on%s", all.c_str());
}

void Block::enter() {
  Fiber& self = block->self();
  try {
    block->body_(block->argument_);
    if (!self.stores.empty()) fail("ended without waiting for %zu bulk stores", self.stores.size());
    if (!self.fetches.empty()) fail("ended without waiting for %zu fetches", self.fetches.size());
  } catch (const Failed& mistake) {
    block->found_ = mistake.text;
  }
  self.waits_for = "ended";
  ++block->num_ended_;
  block->note_change();
  _longjmp(block->scheduler_, 1);
}

const u64* exchange_words(u32 mask, u64 value, const char* what) {
  Meeting& meeting = block->lanes(mask);
  meeting.value[threadIdx.x % 32] = value;
  block->meet(meeting, what, static_cast<u32>(__builtin_popcount(mask)));
  return meeting.result;
}

// ---- one block of a launch

namespace {

// The dynamic shared memory of this block. It ends exactly at a page that nobody may touch, but for what brings its beginning to
// a multiple of 128.
class DynamicShared {
 public:
  explicit DynamicShared(u64 num_bytes) : room_((num_bytes + 127) / 128 * 128) {
    const u64 size = room_;
    room_ = (size + kPage - 1) / kPage * kPage;
    void* base = mmap(nullptr, room_ + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) fail("no shared memory");
    base_ = static_cast<u8*>(base);
    if (mprotect(base_ + room_, kPage, PROT_NONE) != 0) fail("no page behind the shared memory");
    dynamic_shared_bytes = size;
    dynamic_shared = base_ + room_ - size;
    memset(dynamic_shared, poison, size);
  }
  ~DynamicShared() { munmap(base_, room_ + kPage); }
  DynamicShared(const DynamicShared&) = delete;
  DynamicShared& operator=(const DynamicShared&) = delete;

 private:
  static constexpr u64 kPage = 4096;
  u64 room_;
  u8* base_ = nullptr;
};

// `path`: "offset bytes" lines: __shared__ variables, by their distance from random_state, which lies beside them.
void poison_shared(const char* path) {
  std::ifstream file(path);
  if (!file) fail("no list of __shared__ variables: %s", path);
  i64 offset = 0, num_bytes = 0;
  u8* const beside = reinterpret_cast<u8*>(&random_state);
  while (file >> offset >> num_bytes) memset(beside + offset, poison, static_cast<size_t>(num_bytes));
}

}  // namespace

void run_block(const Grid& grid, u32 idx, Block::Body body, void* argument) {
  threadIdx.x = 0;
  blockIdx.x = idx;
  blockDim.x = grid.num_threads;
  gridDim.x = grid.num_blocks;
  random_state = (grid.seed * 64 + idx) * 0x9e3779b97f4a7c15ull | 1u;
  for (i32 round = 0; round < 8; ++round) random_below(2);
  poison_shared(grid.shared_variables);
  const DynamicShared memory(grid.shared_bytes);
  usleep(std::min(random_below(3) * 500, most_sleep_us));
  Block mine;
  block = &mine;
  mine.run(grid.num_threads, body, argument);
}

}  // namespace emulation
