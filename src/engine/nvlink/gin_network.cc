#include "engine/nvlink/gin_network.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "base/thread.h"
#include "engine/nvlink/host_wait.h"

namespace weft::nvlink {
namespace {

constexpr int kMostContexts = 4;
constexpr u64 kCloseNs = 10'000'000'000;

const char* name_of(nccl::GinType type) {
  switch (type) {
    case nccl::GinType::kProxy: return "PROXY";
    case nccl::GinType::kGdaki: return "GDAKI";
    case nccl::GinType::kGpi: return "GPI";
    case nccl::GinType::kEfaGda: return "EFA_GDA";
    case nccl::GinType::kNone: break;
  }
  return "NONE";
}

// NVRTC compiles the device code of these.
bool is_compiled(nccl::GinType type) { return type == nccl::GinType::kProxy || type == nccl::GinType::kGdaki; }

}  // namespace

// A thread of its own makes it, and another one takes it apart: NCCL may hang, and then that thread alone is left.
struct GinNetwork::State {
  State(std::shared_ptr<const nccl::Library> of, GinOpening with) : library(std::move(of)), opening(std::move(with)) {}

  void make();
  void choose();
  void end_once() noexcept {
    if (!is_ending.exchange(true)) end();
  }
  void end() noexcept;
  bool is_whole() const;

