// Channels: the rings of a rank that a transport carries, and which of a peer's each belongs to.
#include <algorithm>
#include <map>

#include "common/error.h"
#include "layout/region.h"

namespace uccl_ep {

Channels list_channels(const Topology& topo, const RegionLayout& layout) {
  Channels channels;
  const int rank = layout.rank;
  const int own = topo.domain_of[rank];
  auto out = [&](const RingLayout& ring, int peer) {
    channels.out.push_back({ring, peer, 0, 0, ring.num_slots, ring.kind != RingKind::kHeader});
  };
  auto in = [&](const RingLayout& ring, int peer) {
    channels.in.push_back({ring, peer, 0, ring.kind != RingKind::kHeader});
  };
  for (int d = 0; d < topo.num_domains(); ++d) {
    if (d == own) continue;
    const int peer = topo.rail(rank, d);
    out(layout.header_send[d], peer);
    if (!layout.meta_send.empty()) out(layout.meta_send[d], peer);
    out(layout.rows_send[d], peer);
    if (!layout.tail_send.empty()) out(layout.tail_send[d], peer);
    for (const auto* rings : {&layout.slots.routing_send, &layout.slots.rows_send, &layout.slots.weights_send})
      if (!rings->empty()) out((*rings)[d], peer);
  }
  for (size_t i = 0; i < layout.incoming.size(); ++i) {
    const int peer = layout.incoming[i];
    out(layout.return_send[i], peer);
    if (!layout.slots.sums_send.empty()) out(layout.slots.sums_send[i], peer);
    in(layout.header_landing[i], peer);
    if (!layout.meta_landing.empty()) in(layout.meta_landing[i], peer);
    in(layout.rows_landing[i], peer);
    if (!layout.tail_landing.empty()) in(layout.tail_landing[i], peer);
    for (const auto* rings : {&layout.slots.routing_landing, &layout.slots.rows_landing, &layout.slots.weights_landing})
      if (!rings->empty()) in((*rings)[i], peer);
  }
  for (int d = 0; d < topo.num_domains(); ++d) {
    if (d == own) continue;
    in(layout.return_landing[d], topo.rail(rank, d));
    if (!layout.slots.sums_landing.empty()) in(layout.slots.sums_landing[d], topo.rail(rank, d));
  }
  return channels;
}

namespace {

// Names how many ranks of other domains this rank may exchange rows with.
[[noreturn]] void refuse_channels(const Topology& topo, int rank, size_t channels) {
  const size_t rails = topo.rails(rank).size(), of_rail = (channels + rails - 1) / rails;
  throw UsageFailure(UsageKind::kConfig,
                     "rank " + std::to_string(rank) + " exchanges rows with " + std::to_string(rails) +
                         " ranks of other domains, by " + std::to_string(channels) +
                         " channels: an immediate can name " + std::to_string(kMaxChannels) + "; allowed are at most " +
                         std::to_string(kMaxChannels / of_rail) + " such ranks, by fewer or larger domains");
}

}  // namespace

Channels checked_channels(const Topology& topo, const RegionLayout& layout) {
  Channels channels = list_channels(topo, layout);
  if (const size_t most = std::max(channels.out.size(), channels.in.size()); most > kMaxChannels)
    refuse_channels(topo, layout.rank, most);
  return channels;
}

void check_channels(const Topology& topo, const DeviceRings& rings) {
  for (int rank : topo.classes()) checked_channels(topo, make_device_layout(topo, rings, rank));
}

uint32_t Channels::out_of(const RingLayout& ring) const {
  for (uint32_t c = 0; c < out.size(); ++c)
    if (out[c].send.stamps_offset == ring.stamps_offset) return c;
  return UINT32_MAX;
}

uint64_t Channels::shared_bytes() const {
  uint64_t most = 0;
  for (const OutChannel& channel : out) most = std::max(most, channel.send.shared_bytes);
  return most;
}

namespace {

EventRing event_ring_of(RingKind kind, bool comes) {
  const bool slots = kind >= RingKind::kSlotRouting;
  const bool own = !comes || kind == RingKind::kReturn || kind == RingKind::kSlotSums;
  if (slots) return own ? EventRing::kSlotOwn : EventRing::kSlotDomain;
  return own ? EventRing::kOwn : EventRing::kDomain;
}

}  // namespace

std::vector<uint32_t> Channels::board_of(EventRing ring) const {
  std::vector<uint32_t> words;
  const uint32_t num_in = static_cast<uint32_t>(in.size());
  for (uint32_t c = 0; c < num_in; ++c)
    if (event_ring_of(in[c].landing.kind, true) == ring) words.push_back(c);
  for (uint32_t c = 0; c < out.size(); ++c)
    if (event_ring_of(out[c].send.kind, false) == ring) words.push_back(num_in + c);
  return words;
}

namespace {

// Channels by kind: of one kind they are in the order of their peers' domains, or of the ranks that a rank lands.
class Numbers {
 public:
  explicit Numbers(const Channels& channels) {
    for (uint32_t c = 0; c < channels.out.size(); ++c) out_[channels.out[c].send.kind].push_back(c);
    for (uint32_t c = 0; c < channels.in.size(); ++c) in_[channels.in[c].landing.kind].push_back(c);
  }
  uint32_t out(RingKind kind, size_t place) const { return out_.at(kind).at(place); }
  uint32_t in(RingKind kind, size_t place) const { return in_.at(kind).at(place); }

