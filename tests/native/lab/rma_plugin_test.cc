// Guards against a plugin that NCCL's proxy could not use: its table is called as NCCL calls it, by ranks as processes and threads, and
// every word is compared. WEFT_RMA_PLUGIN: the library, opened with dlopen; without it the plugin is linked in, for sanitizers.
#include <dlfcn.h>

#include <cstdlib>
#include <fstream>
#include <functional>

#include "base/status.h"
#include "lab/rings.h"
#include "nic/rma_abi.h"
#include "nic/settings.h"

#if defined(WEFT_FAKE_CUDA)
#include "base/cuda_driver.h"
#include "engine/nvlink/fake_cuda.h"
#endif

using namespace weft;
using namespace weft::nic;
using namespace weft::test;

#if !defined(WEFT_RMA_PLUGIN)
extern "C" const rma::Plugin ncclRmaPlugin_v13;
#endif

namespace {

const rma::Plugin& plugin() {
#if defined(WEFT_RMA_PLUGIN)
  static const auto* table = [] {
    void* library = dlopen(WEFT_RMA_PLUGIN, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) report_failure(__FILE__, __LINE__, dlerror());
    return static_cast<const rma::Plugin*>(dlsym(library, "ncclRmaPlugin_v13"));
  }();
  return *table;
#else
  return ncclRmaPlugin_v13;
#endif
}

constexpr int kMostRanks = 4;
constexpr double kLongestS = 60;

// What a bootstrap does for NCCL: every rank's handle to all.
struct Meeting {
  char handles[kMostRanks][rma::kHandleBytes];
  u32 num_there;
  u32 num_done;
};

void meet(u32* word, int num_ranks) {
  __atomic_fetch_add(word, 1, __ATOMIC_ACQ_REL);
  const u64 deadline_ns = deadline_after_s(kLongestS);
  while (__atomic_load_n(word, __ATOMIC_ACQUIRE) < static_cast<u32>(num_ranks) && now_ns() < deadline_ns) usleep(100);
  CHECK(__atomic_load_n(word, __ATOMIC_ACQUIRE) >= static_cast<u32>(num_ranks));
}

void log(int, unsigned long, const char*, int, const char*, ...) {}

// A rank as NCCL makes one of it. Region 0: `data`, sent from the first half, received in the second. Region 1: signals.
class PluginRank {
 public:
  static constexpr u64 kNumPuts = 12, kMostWords = 32768 + 8, kPeerWords = kNumPuts * kMostWords;

  PluginRank(int rank, int num_ranks, Meeting& meeting)
      : rank_(rank),
        num_ranks_(num_ranks),
        meeting_(meeting),
        data_(2 * static_cast<u64>(num_ranks) * kPeerWords, kPoison),
        signals_(static_cast<u64>(num_ranks) * kNumPuts) {}

  void open(int kind = rma::kHostMemory) {
    ok(plugin().init(&context_, 7, log));
    int num_devices = 0;
    ok(plugin().devices(&num_devices));
    CHECK_EQ(num_devices, 1);
    rma::Properties properties{};
    ok(plugin().properties(0, &properties));
    CHECK_EQ(properties.device_type, rma::kByProxy);
    CHECK_EQ(properties.memory_kinds, rma::kHostMemory | rma::kDeviceMemory);
    CHECK(plugin().properties(1, &properties) != rma::kSuccess);
    ok(plugin().listen(context_, 0, meeting_.handles[rank_], &listener_));
    meet(&meeting_.num_there, num_ranks_);
    void* handles[kMostRanks];
    for (int peer = 0; peer < num_ranks_; ++peer) handles[peer] = meeting_.handles[peer];
    ok(plugin().connect(context_, handles, num_ranks_, rank_, listener_, &group_));
    ok(plugin().close_listener(listener_));
    rma::ContextConfig config{8, 0, 2, 64, 0};
    ok(plugin().create_context(group_, &config, &queue_, nullptr));
    ok(plugin().register_memory(group_, data_.data(), data_.size() * 8, kind, 0, &data_region_, nullptr));
    ok(plugin().register_memory(group_, signals_.data(), signals_.size() * 8, kind, 0, &signal_region_, nullptr));
    CHECK(data_region_ != nullptr && signal_region_ != nullptr && queue_ != nullptr);
  }

  void close() {
    ok(plugin().deregister(group_, signal_region_));
    ok(plugin().deregister(group_, data_region_));
    ok(plugin().destroy_context(queue_));
    ok(plugin().close_group(group_));
    ok(plugin().finalize(context_));
  }

