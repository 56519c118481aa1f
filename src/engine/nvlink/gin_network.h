// NCCL as the network of kernels with nodes: one communicator of NCCL's for each epoch of a window (docs/protocols/rail-gin.md).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/cuda_driver.h"
#include "engine/nvlink/nccl_library.h"
#include "engine/poll.h"
#include "weft/layout/rail.h"
#include "weft/transport/rail_gin.h"

namespace weft::nvlink {

// Where NCCL is, and what kernels that include its headers are compiled with.
struct NcclPaths {
  std::string library;
  std::string prologue;               // what their source begins with
  std::vector<std::string> includes;  // folders
};

// What a rank brings to a generation of the network.
struct GinOpening {
  cuda::Context context = nullptr;
  std::vector<int> ranks;  // of the epoch, ascending
  int rank = 0;
  RailMap map;  // with those ranks active
  RailLayout layout;
  nccl::UniqueId id;  // of the first of them
  u8* memory = nullptr;
  u64 num_bytes = 0;                     // of the memory, at least layout.total_bytes
  int traffic_class = nccl::kUndefined;  // of all puts
};

class GinNetwork {
 public:
  // Collective, by all ranks of the epoch. Errors: kUnsupported (no NIC that posts for GPUs), kPeerTimeout (not ready at
  // `deadline_ns`), kInternalError (what NCCL says). `keep_memory()`: it throws, and NCCL may still reach the memory.
  static std::unique_ptr<GinNetwork> open(std::shared_ptr<const nccl::Library> library, const GinOpening& opening,
                                          u64 deadline_ns, const Poll& poll, const std::function<void()>& keep_memory);
  // close(), if nobody has.
  ~GinNetwork();
  GinNetwork(const GinNetwork&) = delete;
  GinNetwork& operator=(const GinNetwork&) = delete;

  // Local. No kernel may use it any more. False: NCCL has not ended after 10 s, so the memory must stay as it is.
  bool close() noexcept;

  const transport::GinRail& argument() const;
  // "PROXY over RAIL connections of NCCL 2.32.3"
  std::string text() const;
  // Macros for the kernels' source, before NCCL's headers: the one backend that they have.
  std::string macros() const;

 private:
  struct State;
  explicit GinNetwork(std::shared_ptr<State> state);

  std::shared_ptr<State> state_;
};

}  // namespace weft::nvlink
