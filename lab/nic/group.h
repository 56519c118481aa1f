// Ranks of one machine that have found each other over sockets, each with its NIC.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/fd.h"
#include "memory/shared_memory.h"
#include "nic/device_copier.h"
#include "nic/settings.h"

namespace weft::nic {

// Where others of this machine reach a rank: an abstract unix socket.
class Listener {
 public:
  Listener();
  const std::string& name() const { return name_; }
  int fd() const { return fd_.get(); }

 private:
  std::string name_;
  OwnedFd fd_;
};

class Group {
 public:
  // Collective: `names` are those of all ranks' listeners. Error kPeerTimeout: not all came by the deadline.
  Group(const Listener& listener, const std::vector<std::string>& names, int rank, const Settings& settings,
        u64 deadline_ns);

  std::mutex& mutex() { return mutex_; }
  DeviceCopier& copier() { return copier_; }
  Nic& nic() { return *nic_; }  // under the mutex
  // Under the mutex: what has arrived, and the faults of now.
  void progress();
  // Adds a line of JSON to the file of the settings, if they name one: what the card has carried.
  void report() const;

 private:
  void inflict_faults(u64 now_ns);

  const int rank_;
  const int num_ports_;
  const std::string faults_path_;
  const std::string report_path_;
  u64 next_look_ns_ = 0;
  std::mutex mutex_;
  DeviceCopier copier_;
  std::vector<SharedMemory> segments_;
  std::unique_ptr<Nic> nic_;
};

}  // namespace weft::nic
