// Guards against declarations of the CUDA driver that differ from the official header: a wrong value or layout would be
// found only by a crash on a GPU. Without the header (no toolkit) it says so and passes; nothing of it is linked.
#include "base/cuda_driver.h"

#include <cstdio>

#if __has_include(<cuda.h>) && __has_include(<cudaTypedefs.h>)

#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstddef>
#include <type_traits>

namespace weft::cuda {

template <class T>
constexpr bool kIsNumber = std::is_integral_v<T> || std::is_enum_v<T>;

// Types that stand for each other: the same bits. Handles are pointers to anything, structs are compared below.
template <class Ours, class Theirs>
constexpr bool same_bits() {
  if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    using OursTo = std::remove_pointer_t<Ours>;
    using TheirsTo = std::remove_pointer_t<Theirs>;
    if constexpr (kIsNumber<OursTo> && kIsNumber<TheirsTo>) return sizeof(OursTo) == sizeof(TheirsTo);
    return kIsNumber<OursTo> == kIsNumber<TheirsTo>;
  } else {
    return kIsNumber<Ours> && kIsNumber<Theirs> && sizeof(Ours) == sizeof(Theirs);
  }
}

template <class Ours, class Theirs>
constexpr bool kSameFunction = false;
template <class OursResult, class... Ours, class TheirResult, class... Theirs>
constexpr bool kSameFunction<OursResult (*)(Ours...), TheirResult (*)(Theirs...)> = [] {
  if constexpr (sizeof...(Ours) != sizeof...(Theirs)) {
    return false;
  } else {
    return same_bits<OursResult, TheirResult>() && (same_bits<Ours, Theirs>() && ...);
  }
}();

