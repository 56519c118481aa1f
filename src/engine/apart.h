// Ranks that wait for each other though they have passed different numbers of boundaries.
#pragma once

#include <optional>
#include <string>

namespace weft {

class Communicator;

// Whether `rank` has installed a later epoch than this rank, so that it sends nothing of this one's any more: then who has passed how many
// boundaries. What it had sent before is visible behind this call. Nothing outside of open groups.
std::optional<std::string> gone_on_text(const Communicator& comm, int rank);

}  // namespace weft
