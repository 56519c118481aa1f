// Text that comes from a user or a peer, made fit for one line of an error or a log.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace weft {

// At most `most_bytes` of it, cut between characters; what is no UTF-8 becomes '?', control characters become spaces.
std::string one_line(std::string_view text, size_t most_bytes);

}  // namespace weft
