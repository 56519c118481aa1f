// The part of the CUDA driver interface that Weft uses, declared here, so that building needs no CUDA toolkit and importing
// no driver. Names, values and layouts are those of cuda.h (CUDA driver API, 12.4); a test compares them where it is there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace weft::cuda {

using Result = int;
using Device = int;
using DevicePtr = uint64_t;
using Context = struct ContextObject*;
using Stream = struct StreamObject*;
using Module = struct ModuleObject*;
using Function = struct FunctionObject*;
using Event = struct EventObject*;
using Graph = struct GraphObject*;
using UserObject = struct UserObjectObject*;
using AllocationHandle = uint64_t;

constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;            // CUDA_ERROR_NOT_READY
constexpr Result kCaptureUnsupported = 900;  // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
constexpr Result kCaptureImplicit = 906;     // CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
constexpr int kLocationDevice = 1;           // CU_MEM_LOCATION_TYPE_DEVICE
constexpr int kAllocationPinned = 1;         // CU_MEM_ALLOCATION_TYPE_PINNED
constexpr int kHandlePosixFd = 1;            // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
constexpr int kHandleFabric = 8;             // CU_MEM_HANDLE_TYPE_FABRIC
constexpr int kAccessReadWrite = 3;          // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
constexpr int kGranularityRecommended = 1;   // CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
constexpr unsigned kHostAllocMapped = 3;     // CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
constexpr int kMaxDynamicShared = 8;         // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kComputeMajor = 75;            // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kComputeMinor = 76;
constexpr int kMultiprocessors = 16;       // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
constexpr int kMaxSharedPerBlock = 97;     // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
constexpr int kRdmaSupported = 110;        // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
constexpr int kFabricSupported = 128;      // CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
constexpr unsigned kNonBlocking = 1;       // CU_STREAM_NON_BLOCKING
constexpr unsigned kDisableTiming = 2;     // CU_EVENT_DISABLE_TIMING
constexpr int kCaptureRelaxed = 2;         // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr int kNotCapturing = 0;           // CU_STREAM_CAPTURE_STATUS_NONE
constexpr unsigned kNoDestructorSync = 1;  // CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
constexpr unsigned kMoveToGraph = 1;       // CU_GRAPH_USER_OBJECT_MOVE

struct Location {
  int type;
  int id;
};

