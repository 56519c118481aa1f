#include "engine/nvlink/receive_heap.h"

#include <algorithm>

#include "base/log.h"
#include "base/status.h"
#include "engine/nvlink/host_wait.h"
#include "weft/layout/checked.h"

namespace weft::nvlink {
namespace {

constexpr u64 kSettleNs = 10'000'000'000;  // longest wait of a destructor for the GPU
constexpr u64 kMomentNs = 100'000;
constexpr size_t kManyPending = 64;  // asking the driver costs more than a few entries

// Of this process. Never destroyed: heaps may be let go at its exit.
struct AllHeaps {
  std::mutex mutex;
  std::set<ReceiveHeap*> heaps;
  std::vector<DeviceMemory> left;  // to the end of the process
};

AllHeaps& all_heaps() {
  static auto* const all = new AllHeaps;
  return *all;
}

u64 in_units(u64 num_bytes) { return std::max(Heap::kAlignment, align_up(num_bytes, Heap::kAlignment)); }

}  // namespace

ReceiveHeap::ReceiveHeap(std::shared_ptr<Gpu> gpu, DeviceMemory memory, u64 first, u64 num_bytes)
    : gpu_(std::move(gpu)), memory_(std::move(memory)), first_(first), heap_(num_bytes) {
  AllHeaps& all = all_heaps();
  const std::lock_guard lock(all.mutex);
  all.heaps.insert(this);
}

// Nothing is unmapped while the GPU is at work in it.
struct ReceiveHeap::Remains {
  std::shared_ptr<Gpu> gpu;
  DeviceMemory memory;
  std::vector<Pending> pending;

