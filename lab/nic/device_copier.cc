#include "nic/device_copier.h"

#include "base/status.h"

namespace weft::nic {

using cuda::driver;

void DeviceCopier::begin() {
  if (context_ != nullptr) return;
  cuda::Context context = nullptr;
  cuda::check(driver().context_pop(&context), "cuCtxPopCurrent");
  if (context == nullptr) throw_unsupported("device memory is registered in a thread without a CUDA context");
  cuda::check(driver().context_push(context), "cuCtxPushCurrent");
  cuda::check(driver().stream_create(&stream_, cuda::kNonBlocking), "cuStreamCreate");
  void* word = nullptr;
  cuda::check(driver().host_alloc(&word, sizeof(u64), cuda::kHostAllocMapped), "cuMemHostAlloc");
  word_ = static_cast<u64*>(word);
  context_ = context;
}

DeviceCopier::~DeviceCopier() {
  if (context_ == nullptr) return;
  const cuda::QuietContextScope scope(context_);
  if (!scope.ok()) return;
  driver().stream_destroy(stream_);
  driver().host_free(word_);
}

bool DeviceCopier::copy(u8* to, Space to_space, const u8* from, Space from_space, u64 num_bytes) {
  if (to_space == Space::kHost && from_space == Space::kHost)
    return Copier::copy(to, to_space, from, from_space, num_bytes);
  if (context_ == nullptr) return false;
  const cuda::ContextScope scope(context_);
  const auto to_gpu = reinterpret_cast<cuda::DevicePtr>(to), from_gpu = reinterpret_cast<cuda::DevicePtr>(from);
  cuda::Result result = cuda::kSuccess;
  if (from_space == Space::kHost) {
    result = driver().copy_from_host_async(to_gpu, from, num_bytes, stream_);
  } else if (to_space == Space::kHost) {
    result = driver().copy_to_host_async(to, from_gpu, num_bytes, stream_);
  } else {
    result = driver().copy_async(to_gpu, from_gpu, num_bytes, stream_);
  }
  return result == cuda::kSuccess && driver().stream_synchronize(stream_) == cuda::kSuccess;
}

// Nobody else writes a signal, so what is read is what it was.
bool DeviceCopier::add(u8* word, Space space, u64 value) {
  if (space == Space::kHost) return Copier::add(word, space, value);
  if (!copy(reinterpret_cast<u8*>(word_), Space::kHost, word, space, sizeof(u64))) return false;
  *word_ += value;
  return copy(word, space, reinterpret_cast<const u8*>(word_), Space::kHost, sizeof(u64));
}

}  // namespace weft::nic
