// The control plane: how ranks exchange small messages and file descriptors, and how they learn that one is gone.
// Two kinds behind one interface: processes (unix sockets) and threads of one process (LocalHub).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "base/text.h"
#include "bootstrap/endpoint.h"
#include "bootstrap/ledger.h"
#include "bootstrap/rank_set.h"
#include "weft/config/base.h"

namespace weft {

enum class AbortCode : uint32_t {
  kNone,
  kPeerLost,
  kPeerClosed,
  kPeerTimeout,
  kInterrupted,
  kRefused,
  kInternal,
  kAborted,
  kUnreachable,  // as kPeerLost, but nobody knows whether the process has ended: its machine does not answer
  kDecided,      // no abort: an epoch was decided that leaves the receiver out; it is to look
  kEvicted,      // never sent: this rank has looked
};

// Why the ranks of a communicator leave their operations. Plain bytes: it travels as it is.
struct AbortReason {
  static constexpr size_t kTextBytes = 200;

  AbortCode code = AbortCode::kNone;
  int rank = -1;       // culprit: who was lost, closed, was late or gave up
  int reporter = -1;   // who says so
  uint32_t epoch = 0;  // of the reporter; with era, group and incarnation as in Origin (R22)
  uint32_t era = 0;
  GroupId group{};
  uint64_t incarnation = 0;
  uint32_t is_ours = 0;   // 1: this rank's control plane says so itself; it knows no epochs. Never believed of a peer
  uint64_t sequence = 0;  // of the broken operation; 0 outside operations
  uint32_t phase = 0;
  uint32_t op_kind = 0;
  RankSet peers;                        // who was late too. kAborted: ranks that count their boundaries differently
  uint64_t attempt = 0;                 // kAborted: the epoch that the reporter was about to enter; 0: none
  std::array<char, kTextBytes> text{};  // why, where somebody said it: one line, zeros behind it. Read it by text_of()
};

// What a rank lets the others know of itself, for their errors alone: that it refused its call, and why, or whom it waits for.
// Plain bytes.
struct Note {
  GroupId group{};  // as in AbortReason
  uint64_t incarnation = 0;
  uint32_t epoch = 0;
  uint32_t era = 0;
  uint64_t heard_ns = 0;                             // set by the receiver
  RankSet awaited;                                   // empty: nobody any more
  std::array<char, AbortReason::kTextBytes> text{};  // empty: nothing any more
};

// Of an AbortReason or a Note, by whom it came from.
template <class Plain>
Origin origin_of(const Plain& plain, int rank) {
  return {plain.group, plain.epoch, plain.era, rank, plain.incarnation};
}

template <class Plain>
void set_origin(Plain& plain, const Origin& origin) noexcept {
  plain.group = origin.group;
  plain.epoch = origin.epoch;
  plain.era = origin.era;
  plain.incarnation = origin.incarnation;
}

template <class Plain>
void set_text(Plain& plain, std::string_view text) noexcept {
  const std::string line = one_line(text, plain.text.size());
  plain.text = {};
  std::copy(line.begin(), line.end(), plain.text.begin());
}

// Whatever a peer wrote there, it is one line.
template <class Plain>
std::string text_of(const Plain& plain) {
  const auto end = std::find(plain.text.begin(), plain.text.end(), '\0');
  return one_line({plain.text.data(), static_cast<size_t>(end - plain.text.begin())}, plain.text.size());
}

struct Parcel {
  std::vector<std::byte> bytes;
  std::vector<OwnedFd> fds;
  bool has_lost_fds = false;  // this process had no room for some of them

