// From endpoints to connections whose other end is known to be the right incarnation of the right rank.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/fd.h"
#include "bootstrap/control_plane.h"
#include "bootstrap/endpoint.h"
#include "bootstrap/group_page.h"
#include "bootstrap/life_lock.h"

namespace weft {

struct Connection {
  OwnedFd socket;
  OwnedFd pidfd;  // invalid where the kernel gives none
  std::shared_ptr<PeerLife> life;
  std::shared_ptr<GroupPage> page;  // of rank 0 alone: it makes the group's
};

struct MeshRequest {
  int rank;
  const std::vector<Endpoint>& endpoints;
  int listener;  // of this rank
  int life_fd;   // page of this rank's LifeLock
  int page_fd;   // GroupPage; -1 unless this is rank 0
  uint64_t deadline_ns;
  const ControlPlane::Poll& poll;
};

// Throws kInvalidArgument or kUnsupported unless these can be the endpoints of a group in which `own` is `rank`'s.
void check_endpoints(int rank, const std::vector<Endpoint>& endpoints, const Endpoint& own);

// Rank i connects to all j < i and is connected to by the others. Result by rank, this rank's entry is empty.
// Errors as connect_processes; a rank that fails tells the others why, as far as they are connected.
std::vector<Connection> connect_mesh(const MeshRequest& request);

}  // namespace weft
