// A rank's address, as one line of text.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "transport/failure.h"
#include "transport/ofi/naming.h"

namespace uccl_ep::ofi {

constexpr size_t kMaxNics = 64;
constexpr size_t kMaxPieces = 1 << 16;
constexpr size_t kMaxNameBytes = 1024;

// A registered piece: its key, and the provider's address of its first byte.
struct RemotePiece {
  uint64_t key = 0;
  uint64_t start = 0;
};

// One memory, as registered with one NIC. Piece i starts at i * stride_bytes; neighbours overlap.
struct RemoteMemory {
  uint64_t bytes = 0;  // 0: none
  uint64_t stride_bytes = 0;
  std::vector<RemotePiece> pieces;
};

struct NicAddress {
  std::string name;  // of the endpoint; the provider's bytes
  RemoteMemory region, device;
};

struct Address {
  int rank = -1;
  uint64_t generation = 0;
  std::string provider;
  int pid = 0;
  uint64_t pid_namespace = 0;
  std::string boot_id;  // of the host
  Naming naming = Naming::kTag;
  uint32_t size_bits = 0;  // of Tags
  uint64_t secret = 0;  // parameter of Tags, token of a Notice
  std::vector<NicAddress> nics;
};

inline void put(std::ostream& text, const RemoteMemory& memory) {
  text << ' ' << memory.bytes << ' ' << memory.stride_bytes << ' ' << memory.pieces.size();
  for (const RemotePiece& piece : memory.pieces) text << ' ' << piece.key << ' ' << piece.start;
}

inline std::string encode_address(const Address& a) {
  std::ostringstream text;
  text << "ofi1 " << a.rank << ' ' << a.generation << ' ' << a.provider << ' ' << a.pid << ' ' << a.pid_namespace << ' '
       << a.boot_id << ' ' << static_cast<uint32_t>(a.naming) << ' ' << a.size_bits << ' ' << a.secret << ' '
       << a.nics.size();
  for (const NicAddress& nic : a.nics) {
    text << ' ';
    for (unsigned char byte : nic.name) text << "0123456789abcdef"[byte >> 4] << "0123456789abcdef"[byte & 15];
    put(text, nic.region);
    put(text, nic.device);
  }
  text << " end";
  return text.str();
}

inline bool take(std::istream& in, RemoteMemory& memory) {
  size_t num_pieces = 0;
  if (!(in >> memory.bytes >> memory.stride_bytes >> num_pieces) || num_pieces > kMaxPieces) return false;
  const bool consistent = memory.bytes == 0
                              ? num_pieces == 0
                              : memory.stride_bytes != 0 && num_pieces == (memory.bytes - 1) / memory.stride_bytes + 1;
  if (!consistent) return false;
  memory.pieces.resize(num_pieces);
  for (RemotePiece& piece : memory.pieces)
    if (!(in >> piece.key >> piece.start)) return false;
  return true;
}

inline bool take(std::istream& in, NicAddress& nic) {
  std::string hex;
  if (!(in >> hex) || hex.size() % 2 != 0 || hex.size() > 2 * kMaxNameBytes ||
      hex.find_first_not_of("0123456789abcdef") != std::string::npos)
    return false;
  auto nibble = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  for (size_t i = 0; i < hex.size(); i += 2)
    nic.name.push_back(static_cast<char>(nibble(hex[i]) << 4 | nibble(hex[i + 1])));
  return take(in, nic.region) && take(in, nic.device);
}

// Throws CommunicationFailure(kTransport) for anything that encode_address cannot have written.
inline Address decode_address(const std::string& text) {
  Address a;
  std::string tag, end;
  uint32_t naming = 0;
  size_t num_nics = 0;
  std::istringstream in(text);
  in >> tag >> a.rank >> a.generation >> a.provider >> a.pid >> a.pid_namespace >> a.boot_id >> naming >> a.size_bits >>
      a.secret >> num_nics;
  bool whole = in && tag == "ofi1" && a.rank >= 0 && naming < kNumNamings && a.size_bits < 32 && num_nics >= 1 &&
               num_nics <= kMaxNics;
  a.naming = static_cast<Naming>(naming);
  for (size_t i = 0; whole && i < num_nics; ++i) whole = take(in, a.nics.emplace_back());
  // Accept only text that encodes back to itself: streams accept signs and spaces, and wrap negatives.
  if (!whole || !(in >> end) || end != "end" || encode_address(a) != text) fail_address("ofi", text);
  return a;
}

}  // namespace uccl_ep::ofi
