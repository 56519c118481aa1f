// Copies to, from and between GPUs, by the driver that the process has. Without one device memory is refused.
#pragma once

#include "base/cuda_driver.h"
#include "nic/nic.h"

namespace weft::nic {

class DeviceCopier : public Copier {
 public:
  ~DeviceCopier() override;

  // Takes the calling thread's current context, once. Error kUnsupported: there is none, or no driver; kCudaError.
  void begin();

  bool copy(u8* to, Space to_space, const u8* from, Space from_space, u64 num_bytes) override;
  bool add(u8* word, Space space, u64 value) override;

 private:
  cuda::Context context_ = nullptr;
  cuda::Stream stream_ = nullptr;  // waits for no other
  u64* word_ = nullptr;            // pinned
};

}  // namespace weft::nic
