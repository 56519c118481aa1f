// check: allow file-size: one driver, a few lines a function
#include "engine/nvlink/fake_cuda.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "base/cuda_driver.h"
#include "launch_request.h"

namespace fake_cuda {
namespace {

using namespace weft::cuda;

constexpr Result kInvalidValue = 1, kOutOfMemory = 2, kNotPermitted = 800, kCapturedEvent = 907;
constexpr Result kLaunchFailed = 719;
constexpr size_t kGranularity = size_t{2} << 20;

struct StreamState {
  bool is_held = false;
  uint64_t submitted = 0;
  uint64_t done = 0;
  int capture = kNotCapturing;
  uint64_t capture_id = 0;
  bool is_spoilt = false;              // the capture: there will be no graph
  std::map<uint64_t, uint64_t> after;  // by other stream: its counter that this one waits for, directly or not
};

struct EventState {
  uint64_t stream = 0;
  uint64_t mark = 0;
  bool is_captured = false;
  uint64_t capture_id = 0;
  std::map<uint64_t, uint64_t> after;  // of the stream, when it was recorded
};

struct Physical {
  int fd = -1;
  size_t bytes = 0;
  int kinds = 0;  // of handles that it was made for
  ~Physical() { close(fd); }
};

// An emulated kernel, and the module that it is alone in. Compiled when it is first launched: where ranks are threads the engine
// prepares every form that some rank may need.
struct EmulatedKernel {
  std::string source;
  std::once_flag once;
  std::string problem;                         // why there is none
  emulation::LaunchFunction launch = nullptr;  // null: it does nothing
  size_t args_bytes = 0;
};

struct UserObjectState {
  void* what = nullptr;
  void (*destroy)(void*) = nullptr;
};

thread_local bool is_in_destructor = false;

struct State {
  std::mutex mutex;
  std::map<uint64_t, std::vector<UserObjectState*>> graphs;  // by capture: what they hold
  std::map<uint64_t, StreamState> streams;
  uint64_t next_stream = 0x1000;
  std::map<AllocationHandle, std::shared_ptr<Physical>> handles;
  std::map<DevicePtr, std::shared_ptr<Physical>> mappings;
  AllocationHandle next_handle = 1;
  std::map<ino_t, std::weak_ptr<Physical>> by_file;
  std::vector<std::pair<uint64_t, uint64_t>> waits;
  Compile compile = nullptr;
  std::map<uint64_t, std::vector<std::function<Result()>>> recorded;  // by capture: what a replay does
  std::string found;                                                  // by an emulated kernel: a mistake
  int given_up = 0;
  uint64_t seed = 1;
  int num_multiprocessors = 132, shared_memory = 232448;
  KernelBody kernel;
  int num_launches = 0;
  unsigned shared_bytes = 0;
  std::atomic<int> gpu_result{0};
  std::atomic<bool> has_fabric{false};
  std::string failing;
  int fail_result = 0;
  int fail_after = 0;
};

State& state() {
  static auto* const kState = new State();
  return *kState;
}

// The injected failure of a function, or success.
Result injected(const char* symbol) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.failing != symbol || s.fail_after-- > 0) return kSuccess;
  s.failing.clear();
  return s.fail_result;
}

void submit(Stream stream) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  StreamState& at = s.streams[reinterpret_cast<uint64_t>(stream)];
  ++at.submitted;
  if (!at.is_held) at.done = at.submitted;
}

// Work of a stream: done now, or in emulation, where a stream records a graph, when that is replayed.
Result enqueue(Stream stream, std::function<Result()> work) {
  State& s = state();
  bool is_recorded = false;
  {
    const std::lock_guard lock(s.mutex);
    const StreamState& at = s.streams[reinterpret_cast<uint64_t>(stream)];
    is_recorded = s.compile != nullptr && at.capture != kNotCapturing;
    if (is_recorded) s.recorded[at.capture_id].push_back(std::move(work));
  }
  const Result result = is_recorded ? kSuccess : work();
  submit(stream);
  return result;
}

ino_t file_of(int fd) {
  struct stat status{};
  fstat(fd, &status);
  return status.st_ino;
}

