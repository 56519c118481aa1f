#include "bootstrap/endpoint_list.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "base/text.h"
#include "bootstrap/build.h"
#include "bootstrap/rank_set.h"

namespace weft {
namespace {

constexpr const char* kShareProcesses =
    "; let the ranks share one: shareProcessNamespace: true in the pod, --pid=host or --pid=container:NAME of docker "
    "run";

// Ranks read each other's memory by the layouts that they were built with. Weft's version says more to a user, so it comes first.
void check_same_build(const Endpoint& first, int peer, const Endpoint& other) {
  if (other.weft_version != first.weft_version) {
    const auto text = [](const Endpoint& each) {
      const auto& version = each.weft_version;
      return one_line({version.data(), strnlen(version.data(), version.size())}, version.size());
    };
    throw_unsupported(name_of(peer) + " is Weft " + text(other) + ", " + name_of(0) + " Weft " + text(first) +
                      "; all ranks need the same Weft");
  }
  if (other.sources != first.sources) {
    throw_unsupported(name_of(peer) + "'s Weft was built from sources whose SHA-256 begins with " +
                      hex_text(other.sources) + ", that of " + name_of(0) + " from " + hex_text(first.sources) +
                      "; all ranks need the same kernels and layouts");
  }
}

// Of all before anything else, so that every rank names the same one, wherever the ranks are.
void check_versions(const std::vector<Endpoint>& endpoints) {
  for (int peer = 0; const Endpoint& each : endpoints) {
    parse_endpoint(std::as_bytes(std::span<const Endpoint, 1>(&each, 1)), "the endpoint of " + name_of(peer++));
  }
  for (int peer = 0; const Endpoint& each : endpoints) check_same_build(endpoints.front(), peer++, each);
}

}  // namespace

const char* share_processes_text() noexcept { return kShareProcesses; }

bool on_one_machine(const std::vector<Endpoint>& endpoints) noexcept {
  return std::all_of(endpoints.begin(), endpoints.end(),
                     [&](const Endpoint& each) { return on_one_machine(each, endpoints.front()); });
}

// Pids of two namespaces may be equal and mean two processes, so this comes before any pid is looked at.
std::string apart_text(int rank, const Endpoint& own, int peer, const Endpoint& other) {
  const std::string who = name_of(peer) + " runs in another ";
  if (other.boot_id != own.boot_id) {
    return name_of(peer) + " runs on another machine than " + name_of(rank) + " (their boot ids differ)";
  }
  if (other.pid_namespace != own.pid_namespace) {
    return who + "pid namespace than " + name_of(rank) + ", so they can't watch each other's process" + kShareProcesses;
  }
  return who + "network namespace than " + name_of(rank) +
         ", so they can't connect; let the ranks share one: containers of one pod, or --network=host";
}

void check_endpoints(int rank, const std::vector<Endpoint>& endpoints, const Endpoint& own, bool may_span,
                     const std::optional<Error>& door_problem) {
  const auto num_ranks = static_cast<int>(endpoints.size());
  if (num_ranks < 1 || num_ranks > kMaxControlRanks) {
    throw_invalid_argument(std::to_string(num_ranks) + " endpoints; allowed: 1.." + std::to_string(kMaxControlRanks));
  }
  if (rank < 0 || rank >= num_ranks) {
    throw_invalid_argument("rank is " + std::to_string(rank) + "; allowed: 0.." + std::to_string(num_ranks - 1));
  }
  check_versions(endpoints);
  const bool is_one_machine = on_one_machine(endpoints);
  for (int peer = 0; peer < num_ranks; ++peer) {
    const Endpoint& other = endpoints[static_cast<size_t>(peer)];
    if (!on_one_machine(other, own) && !may_span) {
      throw_unsupported(apart_text(rank, own, peer, other) +
                        ". Ranks of several machines meet by from_env() or from_process_group() alone");
    }
    if (may_span && !is_one_machine && other.num_addresses == 0) {
      if (door_problem) throw Error(*door_problem);
      throw_unsupported(name_of(peer) + " has no network address by which ranks of other machines could reach it" +
                        (on_one_machine(other, own) ? "" : "; " + apart_text(rank, own, peer, other)));
    }
    for (int before = 0; before < peer; ++before) {
      const Endpoint& earlier = endpoints[static_cast<size_t>(before)];
      if (earlier.name == other.name) {
        throw_invalid_argument("endpoints[" + std::to_string(peer) + "] is the same as endpoints[" +
                               std::to_string(before) + "]");
      }
      // Of every machine, so that no rank waits for one that this keeps from connecting.
      if (earlier.uid != other.uid && on_one_machine(earlier, other)) {
        throw_unsupported(name_of(peer) + " runs as user " + std::to_string(other.uid) + ", " + name_of(before) +
                          " as user " + std::to_string(earlier.uid) + "; all ranks of a machine need the same user");
      }
    }
  }
  if (endpoints[static_cast<size_t>(rank)] != own) {
    throw_invalid_argument("endpoints[" + std::to_string(rank) + "] is not the endpoint of this rank's listener");
  }
}

}  // namespace weft
