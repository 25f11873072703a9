// Where things lie in a GPU's memory, which the host works out.
#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "backend/gpu/packet.h"
#include "backend/gpu/windows.h"
#include "claims.h"
#include "common/units.h"
#include "gpu_layouts.h"

using namespace uccl_ep;

namespace {

CLAIM("staged rows begin at multiples of 128 bytes and fit the widest row") {
  for (uint64_t hidden = kHiddenUnit; hidden <= 16384; hidden += kHiddenUnit)
    for (const RowFormat& format : kRowFormats) {
      const uint64_t bytes = gpu::staged_row_bytes(format.id, hidden);
      EXPECT_EQ(bytes % 128, 0u);
      EXPECT(bytes >= wire_row_bytes(format.id, hidden) && bytes < wire_row_bytes(format.id, hidden) + 128);
      EXPECT(format.id == Dtype::kFp32 || bytes <= gpu::staged_bytes(hidden * 2));
    }
}

uint64_t bytes_of(const gpu::DeviceRegionLayout& layout, const std::string& name) {
  for (const auto& [entry, bytes] : layout.entries)
    if (entry == name) return bytes;
  throw std::logic_error("no entry " + name);
}

void expect_adds_up(const gpu::DeviceRegionLayout& layout) {
  uint64_t sum = 0;
  for (const auto& [name, bytes] : layout.entries) sum += bytes;
  EXPECT_EQ(sum, layout.total_bytes);
}

CLAIM("however wide rows are, the chunks of a window fit a relay's tag") {
  const Topology topo = Topology::from_labels(several({1, 1}));
  for (uint64_t row_bytes : {uint64_t{14336}, uint64_t{128} << 10, uint64_t{512} << 10}) {
    const uint64_t budget = 8 * gpu::kMaxTokens * row_bytes;
    const gpu::DeviceRegionLayout layout = gpu::make_layout(topo, 0, {64, row_bytes}, budget);
    EXPECT(layout.rings.rows_slots <= gpu::kMaxRelayedChunks);
    // Negative control: with a row in each chunk they would not.
    EXPECT(gpu::window_tokens(layout, row_bytes) > gpu::kMaxRelayedChunks);
  }
}

CLAIM("however much memory is allowed, kernels can name every place of a region") {
  const Topology topo = Topology::from_labels(several(std::vector<int>(128, 1)));
  const gpu::DeviceRegionLayout layout = gpu::make_layout(topo, 0, {128, 14336}, uint64_t{1} << 40);
  EXPECT(layout.total_bytes <= uint64_t{16} << 32 && layout.total_bytes > gpu::kMostRegionBytes / 2);
}

CLAIM("a region is within its budget, says what all of it is for, and holds a token block") {
  for_layouts(one_domain(), [](const Topology& topo, uint64_t row_bytes, const gpu::DeviceRegionLayout& layout) {
    expect_adds_up(layout);
    EXPECT_EQ(bytes_of(layout, "rings"), 0u);
    for (uint64_t bytes : wire_rows(row_bytes)) EXPECT(gpu::window_tokens(layout, bytes) >= gpu::kTokenBlock);
    for (const bool in_halves : {false, true})
      EXPECT(gpu::combine_window_tokens(layout, row_bytes, most_pieces(topo), in_halves) >= gpu::kTokenBlock);
    EXPECT_EQ(layout.rows.offset % 128, 0u);
  });
}

CLAIM("a region of several domains is within its budget, says what all of it is for, and begins with its rings") {
  for_layouts(several_domains(), [](const Topology& topo, uint64_t, const gpu::DeviceRegionLayout& layout) {
    expect_adds_up(layout);
    EXPECT_EQ(layout.num_domains, static_cast<uint32_t>(topo.num_domains()));
    EXPECT(layout.entries.front().first == "rings");
    // What every rank ships and lands, as the transport lays it out, ends before the flags begin.
    const int members = static_cast<int>(layout.num_members);
    for (int rank = 0; rank < topo.num_ranks; ++rank)
      if (topo.size_of(topo.domain_of[static_cast<size_t>(rank)]) == members)
        EXPECT(make_device_layout(topo, layout.rings, rank).device_bytes <= layout.header_full.offset);
    EXPECT_EQ(layout.entries.front().second, round_up(device_ring_bytes(topo, layout.rings, members), 256));
    EXPECT_EQ(layout.header_full.offset, layout.entries.front().second);
    // Kernels count slots of one size in both rings.
    EXPECT(layout.slot_bytes == layout.rings.rows_slot_bytes && layout.slot_bytes == layout.rings.return_slot_bytes);
    EXPECT(layout.row_slots == layout.rings.rows_slots && layout.sum_slots == layout.rings.return_slots);
    EXPECT(layout.return_slots >= layout.sum_slots && layout.return_slots == layout.rings.slots_back_from(members));
    EXPECT(layout.return_slots > layout.sum_slots || layout.weights_apart);
    EXPECT_EQ(layout.slot_bytes % kDeviceRingAlignBytes, 0u);
    EXPECT_EQ(layout.head_bytes, layout.rings.packet_bytes.at(members));
    EXPECT_EQ(layout.packet_bytes % kDeviceRingAlignBytes, 0u);
    EXPECT_EQ(layout.rows.offset % 128, 0u);
  });
}

CLAIM("a region for so many tokens holds them in one window, any number in several, and is smaller") {
  uint32_t smaller = 0, larger = 0, fewer = 0;
  std::vector<Topology> topologies = one_domain();
  for (const Topology& topo : several_domains()) topologies.push_back(topo);
  for (const Topology& topo : topologies)
    for (uint64_t row_bytes : kRowBytes)
      for (uint32_t tokens : {1u, 500u, 4096u, gpu::kMaxTokens}) {
        const uint32_t experts = static_cast<uint32_t>(topo.num_ranks) * 4;
        const uint64_t budget = std::max(gpu::least_budget_bytes(topo, {experts, row_bytes}), uint64_t{256} << 20);
        const auto holds = [&](const gpu::DeviceRegionLayout& layout, uint32_t some) {
          // Eight ranks of a token, or four times its share of them in any domain.
          const uint32_t pieces = std::min({most_members(topo), 8u, (31 + layout.num_domains) / layout.num_domains});
          return gpu::window_tokens(layout, row_bytes) >= some &&
                 gpu::combine_window_tokens(layout, row_bytes, gpu::kTokenBlock * pieces) >= some;
        };
        const gpu::DeviceRegionLayout all = gpu::make_layout(topo, 0, {experts, row_bytes}, budget);
        const gpu::DeviceRegionLayout sized = gpu::make_layout(topo, 0, {experts, row_bytes, tokens}, budget);
        const uint32_t whole = static_cast<uint32_t>(round_up(tokens, gpu::kTileTokens));
        EXPECT(sized.total_bytes <= budget);
        EXPECT(sized.total_bytes <= all.total_bytes || sized.max_tokens > all.max_tokens ||
               sized.half_bytes > all.half_bytes || sized.max_pairs > all.max_pairs ||
               sized.weights_apart < all.weights_apart);
        // Their routing has a place before any rows. Without `tokens` windows may be shorter, so that all have one.
        const bool has_place = gpu::least_budget_bytes(topo, {experts, row_bytes, tokens}) <= budget;
        EXPECT(sized.max_tokens >= whole || !has_place);
        EXPECT(sized.max_tokens >= all.max_tokens || (has_place && all.max_tokens == gpu::kMaxTokens));
        fewer += sized.max_tokens < all.max_tokens;
        larger += sized.max_tokens > all.max_tokens;
        EXPECT(holds(sized, tokens) || !holds(all, tokens) || sized.max_pairs > all.max_pairs);
        EXPECT(sized.half_bytes <= whole * row_bytes);
        smaller += sized.total_bytes < all.total_bytes / 2;
      }
  EXPECT(smaller > 20 && larger > 5 && fewer < 5);
}

CLAIM("weights' gradients of all pairs have memory, and places in windows of which two have a half each") {
  uint32_t in_several = 0, in_one = 0, with_rows = 0;
  for_layouts(several_domains(), [&](const Topology&, uint64_t, const gpu::DeviceRegionLayout& layout) {
    const uint64_t windows = gpu::weight_windows(layout, layout.max_pairs);
    EXPECT_EQ(gpu::weight_windows(layout, 0), layout.weights_apart ? 1u : 0u);
    EXPECT_EQ(windows == 0, !layout.weights_apart);
    EXPECT(std::max<uint64_t>(windows, 1) * layout.weight_pairs >= layout.most_stream_pairs);
    EXPECT_EQ(layout.weight_halves, windows > 1 ? gpu::kHalves : 1u);
    EXPECT_EQ(layout.stream_weights, std::min(layout.weight_pairs, layout.stream_pairs));
    for (const auto& [name, bytes] : layout.entries)
      if (name == "piece_weights")
        EXPECT(bytes >= 4ull * layout.num_streams * layout.weight_halves * layout.stream_weights);
    in_several += windows > 1;
    in_one += windows == 1;
    with_rows += windows == 0;
  });
  EXPECT(in_several > 5 && in_one > 5 && with_rows > 5);
}

CLAIM("a packet has room for the most tokens, rows and pairs") {
  auto topologies = several_domains();
  for (const Topology& topo : one_domain()) topologies.push_back(topo);
  for_layouts(topologies, [](const Topology& topo, uint64_t, const gpu::DeviceRegionLayout& layout) {
    const uint32_t tokens = layout.max_tokens, experts = layout.num_experts / layout.num_ranks;
    for (int domain = 0; domain < topo.num_domains(); ++domain) {
      const uint32_t members = static_cast<uint32_t>(topo.size_of(domain));
      const uint32_t stream = topo.num_domains() > 1 ? tokens : 0;
      const auto end = [&](uint32_t pairs) {
        const uint32_t rows = std::min(members * tokens, pairs);  // a row has at least one pair
        return gpu::packet_parts({members, experts, tokens, rows, pairs, stream, true}).end;
      };
      const bool own = members == layout.num_members;
      const int size = topo.size_of(domain);
      const uint64_t chunk = own ? 0 : layout.rings.tail_slot_bytes;
      const uint64_t tail = chunk == 0 ? 0 : layout.rings.tail_chunks.at(size) * chunk;
      const uint64_t bytes = own ? layout.packet_bytes : layout.rings.packet_bytes.at(size) + tail;
      // Every token has every expert of the domain, or as many as a rank may have pairs.
      const uint32_t pairs = std::min(layout.max_pairs, tokens * members * experts);
      EXPECT((!own || pairs == layout.stream_pairs) && end(pairs) <= bytes);
      // Control: not much is wasted.
      EXPECT(end(pairs + 64) + chunk > bytes);
    }
  });
}

CLAIM("tokens beyond 4096 have room for 8 experts each, and for 32 where a quarter of the memory holds them") {
  const auto pairs = [](uint32_t tokens, uint32_t further) {
    return 32 * std::min(tokens, 4096u) + further * (tokens - std::min(tokens, 4096u));
  };
  for (const auto& sizes : {std::vector<int>(1, 8), std::vector<int>(8, 8)})
    for (uint32_t tokens : {0u, 64u, 4096u, 16384u, gpu::kMaxTokens})
      for (uint64_t mib : {400, 4096}) {
        const Topology topo = Topology::from_labels(several(sizes));
        const gpu::RegionNeeds needs{static_cast<uint32_t>(topo.num_ranks), 14336, tokens};
        EXPECT(gpu::least_budget_bytes(topo, needs) <= mib << 20);
        const gpu::DeviceRegionLayout layout = gpu::make_layout(topo, 0, needs, mib << 20);
        EXPECT(layout.max_tokens >= tokens);
        EXPECT_EQ(layout.max_pairs,
                  pairs(layout.max_tokens, tokens > 4096 && (mib == 4096 || sizes.size() == 1) ? 32 : 8));
      }
}

// Ranks in domains of eight, and one alone if `alone`.
Topology eights(int domains, bool alone = false) {
  std::vector<int> sizes(static_cast<size_t>(domains), 8);
  sizes.insert(sizes.end(), alone, 1);
  return Topology::from_labels(several(sizes));
}

CLAIM("4096 BF16 tokens of 7168: 65 ranks need at most 1.15 times what 64 do, 256 256 MiB, 2048 640 MiB") {
  const uint64_t row_bytes = gpu::staged_row_bytes(Dtype::kBf16, 7168), mib = uint64_t{1} << 20;
  const auto least = [&](const Topology& topo) {
    const uint32_t ranks = static_cast<uint32_t>(topo.num_ranks), experts = std::max(256u, ranks);
    return gpu::least_budget_bytes(topo, {(experts + ranks - 1) / ranks * ranks, row_bytes, 4096});
  };
  EXPECT(least(eights(8)) <= 512 * mib && 100 * least(eights(8, true)) <= 115 * least(eights(8)));
  EXPECT(least(eights(32)) <= 256 * mib && least(eights(256)) <= 640 * mib);
  for (const Topology& topo : {eights(8), eights(8, true), eights(32)}) {
    const gpu::RegionNeeds needs{static_cast<uint32_t>(topo.num_ranks) * 4, row_bytes, 4096};
    const uint64_t budget = gpu::least_budget_bytes(topo, needs);
    EXPECT(gpu::make_layout(topo, 0, needs, budget).max_tokens >= 4096);
    EXPECT(gpu::make_layout(topo, 0, needs, budget - gpu::kDevicePage).max_tokens < 4096);
  }
  const auto has = [&](int domains, uint32_t tokens, uint32_t window) {
    const gpu::DeviceRegionLayout usual = gpu::make_layout(eights(domains), 0, {256, row_bytes}, 512 * mib);
    return usual.max_tokens >= tokens && gpu::window_tokens(usual, row_bytes) >= window;
  };
  EXPECT(has(8, gpu::kMaxTokens, 448) && has(16, gpu::kMaxTokens, 288) && has(32, gpu::kMaxTokens, 96));
  EXPECT(!has(8, 1, 480) && !has(16, 1, 320) && !has(32, 1, 128));
}

CLAIM("streams go in batches only where memory is too small for all of them at once") {
  const Topology topo = eights(32);
  const gpu::RegionNeeds needs{256, 14336, 4096};
  const uint64_t least = gpu::least_budget_bytes(topo, needs), mib = uint64_t{1} << 20;
  uint32_t batches = 5, one_block = 0;
  for (uint64_t budget = least; budget <= 768 * mib; budget += 16 * mib) {
    const gpu::DeviceRegionLayout layout = gpu::make_layout(topo, 0, needs, budget);
    const uint64_t streams = 1 + std::min<uint64_t>(layout.batch_streams, layout.num_streams - 1);
    EXPECT(layout.total_bytes <= budget && layout.max_tokens >= 4096 && layout.stream_batches <= batches);
    EXPECT(layout.batch_streams * layout.stream_batches >= layout.num_streams - 1);
    EXPECT_EQ(bytes_of(layout, "pieces"), streams * layout.piece_bytes);
    EXPECT(gpu::combine_window_tokens(layout, 14336, most_pieces(topo)) >= gpu::kTokenBlock);
    // All at once would not fit. Where they do, and little else, a ring back holds one token block.
    if (layout.stream_batches > 1)
      EXPECT(budget - layout.total_bytes < (layout.num_streams - streams) * layout.piece_bytes);
    one_block += layout.stream_batches == 1 && layout.sum_slots * (layout.slot_bytes / 14336) < 2 * gpu::kTokenBlock;
    batches = layout.stream_batches;
  }
  EXPECT(gpu::make_layout(topo, 0, needs, least).stream_batches == 4 && batches == 1 && one_block > 0);
}

CLAIM("ranks of domains of different sizes have layouts of their own, with windows and slots in common") {
  const Topology topo = eights(8, true);
  const auto of = [&](int domain, uint64_t gib) { return gpu::make_layout(topo, domain, {260, 14336}, gib << 30); };
  for (const uint64_t gib : {1, 4}) {
    const gpu::DeviceRegionLayout eight = of(0, gib), alone = of(8, gib);
    EXPECT(eight.num_members == 8 && eight.num_streams == 9 && alone.num_members == 1 && alone.num_streams == 65);
    EXPECT(eight.max_tokens == alone.max_tokens && eight.half_bytes == alone.half_bytes &&
           eight.piece_bytes == alone.piece_bytes && eight.slot_bytes == alone.slot_bytes);
    EXPECT(eight.row_slots == alone.row_slots && eight.sum_slots == alone.sum_slots &&
           eight.weights_apart == (gib == 1) &&
           (gib == 1 ? eight.return_slots == alone.return_slots : eight.return_slots > alone.return_slots));
    EXPECT_EQ(eight.group_hash, alone.group_hash);
    // The one rank merges nothing for others, but it lands and returns the rows of 64.
    EXPECT(bytes_of(alone, "rings") > 2 * bytes_of(eight, "rings"));
    EXPECT(bytes_of(eight, "pieces") >= 9 * eight.piece_bytes && bytes_of(alone, "pieces") < 2 * alone.piece_bytes);
    EXPECT(eight.total_bytes <= gib << 30 && alone.total_bytes <= gib << 30);
    // Control: another budget is another layout.
    EXPECT(gpu::make_layout(topo, 0, {260, 14336}, uint64_t{2} << 30).group_hash != eight.group_hash);
  }
}

}  // namespace

int main(int argc, char** argv) { return claims::main(argc, argv); }