// ---- the driver's functions

Result init(unsigned) { return kSuccess; }
Result get_error_name(Result result, const char** name) {
  static thread_local std::string text;
  text = "CUDA_ERROR_" + std::to_string(result);
  *name = text.c_str();
  return kSuccess;
}
Result device_get(Device* device, int index) {
  *device = index;
  return index == 0 ? kSuccess : kInvalidValue;
}
Result device_get_attribute(int* value, int attribute, Device) {
  const std::map<int, int> known = {{kComputeMajor, 9},
                                    {kComputeMinor, 0},
                                    {kMultiprocessors, state().num_multiprocessors},
                                    {kMaxSharedPerBlock, state().shared_memory},
                                    {kRdmaSupported, 1},
                                    {kFabricSupported, state().has_fabric ? 1 : 0}};
  const auto found = known.find(attribute);
  *value = found == known.end() ? 0 : found->second;
  return kSuccess;
}
Result context_retain(Context* context, Device) {
  *context = reinterpret_cast<Context>(uintptr_t{16});
  return kSuccess;
}
Result context_release(Device) { return kSuccess; }
std::vector<Context>& pushed() {
  static thread_local std::vector<Context> contexts;
  return contexts;
}
Result context_push(Context context) {
  if (is_in_destructor) return kNotPermitted;
  const Result result = injected("cuCtxPushCurrent");
  if (result == kSuccess) pushed().push_back(context);
  return result;
}
Result context_pop(Context* context) {
  if (pushed().empty()) return context_retain(context, 0);  // there is one
  *context = pushed().back();
  pushed().pop_back();
  return kSuccess;
}
Result context_synchronize() {
  if (const Result result = injected("cuCtxSynchronize"); result != kSuccess) return result;
  State& s = state();
  for (;;) {
    {
      const std::lock_guard lock(s.mutex);
      bool captures = false;
      for (auto& [id, stream] : s.streams) {
        stream.is_spoilt = stream.is_spoilt || stream.capture != kNotCapturing;
        captures = captures || stream.capture != kNotCapturing;
      }
      if (captures) return kCaptureUnsupported;
      const bool is_idle = std::all_of(s.streams.begin(), s.streams.end(),
                                       [](const auto& each) { return each.second.done == each.second.submitted; });
      if (is_idle) return kSuccess;
    }
    usleep(200);
  }
}

