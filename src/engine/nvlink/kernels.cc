#include "engine/nvlink/kernels.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "base/status.h"
#include "engine/nvlink/small_dispatch.h"
#include "weft/config/fields.h"
#include "weft/kernels/dispatch/args.h"
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

std::string text_of(fields::Name name) { return std::string(name.data, name.length); }

// Designated initialisers of all fields.
template <class Config>
std::string initialisers(const Config& config) {
  std::string all;
  walk_fields(config, [&]<class Value>(fields::Name name, Value value) {
    all += "." + text_of(name) + " = ";
    if constexpr (fields::IsStruct<Value>) {
      all += "{" + initialisers(value) + "}, ";
    } else if constexpr (std::is_enum_v<Value>) {
      all +=
          "static_cast<" + text_of(fields::type_name<Value>()) + ">(" + std::to_string(static_cast<i64>(value)) + "), ";
    } else {
      all += std::to_string(static_cast<i64>(value)) + ", ";
    }
  });
  return all;
}

// A kernel: the header of its entry, whose name it has, what its types begin with, and the name that profilers show.
struct Entry {
  const char* header;
  const char* kernel;
  const char* type;
  const char* name;
};

template <class Config>
std::string entry(const Entry& of, const Config& config) {
  const std::string kernel = of.kernel, type = of.type;
  return std::string("#include \"weft/kernels/") + of.header + "\"\nconstexpr weft::" + type + "KernelConfig kConfig{" +
         initialisers(config) + "};\nnamespace weft {\n__global__ void __launch_bounds__(kConfig.num_threads(), 1) " +
         of.name + "(const __grid_constant__ weft::kernels::" + type +
         "KernelArgs args) {\n  weft::ptx::wait_for_kernel_before();\n  weft::kernels::" + kernel +
         "<kConfig>(args);\n}\n}  // namespace weft\n";
}

std::string with_length(const std::string& name) { return std::to_string(name.size()) + name; }

template <class Config>
std::string key_of_fields(const Config& config) {
  std::string key;
  walk_fields(config, [&]<class Value>(fields::Name, const Value& value) {
    if constexpr (fields::IsStruct<Value>) {
      key += key_of_fields(value);
    } else {
      key.append(reinterpret_cast<const char*>(&value), sizeof(value));
    }
  });
  return key;
}

// In front of a kernel whose route needs it.
std::string route_header(Route route) {
  return route == Route::kGin ? "#include \"weft/transport/rail_gin.cuh\"\n" : "";
}

}  // namespace

std::string render(const DispatchKernelConfig& config) {
  return route_header(config.route) + entry({"dispatch/entry.cuh", "dispatch", "Dispatch", "dispatch_kernel"}, config);
}
std::string render(const CombineKernelConfig& config) {
  return route_header(config.route) + entry({"combine/entry.cuh", "combine", "Combine", "combine_kernel"}, config);
}
std::string render(const SmallDispatchKernel& kernel) {
  return route_header(kernel.config.route) +
         entry({"small/dispatch_entry.cuh", "small_dispatch", "SmallDispatch", "dispatch_kernel"}, kernel.config);
}
std::string render(const SmallCombineKernelConfig& config) {
  return route_header(config.route) +
         entry({"small/combine_entry.cuh", "small_combine", "SmallCombine", "combine_kernel"}, config);
}

std::string symbol_of(const std::string& source) {
  const std::string before = "(const __grid_constant__ weft::kernels::";
  const size_t name_end = source.find(before), type = name_end + before.size();
  const size_t type_end = name_end == source.npos ? source.npos : source.find(' ', type);
  if (type_end == source.npos) throw_internal("this is not the source of a kernel");
  const size_t name = source.rfind(' ', name_end) + 1;
  return "_ZN4weft" + with_length(source.substr(name, name_end - name)) + "ENS_7kernels" +
         with_length(source.substr(type, type_end - type)) + "E";
}

std::string key_of(const DispatchKernelConfig& config) { return "d" + key_of_fields(config); }
std::string key_of(const CombineKernelConfig& config) { return "c" + key_of_fields(config); }
std::string key_of(const SmallDispatchKernel& kernel) {
  return "s" + key_of_fields(kernel.config) + std::to_string(kernel.num_places);
}
std::string key_of(const SmallCombineKernelConfig& config) { return "t" + key_of_fields(config); }

DispatchKernelConfig with_stages(DispatchKernelConfig config, int shared_bytes) {
  int room = shared_bytes - kStaticSharedBytes - config.index_bytes();
  // Many quantise, or the wire waits for them; by expert other warps need registers too.
  const int most_quantizers = config.is_by_expert() ? 6 : 12;
  if (config.has_fan()) {
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

const Kernel& Kernels::prepare(const DispatchKernelConfig& config, const KernelHeaders& headers) {
  return prepare(headers.prologue + render(config), static_cast<unsigned>(config.num_threads()),
                 static_cast<unsigned>(config.shared_bytes()), headers.folders);
}

const Kernel& Kernels::prepare(const SmallDispatchKernel& kernel, const KernelHeaders& headers) {
  return prepare(headers.prologue + render(kernel), static_cast<unsigned>(SmallDispatchKernelConfig::num_threads()),
                 static_cast<unsigned>(kernel.config.shared_bytes(kernel.num_places)), headers.folders);
}

const Kernel& Kernels::prepare(const SmallCombineKernelConfig& config, const KernelHeaders& headers) {
  return prepare(headers.prologue + render(config), static_cast<unsigned>(SmallCombineKernelConfig::num_threads()), 0,
                 headers.folders);
}

const Kernel& Kernels::prepare(const CombineKernelConfig& config, const KernelHeaders& headers) {
  return prepare(headers.prologue + render(config), static_cast<unsigned>(config.num_threads()),
                 static_cast<unsigned>(config.shared_bytes()), headers.folders);
}

const Kernel& Kernels::prepare(const std::string& source, unsigned num_threads, unsigned shared_bytes,
                               const std::vector<std::string>& folders) {
  const std::lock_guard lock(mutex_);
  // Windows of other sizes launch the same code with more or less shared memory.
  const auto key = std::pair(source, shared_bytes);
  const auto found = loaded_.find(key);
  if (found != loaded_.end()) return found->second;
  const std::string cubin = compiler_.cubin(source, folders);
  cuda::Module module = nullptr;
  cuda::check(cuda::driver().module_load(&module, cubin.data()), "cuModuleLoadData");
  modules_.push_back(module);
  Kernel kernel;
  kernel.num_threads = num_threads;
  kernel.shared_bytes = shared_bytes;
  cuda::check(cuda::driver().module_get_function(&kernel.function, module, symbol_of(source).c_str()),
              "cuModuleGetFunction");
  cuda::check(
      cuda::driver().function_set_attribute(kernel.function, cuda::kMaxDynamicShared, static_cast<int>(shared_bytes)),
      "cuFuncSetAttribute");
  return loaded_.emplace(key, kernel).first->second;
}

}  // namespace weft::nvlink