  // Throws kCapacityExceeded if some were lost, kInternalError if `source` ("rank 2") sent another number.
  void check_fds(size_t num_expected, const std::string& source) const;
};

enum class DetectionChannel : uint32_t {
  kOwnerDeath,   // the robust mutex of the peer lost its owner
  kSocketEnd,    // its socket closed without a goodbye
  kPidfd,        // its process ended
  kGoodbye,      // it closed its control plane
  kRefused,      // it sent something that is no message of ours and was cut off
  kUnreachable,  // its machine has not answered for kUnreachableAfterMs
};
const char* detection_channel_name(DetectionChannel channel) noexcept;

// The first entry of a rank is the one that counted (and called the abort handler); later ones tell when the
// other channels would have told.
struct Detection {
  int rank;
  DetectionChannel channel;
  uint64_t time_ns;  // clock of now_ns()
};

// Limits of one exchange, per rank. Above: Error kInvalidArgument.
inline constexpr size_t kMaxMessageBytes = size_t{16} << 20;
inline constexpr size_t kMaxMessageFds = 64;

class OpenGroup;

// One thread at a time calls exchange and close; everything else may be called from any thread.
// In a child forked from a rank the object must not be used; destroying it there is harmless and tells nobody anything.
class ControlPlane {
 public:
  using Poll = std::function<void()>;
  using AbortHandler = std::function<void(const AbortReason&)>;

  virtual ~ControlPlane() = default;

  virtual int rank() const noexcept = 0;
  virtual int num_ranks() const noexcept = 0;
  virtual bool is_local() const noexcept { return false; }  // ranks are threads of this process

  virtual Ledger& ledger() const noexcept = 0;        // what the ranks decide with; shared by all of them
  virtual bool is_near(int rank) const noexcept = 0;  // on this rank's machine: it can be given file descriptors
  // By rank: nonces of those that connected at the start; 0: an empty slot. Equal on all of them.
  virtual const std::vector<uint64_t>& incarnations() const noexcept = 0;
  virtual OpenGroup* open_group() noexcept { return nullptr; }  // none: nobody can join

  // Collective among `members` (which hold this rank, and are the same list on each of them): every member gives bytes
  // and fds and gets those of all, indexed by rank (ranks outside `members` have empty parcels). fds stay the caller's;
  // the received ones are the receiver's. Descriptors only among ranks of one machine (is_near), else
  // kUnsupported. Parcels of other tags are kept for their own exchange; exchanges of one tag match in the order of the
  // calls. `poll` (may be empty) is called at least every 100 ms and may throw to leave.
  // Returns when everything is received and everything of this rank is on its way.
  // Errors: kPeerLost naming the members that are gone (died, were refused, or closed before they gave anything) unless
  // all parcels had arrived; kPeerTimeout naming the silent ones, never before `deadline_ns` (of now_ns());
  // kInvalidArgument; kInvalidState after close(). A tag whose exchange did not end well is spent: what still arrives
  // for it is dropped, using it again is kInvalidArgument.
  virtual std::vector<Parcel> exchange(const std::vector<int>& members, uint64_t tag,
                                       const std::vector<std::byte>& bytes, const std::vector<int>& fds,
                                       uint64_t deadline_ns, const Poll& poll) = 0;

  // The highest tag with (tag & mask) == prefix among the parcels of the members for whose parcel the exchange under way still
  // waits; 0: none. A parcel of a later tag tells that the one waited for will not come, since those of one rank arrive in the
  // order in which they were sent.
  virtual uint64_t newest_silent_tag(uint64_t prefix, uint64_t mask) const = 0;
  // Drops parcels with (tag & mask) == prefix and a tag below `below`.
  virtual void forget_tags(uint64_t prefix, uint64_t mask, uint64_t below) = 0;

  // Members for whose parcel the exchange under way waits; to be called from its poll.
  virtual std::vector<int> silent_ranks() const = 0;

  // From now on only these ranks belong: parcels of others, those that are there and those that come, are dropped, and what
  // is held of others that are gone is given back. A rank that was left out can't come back.
  virtual void keep_members(const std::vector<int>& members) = 0;

  // Tells every rank that is not gone. Best effort, never blocks, never throws. `reporter` is filled in.
  // It is not delivered to this rank's own handler.
  virtual void publish_abort(const AbortReason& reason) noexcept = 0;
  // As publish_abort, to one rank.
  virtual void tell(int rank, const AbortReason& reason) noexcept = 0;

  // Lets every rank that is not gone know of this one. Best effort, never blocks, never throws; of notes that could not leave
  // yet only the last one does.
  virtual void publish_note(const Note& note) noexcept = 0;
  // The last note of a rank, this one included; an empty one if there is none.
  virtual Note note_of(int rank) const = 0;