  // Puts to every rank, itself too, each with its own signal; then one without, and a signal alone behind its end.
  void exchange(const std::function<void()>& in_the_middle = [] {}) {
    std::vector<void*> requests;
    for (u64 idx = 0; idx + 1 < kNumPuts; ++idx) {
      if (idx == kNumPuts / 2) in_the_middle();
      for (int peer = 0; peer < num_ranks_; ++peer) {
        fill(peer, idx);
        requests.push_back(nullptr);
        ok(plugin().put_signal(queue_, static_cast<int>(idx % 2), send_offset(peer, idx), data_region_,
                               num_words(rank_, peer, idx) * 8, receive_offset(rank_, idx), data_region_,
                               static_cast<u32>(peer), signal_of(rank_, idx) * 8, signal_region_, 5, 2,
                               &requests.back()));
        ok(plugin().progress(queue_));
      }
    }
    std::vector<void*> plain(static_cast<size_t>(num_ranks_));
    const u64 last = kNumPuts - 1;
    for (int peer = 0; peer < num_ranks_; ++peer) {
      fill(peer, last);
      ok(plugin().put(queue_, 0, send_offset(peer, last), data_region_, num_words(rank_, peer, last) * 8,
                      receive_offset(rank_, last), data_region_, static_cast<u32>(peer),
                      &plain[static_cast<size_t>(peer)]));
    }
    for (int peer = 0; peer < num_ranks_; ++peer) {
      CHECK(wait_for([&] { return is_done(plain[static_cast<size_t>(peer)]); }));
      requests.push_back(nullptr);
      ok(plugin().put_signal(queue_, 0, 0, nullptr, 0, 0, nullptr, static_cast<u32>(peer), signal_of(rank_, last) * 8,
                             signal_region_, 99, rma::kSignalInc, &requests.back()));
    }
    for (u64 idx = 0; idx < kNumPuts; ++idx) {
      for (int peer = 0; peer < num_ranks_; ++peer) {
        CHECK(wait_for([&] { return signal(peer, idx) != 0; }));
        CHECK_EQ(num_wrong(peer, idx), 0u);
      }
    }
    for (void* request : requests) CHECK(wait_for([&] { return is_done(request); }));
    finish();
    for (u64 idx = 0; idx < kNumPuts; ++idx) {
      for (int peer = 0; peer < num_ranks_; ++peer) CHECK_EQ(signal(peer, idx), idx == last ? 1u : 5u);
    }
  }

  // Others may still need what this rank has to acknowledge or to send again.
  void finish() {
    const u32 expected = ++num_ends_ * static_cast<u32>(num_ranks_);
    __atomic_fetch_add(&meeting_.num_done, 1, __ATOMIC_ACQ_REL);
    const auto are_all = [&] { return __atomic_load_n(&meeting_.num_done, __ATOMIC_ACQUIRE) >= expected; };
    CHECK(wait_for(are_all));
  }

  template <class Ready>
  bool wait_for(const Ready& ready, double longest_s = kLongestS) const {
    const u64 deadline_ns = deadline_after_s(longest_s);
    while (!ready() && now_ns() < deadline_ns) {
      ok(plugin().progress(queue_));
      std::this_thread::yield();
    }
    return ready();
  }

  bool is_done(void* request) const {
    int done = 0;
    ok(plugin().test(group_, request, &done));
    return done != 0;
  }
  bool has_failed() const {
    bool failed = false;
    ok(plugin().last_error(queue_, &failed));
    return failed;
  }
  // To the next rank: 64 bytes and the first signal.
  rma::Result put_next(u64 from, u64 to, void** request) const {
    return plugin().put_signal(queue_, 0, from, data_region_, 64, to, data_region_,
                               static_cast<u32>((rank_ + 1) % num_ranks_), 0, signal_region_, 1, rma::kSignalInc,
                               request);
  }
  rma::Result get(void** request) const {
    return plugin().get(queue_, 0, 0, data_region_, 64, 0, data_region_, 0, request);
  }
  rma::Result flush(void** request) const { return plugin().flush(queue_, 0, data_region_, 0, request); }
  u64 data_bytes() const { return data_.size() * 8; }
  bool is_untouched() const {
    return std::count(data_.begin(), data_.end(), kPoison) == static_cast<i64>(data_.size());
  }
  u64 first_signal() const { return __atomic_load_n(&signals_[0], __ATOMIC_ACQUIRE); }

