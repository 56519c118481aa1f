#include "nic/group.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <sstream>

#include "base/clock.h"
#include "base/cuda_driver.h"
#include "base/random.h"
#include "base/status.h"

namespace weft::nic {

namespace {

constexpr u64 kFaultsEveryNs = 2'000'000;

// With it goes the descriptor of the sender's segment.
struct Hello {
  i32 rank = -1;
  i32 pid = 0;
  std::array<u8, 16> process{};  // with the pid the same for ranks that are threads of one
  u64 context = 0;               // of CUDA, the same for threads whose memory is on one GPU
};

const std::array<u8, 16>& this_process() {
  static const std::array<u8, 16> random = random_bytes<16>();  // forked children have the same
  return random;
}

// Of this thread; 0: none, or there is no driver.
u64 current_context() {
  try {
    cuda::Context context = nullptr;
    if (cuda::driver().context_pop(&context) != cuda::kSuccess || context == nullptr) return 0;
    cuda::check(cuda::driver().context_push(context), "cuCtxPushCurrent");
    return reinterpret_cast<u64>(context);
  } catch (const Error&) {
    return 0;
  }
}

sockaddr_un address_of(const std::string& name, socklen_t* num_bytes) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), std::min(name.size(), sizeof(address.sun_path) - 1));
  *num_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

OwnedFd make_stream() {
  OwnedFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd.valid()) throw_system_error("socket", errno);
  return fd;
}

void send_hello(const std::string& name, const Hello& hello, int segment) {
  const OwnedFd socket = make_stream();
  socklen_t address_bytes = 0;
  const sockaddr_un address = address_of(name, &address_bytes);
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), address_bytes) != 0)
    throw_system_error("connect to a rank of the software NIC", errno);
  Hello copy = hello;
  iovec bytes{&copy, sizeof(copy)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &segment, sizeof(int));
  if (sendmsg(socket.get(), &message, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(hello)))
    throw_system_error("greeting a rank of the software NIC", errno);
}

// Waits until `fd` can be read, at most until the deadline.
void wait_readable(int fd, u64 deadline_ns) {
  for (u64 now = now_ns(); now < deadline_ns; now = now_ns()) {
    pollfd waited{fd, POLLIN, 0};
    const int left_ms = static_cast<int>(std::min<u64>((deadline_ns - now) / 1'000'000 + 1, 1000));
    if (poll(&waited, 1, left_ms) == 1) return;
  }
  throw_peer_timeout("connect", 0, {}, "not all ranks of the software NIC have come");
}

Hello accept_hello(int listener, u64 deadline_ns, OwnedFd* segment) {
  wait_readable(listener, deadline_ns);
  const OwnedFd socket(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (!socket.valid()) throw_system_error("accept", errno);
  wait_readable(socket.get(), deadline_ns);
  Hello hello;
  iovec bytes{&hello, sizeof(hello)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t num_bytes = recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (num_bytes != static_cast<ssize_t>(sizeof(hello)) || header == nullptr || header->cmsg_type != SCM_RIGHTS)
    throw_internal("a greeting of the software NIC makes no sense");
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
  *segment = OwnedFd(fd);
  return hello;
}

Model own_model(Model model, int rank) {
  model.seed = model.seed * 1000 + static_cast<u64>(rank);
  return model;
}

}  // namespace

Listener::Listener() : fd_(make_stream()) {
  static std::atomic<u64> num_listeners{0};
  name_ = "software-nic-" + std::to_string(getpid()) + "-" + std::to_string(num_listeners++) + "-";
  for (const u8 byte : random_bytes<8>()) name_ += std::to_string(byte) + ".";
  socklen_t address_bytes = 0;
  const sockaddr_un address = address_of(name_, &address_bytes);
  if (bind(fd_.get(), reinterpret_cast<const sockaddr*>(&address), address_bytes) != 0 || listen(fd_.get(), 1024) != 0)
    throw_system_error("listen", errno);
}

Group::Group(const Listener& listener, const std::vector<std::string>& names, int rank, const Settings& settings,
             u64 deadline_ns)
    : rank_(rank),
      num_ports_(settings.model.num_ports),
      faults_path_(settings.faults_path),
      report_path_(settings.report_path),
      segments_(names.size()) {
  const int num_ranks = static_cast<int>(names.size());
  const u64 segment_bytes = Nic::segment_bytes(num_ranks, settings.model);
  SharedMemory& mine = segments_[static_cast<size_t>(rank)];
  mine = SharedMemory::create(segment_bytes);
  std::vector<Nic::Segment> all(names.size());
  all[static_cast<size_t>(rank)] = {reinterpret_cast<u8*>(mine.data()), true};
  const u64 context = current_context();
  for (int peer = 0; peer < num_ranks; ++peer) {
    if (peer != rank)
      send_hello(names[static_cast<size_t>(peer)], {rank, getpid(), this_process(), context}, mine.fd());
  }
  for (int idx = 1; idx < num_ranks; ++idx) {
    OwnedFd fd;
    const Hello hello = accept_hello(listener.fd(), deadline_ns, &fd);
    const auto peer = static_cast<size_t>(hello.rank);
    if (hello.rank < 0 || hello.rank >= num_ranks || segments_[peer].valid())
      throw_internal("a rank of the software NIC has come twice");
    segments_[peer] = SharedMemory::attach(std::move(fd), segment_bytes);
    segments_[peer].drop_fd();
    all[peer] = {reinterpret_cast<u8*>(segments_[peer].data()),
                 hello.pid == getpid() && hello.process == this_process() && hello.context == context};
  }
  nic_ = std::make_unique<Nic>(rank, own_model(settings.model, rank), std::move(all), copier_);
}

void Group::progress() {
  const u64 now = now_ns();
  if (!faults_path_.empty() && now >= next_look_ns_) inflict_faults(now);
  nic_->progress(now);
}

void Group::report() const {
  if (report_path_.empty()) return;
  std::ostringstream line;
  line << R"({"kind": "software_nic", "rank": )" << rank_ << R"(, "port_bytes": [)";
  for (int port = 0; port < num_ports_; ++port) line << (port > 0 ? ", " : "") << nic_->port_bytes(port);
  line << R"(], "frames_again": )" << nic_->num_again() << "}\n";
  std::ofstream(report_path_, std::ios::app) << line.str();
}

void Group::inflict_faults(u64 now_ns) {
  next_look_ns_ = now_ns + kFaultsEveryNs;
  bool is_dark = false;
  for (const FaultLine& fault : read_faults(faults_path_, rank_)) {
    is_dark = is_dark || fault.kind == FaultLine::kDark;
    if (fault.kind == FaultLine::kPort && fault.value < num_ports_) nic_->lose_port(fault.value, now_ns);
    if (fault.kind == FaultLine::kDrop && fault.value < static_cast<int>(segments_.size()))
      nic_->drop_peer(fault.value);
  }
  nic_->set_dark(is_dark);
}

}  // namespace weft::nic