Result granularity(size_t* bytes, const AllocationProp*, int) {
  *bytes = kGranularity;
  return kSuccess;
}
Result mem_create(AllocationHandle* handle, size_t bytes, const AllocationProp* prop, unsigned long long) {
  if (const Result result = injected("cuMemCreate"); result != kSuccess) return result;
  if (bytes % kGranularity != 0 || prop->flags.gpu_direct_rdma != 1) return kInvalidValue;
  auto physical = std::make_shared<Physical>();
  physical->fd = memfd_create("fake-gpu", MFD_CLOEXEC);
  physical->bytes = bytes;
  physical->kinds = prop->handle_types;
  if (ftruncate(physical->fd, static_cast<off_t>(bytes)) != 0) return kOutOfMemory;
  const ino_t file = file_of(physical->fd);
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.by_file[file] = physical;
  *handle = s.next_handle++;
  s.handles[*handle] = physical;
  return kSuccess;
}
Result mem_release(AllocationHandle handle) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return s.handles.erase(handle) == 1 ? kSuccess : kInvalidValue;
}
Result address_reserve(DevicePtr* address, size_t bytes, size_t, DevicePtr, unsigned long long) {
  if (bytes % kGranularity != 0) return kInvalidValue;
  void* place = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *address = reinterpret_cast<DevicePtr>(place);
  return place == MAP_FAILED ? kOutOfMemory : kSuccess;
}
Result address_free(DevicePtr address, size_t bytes) {
  return munmap(reinterpret_cast<void*>(address), bytes) == 0 ? kSuccess : kInvalidValue;
}
Result mem_map(DevicePtr address, size_t bytes, size_t, AllocationHandle handle, unsigned long long) {
  if (const Result result = injected("cuMemMap"); result != kSuccess) return result;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto found = s.handles.find(handle);
  if (found == s.handles.end() || found->second->bytes != bytes || s.mappings.count(address) != 0) return kInvalidValue;
  void* place = mmap(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                     found->second->fd, 0);
  if (place == MAP_FAILED) return kOutOfMemory;
  s.mappings[address] = found->second;
  return kSuccess;
}
Result mem_unmap(DevicePtr address, size_t bytes) {
  if (is_in_destructor) return kNotPermitted;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.mappings.erase(address) != 1) return kInvalidValue;
  void* place = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return place == MAP_FAILED ? kInvalidValue : kSuccess;
}
Result set_access(DevicePtr, size_t, const AccessDesc*, size_t) { return kSuccess; }
// A fabric handle is the number of the physical memory's descriptor in this process.
Result export_handle(void* exported, AllocationHandle handle, int kind, unsigned long long) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto found = s.handles.find(handle);
  if (found == s.handles.end() || (found->second->kinds & kind) == 0) return kInvalidValue;
  const int fd = kind == kHandlePosixFd ? dup(found->second->fd) : found->second->fd;
  std::memcpy(exported, &fd, sizeof(fd));
  return kSuccess;
}
Result import_handle(AllocationHandle* handle, void* shared, int kind) {
  if (const Result result = injected("cuMemImportFromShareableHandle"); result != kSuccess) return result;
  int fd = static_cast<int>(reinterpret_cast<intptr_t>(shared));
  if (kind == kHandleFabric) std::memcpy(&fd, shared, sizeof(fd));
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const std::shared_ptr<Physical> physical = s.by_file[file_of(fd)].lock();
  if (physical == nullptr) return kInvalidValue;
  *handle = s.next_handle++;
  s.handles[*handle] = physical;
  return kSuccess;
}
std::atomic<int> host_pages{0};
Result host_alloc(void** place, size_t bytes, unsigned) {
  ++host_pages;
  *place = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return kSuccess;
}
Result host_free(void* place) {
  free(place);
  --host_pages;
  return kSuccess;
}
Result memset_async(DevicePtr address, unsigned char value, size_t bytes, Stream stream) {
  return enqueue(stream, [=] {
    std::memset(reinterpret_cast<void*>(address), value, bytes);
    return kSuccess;
  });
}
Result copy_bytes(void* to, const void* from, size_t bytes, Stream stream) {
  return enqueue(stream, [=] {
    std::memcpy(to, from, bytes);
    return kSuccess;
  });
}
std::atomic<int> num_copies{0};
Result copy_async(DevicePtr to, DevicePtr from, size_t bytes, Stream stream) {
  ++num_copies;
  return copy_bytes(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes, stream);
}
Result copy_from_host_async(DevicePtr to, const void* from, size_t bytes, Stream stream) {
  return copy_bytes(reinterpret_cast<void*>(to), from, bytes, stream);
}
Result copy_to_host_async(void* to, DevicePtr from, size_t bytes, Stream stream) {
  return copy_bytes(to, reinterpret_cast<const void*>(from), bytes, stream);
}

