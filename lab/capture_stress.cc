// Which use of the CUDA driver (headers of CUDA 13) beside graphs that other threads of the process capture takes it down? Decision 0033.
//   g++ -std=c++20 -O1 -pthread -I/usr/local/cuda/include lab/capture_stress.cc -o build/capture_stress -l:libcuda.so.1
//   build/capture_stress SECONDS
// Four threads each capture, instantiate, launch and destroy graphs of six empty kernels on a stream of their own; what goes on
// beside is named in the row. A child process for each. Prints JSON lines: graphs until the end, calls that failed, and the signal
// that ended the process, 0 if none did.
#include <cuda.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace {

constexpr int kThreads = 4;
constexpr int kKernels = 6;
constexpr long kObjectEvery = 16;  // graphs
constexpr size_t kMapBytes = size_t{8} << 20;
const char* const kSource = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry nothing() { ret; }\n";

enum class Beside { kNothing, kSharedEvents, kSynchronize, kModules, kMappings, kUserObjects };
const char* const kNames[] = {"nothing",
                              "events that other threads record again",
                              "cuCtxSynchronize",
                              "modules come and go",
                              "mappings come and go",
                              "graphs hold objects whose destructors start threads that map and unmap"};

struct Counts {  // in memory that outlives the child
  std::atomic<long> graphs{0}, failed{0};
};

class Stress {
 public:
  Stress(Beside beside, double seconds, Counts& counts)
      : beside_(beside),
        end_(std::chrono::steady_clock::now() + std::chrono::milliseconds(static_cast<int>(1000 * seconds))),
        counts_(counts) {}

