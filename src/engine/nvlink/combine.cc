#include "engine/nvlink/window.h"

namespace weft::nvlink {

void Window::combine(const CombineArgs&, const Poll&) { throw_unsupported("combine between GPUs"); }

}  // namespace weft::nvlink
