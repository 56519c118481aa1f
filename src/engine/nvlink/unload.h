// What a dispatch without room in the heap has left in this rank's landing, for Window::unload.
#pragma once

#include <string>

#include "weft/config/base.h"
#include "weft/config/operation.h"

namespace weft::nvlink {

// Offsets count from the start of the heap memory. Places in the landing:
//   rank_major               row `n` of the result is row `n` of the landing, as are its ids and weights [top_k]
//   expert_major and masked  the row of (source, token) is row source * max_tokens + token; the table says where it goes
struct StagedRows {
  bool is_there = false;
  bool is_cached = false;  // no ids and weights have come
  u64 recv_plan = 0;       // is_cached: the caller's receive plan, which says what the table says else
  Layout layout = Layout::kRankMajor;
  bool zeroes_holes = true;
  u64 stream = 0;
  i64 max_tokens = 0;       // tokens a source that the table has room for
  i64 num_rows = 0;         // rows that the result has (masked: L * C)
  i64 row_bytes = 0;        // of a row of the result
  i64 scale_row_bytes = 0;  // 0: no scales
  i64 id_bytes = 8;         // of one id
  u64 rows = 0;             // of row 0 of the landing
  u64 row_stride = 0;       // bytes from row to row
  u64 scales = 0;           // of the scales of row 0
  u64 scale_stride = 0;
};

std::string render_unload();  // the source of its kernel

}  // namespace weft::nvlink
