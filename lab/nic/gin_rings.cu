// Do rings of slots over GIN's weak signals, as a rail has them, bring every word? By hand, on GPUs, with NCCL 2.30.7 or newer:
//   nvcc -O2 -std=c++20 -arch=native -I include -I NCCL/include lab/nic/gin_rings.cu -o build/gin_rings -L NCCL/lib -lnccl -lcuda
//   python lab/emulated_nic.py --nodes-of 2 --threads -- build/gin_rings RANKS CHUNK_BYTES CHUNKS BLOCKS
// Ranks are threads of this process; rank r has GPU r % number of GPUs. Each block of each rank sends CHUNKS chunks to the rank of its
// index in every other node, one put a chunk, into a ring of kSlots slots with a signal each; the receiver compares every word and
// gives the slot back. No order between two puts is assumed. Rings lie in memory that Weft could allocate: not in NCCL's own.
// Prints a JSON line a rank: words that were wrong, waits that ended at their deadline, and what went out. Exit 1 if any.
#include <cuda.h>
#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_device.h>
#if __has_include(<nccl_device/host.h>)
#include <nccl_device/host.h>
#endif
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "weft/ptx/clock.h"

namespace {

using u32 = unsigned;
using u64 = unsigned long long;

constexpr u32 kSlots = 4;
constexpr int kContexts = 4;
constexpr u64 kDeadlineNs = 20'000'000'000;
constexpr size_t kPage = size_t{2} << 20;

template <class Result>
void require(Result result, Result wanted, const char* what) {
  if (result == wanted) return;
  std::fprintf(stderr, "%s failed: %d (%s)\n", what, static_cast<int>(result), ncclGetLastError(nullptr));
  std::fflush(stderr);
  _exit(2);  // other ranks are in the middle of collectives
}
#define NCCL_OK(call) require(call, ncclSuccess, #call)
#define CUDA_OK(call) require(call, cudaSuccess, #call)
#define DRIVER_OK(call) require(call, CUDA_SUCCESS, #call)

// The two halves of a rank's rings, and where a slot and its signals are.
struct Rings {
  ncclDevComm comm;
  ncclWindow_t window;
  u64* words;
  u64 received_at;  // bytes: the half into which others put
  u32 chunk_bytes;
  u32 num_nodes;