  const std::shared_ptr<const nccl::Library> library;
  const GinOpening opening;
  nccl::Comm comm = nullptr;
  nccl::Window window = nullptr;
  nccl::GinType type = nccl::GinType::kNone;
  nccl::Connection connection = nccl::Connection::kNone;
  bool has_device_comm = false;
  transport::GinRail rail;
  std::exception_ptr failure;
  std::atomic<bool> is_done = false;  // with make()
  std::atomic<bool> is_left = false;  // nobody waits for make() any more
  std::atomic<bool> is_ending = false;
  std::atomic<bool> has_ended = false;  // with end()
};

// All ranks live, and all nodes have as many.
bool GinNetwork::State::is_whole() const {
  const RailMap& map = opening.map;
  return static_cast<i32>(opening.ranks.size()) == map.num_ranks && map.num_ranks % map.node_size() == 0;
}

void GinNetwork::State::choose() {
  const nccl::Library& nccl = *library;
  nccl::Properties found;
  found.version = static_cast<u32>(nccl.told_version());
  found.size = nccl::properties_bytes(nccl.told_version());
  nccl.check(nccl.query_properties(comm, &found), "ncclCommQueryProperties");
  const bool knows_rails = found.num_lsa_teams == opening.map.num_nodes();
  const auto usable = [&](nccl::GinType best) {
    const bool has_proxy = found.has_gin[static_cast<int>(nccl::GinType::kProxy)];
    return is_compiled(best) || best == nccl::GinType::kNone || !has_proxy ? best : nccl::GinType::kProxy;
  };
  type = usable(found.railed_gin_type);
  connection = nccl::Connection::kRail;
  if (!is_whole() || !knows_rails || type == nccl::GinType::kNone) {
    type = usable(found.gin_type);
    connection = nccl::Connection::kFull;
  }
  if (!found.has_device_api || !is_compiled(type)) {
    throw_unsupported(
        "NCCL " + nccl.version_text() + " offers " + name_of(type) +
        (found.has_device_api ? "" : " without device code") +
        " as a network for kernels; need: PROXY or GDAKI, so an RDMA device on every rank (NCCL_DEBUG=INFO "
        "says what it finds)");
  }
  if (found.comm_bytes > transport::GinRail::kMostCommBytes) {
    throw_unsupported("NCCL " + nccl.version_text() + " has device communicators of " +
                      std::to_string(found.comm_bytes) + " bytes; need: at most " +
                      std::to_string(transport::GinRail::kMostCommBytes));
  }
}

void GinNetwork::State::make() {
  const nccl::Library& nccl = *library;
  const cuda::ContextScope scope(opening.context);
  const cuda::RelaxedCaptureScope relaxed;
  const auto own = std::ranges::find(opening.ranks, opening.rank);
  const int number = static_cast<int>(own - opening.ranks.begin());
  nccl.check(nccl.init(&comm, static_cast<int>(opening.ranks.size()), opening.id, number), "ncclCommInitRank");
  if (is_left) throw_invalid_state("nobody waits for this network any more");
  choose();
  nccl.check(nccl.register_window(comm, opening.memory, opening.num_bytes, &window, nccl::kWindowSymmetric),
             "ncclCommWindowRegister");
  const RailLayout& layout = opening.layout;
  const transport::GinSignals signals(layout.num_blocks, layout.num_slots);
  nccl::Requirements wanted;
  wanted.version = static_cast<u32>(nccl.told_version());
  wanted.size = nccl::requirements_bytes(nccl.told_version());
  rail.num_contexts = std::min(kMostContexts, layout.num_blocks);
  wanted.num_contexts = rail.num_contexts;
  wanted.num_signals = static_cast<int>(signals.count(opening.map.num_ranks));
  wanted.num_counters = static_cast<int>(signals.num_counters(opening.map.num_ranks));
  wanted.connection = connection;
  wanted.traffic_class = opening.traffic_class;
  wanted.needs_strong_signals = wanted.needs_address_signals = false;
  wanted.gin_type = type;
  wanted.is_for_own_release = true;
  nccl.check(nccl.create_device_comm(comm, &wanted, rail.comm), "ncclDevCommCreate");
  has_device_comm = true;
  rail.window = window;
  rail.memory = opening.memory;
  rail.layout = layout;
  rail.is_rail_team = connection == nccl::Connection::kRail ? 1 : 0;
  for (size_t idx = 0; idx < opening.ranks.size(); ++idx) {
    const int rank = opening.ranks[idx];
    rail.team_rank[rank] = rail.is_rail_team != 0 ? opening.map.node(rank) : static_cast<i32>(idx);
  }
}

// Local, whoever is gone: ncclCommDestroy would wait for others.
void GinNetwork::State::end() noexcept {
  try {
    const cuda::ContextScope scope(opening.context);
    const cuda::RelaxedCaptureScope relaxed;
    if (std::exchange(has_device_comm, false)) library->destroy_device_comm(comm, rail.comm);
    if (window != nullptr) library->deregister_window(comm, std::exchange(window, nullptr));
    if (comm != nullptr) library->abort(std::exchange(comm, nullptr));
  } catch (const Error& error) {
    log_line(kLogWarning, "NCCL's network: " + error.text);
  }
  has_ended = true;
}

GinNetwork::GinNetwork(std::shared_ptr<State> state) : state_(std::move(state)) {}

GinNetwork::~GinNetwork() {
  if (state_ != nullptr) close();
}

std::unique_ptr<GinNetwork> GinNetwork::open(std::shared_ptr<const nccl::Library> library, const GinOpening& opening,
                                             u64 deadline_ns, const Poll& poll,
                                             const std::function<void()>& keep_memory) {
  auto state = std::make_shared<State>(std::move(library), opening);
  start_thread("weft-nccl", [state] {
    try {
      state->make();
    } catch (...) {
      state->failure = std::current_exception();
    }
    if (state->failure != nullptr) state->end_once();
    state->is_done = true;
    if (state->is_left) state->end_once();
  }).detach();
  bool is_in_time = false;
  const auto leave = [&] {
    state->is_left = true;
    if (!state->is_done || !GinNetwork(state).close()) keep_memory();
  };
  try {
    is_in_time = wait_on_host([&] { return state->is_done.load(); }, deadline_ns, poll);
  } catch (...) {
    leave();
    throw;
  }
  if (!is_in_time) {
    leave();
    throw Error(ErrorCode::kPeerTimeout, "NCCL's network was not ready at the deadline", "connect");
  }
  if (state->failure != nullptr) std::rethrow_exception(state->failure);
  return std::unique_ptr<GinNetwork>(new GinNetwork(std::move(state)));
}

bool GinNetwork::close() noexcept {
  const std::shared_ptr<State> state = std::exchange(state_, nullptr);
  if (state == nullptr) return true;
  try {
    start_thread("weft-nccl-end", [state] { state->end_once(); }).detach();
    if (wait_on_host([&] { return state->has_ended.load(); }, now_ns() + kCloseNs, {})) return true;
    log_line(kLogWarning, "NCCL has not ended its network after 10 s: its memory is left as it is");
  } catch (const Error& error) {
    log_line(kLogWarning, "NCCL's network: " + error.text);
  }
  return false;
}

const transport::GinRail& GinNetwork::argument() const { return state_->rail; }

std::string GinNetwork::text() const {
  const bool is_rail = state_->connection == nccl::Connection::kRail;
  return std::string(name_of(state_->type)) + " over " + (is_rail ? "RAIL" : "FULL") + " connections of NCCL " +
         state_->library->version_text();
}

std::string GinNetwork::macros() const {
  std::string all;
  for (const auto type : {nccl::GinType::kProxy, nccl::GinType::kGdaki, nccl::GinType::kGpi, nccl::GinType::kEfaGda}) {
    const char* value = type == state_->type ? " 1\n" : " 0\n";
    all += std::string("#define NCCL_GIN_") + name_of(type) + "_ENABLE" + value;
  }
  return all;
}

}  // namespace weft::nvlink
