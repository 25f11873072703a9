#include "transport/verbs/sizes.h"

#include <algorithm>

#include "common/units.h"
#include "transport/verbs/datagrams.h"
#include "transport/verbs/link.h"

namespace uccl_ep::verbs {
namespace {

constexpr uint32_t kMostWrites = 256;     // in flight to a rail
constexpr uint32_t kLeastWrites = 8;
constexpr uint32_t kMostArrivals = 4096;  // between two polls
// A rank may have a message and an acknowledgement under way to each peer. What a burst has more comes again. A rank
// that is stopped for half a minute gets a dozen heartbeats and several errors of each peer.
constexpr uint32_t kMostSends = 512, kMostReceives = 4096;
constexpr uint32_t kLeastSends = 64, kLeastReceives = 256;
constexpr uint32_t kLeastOfNic = 16;

constexpr uint64_t kEntryBytes = 64, kReceiveBytes = 32;
constexpr uint64_t kDatagramSendBytes = 2 * kEntryBytes;  // with its route

uint64_t pages(uint64_t num_bytes) { return round_up(num_bytes, kPageBytes); }

}  // namespace

// The completion queue has an entry for everything that may be in flight, so that no completion is ever lost.
QueueSizes queue_sizes(const Nic& nic, size_t num_rails, size_t num_nics) {
  const auto& limits = nic.limits();
  const uint32_t rails = std::max<uint32_t>(1, static_cast<uint32_t>(num_rails));
  const uint32_t nics = static_cast<uint32_t>(num_nics);
  QueueSizes sizes;
  sizes.arrivals = std::min({kMostArrivals / nics, static_cast<uint32_t>(limits.max_cqe) / 2,
                             limits.max_srq_wr > 0 ? static_cast<uint32_t>(limits.max_srq_wr) : kMostArrivals});
  const uint32_t left = (static_cast<uint32_t>(limits.max_cqe) - sizes.arrivals) / rails;
  sizes.writes = std::min({std::max(kMostWrites / nics, kLeastWrites), left, static_cast<uint32_t>(limits.max_qp_wr)});
  if (sizes.writes < kLeastWrites)
    throw UsageFailure(UsageKind::kConfig, "verbs: NIC " + nic.name() + " has room for " +
                                               std::to_string(sizes.writes) + " writes to each of " +
                                               std::to_string(rails) + " rails, at least " +
                                               std::to_string(kLeastWrites) + " are needed");
  return sizes;
}

DatagramSizes datagram_sizes(size_t num_peers, size_t num_nics) {
  const uint32_t peers = static_cast<uint32_t>(std::min<size_t>(num_peers, kMostReceives));
  const uint32_t nics = static_cast<uint32_t>(num_nics);
  return {std::max(std::clamp(2 * peers, kLeastSends, kMostSends) / nics, kLeastOfNic),
          std::max(std::clamp(24 * peers, kLeastReceives, kMostReceives) / nics, kLeastOfNic)};
}

uint64_t queue_bytes(size_t num_rails, size_t num_peers) {
  const uint64_t num_completions = kMostWrites * num_rails + kMostArrivals;
  const uint64_t of_rail = pages(kMostWrites * kEntryBytes) + Link::num_bytes(kMostWrites);
  const uint64_t of_arrivals = pages(num_completions * kEntryBytes) + num_completions * sizeof(Completion) +
                               pages(kMostArrivals * kReceiveBytes);
  const DatagramSizes datagrams = datagram_sizes(num_peers, 1);
  const uint64_t of_datagrams = datagram_buffer_bytes(datagrams) +
                                pages((datagrams.sends + datagrams.receives) * kEntryBytes) +
                                pages(datagrams.sends * kDatagramSendBytes) + pages(datagrams.receives * kReceiveBytes);
  return num_rails * of_rail + of_arrivals + of_datagrams + num_peers * kEntryBytes;
}

}  // namespace uccl_ep::verbs
