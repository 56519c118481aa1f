#include "base/cuda_driver.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <string>

#include "base/status.h"

namespace weft::cuda {
namespace {

constexpr int kVersion = 12040;  // symbols are asked for as of CUDA 12.4

using GetProcAddress = Result (*)(const char*, void**, int, uint64_t, int*);

struct Loader {
  GetProcAddress get;

  template <class Symbol>
  void load(Symbol& symbol, const char* name) const {
    void* found = nullptr;
    int status = 0;
    if (get(name, &found, kVersion, 0, &status) != kSuccess || found == nullptr) {
      throw_unsupported(std::string("the CUDA driver has no ") + name + "; need: a driver of CUDA 12.4 or later");
    }
    symbol = reinterpret_cast<Symbol>(found);
  }
};

void load_memory(const Loader& loader, Driver& driver) {
  loader.load(driver.granularity, "cuMemGetAllocationGranularity");
  loader.load(driver.mem_create, "cuMemCreate");
  loader.load(driver.mem_release, "cuMemRelease");
  loader.load(driver.address_reserve, "cuMemAddressReserve");
  loader.load(driver.address_free, "cuMemAddressFree");
  loader.load(driver.mem_map, "cuMemMap");
  loader.load(driver.mem_unmap, "cuMemUnmap");
  loader.load(driver.set_access, "cuMemSetAccess");
  loader.load(driver.export_handle, "cuMemExportToShareableHandle");
  loader.load(driver.import_handle, "cuMemImportFromShareableHandle");
  loader.load(driver.host_alloc, "cuMemHostAlloc");
  loader.load(driver.host_free, "cuMemFreeHost");
  loader.load(driver.memset_async, "cuMemsetD8Async");
  loader.load(driver.copy_async, "cuMemcpyDtoDAsync");
  loader.load(driver.copy_from_host_async, "cuMemcpyHtoDAsync");
  loader.load(driver.copy_to_host_async, "cuMemcpyDtoHAsync");
}

void load_streams(const Loader& loader, Driver& driver) {
  loader.load(driver.context_synchronize, "cuCtxSynchronize");
  loader.load(driver.stream_create, "cuStreamCreate");
  loader.load(driver.stream_destroy, "cuStreamDestroy");
  loader.load(driver.stream_synchronize, "cuStreamSynchronize");
  loader.load(driver.stream_query, "cuStreamQuery");
  loader.load(driver.stream_wait_event, "cuStreamWaitEvent");
  loader.load(driver.stream_capture_info, "cuStreamGetCaptureInfo");
  loader.load(driver.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  loader.load(driver.event_create, "cuEventCreate");
  loader.load(driver.event_destroy, "cuEventDestroy");
  loader.load(driver.event_record, "cuEventRecord");
  loader.load(driver.event_query, "cuEventQuery");
}

Driver load_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw_unsupported("no CUDA driver (libcuda.so.1) on this machine");
  const Loader loader{reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"))};
  if (loader.get == nullptr) throw_unsupported("the CUDA driver is older than 12.0; need: 12.4 or later");
  Driver driver{};
  loader.load(driver.init, "cuInit");
  loader.load(driver.get_error_name, "cuGetErrorName");
  loader.load(driver.device_get, "cuDeviceGet");
  loader.load(driver.device_get_attribute, "cuDeviceGetAttribute");
  loader.load(driver.primary_context_retain, "cuDevicePrimaryCtxRetain");
  loader.load(driver.primary_context_release, "cuDevicePrimaryCtxRelease");
  loader.load(driver.context_push, "cuCtxPushCurrent");
  loader.load(driver.context_pop, "cuCtxPopCurrent");
  load_memory(loader, driver);
  load_streams(loader, driver);
  loader.load(driver.module_load, "cuModuleLoadData");
  loader.load(driver.module_unload, "cuModuleUnload");
  loader.load(driver.module_get_function, "cuModuleGetFunction");
  loader.load(driver.function_set_attribute, "cuFuncSetAttribute");
  loader.load(driver.launch, "cuLaunchKernelEx");
  loader.load(driver.user_object_create, "cuUserObjectCreate");
  loader.load(driver.user_object_release, "cuUserObjectRelease");
  loader.load(driver.graph_retain_user_object, "cuGraphRetainUserObject");
  const Result started = driver.init(0);
  if (started != kSuccess)
    throw_unsupported("the CUDA driver found no usable GPU (cuInit: " + std::to_string(started) + ")");
  return driver;
}

}  // namespace

// Not by the initialiser of a static: if one throws while another thread waits for it, TSan's runtime waits for ever.
const Driver& driver() {
  static std::mutex mutex;
  static std::atomic<bool> is_loaded{false};
  static Driver loaded;
  if (!is_loaded.load(std::memory_order_acquire)) {
    const std::lock_guard lock(mutex);
    if (!is_loaded.load(std::memory_order_relaxed)) {
      loaded = load_driver();
      is_loaded.store(true, std::memory_order_release);
    }
  }
  return loaded;
}

std::string error_name(Result result) {
  const char* name = nullptr;
  driver().get_error_name(result, &name);
  return name != nullptr ? name : "CUDA error " + std::to_string(result);
}

void check(Result result, const char* call) {
  if (result != kSuccess) throw Error(ErrorCode::kCudaError, std::string(call) + ": " + error_name(result));
}

}  // namespace weft::cuda