  ~Remains() {
    const cuda::QuietContextScope scope(gpu->context);
    const auto is_unknown = [](const Pending& each) { return each.event == nullptr; };
    const auto is_done = [&] {
      return std::all_of(pending.begin(), pending.end(), [](const Pending& each) { return each.event->is_done(); });
    };
    const bool is_known = std::none_of(pending.begin(), pending.end(), is_unknown);
    if (!scope.ok() || (is_known && wait_on_host(is_done, now_ns() + kSettleNs, {}))) return;
    log_line(kLogWarning, is_known
                              ? "a GPU is still at work in the heap of a closed window; its memory is not given back"
                              : "a result was let go after its window, while its stream recorded a CUDA graph or could "
                                "not be asked when its work ends: the window's heap is not given back");
    AllHeaps& all = all_heaps();
    const std::lock_guard lock(all.mutex);
    all.left.push_back(std::move(memory));
  }
};

ReceiveHeap::~ReceiveHeap() {
  {
    AllHeaps& all = all_heaps();
    const std::lock_guard lock(all.mutex);
    all.heaps.erase(this);
  }
  const cuda::QuietContextScope scope(gpu_->context);
  if (!scope.ok()) pending_.clear();  // without a context nothing is at work
  gpu_->clean_up(std::shared_ptr<Remains>(new Remains{gpu_, std::move(memory_), std::move(pending_)}));
}

std::optional<Block> ReceiveHeap::reserve(u64 num_bytes, u64 stream, bool is_capturing) {
  const std::lock_guard lock(mutex_);
  const std::optional<u64> offset = take(num_bytes, stream, is_capturing);
  if (!offset) return std::nullopt;
  return block_at(*offset, num_bytes);
}

std::optional<Block> ReceiveHeap::reserve_up_to(u64 num_bytes, u64 stream, bool is_capturing) {
  const std::lock_guard lock(mutex_);
  const u64 largest = std::min(num_bytes, heap_.largest_free());
  if (largest == 0 && num_bytes > 0) return std::nullopt;
  const std::optional<u64> offset = take(largest, stream, is_capturing);
  if (!offset) return std::nullopt;
  return block_at(*offset, largest);
}

Block ReceiveHeap::block_at(u64 offset, u64 num_bytes) {
  Block block;
  block.offset = first_ + offset;
  block.data = memory_.data() + block.offset;
  block.num_bytes = num_bytes;
  block.in_heap = true;
  block.owner =
      std::shared_ptr<void>(block.data, [heap = shared_from_this(), offset](void*) { heap->release(offset); });
  return block;
}

// Places that will not do are held while another is looked for.
std::optional<u64> ReceiveHeap::take(u64 num_bytes, u64 stream, bool is_capturing) {
  // A place of the same stream needs no event.
  const auto is_unrecorded = [&](const Pending& pending) {
    return pending.event == nullptr && pending.stream != stream;
  };
  if (is_capturing || std::any_of(pending_.begin(), pending_.end(), is_unrecorded)) record_pending();
  if (is_capturing) {  // a graph can't wait for a place; what is at rest is seen to be so in a moment
    const auto is_done = [](const Pending& pending) { return pending.event != nullptr && pending.event->is_done(); };
    wait_on_host([&] { return std::all_of(pending_.begin(), pending_.end(), is_done); }, now_ns() + kMomentNs, {});
  }
  if (is_capturing || pending_.size() > kManyPending) forget_done();
  const u64 whole_bytes = in_units(num_bytes);
  const auto will_do = [&](u64 begin) {
    return std::none_of(pending_.begin(), pending_.end(), [&](const Pending& pending) {
      const bool is_here = pending.begin < begin + whole_bytes && begin < pending.end;
      return is_here && (is_capturing || is_unrecorded(pending));
    });
  };
  std::vector<u64> refused;
  std::optional<u64> offset = heap_.reserve(num_bytes);
  for (; offset && !will_do(*offset); offset = heap_.reserve(num_bytes)) refused.push_back(*offset);
  for (u64 other : refused) heap_.release(other);
  if (!offset) return std::nullopt;
  try {
    wait_for_place(*offset, *offset + whole_bytes, stream);
    live_.emplace(*offset, Live{whole_bytes, stream, {}, is_capturing});
  } catch (...) {
    heap_.release(*offset);
    throw;
  }
  return offset;
}

// From here on whoever waits for the block's stream waits for all this, so it is forgotten.
void ReceiveHeap::wait_for_place(u64 begin, u64 end, u64 stream) {
  std::vector<Pending> rest;
  for (const Pending& pending : pending_) {
    if (pending.end <= begin || end <= pending.begin) {
      rest.push_back(pending);
      continue;
    }
    if (pending.stream != stream) {
      cuda::check(cuda::driver().stream_wait_event(reinterpret_cast<cuda::Stream>(stream), pending.event->handle(), 0),
                  "cuStreamWaitEvent");
    }
    if (pending.begin < begin) rest.push_back({pending.begin, begin, pending.stream, pending.event});
    if (end < pending.end) rest.push_back({end, pending.end, pending.stream, pending.event});
  }
  pending_ = std::move(rest);
}

void ReceiveHeap::record_pending() {
  const Pending* last = nullptr;  // that was recorded here
  for (Pending& pending : pending_) {
    if (pending.event != nullptr) continue;
    pending.event = last != nullptr && last->stream == pending.stream ? last->event : event_on(pending.stream);
    last = &pending;
  }
}

void ReceiveHeap::close() {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  forget_done();
}

void ReceiveHeap::forget_done() {
  record_pending();
  // Releases share events in runs: each is asked once.
  const Event* asked = nullptr;
  bool was_done = false;
  std::erase_if(pending_, [&](const Pending& pending) {
    if (pending.event == nullptr) return false;
    if (pending.event.get() != asked) was_done = pending.event->is_done();
    asked = pending.event.get();
    return was_done;
  });
}

std::shared_ptr<Event> ReceiveHeap::record(u64 stream) {
  const std::lock_guard lock(mutex_);  // what is let go from here on may be behind the event
  std::shared_ptr<Event> event = gpu_->record(stream);
  for (Pending& pending : pending_) {
    if (pending.event == nullptr && pending.stream == stream) pending.event = event;
  }
  return event;
}

// Null: the stream records a graph, or can't be asked.
std::shared_ptr<Event> ReceiveHeap::event_on(u64 stream) noexcept try {
  return capture_of(stream).is_active ? nullptr : gpu_->record(stream);
} catch (const std::exception&) {
  return nullptr;
}

void ReceiveHeap::shrink(Block& block, u64 keep_bytes, const std::shared_ptr<Event>& event) {
  const std::lock_guard lock(mutex_);
  const u64 offset = block.offset - first_;
  Live& live = live_.at(offset);
  const u64 kept_bytes = in_units(keep_bytes);
  block.num_bytes = keep_bytes;
  if (live.is_captured || kept_bytes >= live.num_bytes) return;
  heap_.split(offset, keep_bytes);
  pending_.push_back({offset + kept_bytes, offset + live.num_bytes, live.stream, event});
  live.num_bytes = kept_bytes;
}

void ReceiveHeap::cancel(Block block) {
  const u64 offset = block.offset - first_;
  const auto is_kept = [&] {
    const std::lock_guard lock(mutex_);
    return live_.at(offset).is_captured;
  }();
  block.owner.reset();
  if (!is_kept) return;
  const std::lock_guard lock(mutex_);
  live_.erase(offset);
  heap_.release(offset);
}

bool ReceiveHeap::record_stream(u64 address, u64 stream) {
  AllHeaps& all = all_heaps();
  const std::lock_guard lock(all.mutex);
  return std::any_of(all.heaps.begin(), all.heaps.end(),
                     [&](ReceiveHeap* heap) { return heap->record_stream_here(address, stream); });
}

bool ReceiveHeap::record_stream_here(u64 address, u64 stream) {
  const std::lock_guard lock(mutex_);
  if (!owns(address)) return false;
  const u64 place = address - memory_.address() - first_;
  auto block = live_.upper_bound(place);
  if (block == live_.begin()) return false;
  --block;
  if (place >= block->first + block->second.num_bytes) return false;
  if (stream != block->second.stream) block->second.other_streams.insert(stream);
  return true;
}

// From any thread, from destructors, at interpreter exit. A graph's blocks stay taken.
void ReceiveHeap::release(u64 offset) noexcept try {
  const std::lock_guard lock(mutex_);
  const auto found = live_.find(offset);
  if (found == live_.end() || found->second.is_captured) return;
  const Live live = std::move(found->second);
  live_.erase(found);
  const u64 end = offset + live.num_bytes;
  pending_.push_back({offset, end, live.stream, nullptr});
  if (is_closed_ || !live.other_streams.empty()) {
    const cuda::QuietContextScope scope(gpu_->context);
    if (is_closed_ && scope.ok()) record_pending();  // no call comes that would
    for (u64 stream : live.other_streams) {
      if (scope.ok()) pending_.push_back({offset, end, stream, event_on(stream)});
    }
  }
  heap_.release(offset);
} catch (const std::exception&) {
  return;  // out of memory: the place is lost
}

bool ReceiveHeap::renew(DeviceMemory& fresh) {
  const std::lock_guard lock(mutex_);
  forget_done();
  const bool is_held =
      std::any_of(live_.begin(), live_.end(), [](const auto& block) { return !block.second.is_captured; });
  if (is_held || !pending_.empty()) return false;
  memory_.replace(std::move(fresh));
  heap_.end_quarantine();
  return true;
}

bool ReceiveHeap::is_settled() {
  const std::lock_guard lock(mutex_);
  forget_done();
  return pending_.empty();
}

bool ReceiveHeap::has_captured() const {
  const std::lock_guard lock(mutex_);
  return std::any_of(live_.begin(), live_.end(), [](const auto& block) { return block.second.is_captured; });
}

}  // namespace weft::nvlink
