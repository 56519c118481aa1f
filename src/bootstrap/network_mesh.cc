#include "bootstrap/network_mesh.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <span>
#include <system_error>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "base/random.h"
#include "base/status.h"

namespace weft {
namespace {

constexpr uint64_t kAgainNs = 20'000'000;

// Without those that this machine has, too: whoever listens there is here (containers' bridges have the same address on every
// machine). Of one that has no others all: one machine may play several.
std::vector<IpAddress> addresses_to_call(const Endpoint& own, const Endpoint& other) {
  const auto listed = [](const Endpoint& each) {
    return std::span(each.addresses).first(std::min<size_t>(each.num_addresses, each.addresses.size()));
  };
  const auto all = listed(other);
  std::vector<IpAddress> left;
  std::copy_if(all.begin(), all.end(), std::back_inserter(left), [&](const IpAddress& each) {
    return std::find(listed(own).begin(), listed(own).end(), each) == listed(own).end();
  });
  return left.empty() ? std::vector<IpAddress>(all.begin(), all.end()) : left;
}

std::string error_text(int error_number) { return std::system_category().message(error_number); }

}  // namespace

NetworkMesh::NetworkMesh(int rank, const std::vector<Endpoint>& endpoints, const GroupSecret& secret, int door,
                         const Patience& patience)
    : rank_(rank),
      endpoints_(endpoints),
      secret_(secret),
      door_(door),
      patience_(patience),
      remote_(endpoints.size()),
      done_(endpoints.size()),
      calls_(endpoints.size()) {
  const Endpoint& own = endpoint(rank);
  for (size_t peer = 0; peer < endpoints.size(); ++peer) {
    remote_[peer] = !on_one_machine(own, endpoints[peer]);
    calls_[peer].addresses = addresses_to_call(own, endpoints[peer]);
  }
  for (size_t idx = 0; door >= 0 && idx < own.num_addresses; ++idx) {
    if (is_private(own.addresses[idx])) continue;
    log_line(kLogWarning, "rank " + std::to_string(rank) + " listens at " + text_of(own.addresses[idx]) +
                              ", which is no address of a private network; what the ranks tell each other is not "
                              "encrypted. WEFT_CONTROL_INTERFACE names the interface to use");
    break;
  }
}

std::string NetworkMesh::place_of(int peer) const {
  const Call& each = calls_[static_cast<size_t>(peer)];
  return "rank " + std::to_string(peer) + " at " + text_of(each.addresses[each.address_idx]) + " port " +
         std::to_string(endpoint(peer).port);
}

void NetworkMesh::add_waited(std::vector<pollfd>& waited) const {
  if (door_ >= 0) waited.push_back({door_, POLLIN, 0});
  for (const Call& each : calls_) {
    if (each.wire.valid())
      waited.push_back({each.wire.fd(), static_cast<short>(each.is_connected ? POLLIN : POLLOUT), 0});
  }
  for (const Caller& each : callers_) waited.push_back({each.wire.fd(), POLLIN, 0});
  for (const Wire& each : done_) {
    if (each.valid()) waited.push_back({each.fd(), POLLRDHUP, 0});
  }
}

bool NetworkMesh::is_retrying() const {
  for (int peer = 0; peer < rank_; ++peer) {
    if (is_called(peer) && !calls_[static_cast<size_t>(peer)].wire.valid()) return true;
  }
  return false;
}

void NetworkMesh::step() {
  if (door_ < 0) return;
  for (int peer = 0; peer < rank_; ++peer) {
    if (is_called(peer)) follow(peer);
  }
  accept_callers();
  hear_callers();
  check_done();
}

// --- the calling side ------------------------------------------------------------------------------------------------

void NetworkMesh::follow(int peer) {
  Call& each = call(peer);
  if (!each.wire.valid()) begin(peer);
  if (!each.wire.valid()) return;
  if (each.is_connected) return hear(peer);
  const int state = call_state(each.wire.fd());
  if (state == EINPROGRESS) {
    const bool has_others = each.addresses.size() > 1;
    if (!has_others || now_ns() - each.since_ns <= patience_.address_ns) return;
    each.refused_since_ns = 0;
    return give_up(peer, "no answer", false);
  }
  if (state != 0) return call_failed(peer, state);
  each.is_connected = true;
  each.refused_since_ns = 0;
  each.problem = place_of(peer) + ": connected, but no greeting came";
}

// What the kernel says of a call. Only who is refused at all addresses, time after time, takes the rank for gone.
void NetworkMesh::call_failed(int peer, int error_number) {
  Call& each = call(peer);
  if (error_number != ECONNREFUSED) {
    each.refused_since_ns = 0;
  } else if (each.refused_since_ns == 0) {
    each.refused_since_ns = now_ns();
  } else if (now_ns() - each.refused_since_ns > patience_.door_ns) {
    throw_peer_lost("connect", {peer}, place_of(peer) + " does not listen: it gave up, or has ended");
  }
  give_up(peer, error_text(error_number), false);
}

void NetworkMesh::begin(int peer) {
  Call& each = call(peer);
  if (now_ns() < each.again_ns) return;
  each.is_connected = each.has_greeted = false;
  each.since_ns = now_ns();
  each.wire = Wire(start_call(each.addresses[each.address_idx], endpoint(peer).port), Wire::Kind::kStream);
  if (!each.wire.valid()) call_failed(peer, errno);
}

void NetworkMesh::hear(int peer) {
  Call& each = call(peer);
  switch (each.wire.receive(reader_)) {
    case ReceiveResult::kNothing:
      if (each.addresses.size() > 1 && now_ns() - each.since_ns > patience_.silence_ns) {
        give_up(peer, "it took the call and said nothing", false);
      }
      return;
    case ReceiveResult::kUnreachable:
    case ReceiveResult::kEnd: return give_up(peer, "the connection ended before its greeting came", false);
    case ReceiveResult::kBad: return give_up(peer, "it sent " + reader_.problem, true);
    case ReceiveResult::kPacket: break;
  }
  if (reader_.header.type == PacketType::kRefusal) {
    const Error refusal =
        read_refusal(reader_.payload, "rank " + std::to_string(peer), rank_, static_cast<int>(endpoints_.size()));
    if (each.num_refused + 1 >= each.addresses.size()) throw Error(refusal);
    return give_up(peer, refusal.text, true);
  }
  std::string problem;
  if (!each.has_greeted) {
    problem = answer_challenge(peer);
    if (!problem.empty()) give_up(peer, "it sent " + problem, true);
    return;
  }
  const Drawn drawn{challenge_of(reader_.header, reader_.payload), each.drawn};
  problem = hello_problem(reader_.header, reader_.payload, make_hello(peer, rank_, endpoints_, secret_, drawn));
  if (!problem.empty()) return give_up(peer, "it sent " + problem, true);
  done_[static_cast<size_t>(peer)] = std::exchange(each.wire, Wire());
}

// What is wrong with the packet in reader_ as the challenge of `peer`; empty: nothing, and it is answered.
std::string NetworkMesh::answer_challenge(int peer) {
  Call& each = call(peer);
  Nonce challenge{};
  std::string problem = challenge_problem(reader_.header, reader_.payload, &challenge);
  if (!problem.empty()) return problem;
  each.drawn = random_bytes<sizeof(Nonce)>();
  each.has_greeted = true;
  say_hello(each.wire, peer, {each.drawn, challenge});
  return {};
}

// `is_answer`: there is somebody, but not this rank. An address may be one that several machines have for themselves, so the
// others are tried before that counts.
void NetworkMesh::give_up(int peer, const std::string& problem, bool is_answer) {
  Call& each = call(peer);
  each.problem = place_of(peer) + ": " + problem;
  each.wire.reset();
  each.again_ns = now_ns() + kAgainNs;
  each.num_refused = is_answer ? each.num_refused + 1 : 0;
  if (is_answer && each.num_refused >= each.addresses.size()) throw_invalid_argument(each.problem);
  each.address_idx = (each.address_idx + 1) % each.addresses.size();
}

// --- the called side -------------------------------------------------------------------------------------------------

// Each rank that is still to call has room besides the strangers.
size_t NetworkMesh::most_callers() const {
  size_t most = kCallersAtOnce;
  for (int peer = rank_ + 1; peer < static_cast<int>(endpoints_.size()); ++peer) most += is_remote(peer) && !done(peer);
  return most;
}

// Those that are waiting, but so few at a time that callers without end don't keep the ranks from their deadline. Of more than
// most_callers() that have not greeted the oldest goes: a rank greets at once, and calls again if it is turned away.
void NetworkMesh::accept_callers() {
  const size_t most = most_callers();
  for (size_t turn = 0; turn < kCallersAtOnce; ++turn) {
    OwnedFd caller = accept_caller(door_);
    if (!caller.valid()) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) throw_system_error("accepting a connection", errno);
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      continue;  // it has gone by now, or the network has an error of its own
    }
    Challenge challenge;
    challenge.drawn = random_bytes<sizeof(Nonce)>();
    callers_.push_back({Wire(std::move(caller), Wire::Kind::kAcceptedStream), now_ns(), challenge.drawn});
    callers_.back().wire.send(small_header(PacketType::kChallenge, sizeof(challenge)),
                              std::as_bytes(std::span<const Challenge, 1>(&challenge, 1)), {});
    if (callers_.size() > most) hear_callers();
    if (callers_.size() > most) callers_.pop_front();
  }
}

