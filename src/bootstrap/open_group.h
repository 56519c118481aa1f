// What a control plane has besides if newcomers may join its group: docs/protocols/joining.md.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "bootstrap/greeting.h"
#include "bootstrap/handshake.h"
#include "bootstrap/slot_table.h"

namespace weft {

// Tags of messages that no exchange takes: they go to the listener.
inline constexpr uint64_t kDirectTag = uint64_t{1} << 63;

class OpenGroup {
 public:
  virtual ~OpenGroup() = default;

  virtual SlotTable& slots() noexcept = 0;
  virtual const GroupSecret& secret() const noexcept = 0;
  virtual const Endpoint& endpoint() const noexcept = 0;  // of this rank
  virtual int door() const noexcept = 0;                  // socket at which newcomers call
  virtual int life_fd() const noexcept = 0;
  virtual int page_fd() const noexcept = 0;

  virtual bool has_peer(int slot, uint64_t incarnation) const = 0;
  virtual std::vector<int> peers()
      const = 0;  // slots that this rank has connected to, and that are not known to be gone
  // A newcomer in `slot`, whose last owner is gone and no member. From here on its parcels count and its death is noticed.
  // `answer`, which may be empty and does not throw, is called when nothing can fail any more, before anything is sent to it.
  using Answer = std::function<void()>;
  virtual void add_peer(int slot, uint64_t incarnation, Connection&& connection, const Answer& answer) = 0;
  // Parcels of this rank do not count any more; what is held of it is given back when it has ended.
  virtual void drop_member(int slot) = 0;

  // To one rank, never blocks, best effort; `tag` has kDirectTag.
  virtual void send(int slot, uint64_t tag, std::vector<std::byte> bytes, std::vector<OwnedFd> fds) = 0;
  // Such messages of others, in a thread of the control plane: it must be quick. Those that came before the first listener it hears
  // at once. Empty: none.
  struct Sender {
    int slot;
    uint64_t incarnation;
  };
  using Listen = std::function<void(const Sender& sender, uint64_t tag, Parcel&&)>;
  virtual void set_listener(Listen listen) = 0;
};

}  // namespace weft