 private:
  static void ok(rma::Result result) { CHECK_EQ(result, rma::kSuccess); }
  static u64 num_words(int from, int to, u64 idx) {
    const u64 most = u64{1} << (idx * 7 + static_cast<u64>(from) * 3 + static_cast<u64>(to)) % 16;  // 8 B to 256 KiB
    return most > 4 ? most + idx % 3 : most;
  }
  static u64 value(int from, int to, u64 idx, u64 word) {
    return (idx << 48 | static_cast<u64>(from) << 40 | static_cast<u64>(to) << 32) + word * 0x9e3779b97f4a7c15u + 1;
  }
  u64 send_offset(int peer, u64 idx) const { return (static_cast<u64>(peer) * kPeerWords + idx * kMostWords) * 8; }
  u64 receive_offset(int peer, u64 idx) const {
    return send_offset(peer, idx) + static_cast<u64>(num_ranks_) * kPeerWords * 8;
  }
  static u64 signal_of(int peer, u64 idx) { return static_cast<u64>(peer) * kNumPuts + idx; }
  u64 signal(int peer, u64 idx) const { return __atomic_load_n(&signals_[signal_of(peer, idx)], __ATOMIC_ACQUIRE); }
  void fill(int peer, u64 idx) {
    u64* words = data_.data() + send_offset(peer, idx) / 8;
    for (u64 word = 0; word < num_words(rank_, peer, idx); ++word) words[word] = value(rank_, peer, idx, word);
  }
  u64 num_wrong(int peer, u64 idx) const {
    const u64* words = data_.data() + receive_offset(peer, idx) / 8;
    const u64 count = num_words(peer, rank_, idx);
    u64 wrong = words[count] == kPoison ? 0 : 1;
    for (u64 word = 0; word < count; ++word) wrong += words[word] != value(peer, rank_, idx, word) ? 1 : 0;
    return wrong;
  }

  const int rank_;
  const int num_ranks_;
  u32 num_ends_ = 0;
  Meeting& meeting_;
  std::vector<u64> data_, signals_;
  void* context_ = nullptr;
  void* listener_ = nullptr;
  void* group_ = nullptr;
  void* queue_ = nullptr;
  void* data_region_ = nullptr;
  void* signal_region_ = nullptr;
};

using Body = std::function<void(int rank, PluginRank& self)>;

void run_plugin_processes(int num_ranks, const Body& body) {
  const SharedPages pages(sizeof(Meeting));
  std::vector<pid_t> children;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      PluginRank self(rank, num_ranks, *reinterpret_cast<Meeting*>(pages.data()));
      body(rank, self);
      _exit(exit_code());
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
  }
}