void NetworkMesh::hear_callers() {
  const uint64_t time_ns = now_ns();
  std::erase_if(callers_, [&](Caller& caller) {
    switch (caller.wire.receive(reader_)) {
      case ReceiveResult::kNothing: return time_ns - caller.since_ns > patience_.caller_ns;
      case ReceiveResult::kUnreachable:
      case ReceiveResult::kEnd: return true;
      case ReceiveResult::kBad: refuse(caller, reader_.problem); return true;
      case ReceiveResult::kPacket: break;
    }
    greet(caller);
    return true;
  });
}

bool NetworkMesh::greet(Caller& caller) {
  const int source = source_of(reader_.header, reader_.payload);
  const bool is_rank = source > rank_ && source < static_cast<int>(endpoints_.size()) && is_remote(source);
  // Compared with that of any rank if it is of none: the texts for another version, group or size do not depend on which.
  const int supposed = is_rank ? source : (rank_ == 0 ? static_cast<int>(endpoints_.size()) - 1 : 0);
  const Drawn drawn{challenge_of(reader_.header, reader_.payload), caller.drawn};
  std::string problem =
      hello_problem(reader_.header, reader_.payload, make_hello(supposed, rank_, endpoints_, secret_, drawn));
  if (problem.empty() && (!is_rank || done(source))) problem = "a greeting of a rank that is not waited for";
  if (!problem.empty()) {
    refuse(caller, problem);
    return false;
  }
  say_hello(caller.wire, source, {drawn.target, drawn.source});
  done_[static_cast<size_t>(source)] = std::move(caller.wire);
  return true;
}

