// Messages to ranks of other domains: errors, byes, heartbeats. They travel as datagrams, which may be lost. A message
// is sent again until its receiver has acknowledged it; a receiver takes it once.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "layout/datagram.h"
#include "sync/word.h"
#include "transport/transport.h"

namespace uccl_ep {

struct MessageStats {
  uint64_t sent = 0;  // datagrams of messages, repeated ones too
  uint64_t repeated = 0;  // messages that were sent again
  uint64_t acknowledged = 0;  // acknowledgements that came
  uint64_t taken = 0;  // messages that came
  uint64_t duplicates = 0;  // messages that came again, or after a newer one
  uint64_t strangers = 0;  // datagrams that no rank of the group can have sent to this one
};

class Messages {
 public:
  // peers: the ranks that messages go to and come from.
  Messages(Transport& transport, const DatagramEnds& ends, const std::vector<int>& peers);

  // The message of its kind from now on: older ones, also those under way, are not sent again.
  void compose(MessageKind kind, std::span<const uint8_t> payload);
  // The peer is to get the message of that kind. One that has not acknowledged the last one gets the new one when it
  // would have got that again.
  void owe(int peer, MessageKind kind);
  // As owe(), but the new one is sent at once.
  void owe_now(int peer, MessageKind kind);
  // The peer has said that it leaves. What it does not acknowledge in kMostParting more attempts, it does not need.
  void part(int peer);
  // The peer is gone: nothing is sent to it any more.
  void forget(int peer);
  // Peers that have not acknowledged the message of that kind.
  uint32_t num_owed(MessageKind kind) const { return num_owed_[static_cast<size_t>(kind)]; }

  // Sends what is due, at most kMostSends datagrams. True if anything was sent.
  bool send(uint64_t now_usec);
  // The next message that nobody has taken; nullptr: none has come. It is valid until the next call. `heard` is called
  // with the sender of each datagram of a peer.
  template <typename Heard>
  const Datagram* receive(Heard heard) {
    for (int left = kMostReceives; left > 0; --left) {
      const Arrival arrival = take();
      if (arrival == Arrival::kNone) return nullptr;
      if (arrival == Arrival::kStranger) continue;
      heard(static_cast<int>(received_.header.sender));
      if (arrival == Arrival::kNew) return &received_;
    }
    return nullptr;
  }
  // When send() has work, unless the transport refused some; UINT64_MAX: never.
  uint64_t next_usec() const { return next_usec_; }
  bool refused() const { return refused_; }

  // Any thread.
  MessageStats stats() const {
    return {sent_.value(),  repeated_.value(),   acknowledged_.value(),
            taken_.value(), duplicates_.value(), strangers_.value()};
  }

  // In a pass of the proxy, so that rows do not wait.
  static constexpr int kMostSends = 32, kMostReceives = 64;
  // The first repeat follows after the first pause, and each pause is twice the one before. An idle proxy of a GPU
  // buffer may need 10 ms for an answer.
  static constexpr uint64_t kFirstPauseUsec = 20'000, kLongestPauseUsec = 100'000;
  // The first one of heartbeats, which wake nobody: both ends look every kHeartbeatUsec at least.
  static constexpr uint64_t kHeartbeatPauseUsec = 250'000;
  // Between heartbeats to a peer of which nothing is heard: a rank that is stopped must not find its queues full of
  // them. Once it is heard the next one follows at once.
  static constexpr uint64_t kSilentPauseUsec = 30'000'000;
  static constexpr uint32_t kSilentAttempts = 4;
  static constexpr uint32_t kMostParting = 12;  // 1.04 s

 private:
  enum class Arrival : uint32_t { kNone, kStranger, kKnown, kNew };
  // A message that a peer has to acknowledge.
  struct Debt {
    bool owed = false;
    bool listed = false;  // in pending_
    uint32_t attempts = 0;
    uint64_t due_usec = 0;
  };
  struct Peer {
    bool known = false, parting = false;
    std::array<Debt, kNumMessageKinds> debts;
    std::array<uint64_t, kNumMessageKinds> newest{};  // serials of its messages that were taken
  };
  struct Composed {
    uint64_t serial = 0;
    std::array<uint8_t, sizeof(ErrorRecord)> payload{};
  };
  struct Pending {
    int peer;
    uint32_t kind;
  };

  Debt& debt_of(const Pending& pending) { return peers_[static_cast<size_t>(pending.peer)].debts[pending.kind]; }
  bool is_due(const Pending& pending, uint64_t now_usec);
  bool post(const Pending& pending, uint64_t now_usec);
  Arrival take();
  void acknowledge(const DatagramHeader& message);
  void wake(Peer& peer);
  void settle(int peer, uint32_t kind);

  Transport& transport_;
  const DatagramEnds ends_;
  std::vector<Peer> peers_;  // by rank
  std::array<Composed, kNumMessageKinds> composed_;
  std::array<uint32_t, kNumMessageKinds> num_owed_{};
  std::vector<Pending> pending_;  // every debt that is owed, and settled ones until the next send() that has work
  uint64_t next_usec_ = UINT64_MAX;
  bool refused_ = false;
  Datagram received_;
  Counter sent_, repeated_, acknowledged_, taken_, duplicates_, strangers_;
};

}  // namespace uccl_ep
