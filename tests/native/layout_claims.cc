// Regions and channels: what every rank computes for itself must fit together.
#include <algorithm>
#include <numeric>
#include <set>

#include "claims.h"
#include "layout/region.h"
#include "layout/words.h"
#include "layout_checks.h"

using namespace uccl_ep;

namespace {

struct Case {
  std::vector<int> labels;
  RingParams rings;
};

RingParams ring_params_of(uint64_t slot_bytes, uint32_t num_slots, uint32_t num_experts) {
  return {slot_bytes, 1024, num_slots, num_experts};
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const std::vector<std::vector<int>> labels = {
      {0},          {0, 0},       {0, 1},          {0, 0, 0, 1},    {1, 0, 0, 0},          {0, 1, 0, 1},
      {0, 1, 2, 0}, {4, 7, 4, 9}, {0, 0, 1, 1, 2}, {2, 0, 1, 0, 2}, {0, 0, 0, 0, 1, 1, 2}, {0, 1, 1, 1, 1, 1, 1, 0}};
  for (auto& l : labels)
    for (uint32_t num_slots : {2u, 3u, 8u})
      all.push_back({l, ring_params_of(num_slots == 3 ? 7232 : 65536, num_slots, static_cast<uint32_t>(l.size()) * 4)});
  return all;
}

CLAIM("rows of each format are one bulk copy, with codes for each element and a scale for each block") {
  for (const RowFormat& format : kRowFormats)
    for (uint64_t hidden = kHiddenUnit; hidden <= 16384; hidden += kHiddenUnit) {
      const RowShape shape = row_shape(format.id, hidden);
      EXPECT_EQ(uint64_t{shape.code_bytes} * 8, hidden * format.code_bits);
      EXPECT_EQ(shape.num_scales, format.scale_bytes == 0 ? 0 : (hidden + format.block - 1) / format.block);
      EXPECT_EQ(shape.bytes, wire_row_bytes(format.id, hidden));
      EXPECT(shape.bytes % 16 == 0 && shape.bytes >= shape.code_bytes + shape.scale_bytes());
      EXPECT(shape.bytes < shape.code_bytes + shape.scale_bytes() + 16);
      EXPECT_EQ(is_quantised(format.id), shape.num_scales > 0);
    }
}

CLAIM("a row format is found by what users call it, and by nothing else") {
  for (const RowFormat& format : kRowFormats) EXPECT(find_row_format(format.name, format.scale)->id == format.id);
  EXPECT(find_row_format("fp8", "") == nullptr);
  EXPECT(find_row_format("bf16", "pow2") == nullptr);
}

CLAIM("the rings, flags and records of a rank never overlap") {
  for (const Case& c : cases()) {
    const Topology topo = Topology::from_labels(c.labels);
    for (int rank = 0; rank < topo.num_ranks; ++rank) {
      const RegionLayout layout = make_region_layout(topo, c.rings, rank);
      std::vector<Span> spans = {control_span(layout)};
      for (const RingLayout* ring : rings_of(layout)) {
        add_flags(spans, *ring);
        add_slots(spans, *ring);
      }
      EXPECT(overlap_free(spans, layout.total_bytes));
      // Negative control: a ring moved by one line is noticed.
      spans.back().begin -= kLineBytes;
      spans.back().end -= kLineBytes;
      spans.push_back({layout.total_bytes - 1, layout.total_bytes + 1});
      EXPECT(!overlap_free(spans, layout.total_bytes));
    }
  }
}

CLAIM("the entries of a memory plan add up to the bytes of the region") {
  for (const Case& c : cases()) {
    const Topology topo = Topology::from_labels(c.labels);
    for (int rank = 0; rank < topo.num_ranks; ++rank) {
      const RegionLayout layout = make_region_layout(topo, c.rings, rank);
      uint64_t sum = 0;
      for (auto& [name, bytes] : layout.entries) sum += bytes;
      EXPECT_EQ(sum, layout.total_bytes);
      EXPECT_EQ(layout.total_bytes % kPageBytes, uint64_t{0});
    }
  }
}

CLAIM("what a sender takes for the receiver's landing is the receiver's landing, for every pair of ranks") {
  for (const Case& c : cases()) {
    const Topology topo = Topology::from_labels(c.labels);
    std::vector<Channels> channels;
    for (int rank = 0; rank < topo.num_ranks; ++rank) channels.push_back(make_channels(topo, c.rings, rank));
    for (int rank = 0; rank < topo.num_ranks; ++rank)
      for (int peer = 0; peer < topo.num_ranks; ++peer)
        EXPECT(connected(rank, channels[static_cast<size_t>(rank)], peer, channels[static_cast<size_t>(peer)]));
  }
}

CLAIM("a wrong offset or channel number would be noticed") {
  const Topology topo = Topology::from_labels({0, 0, 0, 1});
  const RingParams rings = ring_params_of(65536, 2, 16);
  Channels mine = make_channels(topo, rings, 0);
  const Channels theirs = make_channels(topo, rings, 3);
  EXPECT(connected(0, mine, 3, theirs));
  mine.out[2].remote_slots_offset += 64;
  EXPECT(!connected(0, mine, 3, theirs));
  mine.out[2].remote_slots_offset -= 64;
  std::swap(mine.in[0].peer_channel, mine.in.back().peer_channel);
  EXPECT(mine.in.size() < 2 || !connected(0, mine, 3, theirs));
}

CLAIM("every rank of another domain lands on exactly one rank of ours, and its sums come back from there") {
  for (const Case& c : cases()) {
    const Topology topo = Topology::from_labels(c.labels);
    for (int d = 0; d < topo.num_domains(); ++d)
      for (int src = 0; src < topo.num_ranks; ++src) {
        if (topo.domain_of[static_cast<size_t>(src)] == d) continue;
        int num_landings = 0;
        for (int rank : topo.members[static_cast<size_t>(d)]) {
          const RegionLayout layout = make_region_layout(topo, c.rings, rank);
          const auto count = std::count(layout.incoming.begin(), layout.incoming.end(), src);
          num_landings += static_cast<int>(count);
          EXPECT(count == 0 || topo.rail(src, d) == rank);
        }
        EXPECT_EQ(num_landings, 1);
      }
  }
}

CLAIM("the rails of a rank are the ranks that its channels lead to and come from, and are each other's") {
  for (const Case& c : cases()) {
    const Topology topo = Topology::from_labels(c.labels);
    for (int rank = 0; rank < topo.num_ranks; ++rank) {
      const Channels channels = make_channels(topo, c.rings, rank);
      std::set<int> peers;
      for (auto& out : channels.out) peers.insert(out.peer);
      for (auto& in : channels.in) peers.insert(in.peer);
      const std::vector<int> rails = topo.rails(rank);
      EXPECT((rails == std::vector<int>(peers.begin(), peers.end())));
      const std::vector<int> others = topo.others(rank);
      EXPECT(std::includes(others.begin(), others.end(), rails.begin(), rails.end()));
      for (int rail : rails) {
        const std::vector<int> theirs = topo.rails(rail);
        EXPECT(std::binary_search(theirs.begin(), theirs.end(), rank));
      }
    }
  }
  // A rank of equal domains has one in each of the others; a lone one is everybody's.
  const Topology even = Topology::from_labels({0, 0, 1, 1, 2, 2}), lone = Topology::from_labels({0, 1, 1, 1});
  EXPECT((even.rails(3) == std::vector{1, 5} && lone.rails(0) == std::vector{1, 2, 3}));
  EXPECT((lone.rails(2) == std::vector{0}));
}

CLAIM("a send ring is found again as its channel") {
  const Topology topo = Topology::from_labels({0, 1, 0, 2});
  const RingParams rings = ring_params_of(65536, 2, 16);
  for (int rank = 0; rank < topo.num_ranks; ++rank) {
    const RegionLayout layout = make_region_layout(topo, rings, rank);
    const Channels channels = make_channels(topo, rings, rank);
    for (uint32_t c = 0; c < channels.out.size(); ++c) EXPECT_EQ(channels.out_of(channels.out[c].send), c);
    EXPECT_EQ(channels.out_of(layout.own_rows), UINT32_MAX);
  }
}

CLAIM("2,048 domains fit the channel field, and their channels fit together") {
  std::vector<int> labels(2048);
  std::iota(labels.begin(), labels.end(), 0);
  const Topology topo = Topology::from_labels(labels);
  const RingParams rings = ring_params_of(7232, 2, 2048);
  const Channels first = make_channels(topo, rings, 0);
  EXPECT_EQ(first.out.size(), size_t{2047 * 4});
  EXPECT_EQ(first.in.size(), size_t{2047 * 4});
  EXPECT(first.out.size() <= kMaxChannels);
  const Channels last = make_channels(topo, rings, 2047);
  EXPECT(connected(0, first, 2047, last));
  EXPECT(connected(2047, last, 0, first));
}

CLAIM("256 domains of four ranks fit every field: each channel survives an immediate, each rank a serial") {
  std::vector<int> labels(256 * 4);
  for (size_t rank = 0; rank < labels.size(); ++rank) labels[rank] = static_cast<int>(rank % 256);
  const Topology topo = Topology::from_labels(labels);
  EXPECT(labels.size() <= kMaxRanks);
  const Channels channels = make_channels(topo, ring_params_of(7232, kMaxRingSlots - 1, 1024), 5);
  EXPECT_EQ(channels.out.size(), size_t{255 * 4});
  auto survives = [](ImmType type, uint32_t channel, uint64_t serial) {
    const Imm imm = decode_imm(encode_imm(type, channel, serial));
    return imm.type == type && imm.channel == channel && imm.serial == (serial & ((1u << kImmSerialBits) - 1));
  };
  for (auto& out : channels.out) EXPECT(survives(ImmType::kData, out.peer_channel, UINT64_MAX));
  for (auto& in : channels.in) EXPECT(survives(ImmType::kCredit, in.peer_channel, 0));
  for (uint64_t rank : {uint64_t{0}, uint64_t{labels.size() - 1}, uint64_t{kMaxRanks - 1}})
    EXPECT(survives(ImmType::kProbe, 0, rank) && decode_imm(encode_imm(ImmType::kProbe, 0, rank)).serial == rank);
  // Negative control: one channel more than there are would be somebody else's.
  EXPECT(!survives(ImmType::kData, kMaxChannels, 0));
}

CLAIM("256 domains of which one is too small to land all others are refused, by an error that names both numbers") {
  std::vector<int> labels(1 + 255 * 12);
  for (size_t rank = 1; rank < labels.size(); ++rank) labels[rank] = 1 + static_cast<int>(rank % 255);
  const Topology topo = Topology::from_labels(labels);
  try {
    make_channels(topo, ring_params_of(7232, 2, 3072), 0);
  } catch (const UsageFailure& failure) {
    const std::string text = failure.what();
    EXPECT(text.find(std::to_string(255 * 12 * 3 + 255)) != std::string::npos);
    EXPECT(text.find(std::to_string(kMaxChannels)) != std::string::npos);
    EXPECT(text.find("3060 ranks of other domains") != std::string::npos);
    EXPECT(text.find("allowed are at most 2048 such ranks") != std::string::npos);
    return;
  }
  throw std::logic_error("it was not refused");
}

CLAIM("as many domains as the refusal of more names have channels enough") {
  const auto refused = [](size_t domains) -> std::string {
    std::vector<int> labels(domains);
    std::iota(labels.begin(), labels.end(), 0);
    const RingParams rings = ring_params_of(7232, 2, static_cast<uint32_t>(domains));
    try {
      const Topology topo = Topology::from_labels(labels);
      checked_channels(topo, make_region_layout(topo, rings, 0));
    } catch (const UsageFailure& failure) {
      return failure.what();
    }
    return "";
  };
  EXPECT(refused(4096).find("allowed are at most 2048 such ranks") != std::string::npos);
  EXPECT(refused(2049).empty());
  EXPECT(!refused(2050).empty());
}

CLAIM("more channels than an immediate can name are refused") {
  std::vector<int> labels(2800);
  for (size_t rank = 0; rank < labels.size(); ++rank) labels[rank] = rank == 0 ? 0 : 1;  // one rank lands 2,799 sources
  const Topology topo = Topology::from_labels(labels);
  EXPECT_THROWS(UsageFailure, make_channels(topo, ring_params_of(7232, 2, 2800), 0));
}

}  // namespace

int main(int argc, char** argv) { return claims::main(argc, argv); }
