// The part of the CUDA driver interface that Weft uses, declared here, so that building needs no CUDA toolkit and importing
// no driver. Names, values and layouts are those of cuda.h (CUDA driver API, 12.4); a test compares them where it is there.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft::cuda {

using Result = int;
using Device = int;
using DevicePtr = uint64_t;
using Context = struct ContextObject*;
using Stream = struct StreamObject*;
using Module = struct ModuleObject*;
using Function = struct FunctionObject*;
using AllocationHandle = uint64_t;

constexpr Result kSuccess = 0;
constexpr int kLocationDevice = 1;          // CU_MEM_LOCATION_TYPE_DEVICE
constexpr int kAllocationPinned = 1;        // CU_MEM_ALLOCATION_TYPE_PINNED
constexpr int kHandlePosixFd = 1;           // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
constexpr int kAccessReadWrite = 3;         // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
constexpr int kGranularityRecommended = 1;  // CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
constexpr unsigned kHostAllocMapped = 3;    // CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
constexpr int kMaxDynamicShared = 8;        // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kComputeMajor = 75;           // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kComputeMinor = 76;
constexpr int kMultiprocessors = 16;    // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
constexpr int kMaxSharedPerBlock = 97;  // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN

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
  Result (*copy_from_host)(DevicePtr, const void*, size_t);
  Result (*stream_synchronize)(Stream);
  Result (*stream_query)(Stream);
  Result (*module_load)(Module*, const void*);
  Result (*module_unload)(Module);
  Result (*module_get_function)(Function*, Module, const char*);
  Result (*function_set_attribute)(Function, int, int);
  Result (*launch)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**,
                   void**);
};

// Loaded and initialised at the first call. Error kUnsupported: no driver, too old, or no GPU.
const Driver& driver();

// Throws kCudaError naming the call and the driver's name of the error.
void check(Result result, const char* call);

// Makes the primary context of a device current for a scope.
class ContextScope {
 public:
  explicit ContextScope(Context context) { check(driver().context_push(context), "cuCtxPushCurrent"); }
  ~ContextScope() {
    Context popped;
    driver().context_pop(&popped);
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;
};

}  // namespace weft::cuda
