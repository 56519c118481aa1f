// NCCL without a GPU, for ranks that are threads of one process: what the engine calls of it (nccl_library.h). Its network is the
// one that emulated kernels post to (tests/emulation/include/nccl_device.h). A library of its own, libnccl.so.2.
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "emulated_switch.h"
#include "engine/nvlink/nccl_abi.h"

namespace {

using namespace weft;

// What a test asks for.
struct Settings {
  int version = nccl::kVersion;
  int node_ranks = 0;  // of NCCL's own nodes; 0: those of no rail
  nccl::GinType type = nccl::GinType::kProxy;
};
Settings settings;
std::atomic<int> num_alive = 0;
std::atomic<int> traffic_class = 0;  // of the newest device communicator

struct Group {
  std::mutex mutex;
  std::condition_variable changed;
  int num_ranks = 0, num_met = 0, num_meetings = 0;
  std::unique_ptr<EmulatedSwitch> network = std::make_unique<EmulatedSwitch>();
  u64 memory[ncclDevComm::kMostRanks] = {};
  std::unique_ptr<u64[]> signals[ncclDevComm::kMostRanks];

  void meet() {
    std::unique_lock lock(mutex);
    const int meeting = num_meetings;
    if (++num_met == num_ranks) {
      num_met = 0;
      ++num_meetings;
      changed.notify_all();
    }
    changed.wait(lock, [&] { return num_meetings != meeting; });
  }
};

std::mutex groups_mutex;
std::map<std::string, std::weak_ptr<Group>> groups;
int num_groups = 0;

}  // namespace

struct nccl::CommStruct {
  std::shared_ptr<Group> group;
  int rank = 0;
  u64 window_bytes = 0;
};

extern "C" {

void fake_nccl_set(int version, int node_ranks, int type) {
  settings = {version, node_ranks, static_cast<nccl::GinType>(type)};
}
// Communicators that nobody has ended.
int fake_nccl_alive() { return num_alive; }
int fake_nccl_traffic_class() { return traffic_class; }

int ncclGetVersion(int* version) {
  *version = settings.version;
  return 0;
}

const char* ncclGetLastError(nccl::Comm) { return "this is no NCCL"; }

int ncclGetUniqueId(nccl::UniqueId* id) {
  const std::lock_guard lock(groups_mutex);
  *id = {};
  const std::string text = "group " + std::to_string(++num_groups);
  std::memcpy(id->bytes, text.data(), text.size());
  return 0;
}

int ncclCommInitRank(nccl::Comm* comm, int num_ranks, nccl::UniqueId id, int rank) {
  auto made = std::make_unique<nccl::CommStruct>();
  made->rank = rank;
  {
    const std::lock_guard lock(groups_mutex);
    std::weak_ptr<Group>& known = groups[id.bytes];
    made->group = known.lock();
    if (made->group == nullptr) known = made->group = std::make_shared<Group>();
    made->group->num_ranks = num_ranks;
  }
  made->group->meet();
  ++num_alive;
  *comm = made.release();
  return 0;
}

int ncclCommAbort(nccl::Comm comm) {
  delete comm;
  --num_alive;
  return 0;
}

int ncclCommQueryProperties(nccl::Comm comm, nccl::Properties* found) {
  if (found->magic != nccl::kMagic || found->size != nccl::properties_bytes(settings.version)) return 4;
  found->rank = comm->rank;
  found->num_ranks = comm->group->num_ranks;
  found->has_device_api = true;
  found->gin_type = found->railed_gin_type = settings.type;
  const int node_ranks = settings.node_ranks == 0 ? 1 : settings.node_ranks;
  found->num_lsa_teams = (comm->group->num_ranks + node_ranks - 1) / node_ranks;
  if (settings.version >= 23100) found->comm_bytes = sizeof(ncclDevComm);
  return 0;
}

int ncclCommWindowRegister(nccl::Comm comm, void* memory, size_t num_bytes, nccl::Window* window, int flags) {
  if (flags != nccl::kWindowSymmetric) return 4;
  comm->group->memory[comm->rank] = reinterpret_cast<u64>(memory);
  comm->window_bytes = num_bytes;
  *window = static_cast<nccl::Window>(memory);
  comm->group->meet();
  return 0;
}

int ncclCommWindowDeregister(nccl::Comm comm, nccl::Window) {
  EmulatedSwitch& network = *comm->group->network;
  network.locked([&] { network.gone |= u64{1} << comm->rank; });
  return 0;
}

int ncclDevCommCreate(nccl::Comm comm, const nccl::Requirements* wanted, void* made) {
  if (wanted->magic != nccl::kMagic || wanted->size != nccl::requirements_bytes(settings.version)) return 4;
  if (wanted->needs_strong_signals || wanted->needs_address_signals) return 4;
  traffic_class = wanted->traffic_class;
  Group& group = *comm->group;
  ncclDevComm found = {};
  found.rank = comm->rank;
  found.num_ranks = group.num_ranks;
  found.node_ranks = wanted->connection == nccl::Connection::kRail ? settings.node_ranks : 0;
  found.num_contexts = wanted->num_contexts;
  found.num_signals = static_cast<u64>(wanted->num_signals);
  found.num_counters = static_cast<u64>(wanted->num_counters);
  found.most_unanswered = 256;  // as NCCL's proxy
  found.window_bytes = comm->window_bytes;
  found.network = reinterpret_cast<u64>(group.network.get());
  const u64 num_words = (found.num_signals + found.num_counters) * static_cast<u64>(found.num_contexts);
  group.signals[comm->rank].reset(new u64[num_words]());
  group.meet();
  for (int rank = 0; rank < group.num_ranks; ++rank) {
    found.memory[rank] = group.memory[rank];
    found.signals[rank] = reinterpret_cast<u64>(group.signals[rank].get());
  }
  std::memcpy(made, &found, sizeof(found));
  return 0;
}

int ncclDevCommDestroy(nccl::Comm, const void*) { return 0; }

}  // extern "C"
