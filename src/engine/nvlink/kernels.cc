#include "engine/nvlink/kernels.h"

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "engine/nvlink/small_dispatch.h"
#include "weft/kernels/arguments.h"
#include "weft/layout/checked.h"

namespace weft::nvlink {
namespace {

constexpr int kStaticSharedBytes = 6 * 1024;  // left for a kernel's own variables
constexpr int kMaxStages = 32;

std::string arch_of(cuda::Device device) {
  int major = 0, minor = 0;
  cuda::check(cuda::driver().device_get_attribute(&major, cuda::kComputeMajor, device), "cuDeviceGetAttribute");
  cuda::check(cuda::driver().device_get_attribute(&minor, cuda::kComputeMinor, device), "cuDeviceGetAttribute");
  if (major < 9) {
    throw_unsupported("a GPU of compute capability " + std::to_string(major) + "." + std::to_string(minor) +
                      "; need: 9.0 or later (bulk copies)");
  }
  return "sm_" + std::to_string(major) + std::to_string(minor);
}

int attribute(cuda::Device device, int which) {
  int value = 0;
  cuda::check(cuda::driver().device_get_attribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

std::string field(const char* name, i64 value) {
  return std::string(".") + name + " = " + std::to_string(value) + ", ";
}

template <class Enum>
std::string field(const char* name, const char* type, Enum value) {
  return std::string(".") + name + " = static_cast<weft::" + type + ">(" + std::to_string(static_cast<int>(value)) +
         "), ";
}

std::string entry(const char* kernel, const char* config_type, const std::string& fields, const char* args_type,
                  const char* num_threads) {
  return std::string("#include \"weft/kernels/") + kernel + ".cuh\"\n" + "constexpr weft::" + config_type +
         " kConfig{" + fields + "};\n" + "extern \"C\" __global__ void __launch_bounds__(" + num_threads +
         ", 1) weft_kernel(const __grid_constant__ weft::kernels::" + args_type +
         " args) {\n  weft::ptx::wait_for_kernel_before();\n  weft::kernels::" + kernel + "<kConfig>(args);\n}\n";
}

}  // namespace

std::string render(const DispatchKernelConfig& config) {
  return entry("dispatch", "DispatchKernelConfig",
               field("num_ranks", config.num_ranks) + field("num_experts", config.num_experts) +
                   field("top_k", config.top_k) + field("num_blocks", config.num_blocks) +
                   field("row_bytes", config.row_bytes) + field("scale_row_bytes", config.scale_row_bytes) +
                   field("hidden", config.hidden) + field("num_stages", config.num_stages) +
                   field("num_fan_stages", config.num_fan_stages) + field("num_groups", config.num_groups) +
                   field("num_quantize_warps", config.num_quantize_warps) + field("dtype", "Dtype", config.dtype) +
                   field("quantize", "Quantize", config.quantize) + field("layout", "Layout", config.layout) +
                   field("topk_is_int64", config.topk_is_int64 ? 1 : 0) + field("is_cached", config.is_cached ? 1 : 0),
               "DispatchKernelArgs", "kConfig.num_threads()");
}

std::string render(const CombineKernelConfig& config) {
  return entry("combine", "CombineKernelConfig",
               field("num_ranks", config.num_ranks) + field("num_blocks", config.num_blocks) +
                   field("top_k", config.top_k) + field("hidden", config.hidden) + field("chunk", config.chunk) +
                   field("slot_chunks", config.slot_chunks) + field("reduce_slots", config.reduce_slots) +
                   field("reduce_rings", config.reduce_rings) + field("push_slots", config.push_slots) +
                   field("sum_warps", config.sum_warps) + field("dtype", "Dtype", config.dtype) +
                   field("layout", "Layout", config.layout) + field("wire_is_fp8", config.wire_is_fp8 ? 1 : 0) +
                   field("has_side", config.has_side ? 1 : 0),
               "CombineKernelArgs", "kConfig.num_threads()");
}

std::string render(const SmallDispatchKernel& kernel) {
  const SmallDispatchKernelConfig& config = kernel.config;
  return entry("small_dispatch", "SmallDispatchKernelConfig",
               field("num_ranks", config.num_ranks) + field("num_experts", config.num_experts) +
                   field("top_k", config.top_k) + field("num_blocks", config.num_blocks) +
                   field("row_bytes", config.row_bytes) + field("scale_row_bytes", config.scale_row_bytes) +
                   field("scale_word_bytes", config.scale_word_bytes) + field("hidden", config.hidden) +
                   field("dtype", "Dtype", config.dtype) + field("quantize", "Quantize", config.quantize) +
                   field("layout", "Layout", config.layout) + field("topk_is_int64", config.topk_is_int64 ? 1 : 0) +
                   field("is_cached", config.is_cached ? 1 : 0) + field("sends", config.sends ? 1 : 0) +
                   field("receives", config.receives ? 1 : 0),
               "SmallDispatchKernelArgs", "kConfig.num_threads()");
}

std::string render(const SmallCombineKernelConfig& config) {
  return entry("small_combine", "SmallCombineKernelConfig",
               field("num_ranks", config.num_ranks) + field("top_k", config.top_k) + field("hidden", config.hidden) +
                   field("dtype", "Dtype", config.dtype) + field("layout", "Layout", config.layout) +
                   field("wire_is_fp8", config.wire_is_fp8 ? 1 : 0) + field("has_side", config.has_side ? 1 : 0) +
                   field("sends", config.sends ? 1 : 0) + field("receives", config.receives ? 1 : 0),
               "SmallCombineKernelArgs", "kConfig.num_threads()");
}

DispatchKernelConfig with_stages(DispatchKernelConfig config, int shared_bytes) {
  int room = shared_bytes - kStaticSharedBytes - config.index_bytes();
  // Many quantise, or the wire waits for them; by expert other warps need registers too.
  const int most_quantizers = config.is_by_expert() ? 6 : 12;
  if (config.is_by_expert()) {
    const int fan_room = config.is_quantized() ? room - 2 * most_quantizers * config.stage_bytes() : room / 2;
    const int fitting = std::clamp(fan_room / config.fan_stage_bytes(), 1, 2 * kMostFanWarps);
    config.num_fan_stages = fitting < kFewFanStages ? fitting : fitting / 2 * 2;
    room -= config.num_fan_stages * config.fan_stage_bytes();
  }
  const int stages = room / config.stage_bytes();
  for (int multiple = config.is_quantized() ? most_quantizers : kStoreWarps; multiple >= kStoreWarps; multiple -= 2) {
    config.num_stages = std::min(stages, kMaxStages) / multiple * multiple;
    config.num_quantize_warps = config.is_quantized() ? multiple : 0;
    if (config.num_stages > 0) return config;
  }
  throw_unsupported("dispatch of rows of " + std::to_string(config.row_bytes) + " bytes, " +
                    std::to_string(config.num_experts) + " experts, " + std::to_string(32 * config.num_groups) +
                    " tokens a call on " + std::to_string(config.num_ranks) +
                    " ranks does not fit the shared memory of an SM; need: smaller rows or fewer tokens a call");
}

Kernels::Kernels(cuda::Device device, const jit::CompilerPaths& paths)
    : shared_bytes_(attribute(device, cuda::kMaxSharedPerBlock)),
      num_multiprocessors_(attribute(device, cuda::kMultiprocessors)),
      compiler_(paths, arch_of(device)) {}

Kernels::~Kernels() {
  for (cuda::Module module : modules_) cuda::driver().module_unload(module);
}

const Kernel& Kernels::prepare(const DispatchKernelConfig& config) {
  return prepare(render(config), static_cast<unsigned>(config.num_threads()),
                 static_cast<unsigned>(config.shared_bytes()));
}

const Kernel& Kernels::prepare(const SmallDispatchKernel& kernel) {
  return prepare(render(kernel), static_cast<unsigned>(SmallDispatchKernelConfig::num_threads()),
                 static_cast<unsigned>(kernel.config.shared_bytes(kernel.num_places)));
}

const Kernel& Kernels::prepare(const SmallCombineKernelConfig& config) {
  return prepare(render(config), static_cast<unsigned>(SmallCombineKernelConfig::num_threads()), 0);
}

const Kernel& Kernels::prepare(const CombineKernelConfig& config) {
  return prepare(render(config), static_cast<unsigned>(config.num_threads()),
                 static_cast<unsigned>(config.shared_bytes()));
}

const Kernel& Kernels::prepare(const std::string& source, unsigned num_threads, unsigned shared_bytes) {
  const std::lock_guard lock(mutex_);
  // Windows of other sizes launch the same code with more or less shared memory.
  const auto key = std::pair(source, shared_bytes);
  const auto found = loaded_.find(key);
  if (found != loaded_.end()) return found->second;
  const std::string cubin = compiler_.cubin(source);
  cuda::Module module = nullptr;
  cuda::check(cuda::driver().module_load(&module, cubin.data()), "cuModuleLoadData");
  modules_.push_back(module);
  Kernel kernel;
  kernel.num_threads = num_threads;
  kernel.shared_bytes = shared_bytes;
  cuda::check(cuda::driver().module_get_function(&kernel.function, module, "weft_kernel"), "cuModuleGetFunction");
  cuda::check(
      cuda::driver().function_set_attribute(kernel.function, cuda::kMaxDynamicShared, static_cast<int>(shared_bytes)),
      "cuFuncSetAttribute");
  return loaded_.emplace(key, kernel).first->second;
}

}  // namespace weft::nvlink
