// Datagrams between ranks of different domains: the messages that carry no rows, and their acknowledgements. A network
// may lose, repeat, delay or reorder them, and strangers may send what they like: decode_datagram() takes only what a
// rank of the same group can have sent to this one.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "common/error.h"
#include "layout/votes.h"

namespace uccl_ep {

constexpr uint32_t kNumMessageKinds = 4;
enum class MessageKind : uint32_t { kError, kBye, kHeartbeat, kVotes };

// The payload of a heartbeat: what its sender knows of itself. Both numbers only grow.
struct Heartbeat {
  uint64_t moved_usec = 0;  // now_usec() of the sender when its operation last moved
  uint64_t num_refused = 0;  // calls that it has refused
};

constexpr uint32_t payload_bytes(MessageKind kind) {
  switch (kind) {
    case MessageKind::kError:
      return sizeof(ErrorRecord);
    case MessageKind::kBye:
      return 0;
    case MessageKind::kHeartbeat:
      return sizeof(Heartbeat);
    case MessageKind::kVotes:
      return kVoteBytes;
  }
  return 0;
}

struct DatagramHeader {
  uint64_t checksum = 0;  // of all that follows
  uint64_t nonce = 0;  // the group's generation
  uint64_t serial = 0;  // counts the sender's messages of the kind from 1 on; of an acknowledgement: the receiver's
  uint32_t sender = 0, receiver = 0;  // ranks
  uint32_t kind = 0;  // MessageKind
  uint32_t acknowledges = 0;  // 1: the sender has that message of the receiver
};
static_assert(sizeof(DatagramHeader) == 40 && std::has_unique_object_representations_v<DatagramHeader>);

// A header and, of a message, payload_bytes() of its kind.
struct Datagram {
  DatagramHeader header;
  uint8_t payload[sizeof(ErrorRecord)];
  static_assert(kVoteBytes <= sizeof(payload));

  MessageKind kind() const { return static_cast<MessageKind>(header.kind); }
  uint32_t num_payload_bytes() const { return header.acknowledges != 0 ? 0 : payload_bytes(kind()); }
  uint32_t num_bytes() const { return static_cast<uint32_t>(sizeof(header)) + num_payload_bytes(); }
  std::span<const uint8_t> bytes() const { return {reinterpret_cast<const uint8_t*>(this), num_bytes()}; }
};
static_assert(std::is_trivially_copyable_v<Datagram> &&
              sizeof(Datagram) == sizeof(DatagramHeader) + sizeof(ErrorRecord));

// FNV-1a, 64 bits: http://www.isthe.com/chongo/tech/comp/fnv. It finds accidents, not attacks.
inline uint64_t datagram_checksum(std::span<const uint8_t> bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (uint8_t byte : bytes.subspan(sizeof(DatagramHeader::checksum))) hash = (hash ^ byte) * 0x100000001b3;
  return hash;
}

inline Datagram encode_datagram(DatagramHeader header, std::span<const uint8_t> payload) {
  Datagram datagram;
  datagram.header = header;
  if (!payload.empty()) std::memcpy(datagram.payload, payload.data(), payload.size());
  datagram.header.checksum = datagram_checksum(datagram.bytes());
  return datagram;
}

// What a receiver expects of every datagram.
struct DatagramEnds {
  uint64_t nonce = 0;
  uint32_t receiver = 0;
  uint32_t num_ranks = 0;
};

// False for what no other rank of the group can have sent to the receiver; then `datagram` is undefined.
inline bool decode_datagram(std::span<const uint8_t> bytes, const DatagramEnds& ends, Datagram& datagram) {
  DatagramHeader& header = datagram.header;
  if (bytes.size() < sizeof(header) || bytes.size() > sizeof(datagram)) return false;
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.nonce != ends.nonce || header.receiver != ends.receiver || header.sender >= ends.num_ranks ||
      header.sender == ends.receiver || header.kind >= kNumMessageKinds || header.acknowledges > 1 ||
      header.serial == 0 || bytes.size() != datagram.num_bytes() || header.checksum != datagram_checksum(bytes))
    return false;
  if (bytes.size() != sizeof(header))
    std::memcpy(datagram.payload, bytes.data() + sizeof(header), bytes.size() - sizeof(header));
  return true;
}

}  // namespace uccl_ep