Result stream_create(Stream* stream, unsigned) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  *stream = reinterpret_cast<Stream>(s.next_stream++);
  return kSuccess;
}
Result stream_destroy(Stream) { return kSuccess; }
Result stream_synchronize(Stream) { return kSuccess; }
Result stream_query(Stream) { return kSuccess; }
Result stream_wait_event(Stream stream, Event event, unsigned) {
  if (const Result result = injected("cuStreamWaitEvent"); result != kSuccess) return result;
  const auto* from = reinterpret_cast<EventState*>(event);
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const bool is_capturing = s.streams[reinterpret_cast<uint64_t>(stream)].capture != kNotCapturing;
  if (is_capturing != from->is_captured) return 905;  // CUDA_ERROR_STREAM_CAPTURE_ISOLATION
  s.waits.emplace_back(reinterpret_cast<uint64_t>(stream), from->stream);
  auto& after = s.streams[reinterpret_cast<uint64_t>(stream)].after;
  for (const auto& [other, mark] : from->after) after[other] = std::max(after[other], mark);
  after[from->stream] = std::max(after[from->stream], from->mark);
  return kSuccess;
}
Result stream_capture_info(Stream stream, int* status, uint64_t* id, Graph* graph, void*, void*, size_t*) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const StreamState& at = s.streams[reinterpret_cast<uint64_t>(stream)];
  *status = at.capture;
  *id = at.capture_id;
  *graph = at.capture == kNotCapturing ? nullptr : reinterpret_cast<Graph>(at.capture_id);
  return kSuccess;
}
Result user_object_create(UserObject* object, void* what, void (*destroy)(void*), unsigned, unsigned flags) {
  if (const Result result = injected("cuUserObjectCreate"); result != kSuccess) return result;
  if (flags != kNoDestructorSync) return kInvalidValue;
  *object = reinterpret_cast<UserObject>(new UserObjectState{what, destroy});
  return kSuccess;
}
void destroy_object(UserObjectState* object) {
  std::thread([object] {
    is_in_destructor = true;
    object->destroy(object->what);
    delete object;
  }).join();
}
Result user_object_release(UserObject object, unsigned) {
  destroy_object(reinterpret_cast<UserObjectState*>(object));
  return kSuccess;
}
Result graph_retain_user_object(Graph graph, UserObject object, unsigned, unsigned flags) {
  if (const Result result = injected("cuGraphRetainUserObject"); result != kSuccess) return result;
  if (flags != kMoveToGraph) return kInvalidValue;
  const std::lock_guard lock(state().mutex);
  state().graphs[reinterpret_cast<uint64_t>(graph)].push_back(reinterpret_cast<UserObjectState*>(object));
  return kSuccess;
}
Result exchange_capture_mode(int*) { return kSuccess; }
Result event_create(Event* event, unsigned) {
  *event = reinterpret_cast<Event>(new EventState());
  return kSuccess;
}
Result event_destroy(Event event) {
  delete reinterpret_cast<EventState*>(event);
  return kSuccess;
}
Result event_record(Event event, Stream stream) {
  auto* to = reinterpret_cast<EventState*>(event);
  submit(stream);
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const StreamState& at = s.streams[reinterpret_cast<uint64_t>(stream)];
  const StreamState& before = s.streams[to->stream];
  const bool is_in_use = to->is_captured && before.capture != kNotCapturing && before.capture_id == to->capture_id;
  if (is_in_use && at.capture_id != to->capture_id) return kCapturedEvent;  // threads: that capture may be ending
  *to = {reinterpret_cast<uint64_t>(stream), at.submitted, at.capture != kNotCapturing, at.capture_id, at.after};
  return kSuccess;
}
Result event_query(Event event) {
  const auto* of = reinterpret_cast<EventState*>(event);
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.gpu_result != 0) return s.gpu_result;
  if (of->is_captured) return kCapturedEvent;
  return s.streams[of->stream].done >= of->mark ? kSuccess : kNotReady;
}
// What the compiler gives for an emulated kernel is its source.
Result module_load(Module* module, const void* image) {
  *module = reinterpret_cast<Module>(uintptr_t{32});
  if (state().compile != nullptr) {
    auto* const kernel = new EmulatedKernel();
    kernel->source = static_cast<const char*>(image);
    *module = reinterpret_cast<Module>(kernel);
  }
  return injected("cuModuleLoadData");
}
Result module_unload(Module) { return kSuccess; }
Result module_get_function(Function* function, Module module, const char*) {
  *function = reinterpret_cast<Function>(uintptr_t{48});
  if (state().compile != nullptr) *function = reinterpret_cast<Function>(module);
  return kSuccess;
}

void load(EmulatedKernel& kernel) {
  char answer[4000] = {};
  const int status = state().compile(kernel.source.c_str(), answer, sizeof(answer));
  if (status != 0) kernel.problem = answer;
  if (status != 0 || answer[0] == '\0') return;
  void* const library = dlopen(answer, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    kernel.problem = dlerror();
    return;
  }
  kernel.launch = reinterpret_cast<emulation::LaunchFunction>(dlsym(library, emulation::kLaunchSymbol));
  const auto args_bytes = reinterpret_cast<emulation::ArgsBytesFunction>(dlsym(library, emulation::kArgsBytesSymbol));
  kernel.args_bytes = args_bytes();
}

