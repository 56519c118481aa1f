// Real processes as ranks for the tests of the control plane: forked, connected, told what to do by the test.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "bootstrap/control_plane.h"
#include "bootstrap/endpoint.h"
#include "check.h"

namespace weft::test {

constexpr double kLongS = 120;  // for waits that must not run out

inline std::vector<std::byte> bytes_of(uint64_t value, size_t num_bytes = sizeof(uint64_t)) {
  std::vector<std::byte> bytes(num_bytes);
  for (size_t at = 0; at < num_bytes; ++at) bytes[at] = static_cast<std::byte>((value >> (8 * (at % 8))) + at / 8);
  return bytes;
}

inline std::vector<int> all_but(int num_ranks, const std::vector<int>& without = {}) {
  std::vector<int> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (std::find(without.begin(), without.end(), rank) == without.end()) ranks.push_back(rank);
  }
  return ranks;
}

inline std::set<int> open_fds() {
  std::set<int> fds;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    fds.insert(std::stoi(entry.path().filename()));
  }
  return fds;
}

inline int num_open_fds() { return static_cast<int>(open_fds().size()); }

// Collects what an abort handler hears. Must outlive the control plane it listens to.
class Ear {
 public:
  ControlPlane::AbortHandler handler() {
    return [this](const AbortReason& reason) {
      const std::lock_guard lock(mutex_);
      heard_.push_back(reason);
    };
  }
  std::vector<AbortReason> heard() const {
    const std::lock_guard lock(mutex_);
    return heard_;
  }
  // Waits until `count` reasons were heard; false if that did not happen.
  bool wait_for(size_t count) const {
    const uint64_t deadline_ns = deadline_after_s(kLongS);
    while (heard().size() < count && now_ns() < deadline_ns) usleep(200);
    return heard().size() >= count;
  }
  // How many heard reasons name `rank` with `code`.
  int count(int rank, AbortCode code) const {
    int found = 0;
    for (const AbortReason& reason : heard()) found += reason.rank == rank && reason.code == code ? 1 : 0;
    return found;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<AbortReason> heard_;
};

// A pipe of 64-bit words in both directions.
class WordPipe {
 public:
  explicit WordPipe(int fd) : fd_(fd) {}
  void tell(uint64_t word) const { CHECK_EQ(send(fd_, &word, sizeof(word), MSG_NOSIGNAL), ssize_t{sizeof(word)}); }
  uint64_t hear() const {  // ~0 if nothing comes
    uint64_t word = ~uint64_t{0};
    pollfd waited{fd_, POLLIN, 0};
    if (poll(&waited, 1, static_cast<int>(kLongS * 1000)) == 1 && recv(fd_, &word, sizeof(word), 0) != sizeof(word)) {
      word = ~uint64_t{0};
    }
    return word;
  }
  int fd() const { return fd_; }