 private:
  std::map<RingKind, std::vector<uint32_t>> out_, in_;
};

// A rank's channels to and from `rank`, of a kind, are at one of two places.
struct Places {
  size_t of_domain = 0;  // among other domains, that of `rank`
  size_t of_rank = 0;  // among the ranks whose rows it lands, `rank`
  Places(const Topology& topo, int peer, int rank) {
    const int own = topo.domain_of[rank];
    of_domain = static_cast<size_t>(own - (own > topo.domain_of[peer]));
    const std::vector<int> landed = topo.landed(peer);
    const auto place = [&](int of) {
      return static_cast<size_t>(std::lower_bound(landed.begin(), landed.end(), of) - landed.begin());
    };
    of_rank = (place(rank) + landed.size() - place(peer)) % std::max<size_t>(landed.size(), 1);  // from the next one on
  }
};

bool is_return(RingKind kind) { return kind == RingKind::kReturn || kind == RingKind::kSlotSums; }

// `layout_of(rank)`: of any rank. Where domains have one size, a peer has what `rank` has, at the same offsets.
template <typename LayoutOf>
Channels match_channels(const Topology& topo, int rank, LayoutOf layout_of) {
  Channels mine = checked_channels(topo, layout_of(rank));
  const bool alike = topo.domains_of_size.size() == 1;
  struct Peer {
    Channels channels;
    Numbers numbers{channels};
  };
  const Peer own{mine};
  std::map<int, Peer> others;
  std::map<int, Places> places;
  const auto peer_of = [&](int number) -> const Peer& {
    if (alike) return own;
    if (const auto known = others.find(number); known != others.end()) return known->second;
    return others.try_emplace(number, Peer{list_channels(topo, layout_of(number))}).first->second;
  };
  const auto places_of = [&](int number) {
    const auto known = places.find(number);
    return known != places.end() ? known->second : places.try_emplace(number, topo, number, rank).first->second;
  };
  for (auto& channel : mine.out) {
    const Peer& peer = peer_of(channel.peer);
    const Places at = places_of(channel.peer);
    const RingKind kind = channel.send.kind;
    channel.peer_channel = peer.numbers.in(kind, is_return(kind) ? at.of_domain : at.of_rank);
    const RingLayout& landing = peer.channels.in[channel.peer_channel].landing;
    channel.remote_slots_offset = landing.slots_offset;
    channel.remote_slots = landing.num_slots;
  }
  for (auto& channel : mine.in) {
    const Places at = places_of(channel.peer);
    const RingKind kind = channel.landing.kind;
    channel.peer_channel = peer_of(channel.peer).numbers.out(kind, is_return(kind) ? at.of_rank : at.of_domain);
  }
  return mine;
}

}  // namespace

Channels make_channels(const Topology& topo, const RingParams& rings, int rank) {
  return match_channels(topo, rank, [&](int of) { return make_region_layout(topo, rings, of); });
}

Channels make_device_channels(const Topology& topo, const DeviceRings& rings, int rank) {
  return match_channels(topo, rank, [&](int of) { return make_device_layout(topo, rings, of); });
}

}  // namespace uccl_ep