Result function_set_attribute(Function, int, int) { return kSuccess; }

// The GPU is of no use from here on, until the text has been asked for.
Result fail_with(const std::string& text) {
  const std::lock_guard lock(state().mutex);
  if (!text.empty()) state().found = text;
  state().gpu_result = kLaunchFailed;
  state().given_up = 1;
  return kLaunchFailed;
}

// In the calling thread, which returns when all blocks have ended. A mistake that they have found fails the GPU.
Result run_emulated(const EmulatedKernel& kernel, const LaunchConfig& config, const void* args) {
  constexpr uint32_t kMostSleepUs = 200;
  State& s = state();
  char found[1000] = {};
  emulation::LaunchRequest request;
  request.args = args;
  request.num_blocks = config.blocks[0];
  request.num_threads = config.threads[0];
  request.shared_bytes = config.shared_bytes;
  request.most_sleep_us = kMostSleepUs;
  request.given_up = &s.given_up;
  request.found = found;
  request.found_bytes = sizeof(found);
  {
    const std::lock_guard lock(s.mutex);
    request.seed = s.seed++;
  }
  return kernel.launch(&request) == 0 ? kSuccess
                                      : fail_with(found);  // without a text because of what another has found
}

Result launch(const LaunchConfig* config, Function function, void** params, void**) {
  if (const Result result = injected("cuLaunchKernelEx"); result != kSuccess) return result;
  State& s = state();
  if (s.gpu_result != 0) return s.gpu_result;
  KernelBody body;
  {
    const std::lock_guard lock(s.mutex);
    ++s.num_launches;
    s.shared_bytes = config->shared_bytes;
    body = s.kernel;
  }
  if (function != reinterpret_cast<Function>(uintptr_t{48})) {
    auto* const kernel = reinterpret_cast<EmulatedKernel*>(function);
    std::call_once(kernel->once, [kernel] { load(*kernel); });
    if (!kernel->problem.empty()) return fail_with(kernel->problem);
    const auto* const given = static_cast<const unsigned char*>(params[0]);
    return enqueue(config->stream, [kernel, plain = *config, args = std::vector(given, given + kernel->args_bytes)] {
      return kernel->launch == nullptr ? kSuccess : run_emulated(*kernel, plain, args.data());
    });
  }
  submit(config->stream);
  if (body) body(params[0]);
  return kSuccess;
}

template <class Function>
void* erased(Function* function) {
  return reinterpret_cast<void*>(function);
}