 private:
  int fd_;
};

// What several machines decide in: compare-and-set in files that all ranks of a test reach.
class FileStore {
 public:
  FileStore() {
    std::string folder = "/tmp/weft-test-XXXXXX";
    if (mkdtemp(folder.data()) == nullptr) report_failure(__FILE__, __LINE__, "mkdtemp");
    folder_ = folder;
  }
  ~FileStore() {
    if (getpid() == owner_) std::filesystem::remove_all(folder_);
  }
  FileStore(const FileStore&) = delete;
  FileStore& operator=(const FileStore&) = delete;

  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) const {
    const OwnedFd lock(open((folder_ + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    flock(lock.get(), LOCK_EX);
    std::string path = folder_ + "/" + key;
    std::replace(path.begin() + static_cast<ptrdiff_t>(folder_.size()) + 1, path.end(), '/', '.');
    std::stringstream held;
    held << std::ifstream(path).rdbuf();
    if (held.str() != expected || desired.empty()) return held.str();
    std::ofstream(path) << desired;
    return desired;
  }
  size_t num_keys() const {
    size_t count = 0;
    for (const auto& each : std::filesystem::directory_iterator(folder_)) count += each.path().filename() != "lock";
    return count;
  }

 private:
  const pid_t owner_ = getpid();
  std::string folder_;
};

// A decider of this rank and the thread that serves it.
class ServedDecider {
 public:
  using CompareSet = std::function<std::string(const std::string&, const std::string&, const std::string&)>;
  explicit ServedDecider(CompareSet compare_set)
      : decider(std::make_shared<Decider>()), thread_([held = decider, compare_set = std::move(compare_set)] {
          while (const auto request = held->next()) {
            try {
              held->answer(request->number, compare_set(request->key, request->expected, request->desired));
            } catch (const std::exception& error) {
              held->fail(request->number, error.what());
            }
          }
        }) {}
  ~ServedDecider() {
    decider->close();
    thread_.join();
  }

  const std::shared_ptr<Decider> decider;

 private:
  std::thread thread_;
};

// Inside a forked rank.
struct Rank {
  int rank;
  int num_ranks;
  WordPipe parent;
  Listener listener;
  std::vector<Endpoint> endpoints;
  std::unique_ptr<ControlPlane> plane;  // after connect()

  void connect(double timeout_s = kLongS, const Across& across = {}) {
    plane = connect_processes(rank, endpoints, std::move(listener), deadline_after_s(timeout_s), {}, across);
  }
  // An exchange among `members` in which every parcel is checked.
  void exchange(const std::vector<int>& members, uint64_t tag, double timeout_s = kLongS, size_t num_bytes = 24) {
    const auto word = [&](int member) { return tag * 1000003 + static_cast<uint64_t>(member) * 77; };
    const auto parcels =
        plane->exchange(members, tag, bytes_of(word(rank), num_bytes), {}, deadline_after_s(timeout_s), {});
    CHECK_EQ(parcels.size(), static_cast<size_t>(num_ranks));
    for (const int member : members) {
      CHECK(parcels[static_cast<size_t>(member)].bytes == bytes_of(word(member), num_bytes));
    }
  }
};

// Forks ranks that run `body` and leave; the test (the parent) holds no connection to any control plane.
class ForkedRanks {
 public:
  // `machines`: by rank, names of machines that this one plays; empty: one machine, and no doors.
  ForkedRanks(int num_ranks, const std::function<void(Rank&)>& body, std::vector<std::string> machines = {})
      : machines_(std::move(machines)) {
    for (int rank = 0; rank < num_ranks; ++rank) start(rank, num_ranks, body);
    std::vector<Endpoint> endpoints(static_cast<size_t>(num_ranks));
    for (int rank = 0; rank < num_ranks; ++rank) {
      Endpoint& endpoint = endpoints[static_cast<size_t>(rank)];
      CHECK_EQ(recv(pipe(rank).fd(), &endpoint, sizeof(endpoint), MSG_WAITALL), ssize_t{sizeof(endpoint)});
    }
    for (int rank = 0; rank < num_ranks; ++rank) {
      const size_t num_bytes = endpoints.size() * sizeof(Endpoint);
      CHECK_EQ(send(pipe(rank).fd(), endpoints.data(), num_bytes, MSG_NOSIGNAL), static_cast<ssize_t>(num_bytes));
    }
  }
  ~ForkedRanks() {
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      if (pids_[rank] > 0) {
        ::kill(pids_[rank], SIGKILL);
        waitpid(pids_[rank], nullptr, 0);
      }
      close(pipes_[rank].fd());
    }
  }
  ForkedRanks(const ForkedRanks&) = delete;
  ForkedRanks& operator=(const ForkedRanks&) = delete;

  const WordPipe& pipe(int rank) const { return pipes_[static_cast<size_t>(rank)]; }
  int num_ranks() const { return static_cast<int>(pids_.size()); }
  void signal(int rank, int number) const { ::kill(pids_[static_cast<size_t>(rank)], number); }

  // Waits for the end of a rank and checks that its own checks held (or that it died by `signal_number`).
  void join(int rank, int signal_number = 0) {
    int status = 0;
    waitpid(pids_[static_cast<size_t>(rank)], &status, 0);
    pids_[static_cast<size_t>(rank)] = -1;
    if (signal_number != 0) {
      CHECK(WIFSIGNALED(status) && WTERMSIG(status) == signal_number);
    } else {
      CHECK(WIFEXITED(status));
      CHECK_EQ(WEXITSTATUS(status), 0);
    }
  }
  void await_stop(int rank) const {  // by SIGSTOP
    int status = 0;
    waitpid(pids_[static_cast<size_t>(rank)], &status, WUNTRACED);
    CHECK(WIFSTOPPED(status));
  }
  // Looks, which take nothing from join() and await_stop().
  bool has_ended(int rank) const { return look(rank, WEXITED).si_pid != 0; }
  bool has_stopped(int rank) const { return look(rank, WSTOPPED).si_pid != 0; }
  bool has_failed(int rank) const {  // it has ended neither in order nor by SIGKILL
    const siginfo_t seen = look(rank, WEXITED);
    return seen.si_pid != 0 && seen.si_status != (seen.si_code == CLD_EXITED ? 0 : SIGKILL);
  }
  void join_all(const std::vector<int>& without = {}) {
    for (const int rank : all_but(num_ranks(), without)) join(rank);
  }

 private:
  siginfo_t look(int rank, int what) const {
    siginfo_t seen{};
    const pid_t pid = pids_[static_cast<size_t>(rank)];
    if (pid > 0) waitid(P_PID, static_cast<id_t>(pid), &seen, what | WNOHANG | WNOWAIT);
    return seen;
  }

  void start(int rank, int num_ranks, const std::function<void(Rank&)>& body) {
    int ends[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    std::fflush(nullptr);
    const pid_t pid = fork();
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);  // a test that hangs leaves nobody behind
      close(ends[0]);
      for (const WordPipe& sibling : pipes_) close(sibling.fd());
      _exit(run(rank, num_ranks, WordPipe(ends[1]), body));
    }
    close(ends[1]);
    pids_.push_back(pid);
    pipes_.emplace_back(ends[0]);
  }

  int run(int rank, int num_ranks, WordPipe parent, const std::function<void(Rank&)>& body) const {
    alarm(100);  // a rank that hangs fails its test
    num_failures() = 0;
    try {
      const DoorOptions door{"lo"};
      Rank self{rank, num_ranks, parent, Listener(machines_.empty() ? nullptr : &door, machine_of(rank)), {}, {}};
      self.endpoints.resize(static_cast<size_t>(num_ranks));
      const Endpoint own = self.listener.endpoint();
      CHECK_EQ(send(parent.fd(), &own, sizeof(own), MSG_NOSIGNAL), ssize_t{sizeof(own)});
      const size_t num_bytes = self.endpoints.size() * sizeof(Endpoint);
      CHECK_EQ(recv(parent.fd(), self.endpoints.data(), num_bytes, MSG_WAITALL), static_cast<ssize_t>(num_bytes));
      body(self);
    } catch (const std::exception& error) {
      report_failure("rank", rank, std::string("unexpected exception: ") + error.what());
    }
    return exit_code();
  }

  std::string machine_of(int rank) const { return machines_.empty() ? "" : machines_[static_cast<size_t>(rank)]; }

  const std::vector<std::string> machines_;
  std::vector<pid_t> pids_;
  std::vector<WordPipe> pipes_;
};

// `statement` must throw Error `expected_code` that names `expected_peers`.
template <class Statement>
void check_error(ErrorCode expected_code, const std::vector<int>& expected_peers, const Statement& statement,
                 const char* file, int line) {
  try {
    statement();
    report_failure(file, line, std::string("nothing thrown, expected ") + error_code_name(expected_code));
  } catch (const Error& error) {
    if (error.code != expected_code || error.peers != expected_peers || error.text.empty()) {
      report_failure(
          file, line,
          std::string(error_code_name(error.code)) + " naming " + ranks_text(error.peers) + ": " + error.text);
    }
  }
}
#define CHECK_ERROR(code, peers, statement) \
  weft::test::check_error(weft::ErrorCode::code, std::vector<int> peers, [&] { statement; }, __FILE__, __LINE__)

}  // namespace weft::test
