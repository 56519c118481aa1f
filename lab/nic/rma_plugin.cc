// The software NIC as NCCL's plugin for puts: what GIN's proxy thread calls. docs/protocols/software-nic.md; lab/README.md says how a
// process of the lab takes it. One lock a group: NCCL posts and tests from more threads than the one that makes progress.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/clock.h"
#include "base/status.h"
#include "nic/group.h"
#include "nic/rma_abi.h"

namespace {

using namespace weft;
using namespace weft::nic;

constexpr double kConnectS = 120;
constexpr int kSpeedWithoutLimit = 400'000;  // Mb/s

std::atomic<rma::Logger> current_logger{nullptr};

void warn(const char* text) {
  if (const rma::Logger logger = current_logger) {
    logger(rma::kLogWarning, rma::kLogAll, __FILE__, __LINE__, "software NIC: %s", text);
  } else {
    std::fprintf(stderr, "software NIC: %s\n", text);
  }
}

// No exception leaves the library.
template <class Body>
rma::Result guarded(const Body& body) {
  try {
    return body();
  } catch (const Error& error) {
    warn(error.what());
    return error.code == ErrorCode::kInvalidArgument ? rma::kInvalidArgument : rma::kSystemError;
  } catch (const std::exception& error) {
    warn(error.what());
    return rma::kSystemError;
  }
}

Settings settings() {
  const char* text = std::getenv("SOFTWARE_NIC");
  return parse_settings(text == nullptr ? "" : text);
}

// Numbers travel as pointers that are not null.
void* as_pointer(u64 number) { return reinterpret_cast<void*>(number + 1); }
u64 as_number(void* pointer) { return reinterpret_cast<u64>(pointer) - 1; }
Group& group_of(void* pointer) { return *static_cast<Group*>(pointer); }

rma::Result init(void** context, uint64_t, rma::Logger logger) {
  current_logger = logger;
  *context = as_pointer(0);
  return rma::kSuccess;
}

rma::Result devices(int* num_devices) {
  *num_devices = 1;
  return rma::kSuccess;
}

rma::Result properties(int device, rma::Properties* properties) {
  static char name[] = "software_nic";
  return guarded([&] {
    if (device != 0) throw_invalid_argument("there is one device");
    const Model model = settings().model;
    std::memset(properties, 0, sizeof(*properties));
    properties->name = name;
    properties->guid = 0x50f7;
    properties->memory_kinds = rma::kHostMemory | rma::kDeviceMemory;
    const double speed_mbps = model.port_bytes_per_s * model.num_ports * 8e-6;
    properties->speed_mbps = speed_mbps > 0 ? static_cast<int>(speed_mbps) : kSpeedWithoutLimit;
    properties->port = 1;
    properties->latency_us = static_cast<float>(model.latency_ns) * 1e-3f;
    properties->max_comms = 1 << 20;
    properties->max_receives = 8;
    properties->device_type = rma::kByProxy;
    properties->parts.num_devices = 1;
    properties->max_p2p_bytes = properties->max_collective_bytes = size_t{1} << 40;
    properties->max_multi_requests = 1;
    properties->rail = properties->plane = -1;
    return rma::kSuccess;
  });
}

rma::Result listen(void*, int, void* handle, void** listener) {
  return guarded([&] {
    auto made = std::make_unique<Listener>();
    std::memset(handle, 0, rma::kHandleBytes);
    std::memcpy(handle, made->name().data(), std::min(made->name().size(), rma::kHandleBytes - 1));
    *listener = made.release();
    return rma::kSuccess;
  });
}

rma::Result connect(void*, void** handles, int num_ranks, int rank, void* listener, void** group) {
  return guarded([&] {
    if (num_ranks < 1 || num_ranks > kMaxRanks) throw_unsupported("a software NIC has 1 to 64 ranks");
    std::vector<std::string> names;
    for (int peer = 0; peer < num_ranks; ++peer) names.emplace_back(static_cast<const char*>(handles[peer]));
    *group = new Group(*static_cast<Listener*>(listener), names, rank, settings(), deadline_after_s(kConnectS));
    return rma::kSuccess;
  });
}

// All contexts of a group share its card.
rma::Result create_context(void* group, rma::ContextConfig*, void** queue, void** device_handle) {
  *queue = group;
  if (device_handle != nullptr) *device_handle = nullptr;
  return rma::kSuccess;
}

// NOLINTBEGIN(readability-function-size): parameters are NCCL's

rma::Result register_memory(void* group, void* data, size_t num_bytes, int kind, uint64_t, void** region,
                            void** shown) {
  return guarded([&] {
    const std::lock_guard lock(group_of(group).mutex());
    const bool is_device = kind == rma::kDeviceMemory;
    if (is_device) group_of(group).copier().begin();
    *region = as_pointer(group_of(group).nic().add_region(
        {static_cast<u8*>(data), num_bytes, is_device ? Space::kDevice : Space::kHost}));
    if (shown != nullptr) *shown = *region;
    return rma::kSuccess;
  });
}

rma::Result register_dmabuf(void* group, void* data, size_t num_bytes, int kind, uint64_t, int, uint64_t flags,
                            void** region, void** shown) {
  return register_memory(group, data, num_bytes, kind, flags, region, shown);
}

rma::Result deregister(void* group, void* region) {
  const std::lock_guard lock(group_of(group).mutex());
  group_of(group).nic().remove_region(static_cast<u32>(as_number(region)));
  return rma::kSuccess;
}

rma::Result destroy_context(void*) { return rma::kSuccess; }

rma::Result close_group(void* group) {
  return guarded([&] {
    const std::unique_ptr<Group> closed(&group_of(group));
    closed->report();
    return rma::kSuccess;
  });
}

rma::Result close_listener(void* listener) {
  delete static_cast<Listener*>(listener);
  return rma::kSuccess;
}

Place place_of(void* region, uint64_t offset) { return {static_cast<u32>(as_number(region)), offset}; }

rma::Result post(void* queue, const Put& put, void** request) {
  return guarded([&] {
    const std::lock_guard lock(group_of(queue).mutex());
    *request = reinterpret_cast<void*>(group_of(queue).nic().post(put, now_ns()));
    return rma::kSuccess;
  });
}

rma::Result put(void* queue, int, uint64_t from, void* from_region, size_t num_bytes, uint64_t to, void* to_region,
                uint32_t rank, void** request) {
  return post(queue, {static_cast<int>(rank), place_of(from_region, from), place_of(to_region, to), num_bytes, {}, 0},
              request);
}

rma::Result put_signal(void* queue, int, uint64_t from, void* from_region, size_t num_bytes, uint64_t to,
                       void* to_region, uint32_t rank, uint64_t signal, void* signal_region, uint64_t value,
                       uint32_t op, void** request) {
  return post(queue,
              {static_cast<int>(rank), place_of(from_region, from), place_of(to_region, to), num_bytes,
               place_of(signal_region, signal), op == rma::kSignalInc ? 1 : value},
              request);
}

rma::Result get(void*, int, uint64_t, void*, size_t, uint64_t, void*, uint32_t, void**) {
  warn("it does no gets");
  return rma::kInvalidUsage;
}

// NOLINTEND(readability-function-size)

// What was applied is visible already.
rma::Result flush(void*, int, void*, uint32_t, void** request) {
  *request = nullptr;
  return rma::kSuccess;
}

rma::Result test(void* group, void* request, int* is_done) {
  const std::lock_guard lock(group_of(group).mutex());
  *is_done = request == nullptr || group_of(group).nic().is_done(reinterpret_cast<u64>(request)) ? 1 : 0;
  return rma::kSuccess;
}

rma::Result progress(void* queue) {
  return guarded([&] {
    const std::unique_lock lock(group_of(queue).mutex(), std::try_to_lock);
    if (!lock.owns_lock()) return rma::kSuccess;
    group_of(queue).progress();
    return rma::kSuccess;
  });
}

rma::Result last_error(void* queue, bool* has_failed) {
  const std::lock_guard lock(group_of(queue).mutex());
  *has_failed = !group_of(queue).nic().error().empty();
  return rma::kSuccess;
}

rma::Result finalize(void*) { return rma::kSuccess; }

}  // namespace

// NOLINTNEXTLINE(readability-identifier-naming): the name that NCCL looks for
extern "C" __attribute__((visibility("default"))) const rma::Plugin ncclRmaPlugin_v13 = {
    "software_nic",  init,       devices,         properties,  listen,         connect, create_context, register_memory,
    register_dmabuf, deregister, destroy_context, close_group, close_listener, put,     put_signal,     get,
    flush,           test,       progress,        last_error,  finalize};
