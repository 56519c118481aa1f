#include "engine/describe.h"

#include <array>
#include <cstdio>

#include "weft/layout/window.h"

namespace weft {
namespace {

std::string hex(u64 number) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(number));
  return text.data();
}

}  // namespace

const char* op_name(u32 op_kind) {
  constexpr const char* kNames[kNumOpKinds] = {"communicator", "dispatch", "combine", "barrier"};
  return op_kind < kNumOpKinds ? kNames[op_kind] : "unknown operation";
}

const char* phase_name(u32 phase) {
  constexpr const char* kNames[kNumPhases] = {"count", "notify", "send", "reduce"};
  return phase < kNumPhases ? kNames[phase] : "unknown phase";
}

std::string describe(const OperationConfig& config) {
  constexpr const char* kLayouts[] = {"rank_major", "expert_major", "masked"};
  constexpr const char* kDtypes[] = {"bytes", "bfloat16", "float16", "float32"};
  constexpr const char* kOrders[] = {"rank", "last_pick", "pick"};
  constexpr const char* kQuantize[] = {"None", "'fp8'", "'fp8_ue8m0'", "'fp8_pow2'"};
  std::string text = std::string(op_name(static_cast<u32>(config.kind)));
  if (config.kind == OpKind::kBarrier) return text;
  text += std::string("(layout='") + kLayouts[static_cast<int>(config.layout)] +
          "', dtype=" + kDtypes[static_cast<int>(config.dtype)] + ", hidden=" + std::to_string(config.hidden) +
          ", row_bytes=" + std::to_string(config.row_bytes) + ", alignment=" + std::to_string(config.alignment) +
          ", capacity=" + (config.capacity < 0 ? "None" : std::to_string(config.capacity)) +
          ", max_tokens=" + std::to_string(config.max_tokens);
  const bool is_dispatch = config.kind == OpKind::kDispatch;
  if (is_dispatch || config.quantize != Quantize::kNone) {
    text += std::string(is_dispatch ? ", quantize=" : ", wire=") + kQuantize[static_cast<int>(config.quantize)];
  }
  if (is_dispatch && config.is_cached == 0) {
    if (config.handle != 0) text += ", expert map " + hex(config.handle);
  } else if (config.handle != 0) {
    text += ", handle of sequence " + std::to_string(config.handle);
  }
  if (!is_dispatch && config.is_cached != 0) text += std::string(", order='") + kOrders[config.is_cached] + "'";
  if (config.has_side != 0) text += config.has_side == 2 ? ", with side of all ranks" : ", with side";
  if (config.is_small == 1) text += ", small batches";
  if (config.is_small == 2) text += ", in two launches";
  return text + ")";
}

std::string mismatch_text(const Caller& mine, const Caller& other) {
  const bool is_other_object = mine.object != other.object;
  const auto text = [&](const Caller& caller) {
    const std::string object = is_other_object ? " of ExpertParallel " + std::to_string(caller.object) : "";
    return "rank " + std::to_string(caller.rank) + " " + caller.call + object;
  };
  return "ranks called different things: " + text(mine) + ", " + text(other) +
         (is_other_object
              ? ". Objects of one shape are numbered as they were made; every rank must call them in the same order"
              : "") +
         "; the call was given up on every rank, nothing was sent";
}

}  // namespace weft
