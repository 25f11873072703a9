// What must hold of the regions and channels that every rank computes for itself.
#pragma once

#include <algorithm>
#include <vector>

#include "layout/region.h"

namespace uccl_ep {

struct Span {
  uint64_t begin, end;
};

// Rings that share memory count it once.
inline void add_slots(std::vector<Span>& spans, const RingLayout& ring) {
  const Span shared{ring.slots_offset, ring.slots_offset + ring.shared_bytes};
  if (std::any_of(spans.begin(), spans.end(),
                  [&](const Span& s) { return s.begin == shared.begin && s.end == shared.end; }))
    return;
  if (ring.shared_bytes > 0) return spans.push_back(shared);
  spans.push_back({ring.slots_offset, ring.slots_offset + ring.num_slots * ring.slot_bytes});
}
inline void add_flags(std::vector<Span>& spans, const RingLayout& ring) {
  spans.push_back({ring.stamps_offset, ring.stamps_offset + ring.num_slots * sizeof(uint64_t)});
  if (ring.num_readers != 0)
    spans.push_back({ring.consumed_offset, ring.consumed_offset + ring.num_readers * kLineBytes});
}

// Without the own domain's places in lists by domain.
inline std::vector<const RingLayout*> rings_of(const RegionLayout& layout) {
  std::vector<const RingLayout*> rings = {&layout.own_header, &layout.own_meta, &layout.own_rows};
  for (auto* list : {&layout.header_send, &layout.meta_send, &layout.rows_send, &layout.header_landing,
                     &layout.meta_landing, &layout.rows_landing, &layout.return_send, &layout.return_landing})
    for (auto& ring : *list) rings.push_back(&ring);
  const RegionLayout::Slots& slots = layout.slots;
  for (auto* list : {&slots.routing_send, &slots.rows_send, &slots.weights_send, &slots.sums_send,
                     &slots.routing_landing, &slots.rows_landing, &slots.weights_landing, &slots.sums_landing})
    for (auto& ring : *list) rings.push_back(&ring);
  for (auto& list : layout.pieces)
    for (auto& ring : list) rings.push_back(&ring);
  std::erase_if(rings, [](const RingLayout* ring) { return ring->num_slots == 0; });
  return rings;
}

inline Span control_span(const RegionLayout& layout) {
  return {0, kPageBytes + layout.incoming.size() * kRemoteSignsBytes};
}

inline bool overlap_free(std::vector<Span> spans, uint64_t total_bytes) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  for (size_t i = 0; i + 1 < spans.size(); ++i)
    if (spans[i].end > spans[i + 1].begin) return false;
  return spans.back().end <= total_bytes;
}

// Every outgoing channel of `mine` ends in a landing ring of its peer that is meant for it, and the other way round.
inline bool connected(int rank, const Channels& mine, int peer, const Channels& theirs) {
  for (uint32_t c = 0; c < mine.out.size(); ++c) {
    const OutChannel& out = mine.out[c];
    if (out.peer != peer) continue;
    if (out.peer_channel >= theirs.in.size()) return false;
    const InChannel& in = theirs.in[out.peer_channel];
    const bool same_window = in.landing.num_slots == out.send.num_slots && in.landing.slot_bytes == out.send.slot_bytes;
    if (in.peer != rank || in.peer_channel != c || in.landing.kind != out.send.kind || in.credited != out.credited ||
        !same_window || in.landing.slots_offset != out.remote_slots_offset)
      return false;
  }
  for (uint32_t c = 0; c < mine.in.size(); ++c) {
    const InChannel& in = mine.in[c];
    if (in.peer != peer) continue;
    if (in.peer_channel >= theirs.out.size() || theirs.out[in.peer_channel].peer != rank ||
        theirs.out[in.peer_channel].peer_channel != c)
      return false;
  }
  return true;
}

}  // namespace uccl_ep
