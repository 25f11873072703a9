// The address of a rank's NICs, as one line of text.
#pragma once

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "transport/failure.h"

namespace uccl_ep::verbs {

// Registered memory as a peer writes to it: pieces that overlap, so that every write lies in one of them.
struct MemoryAddress {
  uint64_t base = 0;
  uint64_t num_bytes = 0;
  uint64_t stride = 0;               // from the start of a piece to that of the next
  std::vector<uint32_t> keys;        // by piece; none: no such memory

  // The piece of a write at `offset`.
  uint32_t key_of(uint64_t offset) const {
    const uint64_t piece = offset / stride;
    return keys[piece < keys.size() ? piece : keys.size() - 1];
  }
};

// The queue pair that a rail writes to.
struct PairAddress {
  uint32_t rail = 0;  // a rank
  uint32_t number = 0;
  uint32_t first_psn = 0;
};

struct NicAddress {
  uint64_t gid_high = 0, gid_low = 0;  // the GID's halves, as numbers in host byte order
  uint32_t lid = 0;
  uint32_t mtu = 0;  // ibv_mtu
  bool is_ethernet = false;
  MemoryAddress host, device;
  uint32_t datagram_pair = 0;  // the number of the queue pair that datagrams go to
  std::vector<PairAddress> pairs;  // by ascending rail

  // nullptr: none.
  const PairAddress* pair_of(int rail) const {
    const auto its = std::lower_bound(pairs.begin(), pairs.end(), static_cast<uint32_t>(rail),
                                      [](const PairAddress& pair, uint32_t rank) { return pair.rail < rank; });
    return its != pairs.end() && its->rail == static_cast<uint32_t>(rail) ? &*its : nullptr;
  }
};

struct Address {
  int rank = -1;
  uint64_t generation = 0;
  int pid = 0;
  uint64_t pid_namespace = 0;
  std::string boot_id;
  std::string policy;  // "rc", "srd"
  std::vector<NicAddress> nics;
};

namespace detail {

inline void put(std::ostream& out, const std::vector<uint32_t>& values) {
  out << ' ' << values.size();
  for (uint32_t value : values) out << ' ' << value;
}
inline void put(std::ostream& out, const MemoryAddress& m) {
  out << ' ' << m.base << ' ' << m.num_bytes << ' ' << m.stride;
  put(out, m.keys);
}
inline void put(std::ostream& out, const std::vector<PairAddress>& pairs) {
  out << ' ' << pairs.size();
  for (const PairAddress& pair : pairs) out << ' ' << pair.rail << ' ' << pair.number << ' ' << pair.first_psn;
}
constexpr size_t kMost = 1 << 20;
inline void take(std::istream& in, std::vector<uint32_t>& values) {
  size_t count = 0;
  if (!(in >> count) || count > kMost) return in.setstate(std::ios::failbit);
  values.clear();
  for (uint32_t value; values.size() < count && in >> value;) values.push_back(value);
}
inline void take(std::istream& in, std::vector<PairAddress>& pairs) {
  size_t count = 0;
  if (!(in >> count) || count > kMost) return in.setstate(std::ios::failbit);
  pairs.clear();
  for (PairAddress pair; pairs.size() < count && in >> pair.rail >> pair.number >> pair.first_psn;) {
    // A search by rail relies on their order.
    if (pair.number == 0 || (!pairs.empty() && pair.rail <= pairs.back().rail)) in.setstate(std::ios::failbit);
    pairs.push_back(pair);
  }
}
inline void take(std::istream& in, MemoryAddress& m) {
  in >> m.base >> m.num_bytes >> m.stride;
  take(in, m.keys);
  // A writer to this memory divides by the stride and takes a key.
  if (m.keys.empty() ? m.num_bytes != 0 : m.stride == 0) in.setstate(std::ios::failbit);
}

}  // namespace detail

inline std::string encode_address(const Address& a) {
  std::ostringstream out;
  out << "verbs2 " << a.rank << ' ' << a.generation << ' ' << a.pid << ' ' << a.pid_namespace << ' ' << a.boot_id << ' '
      << a.policy << ' ' << a.nics.size();
  for (const NicAddress& n : a.nics) {
    out << ' ' << n.gid_high << ' ' << n.gid_low << ' ' << n.lid << ' ' << n.mtu << ' ' << n.is_ethernet;
    detail::put(out, n.host);
    detail::put(out, n.device);
    out << ' ' << n.datagram_pair;
    detail::put(out, n.pairs);
  }
  out << " end";
  return out.str();
}

// Throws CommunicationFailure(kTransport) for anything that encode_address cannot have written.
inline Address decode_address(const std::string& text) {
  constexpr size_t kMostNics = 64;
  constexpr uint32_t kMostLid = (1u << 16) - 1;
  Address a;
  std::string tag, end;
  size_t num_nics = 0;
  std::istringstream in(text);
  in >> tag >> a.rank >> a.generation >> a.pid >> a.pid_namespace >> a.boot_id >> a.policy >> num_nics;
  if (num_nics > kMostNics) in.setstate(std::ios::failbit);
  for (size_t i = 0; in && i < num_nics; ++i) {
    NicAddress n;
    in >> n.gid_high >> n.gid_low >> n.lid >> n.mtu >> n.is_ethernet;
    detail::take(in, n.host);
    detail::take(in, n.device);
    in >> n.datagram_pair;
    detail::take(in, n.pairs);
    if (n.host.keys.empty() || n.datagram_pair == 0 || n.lid > kMostLid) in.setstate(std::ios::failbit);
    a.nics.push_back(std::move(n));
  }
  in >> end;
  // Accept only text that encodes back to itself: streams accept signs, spaces and text after the last field, and wrap
  // negatives.
  if (!in || tag != "verbs2" || end != "end" || a.rank < 0 || num_nics == 0 || encode_address(a) != text)
    fail_address("verbs", text);
  return a;
}

}  // namespace uccl_ep::verbs
