// From endpoints to connections whose other end is known to be the right incarnation of the right rank.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/status.h"
#include "bootstrap/control_plane.h"
#include "bootstrap/endpoint.h"
#include "bootstrap/endpoint_list.h"
#include "bootstrap/greeting.h"
#include "bootstrap/group_page.h"
#include "bootstrap/life_lock.h"
#include "bootstrap/wire.h"

namespace weft {

struct Connection {
  Wire wire;
  OwnedFd pidfd;                    // invalid where the kernel gives none, and of a rank of another machine
  std::shared_ptr<PeerLife> life;   // likewise
  std::shared_ptr<GroupPage> page;  // of rank 0 alone, on one machine: it makes the group's
};

struct MeshRequest {
  int rank;
  const std::vector<Endpoint>& endpoints;
  int listener;  // of this rank
  int door;      // open; -1 unless there are ranks of other machines
  int life_fd;   // page of this rank's LifeLock
  int page_fd;   // GroupPage; -1 unless this is rank 0 and the group is on one machine
  uint64_t deadline_ns;
  const ControlPlane::Poll& poll;
  GroupSecret secret;
  int num_slots = 0;  // of the group's page; 0: as many as endpoints
};

// Rank i connects to all j < i and is connected to by the others: by unix sockets on its machine, by TCP to those of
// others. Result by rank, this rank's entry is empty.
// Errors as connect_processes; a rank that fails tells the others why, as far as they are connected.
std::vector<Connection> connect_mesh(const MeshRequest& request);

}  // namespace weft