const std::map<std::string, void*>& functions() {
  static const std::map<std::string, void*> kFunctions = {
      {"cuInit", erased(init)},
      {"cuGetErrorName", erased(get_error_name)},
      {"cuDeviceGet", erased(device_get)},
      {"cuDeviceGetAttribute", erased(device_get_attribute)},
      {"cuDevicePrimaryCtxRetain", erased(context_retain)},
      {"cuDevicePrimaryCtxRelease", erased(context_release)},
      {"cuCtxPushCurrent", erased(context_push)},
      {"cuCtxPopCurrent", erased(context_pop)},
      {"cuCtxSynchronize", erased(context_synchronize)},
      {"cuMemGetAllocationGranularity", erased(granularity)},
      {"cuMemCreate", erased(mem_create)},
      {"cuMemRelease", erased(mem_release)},
      {"cuMemAddressReserve", erased(address_reserve)},
      {"cuMemAddressFree", erased(address_free)},
      {"cuMemMap", erased(mem_map)},
      {"cuMemUnmap", erased(mem_unmap)},
      {"cuMemSetAccess", erased(set_access)},
      {"cuMemExportToShareableHandle", erased(export_handle)},
      {"cuMemImportFromShareableHandle", erased(import_handle)},
      {"cuMemHostAlloc", erased(host_alloc)},
      {"cuMemFreeHost", erased(host_free)},
      {"cuMemsetD8Async", erased(memset_async)},
      {"cuMemcpyDtoDAsync", erased(copy_async)},
      {"cuMemcpyHtoDAsync", erased(copy_from_host_async)},
      {"cuMemcpyDtoHAsync", erased(copy_to_host_async)},
      {"cuStreamCreate", erased(stream_create)},
      {"cuStreamDestroy", erased(stream_destroy)},
      {"cuStreamSynchronize", erased(stream_synchronize)},
      {"cuStreamQuery", erased(stream_query)},
      {"cuStreamWaitEvent", erased(stream_wait_event)},
      {"cuStreamGetCaptureInfo", erased(stream_capture_info)},
      {"cuThreadExchangeStreamCaptureMode", erased(exchange_capture_mode)},
      {"cuEventCreate", erased(event_create)},
      {"cuEventDestroy", erased(event_destroy)},
      {"cuEventRecord", erased(event_record)},
      {"cuEventQuery", erased(event_query)},
      {"cuModuleLoadData", erased(module_load)},
      {"cuModuleUnload", erased(module_unload)},
      {"cuModuleGetFunction", erased(module_get_function)},
      {"cuFuncSetAttribute", erased(function_set_attribute)},
      {"cuLaunchKernelEx", erased(launch)},
      {"cuUserObjectCreate", erased(user_object_create)},
      {"cuUserObjectRelease", erased(user_object_release)},
      {"cuGraphRetainUserObject", erased(graph_retain_user_object)},
  };
  return kFunctions;
}

}  // namespace

void set_kernel(KernelBody body) {
  const std::lock_guard lock(state().mutex);
  state().kernel = std::move(body);
}
void compile_with(Compile compile) { state().compile = compile; }
int replay(uint64_t id) {
  std::vector<std::function<Result()>> work;
  {
    const std::lock_guard lock(state().mutex);
    work = state().recorded[id];
  }
  for (const std::function<Result()>& each : work) {
    if (const Result result = each(); result != kSuccess) return result;
  }
  return kSuccess;
}
void hold(uint64_t stream) {
  const std::lock_guard lock(state().mutex);
  state().streams[stream].is_held = true;
}
void let_go(uint64_t stream) {
  const std::lock_guard lock(state().mutex);
  StreamState& at = state().streams[stream];
  at.is_held = false;
  at.done = at.submitted;
}
void begin_capture(uint64_t stream, uint64_t id) {
  const std::lock_guard lock(state().mutex);
  state().streams[stream].capture = 1;
  state().streams[stream].capture_id = id;
}
void end_capture(uint64_t stream) {
  std::optional<uint64_t> spoilt;
  {
    const std::lock_guard lock(state().mutex);
    StreamState& at = state().streams[stream];
    at.capture = kNotCapturing;
    if (std::exchange(at.is_spoilt, false)) spoilt = at.capture_id;
  }
  if (spoilt) destroy_graph(*spoilt);
}
void destroy_graph(uint64_t id) {
  std::vector<UserObjectState*> held;
  {
    const std::lock_guard lock(state().mutex);
    held = std::exchange(state().graphs[id], {});
    state().recorded.erase(id);
  }
  for (UserObjectState* each : held) destroy_object(each);
}
int num_device_copies() { return num_copies; }
int num_held_by(uint64_t id) {
  const std::lock_guard lock(state().mutex);
  return static_cast<int>(state().graphs[id].size());
}
void offer_fabric(bool is_there) { state().has_fabric = is_there; }
void fail_gpu(int result) { state().gpu_result = result; }
void fail_next(const char* symbol, int result, int after) {
  const std::lock_guard lock(state().mutex);
  state().failing = symbol;
  state().fail_result = result;
  state().fail_after = after;
}
std::vector<std::pair<uint64_t, uint64_t>> waits() {
  const std::lock_guard lock(state().mutex);
  return std::exchange(state().waits, {});
}
bool runs_after(uint64_t stream, uint64_t other, uint64_t mark) {
  const std::lock_guard lock(state().mutex);
  return stream == other || state().streams[stream].after[other] >= mark || state().streams[other].done >= mark;
}
uint64_t give_work(uint64_t stream) {
  submit(reinterpret_cast<Stream>(stream));
  const std::lock_guard lock(state().mutex);
  return state().streams[stream].submitted;
}
int num_host_pages() { return host_pages; }
int num_mapped() {
  const std::lock_guard lock(state().mutex);
  return static_cast<int>(state().mappings.size());
}
int64_t physical_bytes() {
  const std::lock_guard lock(state().mutex);
  int64_t bytes = 0;
  for (const auto& [file, physical] : state().by_file) {
    if (const std::shared_ptr<Physical> held = physical.lock()) bytes += static_cast<int64_t>(held->bytes);
  }
  return bytes;
}
int64_t physical_bytes_at_last(int64_t expected) {
  for (int tries = 0; tries < 3000 && physical_bytes() != expected; ++tries) usleep(1000);
  return physical_bytes();
}
int num_launches() {
  const std::lock_guard lock(state().mutex);
  return state().num_launches;
}
unsigned last_shared_bytes() {
  const std::lock_guard lock(state().mutex);
  return state().shared_bytes;
}

}  // namespace fake_cuda