void run_plugin_threads(int num_ranks, const Body& body) {
  const SharedPages pages(sizeof(Meeting));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      PluginRank self(rank, num_ranks, *reinterpret_cast<Meeting*>(pages.data()));
      body(rank, self);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void set_nic(const std::string& text) { setenv("SOFTWARE_NIC", text.c_str(), 1); }

void exchange_once(int, PluginRank& self) {
  self.open();
  self.exchange();
  CHECK(!self.has_failed());
  self.close();
}

// A file of faults, which ranks come to know while they run.
class FaultFile {
 public:
  FaultFile() {
    const int fd = mkstemp(path_.data());
    CHECK(fd >= 0);
    ::close(fd);
    set_nic("faults=" + path_);
  }
  ~FaultFile() {
    unlink(path_.c_str());
    set_nic("");
  }
  void write(const std::string& text) const { std::ofstream(path_) << text; }

 private:
  std::string path_ = "/tmp/software-nic-faults-XXXXXX";
};

TEST(settings_are_taken_or_named) {
  const Settings settings =
      parse_settings("ports=3,gb_s=2.5,latency_us=8.4,spread_us=0,seed=9,faults=/a/b,report=/a/c");
  CHECK_EQ(settings.model.num_ports, 3);
  CHECK(settings.model.port_bytes_per_s == 2.5e9);
  CHECK_EQ(settings.model.latency_ns, 8400u);
  CHECK_EQ(settings.model.spread_ns, 0u);
  CHECK_EQ(settings.model.seed, 9u);
  CHECK_EQ(settings.faults_path, "/a/b");
  CHECK_EQ(settings.report_path, "/a/c");
  CHECK(parse_settings("").model.spread_ns > 0);                     // reordering is on
  CHECK_EQ(parse_settings("gb_s=0.0").model.port_bytes_per_s, 0.0);  // no limit, as without it
  for (const char* bad :
       {"ports=0", "ports=9", "gb_s=x", "gb_s=-1", "gb_s=nan", "gb_s=inf", "gb_s=", "latency_us=", "speed=3"}) {
    CHECK_THROWS(parse_settings(bad), Error,
                 [](const Error& error) { CHECK(error.code == ErrorCode::kInvalidArgument); });
  }
  set_nic("speed=3");
  rma::Properties properties{};
  CHECK_EQ(plugin().properties(0, &properties), rma::kInvalidArgument);
  set_nic("ports=2,gb_s=0.0");  // NCCL plans with a rate all the same
  CHECK_EQ(plugin().properties(0, &properties), rma::kSuccess);
  CHECK(properties.speed_mbps > 0);
  set_nic("ports=2,gb_s=5");
  CHECK_EQ(plugin().properties(0, &properties), rma::kSuccess);
  CHECK_EQ(properties.speed_mbps, 80'000);
  set_nic("");
}

#if !defined(__SANITIZE_THREAD__)
// These fork, and come first: a driver that a process has started does not work in its children.
TEST(processes_exchange) {
  for (const int num_ranks : {2, 3, 4}) run_plugin_processes(num_ranks, exchange_once);
  set_nic("ports=1,spread_us=0,latency_us=20,gb_s=1");
  run_plugin_processes(2, exchange_once);
  set_nic("");
}

TEST(a_lost_port_ends_no_call) {
  const FaultFile faults;
  run_plugin_processes(3, [&](int rank, PluginRank& self) {
    self.open();
    self.exchange([&] {
      if (rank == 0) faults.write("0 port 1\n1 port 0\n2 port 1\n2 port 7\n");
    });
    CHECK(!self.has_failed());
    self.close();
  });
}

TEST(from_a_dark_card_nothing_comes) {
  const FaultFile faults;
  faults.write("not a fault\n0 dark\n");
  run_plugin_processes(2, [&](int rank, PluginRank& self) {
    self.open();
    void* request = nullptr;
    CHECK_EQ(self.put_next(0, self.data_bytes() / 2, &request), rma::kSuccess);
    CHECK(!self.wait_for([&] { return self.is_done(request) || self.first_signal() != 0; }, 0.2));
    CHECK(self.is_untouched());
    self.finish();
    if (rank == 0) faults.write("");
    CHECK(self.wait_for([&] { return self.is_done(request) && self.first_signal() == 1; }));
    self.finish();
    self.close();
  });
}

TEST(what_is_not_registered_is_refused_and_not_touched) {
  run_plugin_processes(2, [](int, PluginRank& self) {
    self.open();
    void* request = nullptr;
    CHECK_EQ(self.put_next(self.data_bytes() - 56, 0, &request), rma::kInvalidArgument);
    CHECK(self.get(&request) == rma::kInvalidUsage);
    CHECK_EQ(self.flush(&request), rma::kSuccess);
    CHECK(request == nullptr && self.is_done(request));
    CHECK(!self.has_failed());
    CHECK_EQ(self.put_next(0, self.data_bytes() - 56, &request), rma::kSuccess);
    CHECK(self.wait_for([&] { return self.has_failed(); }));
    CHECK(self.is_untouched());
    CHECK_EQ(self.first_signal(), 0u);
    CHECK(!self.is_done(request));
    self.finish();
    self.close();
  });
}
#endif

TEST(threads_exchange) {
  for (const int num_ranks : {1, 2, 4}) run_plugin_threads(num_ranks, exchange_once);
}

TEST(cards_report_what_they_have_carried) {
  std::string path = "/tmp/software-nic-report-XXXXXX";
  const int fd = mkstemp(path.data());
  CHECK(fd >= 0);
  ::close(fd);
  set_nic("ports=2,report=" + path);
  run_plugin_threads(2, exchange_once);
  set_nic("");
  std::ifstream file(path);
  int num_lines = 0;
  for (std::string line; std::getline(file, line); ++num_lines) {
    u64 first = 0, second = 0;
    const size_t at = line.find("\"port_bytes\": [");
    CHECK(at != std::string::npos);
    CHECK_EQ(std::sscanf(line.c_str() + at, "\"port_bytes\": [%lu, %lu]", &first, &second), 2);
    CHECK(first > 0 && second > 0);
    CHECK(line.ends_with("\"frames_again\": 0}"));
  }
  CHECK_EQ(num_lines, 2);
  unlink(path.c_str());
}

#if defined(WEFT_FAKE_CUDA)
// On a driver without a GPU, whose memory is the host's.
TEST(device_memory_goes_through_the_driver) {
  const auto on_device = [](int, PluginRank& self) {
    cuda::Context context = nullptr;
    cuda::check(cuda::driver().primary_context_retain(&context, 0), "retain");
    const cuda::ContextScope scope(context);
    self.open(rma::kDeviceMemory);
    self.exchange();
    CHECK(!self.has_failed());
    self.close();
  };
  run_plugin_threads(2, on_device);
  run_plugin_processes(2, on_device);
}

TEST(threads_on_two_gpus_copy_by_way_of_the_host) {
  const auto num_copies = [](uintptr_t apart) {
    const int before = fake_cuda::num_device_copies();
    run_plugin_threads(2, [apart](int rank, PluginRank& self) {
      const uintptr_t context = 16 + apart * static_cast<uintptr_t>(rank);
      const cuda::ContextScope scope(reinterpret_cast<cuda::Context>(context));
      self.open(rma::kDeviceMemory);
      self.exchange();
      CHECK(!self.has_failed());
      self.close();
    });
    return fake_cuda::num_device_copies() - before;
  };
  const int on_one = num_copies(0), on_two = num_copies(1);
  CHECK(on_two > 0 && on_two < on_one);  // a rank's to itself
}
#endif

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv); }
