// One GPU of this process: its context, kernels, events. Shared by all windows on it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/cuda_driver.h"
#include "engine/nvlink/kernels.h"
#include "engine/poll.h"

namespace weft::nvlink {

inline cuda::Stream stream_of(u64 stream) { return reinterpret_cast<cuda::Stream>(stream); }

class Gpu;

// A recorded event; goes back to its GPU for another use.
class Event {
 public:
  Event(Gpu& gpu, cuda::Event handle) : gpu_(gpu), handle_(handle) {}
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  // kSuccess: all work recorded before has ended; kNotReady; else the GPU has failed.
  cuda::Result state() const noexcept;
  // A GPU that has failed, or a driver that can't be asked any more (interpreter exit), has no work left either.
  bool is_done() const noexcept { return state() != cuda::kNotReady; }
  cuda::Event handle() const noexcept { return handle_; }

 private:
  Gpu& gpu_;
  cuda::Event handle_;
};

// Whether a stream records a graph, and which one.
struct Capture {
  bool is_active = false;
  u64 id = 0;
  cuda::Graph graph = nullptr;
};
// Error kCudaError, unless the stream merely can't be asked because another one records: then active, id 0, no graph.
Capture capture_of(u64 stream);

// The context is the primary one, which torch uses too. Everything that has memory or events of a GPU holds it, in threads of
// the library too. Shared from this, so that what Python hands in is a C++ reference: one to the Python object could only be
// dropped with the interpreter's lock, which a thread that asks for it at the interpreter's end does not survive.
class Gpu : public std::enable_shared_from_this<Gpu> {
 public:
  // Errors: kUnsupported (no driver, no such GPU, too old a GPU, no NVRTC), kCudaError.
  Gpu(int gpu_index, const jit::CompilerPaths& paths);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  // The context must be current. Never for a stream that records a graph.
  std::shared_ptr<Event> record(u64 stream);
  // Records `event` anew, or makes it if it is null.
  void record(u64 stream, std::shared_ptr<Event>& event);
  // Waits until the stream of the library's own house-keeping has run dry.
  void settle();
  // False: still at work at `deadline_ns`. Waits for everything on this GPU, also for what is not ours. Nothing in this process
  // may capture meanwhile: it would be spoilt (docs/decisions/0033). Errors: kInvalidState (something captures), kCudaError.
  bool wait_until_idle(u64 deadline_ns, const Poll& poll);

  // 4096 bytes of host memory that the GPU maps. Kept for the next one: giving them back to the driver would wait for every
  // kernel of the process.
  void* take_host_page();
  void give_back_host_page(void* page) noexcept;

  // Destroys what has memory of this GPU. Unmapping may wait for kernels; where ranks are threads those may wait for the
  // rank that cleans up, so there a thread of its own does it, and only for a moment is it waited for.
  void clean_up(std::shared_ptr<void> remains) noexcept;
  // The graph that is captured, all made of it, and their replays hold `kept` from now on. Let go by the last of them it is
  // destroyed in a thread of its own. Error kCudaError: nothing holds it.
  void keep_for(cuda::Graph graph, std::shared_ptr<void> kept);

  const int index;
  cuda::Device device = 0;
  cuda::Context context = nullptr;
  cuda::Stream house_keeping = nullptr;  // zeroing and filling of windows
  std::optional<Kernels> kernels;
  std::atomic<bool> has_thread_ranks{false};

 private:
  friend class Event;

  cuda::Event take_event();

  std::mutex mutex_;
  std::vector<cuda::Event> idle_events_;
  std::vector<void*> idle_pages_;
};

// At the end of the process: what graphs hold is not given back any more, for the driver goes away beside whoever would do it.
// Waits, bounded, for those that do it just now.
void leave_graphs_to_the_exit();

}  // namespace weft::nvlink
