#include "engine/nvlink/gpu.h"

#include <atomic>
#include <future>
#include <thread>

#include "base/log.h"
#include "base/status.h"
#include "base/thread.h"
#include "engine/nvlink/host_wait.h"
#include "weft/transport/host_words.h"

namespace weft::nvlink {
Event::~Event() {
  const std::lock_guard lock(gpu_.mutex_);
  gpu_.idle_events_.push_back(handle_);
}

cuda::Result Event::state() const noexcept {
  const cuda::RelaxedCaptureScope relaxed;
  return cuda::driver().event_query(handle_);
}

Capture capture_of(u64 stream) {
  int status = cuda::kNotCapturing;
  Capture capture;
  const cuda::Result result = cuda::driver().stream_capture_info(stream_of(stream), &status, &capture.id,
                                                                 &capture.graph, nullptr, nullptr, nullptr);
  if (result == cuda::kCaptureImplicit) return {true, 0, nullptr};
  cuda::check(result, "cuStreamGetCaptureInfo");
  capture.is_active = status != cuda::kNotCapturing;
  return capture;
}

Gpu::Gpu(int gpu_index, const jit::CompilerPaths& paths) : index(gpu_index) {
  cuda::check(cuda::driver().device_get(&device, index), "cuDeviceGet");
  cuda::check(cuda::driver().primary_context_retain(&context, device), "cuDevicePrimaryCtxRetain");
  const cuda::ContextScope scope(context);
  cuda::check(cuda::driver().stream_create(&house_keeping, cuda::kNonBlocking), "cuStreamCreate");
  kernels.emplace(device, paths);
}

Gpu::~Gpu() {
  {
    const cuda::QuietContextScope scope(context);
    if (scope.ok()) {
      kernels.reset();
      for (cuda::Event event : idle_events_) cuda::driver().event_destroy(event);
      for (void* page : idle_pages_) cuda::driver().host_free(page);
      if (house_keeping != nullptr) cuda::driver().stream_destroy(house_keeping);
    }
  }
  cuda::driver().primary_context_release(device);
}

std::shared_ptr<Event> Gpu::record(u64 stream) {
  std::shared_ptr<Event> event;
  record(stream, event);
  return event;
}

void Gpu::record(u64 stream, std::shared_ptr<Event>& event) {
  if (event == nullptr) event = std::make_shared<Event>(*this, take_event());
  cuda::check(cuda::driver().event_record(event->handle(), stream_of(stream)), "cuEventRecord");
}

cuda::Event Gpu::take_event() {
  cuda::Event handle = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!idle_events_.empty()) {
      handle = idle_events_.back();
      idle_events_.pop_back();
    }
  }
  if (handle == nullptr) {
    const cuda::RelaxedCaptureScope relaxed;  // to record is always allowed
    cuda::check(cuda::driver().event_create(&handle, cuda::kDisableTiming), "cuEventCreate");
  }
  return handle;
}

void Gpu::settle() { cuda::check(cuda::driver().stream_synchronize(house_keeping), "cuStreamSynchronize"); }

void* Gpu::take_host_page() {
  const std::lock_guard lock(mutex_);
  void* page = nullptr;
  if (idle_pages_.empty()) {
    cuda::check(cuda::driver().host_alloc(&page, transport::kHostPageBytes, cuda::kHostAllocMapped), "cuMemHostAlloc");
  } else {
    page = idle_pages_.back();
    idle_pages_.pop_back();
  }
  return page;
}

void Gpu::give_back_host_page(void* page) noexcept {
  const std::lock_guard lock(mutex_);
  idle_pages_.push_back(page);
}

void Gpu::clean_up(std::shared_ptr<void> remains) noexcept {
  if (!has_thread_ranks) return remains.reset();
  constexpr std::chrono::milliseconds kPatience{100};
  const auto held = std::make_shared<std::shared_ptr<void>>(std::move(remains));
  auto end = std::make_shared<std::promise<void>>();
  const std::future<void> is_over = end->get_future();
  try {
    start_thread("weft-clean-up", [end, held, current = context] {
      const cuda::QuietContextScope scope(current);
      const cuda::RelaxedCaptureScope relaxed;
      held->reset();
      end->set_value();
    }).detach();
  } catch (const std::exception&) {  // no thread to be had
    return held->reset();
  }
  is_over.wait_for(kPatience);
}

namespace {

struct Kept {
  std::shared_ptr<Gpu> gpu;
  std::shared_ptr<void> what;
};

std::atomic<bool> process_ends{false};
std::atomic<int> num_letting_go{0};

// In a thread of the driver's, which may not call it.
void let_go(void* kept) noexcept try {
  if (process_ends) return;
  ++num_letting_go;
  start_thread("weft-clean-up", [held = static_cast<Kept*>(kept)] {
    const cuda::RelaxedCaptureScope relaxed;
    {
      const cuda::QuietContextScope scope(held->gpu->context);
      held->what.reset();
    }
    delete held;
    --num_letting_go;
  }).detach();
} catch (const std::exception&) {
  --num_letting_go;
  return;  // no thread to be had: the memory is left to the end of the process
}

}  // namespace

void leave_graphs_to_the_exit() {
  constexpr u64 kPatienceNs = 2'000'000'000;
  process_ends = true;
  wait_on_host([] { return num_letting_go == 0; }, now_ns() + kPatienceNs, {});
}

void Gpu::keep_for(cuda::Graph graph, std::shared_ptr<void> kept) {
  const cuda::RelaxedCaptureScope relaxed;
  auto* const held = new Kept{shared_from_this(), std::move(kept)};
  cuda::UserObject object = nullptr;
  cuda::Result result = cuda::driver().user_object_create(&object, held, let_go, 1, cuda::kNoDestructorSync);
  if (result != cuda::kSuccess) delete held;
  cuda::check(result, "cuUserObjectCreate");
  result = cuda::driver().graph_retain_user_object(graph, object, 1, cuda::kMoveToGraph);
  if (result != cuda::kSuccess) cuda::driver().user_object_release(object, 1);
  cuda::check(result, "cuGraphRetainUserObject");
}

// The driver has no call that asks a whole context and returns; a thread asks, and is left alone if the answer is late.
bool Gpu::wait_until_idle(u64 deadline_ns, const Poll& poll) {
  auto answer = std::make_shared<std::promise<cuda::Result>>();
  std::future<cuda::Result> result = answer->get_future();
  start_thread("weft-idle", [answer, current = context] {
    const cuda::QuietContextScope scope(current);
    const cuda::RelaxedCaptureScope relaxed;
    answer->set_value(scope.ok() ? cuda::driver().context_synchronize() : cuda::kSuccess);
  }).detach();
  const auto is_there = [&] { return result.wait_for(std::chrono::seconds(0)) == std::future_status::ready; };
  if (!wait_on_host(is_there, deadline_ns, poll)) return false;
  const cuda::Result found = result.get();
  if (found == cuda::kCaptureUnsupported) {
    throw_invalid_state("a stream of GPU " + std::to_string(index) +
                        " records a CUDA graph, so the GPU can't be asked whether replays have ended, and the graph is "
                        "spoilt; end all captures of this process, then rebuild again");
  }
  cuda::check(found, "cuCtxSynchronize");
  return true;
}

}  // namespace weft::nvlink