  // The handler hears of each peer once: kPeerLost, kPeerClosed or kRefused (reporter: this rank), and of every reason
  // that a peer published, of whatever epoch. It is called from threads of the control plane (or of the publishing
  // rank, for threads), never two at a time; it must be quick and must not call close() or wait for a rank.
  // What happened before is delivered inside this call. An empty handler: none; after return the old one is not running
  // (unless this is called from inside of it).
  virtual void set_abort_handler(AbortHandler handler) = 0;

  // Ascending ranks that are gone, in whichever way. Socket, pidfd and life page of such a rank are released as they end.
  virtual std::vector<int> dead_ranks() const = 0;
  // Those of them that are proven to touch no memory any more: their process has ended, or they have closed in order.
  virtual std::vector<int> ended_ranks() const = 0;
  virtual std::vector<Detection> detections() const = 0;
  // Whether a rank has closed or its process has ended by now: known before the calls above say so, and before any socket of it is
  // closed, but only for ranks of this machine. Waits 20 ms where it has not.
  virtual bool has_ended(int rank) const = 0;

  // Says goodbye, best effort, and stops. Never waits for a peer, works with all of them dead, safe to repeat; the
  // destructor calls it. After return the abort handler is not called any more. `why` (one line; empty: nothing special)
  // goes to the peers, into the text of kPeerClosed.
  virtual void close(std::string_view why = {}) noexcept = 0;
};

// How ranks of several machines decide, and what they have to know.
struct Across {
  std::shared_ptr<Decider>
      decider;  // served by the caller until the control plane is closed, which closes it; none: one machine
  std::vector<std::byte> secret;  // besides the keys in the endpoints; equal on all ranks
};

// A group that newcomers may join.
struct Capacity {
  int num_slots = 0;  // 0: as many as endpoints, and nobody may join
};

// Full mesh among the processes of `endpoints` (index = rank): on one machine over unix sockets, pid, uid, start time and
// boot id of each peer are checked before a byte of it is believed; between machines over TCP, by proof of the group's
// secret. Collective; `listener` is the one whose endpoint is endpoints[rank]. From here on a death of a peer is noticed by
// owner death of its robust mutex, its socket, its pidfd.
// Errors: kInvalidArgument (a bad rank or endpoint, ranks that were given different lists, a wrong secret), kUnsupported
// (ranks on several machines and no `across.decider`, or with a `capacity`, or of several users of a machine), what kept `listener` from having a
// door, kPeerLost (a peer ended meanwhile), kPeerTimeout (a peer did not come by `deadline_ns`). `poll`: as in exchange.
std::unique_ptr<ControlPlane> connect_processes(int rank, const std::vector<Endpoint>& endpoints, Listener&& listener,
                                                uint64_t deadline_ns, const ControlPlane::Poll& poll,
                                                const Across& across = {}, const Capacity& capacity = {});

// A new process in a slot of a running group, connected to everybody in it: docs/protocols/joining.md.
struct Newcomer {
  std::unique_ptr<ControlPlane> plane;
  Membership::Welcome welcome;
};
// Errors: kInvalidArgument (no address, the slot is taken), kInvalidState (this process is in the group), kUnsupported (another
// machine, namespace, user or version), kCapacityExceeded (no slot is free), kPeerLost, kPeerTimeout.
Newcomer join_processes(std::string_view address, int slot, Listener&& listener, uint64_t deadline_ns,
                        const ControlPlane::Poll& poll);

// Where the threads of one process meet.
class LocalHub {
 public:
  explicit LocalHub(int num_ranks);  // 1..kMaxControlRanks, else Error kInvalidArgument
  ~LocalHub();
  LocalHub(const LocalHub&) = delete;
  LocalHub& operator=(const LocalHub&) = delete;

  int num_ranks() const noexcept;

  struct State;
  const std::shared_ptr<State>& state() const noexcept { return state_; }

 private:
  std::shared_ptr<State> state_;
};

// Takes slot `rank` of the hub. Does not wait. Error kInvalidArgument if the slot is out of range or was taken before.
std::unique_ptr<ControlPlane> connect_threads(const std::shared_ptr<LocalHub>& hub, int rank);

}  // namespace weft
