#include "proxy/messages.h"

#include <algorithm>
#include <cstring>

namespace uccl_ep {

static_assert(sizeof(Datagram) <= kMaxDatagramBytes);

namespace {

// A heartbeat and its acknowledgement wait until their receiver wakes anyway: it would wake for little else.
bool is_urgent(MessageKind kind) { return kind != MessageKind::kHeartbeat; }

}  // namespace

Messages::Messages(Transport& transport, const DatagramEnds& ends, const std::vector<int>& peers)
    : transport_(transport), ends_(ends), peers_(ends.num_ranks) {
  for (int peer : peers) peers_[static_cast<size_t>(peer)].known = true;
  pending_.reserve(kNumMessageKinds * peers.size());
}

void Messages::compose(MessageKind kind, std::span<const uint8_t> payload) {
  Composed& composed = composed_[static_cast<size_t>(kind)];
  ++composed.serial;
  std::copy(payload.begin(), payload.end(), composed.payload.begin());
}

void Messages::owe(int peer, MessageKind kind) {
  const Pending pending{peer, static_cast<uint32_t>(kind)};
  Debt& debt = debt_of(pending);
  if (debt.owed) return;
  ++num_owed_[pending.kind];
  if (!debt.listed) pending_.push_back(pending);
  debt = {true, true, 0, 0};
  next_usec_ = 0;
}

void Messages::owe_now(int peer, MessageKind kind) {
  owe(peer, kind);
  Debt& debt = debt_of({peer, static_cast<uint32_t>(kind)});
  debt.attempts = debt.due_usec = 0;
  next_usec_ = 0;
}

void Messages::part(int peer) {
  Peer& its = peers_[static_cast<size_t>(peer)];
  if (its.parting) return;
  its.parting = true;
  for (Debt& debt : its.debts) debt.attempts = debt.due_usec = 0;
  next_usec_ = 0;
}

void Messages::forget(int peer) {
  for (uint32_t kind = 0; kind < kNumMessageKinds; ++kind) settle(peer, kind);
}

void Messages::settle(int peer, uint32_t kind) {
  Debt& debt = debt_of({peer, kind});
  if (debt.owed) --num_owed_[kind];
  debt.owed = false;
}

bool Messages::send(uint64_t now_usec) {
  refused_ = false;
  if (now_usec < next_usec_) return false;
  std::erase_if(pending_, [&](const Pending& pending) {
    Debt& debt = debt_of(pending);
    return !(debt.listed = debt.owed);
  });
  next_usec_ = UINT64_MAX;
  int num_sent = 0;
  for (const Pending& pending : pending_) {
    if (is_due(pending, now_usec) && num_sent < kMostSends && !refused_) num_sent += post(pending, now_usec);
    if (debt_of(pending).owed) next_usec_ = std::min(next_usec_, debt_of(pending).due_usec);
  }
  return num_sent != 0;
}

// Settles what a leaving peer was told often enough. A bye waits until the peer has this rank's error: who knows the
// bye alone takes the rank for one that left without a reason.
bool Messages::is_due(const Pending& pending, uint64_t now_usec) {
  const Peer& peer = peers_[static_cast<size_t>(pending.peer)];
  Debt& debt = debt_of(pending);
  if (now_usec < debt.due_usec) return false;
  if (pending.kind == static_cast<uint32_t>(MessageKind::kBye) &&
      peer.debts[static_cast<size_t>(MessageKind::kError)].owed) {
    debt.due_usec = now_usec + kFirstPauseUsec / 20;
    return false;
  }
  const bool enough = peer.parting && debt.attempts >= kMostParting;
  if (enough) settle(pending.peer, pending.kind);
  return !enough;
}

bool Messages::post(const Pending& pending, uint64_t now_usec) {
  Debt& debt = debt_of(pending);
  const MessageKind kind = static_cast<MessageKind>(pending.kind);
  const Composed& composed = composed_[pending.kind];
  DatagramHeader header;
  header.nonce = ends_.nonce;
  header.serial = composed.serial;
  header.sender = ends_.receiver;
  header.receiver = static_cast<uint32_t>(pending.peer);
  header.kind = pending.kind;
  const Datagram datagram = encode_datagram(header, std::span(composed.payload).first(payload_bytes(kind)));
  if (transport_.send_datagram(pending.peer, datagram.bytes()) == PostResult::kAgain) {
    refused_ = true;
    return false;
  }
  if (is_urgent(kind)) transport_.wake(pending.peer);
  sent_.add(1);
  if (debt.attempts != 0) repeated_.add(1);
  const uint64_t first_usec = is_urgent(kind) ? kFirstPauseUsec : kHeartbeatPauseUsec;
  const uint64_t longest_usec = kind == MessageKind::kHeartbeat ? kSilentPauseUsec : kLongestPauseUsec;
  debt.due_usec = now_usec + std::min(first_usec << std::min(debt.attempts, 16u), longest_usec);
  ++debt.attempts;
  return true;
}

Messages::Arrival Messages::take() {
  std::array<uint8_t, kMaxDatagramBytes> bytes;
  const size_t num_bytes = transport_.receive_datagram(bytes);
  if (num_bytes == 0) return Arrival::kNone;
  const DatagramHeader& header = received_.header;
  if (!decode_datagram(std::span(bytes).first(num_bytes), ends_, received_) || !peers_[header.sender].known) {
    strangers_.add(1);
    return Arrival::kStranger;
  }
  wake(peers_[header.sender]);
  if (header.acknowledges != 0) {
    acknowledged_.add(1);
    if (header.serial == composed_[header.kind].serial) settle(static_cast<int>(header.sender), header.kind);
    return Arrival::kKnown;
  }
  acknowledge(header);
  uint64_t& newest = peers_[header.sender].newest[header.kind];
  if (header.serial <= newest) {
    duplicates_.add(1);
    return Arrival::kKnown;
  }
  newest = header.serial;
  taken_.add(1);
  return Arrival::kNew;
}

// A peer that was silent is heard.
void Messages::wake(Peer& peer) {
  for (Debt& debt : peer.debts) {
    if (!debt.owed || debt.attempts <= kSilentAttempts || peer.parting) continue;
    debt.attempts = debt.due_usec = 0;
    next_usec_ = 0;
  }
}

// If this is refused or lost, the message comes again.
void Messages::acknowledge(const DatagramHeader& message) {
  DatagramHeader header = message;
  header.sender = message.receiver;
  header.receiver = message.sender;
  header.acknowledges = 1;
  const Datagram datagram = encode_datagram(header, {});
  const int peer = static_cast<int>(message.sender);
  if (transport_.send_datagram(peer, datagram.bytes()) == PostResult::kAgain) return;
  if (is_urgent(static_cast<MessageKind>(message.kind))) transport_.wake(peer);
}

}  // namespace uccl_ep
