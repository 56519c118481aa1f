// The endpoints of a group, before anybody is called: whether they can be one, and where its ranks are.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "bootstrap/endpoint.h"

namespace weft {

inline std::string name_of(int rank) { return "rank " + std::to_string(rank); }

// Throws kInvalidArgument or kUnsupported unless these can be the endpoints of a group in which `own` is `rank`'s. `may_span`: over
// several machines; `door_problem`: why `own` has no address, thrown if they are.
void check_endpoints(int rank, const std::vector<Endpoint>& endpoints, const Endpoint& own, bool may_span = false,
                     const std::optional<Error>& door_problem = {});

// Why two ranks are not on one machine, and what would mend it: "rank 1 runs on another machine than rank 0 (...)".
std::string apart_text(int rank, const Endpoint& own, int peer, const Endpoint& other);

const char* share_processes_text() noexcept;  // what mends ranks that are apart, for the end of a text

bool on_one_machine(const std::vector<Endpoint>& endpoints) noexcept;  // all of them

}  // namespace weft
