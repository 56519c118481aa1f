// Memory of results, and typed parts of it.
#pragma once

#include <memory>
#include <vector>

#include "weft/config/operation.h"

namespace weft {

// Memory of a result. Freed when the last owner lets go.
struct Block {
  u8* data = nullptr;
  u64 num_bytes = 0;
  std::shared_ptr<void> owner;
  bool in_heap = false;
  u64 offset = 0;  // in the heap
};

// A typed part of a block.
struct Array {
  Block block;
  std::vector<i64> shape;
  Dtype dtype = Dtype::kBytes;
  bool is_integer = false;  // of dtype's width, or int64 if is_int64
  bool is_int64 = false;
  int gpu = -1;  // index of the GPU whose memory it is, -1: the host's
};

}  // namespace weft