// ---- what is found by name: the driver's one entry, and NVRTC

extern "C" {

int cuGetProcAddress_v2(const char* symbol, void** found, int, uint64_t, int*) {
  const auto function = fake_cuda::functions().find(symbol);
  if (function == fake_cuda::functions().end()) return 500;  // CUDA_ERROR_NOT_FOUND
  *found = function->second;
  return 0;
}

int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return 0;
}
// A program is its source, then what it is compiled to: in emulation the same.
int nvrtcCreateProgram(void** program, const char* source, const char*, int, const char* const*, const char* const*) {
  *program = new std::string(source);
  return 0;
}
int nvrtcCompileProgram(void* program, int, const char* const*) {
  if (fake_cuda::state().compile == nullptr) *static_cast<std::string*>(program) = "cube";
  return 0;
}
int nvrtcDestroyProgram(void** program) {
  delete static_cast<std::string*>(*program);
  return 0;
}
int nvrtcGetProgramLogSize(void* program, size_t* num_bytes) {
  *num_bytes = static_cast<std::string*>(program)->size() + 1;
  return 0;
}
int nvrtcGetProgramLog(void* program, char* log) {
  std::strcpy(log, static_cast<std::string*>(program)->c_str());
  return 0;
}
int nvrtcGetCUBINSize(void* program, size_t* num_bytes) { return nvrtcGetProgramLogSize(program, num_bytes); }
int nvrtcGetCUBIN(void* program, char* cubin) { return nvrtcGetProgramLog(program, cubin); }
const char* nvrtcGetErrorString(int) { return "NVRTC_ERROR"; }

// ---- for Python: the emulated GPU

void emulated_gpu_start(fake_cuda::Compile compile, int num_multiprocessors, int shared_memory) {
  fake_cuda::compile_with(compile);
  fake_cuda::state().num_multiprocessors = num_multiprocessors;
  fake_cuda::state().shared_memory = shared_memory;
}
// What a kernel has found, "" if nothing; the GPU works again.
void emulated_gpu_found(char* text, size_t num_bytes) {
  fake_cuda::State& s = fake_cuda::state();
  const std::lock_guard lock(s.mutex);
  std::strncpy(text, s.found.c_str(), num_bytes - 1);
  s.found.clear();
  s.given_up = s.gpu_result = 0;
}
void emulated_gpu_seed(uint64_t seed) { fake_cuda::state().seed = seed; }
void emulated_gpu_begin_capture(uint64_t stream, uint64_t id) { fake_cuda::begin_capture(stream, id); }
void emulated_gpu_end_capture(uint64_t stream) { fake_cuda::end_capture(stream); }
uint64_t emulated_gpu_given(uint64_t stream) {
  const std::lock_guard lock(fake_cuda::state().mutex);
  return fake_cuda::state().streams[stream].submitted;
}
int emulated_gpu_replay(uint64_t id) { return fake_cuda::replay(id); }
void emulated_gpu_destroy_graph(uint64_t id) { fake_cuda::destroy_graph(id); }

}  // extern "C"