  void run() {
    CUdevice device = 0;
    expect(cuInit(0));
    expect(cuDeviceGet(&device, 0));
    expect(cuDevicePrimaryCtxRetain(&context_, device));
    expect(cuCtxSetCurrent(context_));
    CUmodule module = nullptr;
    expect(cuModuleLoadData(&module, kSource));
    expect(cuModuleGetFunction(&kernel_, module, "nothing"));
    std::vector<std::thread> threads(kThreads);
    for (std::thread& each : threads) each = std::thread([this] { capture(); });
    if (const std::function<void()> body = work_beside()) {
      threads.emplace_back([this, body] {
        expect(cuCtxSetCurrent(context_));
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        expect(cuThreadExchangeStreamCaptureMode(&mode));
        for (; !is_over(); std::this_thread::sleep_for(std::chrono::microseconds(300))) body();
      });
    }
    for (std::thread& each : threads) each.join();
    for (int tries = 0; num_objects_ != 0 && tries < 10'000; ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    counts_.failed += num_objects_;
  }

 private:
  bool is_over() const { return std::chrono::steady_clock::now() >= end_; }
  void expect(CUresult result) { counts_.failed += result != CUDA_SUCCESS ? 1 : 0; }

  void capture() {
    expect(cuCtxSetCurrent(context_));
    CUstream stream = nullptr;
    expect(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CUevent event = take();
    for (; !is_over(); ++counts_.graphs) {
      CUgraph graph = nullptr;
      CUgraphExec made = nullptr;
      expect(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
      if (beside_ == Beside::kUserObjects && counts_.graphs % kObjectEvery == 0) hold_an_object(stream);
      for (int number = 0; number < kKernels; ++number) {
        expect(cuLaunchKernel(kernel_, 1, 1, 1, 32, 1, 1, 0, stream, nullptr, nullptr));
        if (beside_ == Beside::kSharedEvents) {  // the last goes to whoever takes one next
          CUevent next = take();
          give(event);
          event = next;
        }
        expect(cuEventRecord(event, stream));
      }
      expect(cuStreamEndCapture(stream, &graph));
      expect(cuGraphInstantiate(&made, graph, 0));
      expect(cuGraphLaunch(made, stream));
      expect(cuStreamSynchronize(stream));
      expect(cuGraphExecDestroy(made));
      expect(cuGraphDestroy(graph));
    }
  }

  CUevent take() {
    const std::lock_guard lock(mutex_);
    CUevent event = nullptr;
    if (idle_.empty()) {
      expect(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    } else {
      event = idle_.back();
      idle_.pop_back();
    }
    return event;
  }
  void give(CUevent event) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(event);
  }

  // As Weft does at the first call of a capture (src/engine/nvlink/gpu.cc).
  void hold_an_object(CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUgraph graph = nullptr;
    expect(cuStreamGetCaptureInfo(stream, &status, nullptr, &graph, nullptr, nullptr, nullptr));
    CUuserObject object = nullptr;
    const auto start = [](void* self) {
      std::thread([self] {
        auto* const stress = static_cast<Stress*>(self);
        stress->expect(cuCtxSetCurrent(stress->context_));
        stress->map_and_unmap();
        --stress->num_objects_;
      }).detach();
    };
    const CUresult made = cuUserObjectCreate(&object, this, start, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
    expect(made);
    if (made != CUDA_SUCCESS) return;
    ++num_objects_;
    const CUresult kept = cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE);
    expect(kept);
    if (kept != CUDA_SUCCESS) cuUserObjectRelease(object, 1);
  }

  std::function<void()> work_beside() {
    if (beside_ == Beside::kSynchronize) return [] { cuCtxSynchronize(); };  // refused while a stream records
    if (beside_ == Beside::kModules) return [this] { load_and_unload(); };
    if (beside_ == Beside::kMappings) return [this] { map_and_unmap(); };
    return {};
  }
  void load_and_unload() {
    CUmodule module = nullptr;
    CUfunction function = nullptr;
    expect(cuModuleLoadData(&module, kSource));
    expect(cuModuleGetFunction(&function, module, "nothing"));
    expect(cuModuleUnload(module));
  }
  void map_and_unmap() {
    CUmemAllocationProp kind = {};
    kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    const CUmemAccessDesc access = {kind.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle memory = 0;
    CUdeviceptr address = 0;
    expect(cuMemCreate(&memory, kMapBytes, &kind, 0));
    expect(cuMemAddressReserve(&address, kMapBytes, 0, 0, 0));
    expect(cuMemMap(address, kMapBytes, 0, memory, 0));
    expect(cuMemSetAccess(address, kMapBytes, &access, 1));
    expect(cuMemUnmap(address, kMapBytes));
    expect(cuMemAddressFree(address, kMapBytes));
    expect(cuMemRelease(memory));
  }

  const Beside beside_;
  const std::chrono::steady_clock::time_point end_;
  Counts& counts_;
  CUcontext context_ = nullptr;
  CUfunction kernel_ = nullptr;
  std::mutex mutex_;
  std::vector<CUevent> idle_;
  std::atomic<int> num_objects_{0};
};

}  // namespace

int main(int num_args, char** args) {
  const double seconds = num_args > 1 ? std::atof(args[1]) : 5;
  auto* counts =
      static_cast<Counts*>(mmap(nullptr, sizeof(Counts), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  if (counts == MAP_FAILED) return 1;
  for (const Beside beside : {Beside::kNothing, Beside::kSharedEvents, Beside::kSynchronize, Beside::kModules,
                              Beside::kMappings, Beside::kUserObjects}) {
    new (counts) Counts();
    const pid_t child = fork();
    if (child == 0) {
      Stress(beside, seconds, *counts).run();
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    std::printf(
        "{\"kind\": \"capture_stress\", \"beside\": \"%s\", \"threads\": %d, \"seconds\": %g, \"graphs\": %ld, "
        "\"failed\": %ld, \"signal\": %d}\n",
        kNames[static_cast<int>(beside)], kThreads, seconds, counts->graphs.load(), counts->failed.load(),
        WIFSIGNALED(status) ? WTERMSIG(status) : 0);
    std::fflush(stdout);
  }
}