struct AllocationProp {
  int type;
  int handle_types;
  Location location;
  void* win32;
  struct {
    unsigned char compression;
    unsigned char gpu_direct_rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
static_assert(sizeof(AllocationProp) == 32);

struct AccessDesc {
  Location location;
  int flags;
};

// CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the kernel may begin before the one in front of it in the stream has ended.
constexpr int kMayBeginEarly = 6;

struct alignas(8) LaunchAttribute {
  int id;
  int padding;
  int value;  // of a union
  int rest[15];
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {
  unsigned blocks[3];
  unsigned threads[3];
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

struct FabricHandle {
  unsigned char data[64];
};

struct Driver {
  Result (*init)(unsigned);
  Result (*get_error_name)(Result, const char**);
  Result (*device_get)(Device*, int);
  Result (*device_get_attribute)(int*, int, Device);
  Result (*primary_context_retain)(Context*, Device);
  Result (*primary_context_release)(Device);
  Result (*context_push)(Context);
  Result (*context_pop)(Context*);
  Result (*granularity)(size_t*, const AllocationProp*, int);
  Result (*mem_create)(AllocationHandle*, size_t, const AllocationProp*, unsigned long long);
  Result (*mem_release)(AllocationHandle);
  Result (*address_reserve)(DevicePtr*, size_t, size_t, DevicePtr, unsigned long long);
  Result (*address_free)(DevicePtr, size_t);
  Result (*mem_map)(DevicePtr, size_t, size_t, AllocationHandle, unsigned long long);
  Result (*mem_unmap)(DevicePtr, size_t);
  Result (*set_access)(DevicePtr, size_t, const AccessDesc*, size_t);
  Result (*export_handle)(void*, AllocationHandle, int, unsigned long long);
  Result (*import_handle)(AllocationHandle*, void*, int);
  Result (*host_alloc)(void**, size_t, unsigned);
  Result (*host_free)(void*);
  Result (*memset_async)(DevicePtr, unsigned char, size_t, Stream);
  Result (*copy_async)(DevicePtr, DevicePtr, size_t, Stream);
  Result (*copy_from_host_async)(DevicePtr, const void*, size_t, Stream);
  Result (*copy_to_host_async)(void*, DevicePtr, size_t, Stream);
  Result (*context_synchronize)();
  Result (*stream_create)(Stream*, unsigned);
  Result (*stream_destroy)(Stream);
  Result (*stream_synchronize)(Stream);
  Result (*stream_query)(Stream);
  Result (*stream_wait_event)(Stream, Event, unsigned);
  // Status and, if wanted, id and graph of a capture; the rest may be null.
  Result (*stream_capture_info)(Stream, int*, uint64_t*, Graph*, void*, void*, size_t*);
  Result (*exchange_capture_mode)(int*);
  Result (*event_create)(Event*, unsigned);
  Result (*event_destroy)(Event);
  Result (*event_record)(Event, Stream);
  Result (*event_query)(Event);
  Result (*module_load)(Module*, const void*);
  Result (*module_unload)(Module);
  Result (*module_get_function)(Function*, Module, const char*);
  Result (*function_set_attribute)(Function, int, int);
  Result (*launch)(const LaunchConfig*, Function, void**, void**);
  // The function is called by a thread of the driver when nobody holds the object any more; it may not call the driver.
  Result (*user_object_create)(UserObject*, void*, void (*)(void*), unsigned, unsigned);
  Result (*user_object_release)(UserObject, unsigned);
  Result (*graph_retain_user_object)(Graph, UserObject, unsigned, unsigned);
};

// Loaded and initialised at the first call. Error kUnsupported: no driver, too old, or no GPU.
const Driver& driver();

// "CUDA_ERROR_ILLEGAL_ADDRESS", ...
std::string error_name(Result result);

// Throws kCudaError naming the call and the driver's name of the error.
void check(Result result, const char* call);

// Makes the primary context of a device current for a scope.
class ContextScope {
 public:
  explicit ContextScope(Context context) { check(driver().context_push(context), "cuCtxPushCurrent"); }
  ~ContextScope() { pop(); }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

  static void pop() noexcept {
    Context popped = nullptr;
    driver().context_pop(&popped);
  }
};

// The same for clean-up, which must not throw: at interpreter exit or in a forked child the context may be gone, then
// `ok()` is false and nothing of the driver needs to be given back.
class QuietContextScope {
 public:
  explicit QuietContextScope(Context context) noexcept : ok_(driver().context_push(context) == kSuccess) {}
  ~QuietContextScope() {
    if (ok_) ContextScope::pop();
  }
  QuietContextScope(const QuietContextScope&) = delete;
  QuietContextScope& operator=(const QuietContextScope&) = delete;
  bool ok() const noexcept { return ok_; }

 private:
  bool ok_;
};

// While another stream of this thread records a graph, the driver forbids calls that have nothing to do with it (making or
// asking events, loading modules). In this scope they are allowed.
class RelaxedCaptureScope {
 public:
  RelaxedCaptureScope() noexcept { driver().exchange_capture_mode(&mode_); }
  ~RelaxedCaptureScope() { driver().exchange_capture_mode(&mode_); }
  RelaxedCaptureScope(const RelaxedCaptureScope&) = delete;
  RelaxedCaptureScope& operator=(const RelaxedCaptureScope&) = delete;

 private:
  int mode_ = kCaptureRelaxed;
};

}  // namespace weft::cuda