// The version that cuGetProcAddress gives for 12.4, which is not always the newest of the header.
#define WEFT_SAME_FUNCTION(member, type) \
  static_assert(kSameFunction<decltype(Driver::member), type>, #member " differs from " #type)
WEFT_SAME_FUNCTION(init, PFN_cuInit_v2000);
WEFT_SAME_FUNCTION(get_error_name, PFN_cuGetErrorName_v6000);
WEFT_SAME_FUNCTION(device_get, PFN_cuDeviceGet_v2000);
WEFT_SAME_FUNCTION(device_get_attribute, PFN_cuDeviceGetAttribute_v2000);
WEFT_SAME_FUNCTION(primary_context_retain, PFN_cuDevicePrimaryCtxRetain_v7000);
WEFT_SAME_FUNCTION(primary_context_release, PFN_cuDevicePrimaryCtxRelease_v11000);
WEFT_SAME_FUNCTION(context_push, PFN_cuCtxPushCurrent_v4000);
WEFT_SAME_FUNCTION(context_pop, PFN_cuCtxPopCurrent_v4000);
WEFT_SAME_FUNCTION(context_synchronize, PFN_cuCtxSynchronize_v2000);
WEFT_SAME_FUNCTION(granularity, PFN_cuMemGetAllocationGranularity_v10020);
WEFT_SAME_FUNCTION(mem_create, PFN_cuMemCreate_v10020);
WEFT_SAME_FUNCTION(mem_release, PFN_cuMemRelease_v10020);
WEFT_SAME_FUNCTION(address_reserve, PFN_cuMemAddressReserve_v10020);
WEFT_SAME_FUNCTION(address_free, PFN_cuMemAddressFree_v10020);
WEFT_SAME_FUNCTION(mem_map, PFN_cuMemMap_v10020);
WEFT_SAME_FUNCTION(mem_unmap, PFN_cuMemUnmap_v10020);
WEFT_SAME_FUNCTION(set_access, PFN_cuMemSetAccess_v10020);
WEFT_SAME_FUNCTION(export_handle, PFN_cuMemExportToShareableHandle_v10020);
WEFT_SAME_FUNCTION(import_handle, PFN_cuMemImportFromShareableHandle_v10020);
WEFT_SAME_FUNCTION(host_alloc, PFN_cuMemHostAlloc_v2020);
WEFT_SAME_FUNCTION(host_free, PFN_cuMemFreeHost_v2000);
WEFT_SAME_FUNCTION(memset_async, PFN_cuMemsetD8Async_v3020);
WEFT_SAME_FUNCTION(copy_async, PFN_cuMemcpyDtoDAsync_v3020);
WEFT_SAME_FUNCTION(copy_from_host_async, PFN_cuMemcpyHtoDAsync_v3020);
WEFT_SAME_FUNCTION(copy_to_host_async, PFN_cuMemcpyDtoHAsync_v3020);
WEFT_SAME_FUNCTION(stream_create, PFN_cuStreamCreate_v2000);
WEFT_SAME_FUNCTION(stream_destroy, PFN_cuStreamDestroy_v4000);
WEFT_SAME_FUNCTION(stream_synchronize, PFN_cuStreamSynchronize_v2000);
WEFT_SAME_FUNCTION(stream_query, PFN_cuStreamQuery_v2000);
WEFT_SAME_FUNCTION(stream_wait_event, PFN_cuStreamWaitEvent_v3020);
WEFT_SAME_FUNCTION(stream_capture_info, PFN_cuStreamGetCaptureInfo_v12030);
WEFT_SAME_FUNCTION(exchange_capture_mode, PFN_cuThreadExchangeStreamCaptureMode_v10010);
WEFT_SAME_FUNCTION(event_create, PFN_cuEventCreate_v2000);
WEFT_SAME_FUNCTION(event_destroy, PFN_cuEventDestroy_v4000);
WEFT_SAME_FUNCTION(event_record, PFN_cuEventRecord_v2000);
WEFT_SAME_FUNCTION(event_query, PFN_cuEventQuery_v2000);
WEFT_SAME_FUNCTION(module_load, PFN_cuModuleLoadData_v2000);
WEFT_SAME_FUNCTION(module_unload, PFN_cuModuleUnload_v2000);
WEFT_SAME_FUNCTION(module_get_function, PFN_cuModuleGetFunction_v2000);
WEFT_SAME_FUNCTION(function_set_attribute, PFN_cuFuncSetAttribute_v9000);
WEFT_SAME_FUNCTION(launch, PFN_cuLaunchKernelEx_v11060);
WEFT_SAME_FUNCTION(user_object_create, PFN_cuUserObjectCreate_v11030);
WEFT_SAME_FUNCTION(user_object_release, PFN_cuUserObjectRelease_v11030);
WEFT_SAME_FUNCTION(graph_retain_user_object, PFN_cuGraphRetainUserObject_v11030);

static_assert(sizeof(Device) == sizeof(CUdevice) && sizeof(DevicePtr) == sizeof(CUdeviceptr));
static_assert(sizeof(AllocationHandle) == sizeof(CUmemGenericAllocationHandle));

static_assert(sizeof(Location) == sizeof(CUmemLocation) && offsetof(Location, id) == offsetof(CUmemLocation, id));
static_assert(sizeof(AccessDesc) == sizeof(CUmemAccessDesc) &&
              offsetof(AccessDesc, flags) == offsetof(CUmemAccessDesc, flags));
static_assert(sizeof(LaunchConfig) == sizeof(CUlaunchConfig) && sizeof(LaunchAttribute) == sizeof(CUlaunchAttribute));
static_assert(alignof(LaunchAttribute) == alignof(CUlaunchAttribute));
static_assert(offsetof(LaunchConfig, threads) == offsetof(CUlaunchConfig, blockDimX));
static_assert(offsetof(LaunchConfig, shared_bytes) == offsetof(CUlaunchConfig, sharedMemBytes));
static_assert(offsetof(LaunchConfig, stream) == offsetof(CUlaunchConfig, hStream));
static_assert(offsetof(LaunchConfig, attributes) == offsetof(CUlaunchConfig, attrs));
static_assert(offsetof(LaunchConfig, num_attributes) == offsetof(CUlaunchConfig, numAttrs));
static_assert(offsetof(LaunchAttribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(kMayBeginEarly == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
static_assert(sizeof(FabricHandle) == sizeof(CUmemFabricHandle));
static_assert(sizeof(AllocationProp) == sizeof(CUmemAllocationProp));
static_assert(offsetof(AllocationProp, type) == offsetof(CUmemAllocationProp, type));
static_assert(offsetof(AllocationProp, handle_types) == offsetof(CUmemAllocationProp, requestedHandleTypes));
static_assert(offsetof(AllocationProp, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(AllocationProp, win32) == offsetof(CUmemAllocationProp, win32HandleMetaData));
static_assert(offsetof(AllocationProp, flags.compression) == offsetof(CUmemAllocationProp, allocFlags.compressionType));
static_assert(offsetof(AllocationProp, flags.gpu_direct_rdma) ==
              offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable));
static_assert(offsetof(AllocationProp, flags.usage) == offsetof(CUmemAllocationProp, allocFlags.usage));

static_assert(kSuccess == CUDA_SUCCESS);
static_assert(kNotReady == CUDA_ERROR_NOT_READY);
static_assert(kCaptureImplicit == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
static_assert(kLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(kAllocationPinned == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(kHandlePosixFd == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(kHandleFabric == CU_MEM_HANDLE_TYPE_FABRIC);
static_assert(kAccessReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(kGranularityRecommended == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
static_assert(kHostAllocMapped == (CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
static_assert(kMaxDynamicShared == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(kComputeMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(kComputeMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(kMultiprocessors == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(kMaxSharedPerBlock == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
static_assert(kRdmaSupported == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
static_assert(kFabricSupported == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED);
static_assert(kNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(kCaptureRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(kNotCapturing == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(kNoDestructorSync == CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
static_assert(kMoveToGraph == CU_GRAPH_USER_OBJECT_MOVE);

}  // namespace weft::cuda

int main() {
  std::printf("cuda.h %d: the declarations agree\n", CUDA_VERSION);
  return 0;
}

#else

int main() {
  std::printf("no cuda.h: nothing to compare with\n");
  return 0;
}

#endif