  __device__ u64 slot(u32 node, u32 slot) const { return (node * gridDim.x + blockIdx.x) * kSlots + slot; }
  __device__ u64 credit(u32 node) const {
    return num_nodes * gridDim.x * kSlots + node * static_cast<u64>(gridDim.x) + blockIdx.x;
  }
};

struct Outcome {
  u64 num_wrong;
  u32 num_late;
};

__device__ u64 value(u32 from, u32 to, u32 chunk, u32 word) {
  return static_cast<u64>(from) << 56 | static_cast<u64>(to) << 48 | static_cast<u64>(blockIdx.x) << 40 |
         static_cast<u64>(chunk) << 20 | word;
}

// By the block: whether the signal has come to `least`. Once one wait is late, none waits any more.
__device__ bool wait_for(ncclGin& gin, u64 signal, u64 least, Outcome* outcome) {
  __shared__ bool is_there;
  __syncthreads();
  if (threadIdx.x == 0) {
    const u64 begin = weft::ptx::globaltimer_ns();
    const auto id = static_cast<ncclGinSignal_t>(signal);
    const volatile u32* num_late = &outcome->num_late;
    while (!(is_there = gin.readSignal(id, 64, cuda::memory_order_acquire) >= least) && *num_late == 0) {
      if (weft::ptx::globaltimer_ns() - begin > kDeadlineNs) atomicAdd(&outcome->num_late, 1);
    }
  }
  __syncthreads();
  return is_there;
}

__global__ void exchange(Rings rings, u32 num_chunks, Outcome* outcome) {
  const ncclTeam rail = ncclTeamRail(rings.comm);
  const auto me = static_cast<u32>(rail.rank);
  ncclGin gin(rings.comm, static_cast<int>(blockIdx.x) % kContexts);
  const u32 num_words = rings.chunk_bytes / 8;
  for (u32 chunk = 0; chunk < num_chunks; ++chunk) {
    const u32 at = chunk % kSlots;
    for (u32 peer = 0; peer < rings.num_nodes; ++peer) {
      if (peer == me) continue;
      if (chunk >= kSlots && !wait_for(gin, rings.credit(peer), chunk - kSlots + 1, outcome)) return;
      const u64 from = rings.slot(peer, at) * rings.chunk_bytes;
      for (u32 word = threadIdx.x; word < num_words; word += blockDim.x)
        rings.words[from / 8 + word] = value(me, peer, chunk, word);
      __threadfence_system();
      __syncthreads();
      if (threadIdx.x != 0) continue;
      const u64 mine = rings.slot(me, at);
      gin.put(rail, static_cast<int>(peer), rings.window, rings.received_at + mine * rings.chunk_bytes, rings.window,
              from, rings.chunk_bytes, ncclGin_WeakSignalAdd{static_cast<ncclGinSignal_t>(mine), 1});
    }
    for (u32 peer = 0; peer < rings.num_nodes; ++peer) {
      if (peer == me) continue;
      if (!wait_for(gin, rings.slot(peer, at), chunk / kSlots + 1, outcome)) return;
      const volatile u64* words = rings.words + (rings.received_at + rings.slot(peer, at) * rings.chunk_bytes) / 8;
      u32 num_wrong = 0;
      for (u32 word = threadIdx.x; word < num_words; word += blockDim.x)
        num_wrong += words[word] != value(peer, me, chunk, word);
      if (num_wrong > 0) atomicAdd(&outcome->num_wrong, num_wrong);
      __syncthreads();  // all have read the slot
      if (threadIdx.x == 0)
        gin.signal(rail, static_cast<int>(peer),
                   ncclGin_WeakSignalAdd{static_cast<ncclGinSignal_t>(rings.credit(me)), 1});
    }
  }
  ncclCoopCta block;
  gin.flush(block);
}

// Memory that a NIC may reach, as Weft's heaps are.
void* allocate(size_t num_bytes, int gpu) {
  CUmemAllocationProp kind = {};
  kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  kind.location = {CU_MEM_LOCATION_TYPE_DEVICE, gpu};
  kind.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  kind.allocFlags.gpuDirectRDMACapable = 1;
  CUmemGenericAllocationHandle handle;
  CUdeviceptr address;
  DRIVER_OK(cuMemCreate(&handle, num_bytes, &kind, 0));
  DRIVER_OK(cuMemAddressReserve(&address, num_bytes, 0, 0, 0));
  DRIVER_OK(cuMemMap(address, num_bytes, 0, handle, 0));
  const CUmemAccessDesc access = {kind.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  DRIVER_OK(cuMemSetAccess(address, num_bytes, &access, 1));
  return reinterpret_cast<void*>(address);
}

struct Run {
  int num_ranks;
  u32 chunk_bytes, num_chunks, num_blocks;
  ncclUniqueId id = {};
  std::atomic<int> num_ready{0}, num_bad{0};
};

void one_rank(Run& run, int rank) {
  int num_gpus = 0;
  CUDA_OK(cudaGetDeviceCount(&num_gpus));
  const int gpu = rank % num_gpus;
  CUDA_OK(cudaSetDevice(gpu));
  CUDA_OK(cudaFree(nullptr));
  ncclComm_t comm = nullptr;
  NCCL_OK(ncclCommInitRank(&comm, run.num_ranks, run.id, rank));
  ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
  NCCL_OK(ncclCommQueryProperties(comm, &properties));
  const auto num_nodes = static_cast<u32>(properties.nLsaTeams);

  const u64 half = static_cast<u64>(num_nodes) * run.num_blocks * kSlots * run.chunk_bytes;
  const size_t total = (2 * half + kPage - 1) / kPage * kPage;
  void* memory = allocate(total, gpu);
  CUDA_OK(cudaMemset(memory, 0xff, total));
  ncclWindow_t window = nullptr;
  NCCL_OK(ncclCommWindowRegister(comm, memory, total, &window, NCCL_WIN_COLL_SYMMETRIC));
  ncclDevCommRequirements_t wanted = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  wanted.ginContextCount = kContexts;
  wanted.ginSignalCount = static_cast<int>(num_nodes * run.num_blocks * (kSlots + 1));
  wanted.ginConnectionType = NCCL_GIN_CONNECTION_RAIL;
  ncclDevComm device_comm;
  NCCL_OK(ncclDevCommCreate(comm, &wanted, &device_comm));

  cudaStream_t stream;
  CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Outcome* outcome = nullptr;
  CUDA_OK(cudaMallocHost(&outcome, sizeof(Outcome)));
  *outcome = {};
  CUDA_OK(cudaDeviceSynchronize());
  for (++run.num_ready; run.num_ready < run.num_ranks;) usleep(100);
  const Rings rings{device_comm, window, static_cast<u64*>(memory), half, run.chunk_bytes, num_nodes};
  const auto begin = std::chrono::steady_clock::now();
  exchange<<<run.num_blocks, 256, 0, stream>>>(rings, run.num_chunks, outcome);
  CUDA_OK(cudaStreamSynchronize(stream));
  const double took_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const double bytes = static_cast<double>(num_nodes - 1) * run.num_blocks * run.num_chunks * run.chunk_bytes;
  std::printf(
      "{\"kind\": \"gin_rings\", \"nic\": \"emulated\", \"rank\": %d, \"ranks\": %d, \"nodes\": %u, \"gpus\": %d, "
      "\"gin_type\": %d, \"nccl\": %d, \"chunk_bytes\": %u, \"chunks\": %u, \"blocks\": %u, \"wrong_words\": %llu, "
      "\"late\": %u, \"ms\": %.3f, \"gb_s\": %.3f}\n",
      rank, run.num_ranks, num_nodes, num_gpus, static_cast<int>(properties.ginType), NCCL_VERSION_CODE,
      run.chunk_bytes, run.num_chunks, run.num_blocks, outcome->num_wrong, outcome->num_late, took_s * 1e3,
      bytes / took_s / 1e9);
  std::fflush(stdout);
  if (outcome->num_wrong + outcome->num_late > 0) ++run.num_bad;
  NCCL_OK(ncclDevCommDestroy(comm, &device_comm));
  NCCL_OK(ncclCommWindowDeregister(comm, window));
  NCCL_OK(ncclCommDestroy(comm));
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 5) {
    std::fprintf(stderr, "usage: gin_rings RANKS CHUNK_BYTES CHUNKS BLOCKS\n");
    return 2;
  }
  const auto number = [&](int idx) { return static_cast<u32>(std::strtoul(arguments[idx], nullptr, 10)); };
  Run run{static_cast<int>(number(1)), number(2), number(3), number(4)};
  CUDA_OK(cudaFree(nullptr));
  NCCL_OK(ncclGetUniqueId(&run.id));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < run.num_ranks; ++rank) ranks.emplace_back([&run, rank] { one_rank(run, rank); });
  for (std::thread& rank : ranks) rank.join();
  return run.num_bad > 0 ? 1 : 0;
}