void NetworkMesh::refuse(Caller& caller, const std::string& problem) {
  turned_away_ = "a caller from " + text_of(caller_address(caller.wire.fd())) + " sent " + problem;
  log_line(kLogWarning, "rank " + std::to_string(rank_) + " turned a caller away: it came from " +
                            text_of(caller_address(caller.wire.fd())) + " and sent " + problem);
  const auto bytes =
      pack_refusal(Error(ErrorCode::kInvalidArgument, "it turned this rank away, which had sent " + problem));
  caller.wire.send(small_header(PacketType::kRefusal, bytes.size()), bytes, {});
}

// --- both ------------------------------------------------------------------------------------------------------------

void NetworkMesh::say_hello(Wire& wire, int peer, const Drawn& drawn) {
  const Hello hello = make_hello(rank_, peer, endpoints_, secret_, drawn);
  // A fresh connection has room; one that has ended is noticed by its end.
  wire.send(small_header(PacketType::kHello, sizeof(hello)), std::as_bytes(std::span<const Hello, 1>(&hello, 1)), {});
}

void NetworkMesh::check_done() {
  std::vector<pollfd> ended;  // one call of the kernel for all of them
  for (const Wire& wire : done_) ended.push_back({wire.fd(), POLLRDHUP, 0});
  if (::poll(ended.data(), ended.size(), 0) <= 0) return;
  for (int peer = 0; peer < static_cast<int>(done_.size()); ++peer) {
    if (ended[static_cast<size_t>(peer)].revents == 0) continue;
    Wire& wire = done_[static_cast<size_t>(peer)];
    if (wire.receive(reader_) == ReceiveResult::kPacket && reader_.header.type == PacketType::kRefusal) {
      throw Error(
          read_refusal(reader_.payload, "rank " + std::to_string(peer), rank_, static_cast<int>(endpoints_.size())));
    }
    throw_peer_lost("connect", {peer}, "rank " + std::to_string(peer) + " ended while the ranks connected");
  }
}

void NetworkMesh::tell_all(std::span<const std::byte> refusal) noexcept {
  try {
    if (door_ >= 0) accept_callers();
    hear_farewell();
  } catch (...) {  // NOLINT(bugprone-empty-catch): it leaves as it is
  }
  const auto tell = [&](Wire& wire) {
    if (wire.valid()) wire.send(small_header(PacketType::kRefusal, refusal.size()), refusal, {});
  };
  for (Wire& wire : done_) tell(wire);
  for (Call& each : calls_) {
    if (each.has_greeted) tell(each.wire);
  }
}

// Only ranks that have greeted are told why this one gives up, and believe it: the last chance for greetings that are on their way,
// in both directions.
void NetworkMesh::hear_farewell() {
  const uint64_t end_ns = now_ns() + patience_.farewell_ns;
  // check: allow spin-loop: sleeps in poll and ends after farewell_ns
  for (;;) {
    hear_callers();
    std::vector<pollfd> waited;
    for (const Caller& each : callers_) waited.push_back({each.wire.fd(), POLLIN, 0});
    for (int peer = 0; peer < rank_; ++peer) {
      Call& each = call(peer);
      if (!is_called(peer) || !each.is_connected || each.has_greeted) continue;
      const ReceiveResult result = each.wire.receive(reader_);
      if (result == ReceiveResult::kNothing) waited.push_back({each.wire.fd(), POLLIN, 0});
      if (result == ReceiveResult::kPacket) answer_challenge(peer);
    }
    if (waited.empty() || now_ns() >= end_ns) return;
    ::poll(waited.data(), waited.size(), 10);
  }
}

std::string NetworkMesh::hint(const std::vector<int>& ranks) const {
  std::string all;
  for (const int peer : ranks) {
    const std::string& problem = calls_[static_cast<size_t>(peer)].problem;
    if (all.empty() && !problem.empty()) all = "; " + problem;
  }
  return turned_away_.empty() ? all : all + "; " + turned_away_;
}

}  // namespace weft
