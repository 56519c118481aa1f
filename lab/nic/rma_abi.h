// The table that NCCL 2.30.3 to 2.32.3 asks a plugin for puts of (`ncclRmaPlugin_v13`), and the structs of its calls. Order and sizes
// are NCCL's; names are ours.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft::nic::rma {

using Result = int;
constexpr Result kSuccess = 0;
constexpr Result kSystemError = 2;
constexpr Result kInvalidArgument = 4;
constexpr Result kInvalidUsage = 5;

using Logger = void (*)(int level, unsigned long flags, const char* file, int line, const char* format, ...);
constexpr int kLogWarning = 2;
constexpr unsigned long kLogAll = ~0ul;

constexpr size_t kHandleBytes = 128;  // of what listen() gives to the others
constexpr int kHostMemory = 1, kDeviceMemory = 2;
constexpr int kByProxy = 2;         // GIN's backend whose puts NCCL's own thread posts
constexpr uint32_t kSignalInc = 1;  // else the value is added

struct VirtualDevices {
  int num_devices;
  int devices[8];
};

struct Properties {
  char* name;
  char* pci_path;
  uint64_t guid;
  int memory_kinds;
  int is_registration_global;
  int needs_flush;
  int speed_mbps;
  int port;
  float latency_us;
  int max_comms;
  int max_receives;
  int device_type;
  int device_version;
  VirtualDevices parts;
  size_t max_p2p_bytes;
  size_t max_collective_bytes;
  int max_multi_requests;
  int16_t rail;
  int16_t plane;
};

struct ContextConfig {
  int num_signals;
  int num_counters;
  int num_contexts;
  int queue_depth;
  int traffic_class;
};

struct Plugin {
  const char* name;
  Result (*init)(void** context, uint64_t comm_id, Logger logger);
  Result (*devices)(int* num_devices);
  Result (*properties)(int device, Properties* properties);
  Result (*listen)(void* context, int device, void* handle, void** listener);
  Result (*connect)(void* context, void** handles, int num_ranks, int rank, void* listener, void** group);
  Result (*create_context)(void* group, ContextConfig* config, void** queue, void** device_handle);
  Result (*register_memory)(void* group, void* data, size_t num_bytes, int kind, uint64_t flags, void** region,
                            void** shown);
  Result (*register_dmabuf)(void* group, void* data, size_t num_bytes, int kind, uint64_t offset, int fd,
                            uint64_t flags, void** region, void** shown);
  Result (*deregister)(void* group, void* region);
  Result (*destroy_context)(void* queue);
  Result (*close_group)(void* group);
  Result (*close_listener)(void* listener);
  Result (*put)(void* queue, int context, uint64_t from, void* from_region, size_t num_bytes, uint64_t to,
                void* to_region, uint32_t rank, void** request);
  Result (*put_signal)(void* queue, int context, uint64_t from, void* from_region, size_t num_bytes, uint64_t to,
                       void* to_region, uint32_t rank, uint64_t signal, void* signal_region, uint64_t value,
                       uint32_t op, void** request);
  Result (*get)(void* queue, int context, uint64_t from, void* from_region, size_t num_bytes, uint64_t to,
                void* to_region, uint32_t rank, void** request);
  Result (*flush)(void* queue, int context, void* region, uint32_t rank, void** request);
  Result (*test)(void* group, void* request, int* is_done);
  Result (*progress)(void* queue);
  Result (*last_error)(void* queue, bool* has_failed);
  Result (*finalize)(void* context);
};

}  // namespace weft::nic::rma
