// What a wait of the host calls in between.
#pragma once

#include <functional>

namespace weft {

using Poll = std::function<void()>;  // called at least every 100 ms of waiting; may throw to leave

}  // namespace weft
