#include "backend/gpu/layout.h"

#include <algorithm>

#include "backend/gpu/layout_parts.h"
#include "backend/gpu/packet_sizes.h"
#include "common/units.h"

namespace uccl_ep::gpu {
namespace {

constexpr uint32_t kLeastStreams = 8;  // of a batch, if there are more

uint32_t tiles_of(uint64_t tokens) {
  return static_cast<uint32_t>(std::min<uint64_t>(round_up(tokens, kTileTokens), kMaxTokens) / kTileTokens);
}

// The largest number, up to `most`, for which fits(number); it is taken for granted for `low`.
template <typename Fits>
uint32_t largest(uint32_t most, Fits fits, uint32_t low = 1) {
  uint32_t high = most;
  while (low < high) {
    const uint32_t middle = low + (high - low + 1) / 2;
    (fits(middle) ? low : high) = fits(middle) ? middle : middle - 1;
  }
  return low;
}

// The layouts of all domains: one for each size.
class Layouts {
 public:
  Layouts(const Topology& topo, const RegionNeeds& needs) : topo_(topo), needs_(needs) {
    for (const auto& [size, number] : topo.domains_of_size) {
      shapes_.emplace_back(topo, size);
      if (size > 1) most_relayed_ = std::max(most_relayed_, shapes_.back().streams - 1);
    }
  }
  // The tokens whose routing fits in any case, if that is possible.
  uint32_t wanted_tiles() const { return tiles_of(needs_.window_tokens == 0 ? kUsualTokens : needs_.window_tokens); }
  // The room that takes the least memory; with it the group is refused, or not.
  void take_least_room() { room_ = {1, kUsualTokens, most_relayed_, kLeastStreams}; }
  // The most that leaves memory for the wanted tokens and the shortest window. False: with so many `full` tokens,
  // beyond the usual ones, that takes more than a quarter of the memory, which rows need, too.
  bool take_room(uint32_t full, uint64_t budget_bytes) {
    room_ = Room(kHalves, full, most_relayed_, most_relayed_);
    if (full > kUsualTokens) return least() <= budget_bytes / 4;
    if (least() > budget_bytes) take_room_with_weights_apart(budget_bytes);
    return true;
  }
  void take_room_with_weights_apart(uint64_t budget_bytes) {
    const auto fits = [&](uint32_t most) {
      room_ = Room(1, kUsualTokens, most_relayed_, most);
      return least() <= budget_bytes;
    };
    if (!fits(most_relayed_)) fits(std::max(largest(std::max(most_relayed_, 1u), fits), kLeastStreams));
  }
  // In a room that could be smaller.
  bool weights_go_with_rows() const {
    return shapes_.front().domains > 1 && room_.returned_blocks == kHalves && room_.full_tokens == kUsualTokens;
  }
  // `staged_blocks`: at once, at least those of a window.
  DeviceRegionLayout of(const Shape& shape, uint32_t tiles, uint32_t window_blocks, uint32_t staged_blocks) const {
    const uint32_t window = window_blocks * kTokenBlock, staged = staged_blocks * kTokenBlock;
    return layout_for(topo_, shape, needs_, tiles * kTileTokens, {window, std::max(window, staged)}, room_);
  }
  const std::vector<Shape>& shapes() const { return shapes_; }
  // Of the rank that needs most.
  uint64_t used(uint32_t tiles, uint32_t window_blocks, uint32_t staged_blocks = 1) const {
    uint64_t most = 0;
    for (const Shape& shape : shapes_)
      most = std::max(most, of(shape, tiles, window_blocks, staged_blocks).total_bytes);
    return most;
  }
  uint64_t bytes(uint32_t tiles, uint32_t window_blocks, uint32_t staged_blocks = 1) const {
    return round_up(used(tiles, window_blocks, staged_blocks), kDevicePage);
  }

 private:
  uint64_t least() const { return bytes(wanted_tiles(), 1); }

  const Topology& topo_;
  const RegionNeeds& needs_;
  std::vector<Shape> shapes_;
  uint32_t most_relayed_ = 0;  // by a rank that is not alone in its domain
  Room room_{kHalves, 0, 0, 0};
};

// Token blocks of a window that costs no time where there are several domains. Two windows of a combine have as many.
// At 50 GB/s, a combine whose two windows sent 16 MB took as long as in one window; with 11 MB it took 14 % longer. Of
// n - 1 other domains, a token with experts on kUsualRanks ranks reaches about one in (n + kUsualRanks - 1) /
// kUsualRanks.
uint32_t enough_blocks(uint32_t domains, uint64_t row_bytes) {
  constexpr uint64_t kUnderWay = 16'000'000;
  if (domains == 1) return UINT32_MAX;
  const uint64_t tokens = kUnderWay * (domains + kUsualRanks - 1) / (row_bytes * kUsualRanks * (domains - 1));
  return static_cast<uint32_t>((tokens + kTokenBlock - 1) / kTokenBlock);
}

// Tiles of tokens whose routing there is room for, and token blocks of a window.
struct Lengths {
  uint32_t tiles, window;
};

// FNV-1a of names and sizes, continued from `hash`.
uint64_t hash_of(const DeviceRegionLayout& layout, uint64_t hash) {
  const auto add = [&](uint64_t byte) { hash = (hash ^ byte) * 0x100000001B3u; };
  for (const auto& [name, bytes] : layout.entries) {
    for (char letter : name) add(static_cast<uint8_t>(letter));
    for (uint32_t shift = 0; shift < 64; shift += 8) add(bytes >> shift & 0xFF);
  }
  return hash;
}

// The routing, which is not split into windows, may take half of the budget for what usual tokens need, a tenth for
// more of them, and gets at least what `window_tokens` tokens need. It gets more where windows stay three quarters of
// what they are with usual tokens, and so long that they cost no time, or as long as they were asked for, or where
// there is a single one. If nothing was asked for, and usual tokens' windows cost time, too, three quarters are enough
// where they make room for all tokens. Rows, which are split into windows, get the rest.
Lengths lengths_of(const Layouts& layouts, const RegionNeeds& needs, uint64_t budget_bytes) {
  // Bytes beyond the least routing; what fits into its last page costs nothing.
  const auto routing = [&](uint32_t tiles) {
    return layouts.bytes(tiles, 1) == layouts.bytes(1, 1) ? 0 : layouts.used(tiles, 1) - layouts.used(1, 1);
  };
  constexpr uint32_t kBlocks = kTileTokens / kTokenBlock;  // of a tile
  const uint32_t given = needs.window_tokens, wanted = tiles_of(given == 0 ? kMaxTokens : given);
  // Token blocks that are staged at once: of many domains as many as cost no time, though a window may be shorter.
  const auto staged = [&](uint32_t tiles) {
    if (layouts.shapes().front().domains < 2 * kUsualRanks) return 1u;
    return std::min(enough_blocks(layouts.shapes().front().domains, needs.row_bytes),
                    std::min(tiles, wanted) * kBlocks);
  };
  const auto longest_window = [&](uint32_t tiles) {
    return largest(std::min(tiles, wanted) * kBlocks,
                   [&](uint32_t n) { return layouts.bytes(tiles, n) <= budget_bytes; });
  };
  const uint32_t usual = longest_window(layouts.wanted_tiles());
  const uint32_t domains = layouts.shapes().front().domains, most_of_usual = usual - usual / 4;
  uint32_t enough = std::min(std::max(most_of_usual, enough_blocks(domains, needs.row_bytes)), wanted * kBlocks);
  const bool holds_all = given == 0 && layouts.bytes(tiles_of(kMaxTokens), most_of_usual) <= budget_bytes;
  if (domains > 1 && usual < enough && holds_all) enough = most_of_usual;
  const auto fits = [&](uint32_t n) {
    const uint64_t most = budget_bytes / (n <= tiles_of(kUsualTokens) ? 2 : 10);
    const bool leaves_enough = layouts.bytes(n, std::min(enough, n * kBlocks)) <= budget_bytes;
    return ((given != 0 && n <= wanted) || routing(n) <= most || leaves_enough) &&
           layouts.bytes(n, 1, n <= tiles_of(kUsualTokens) ? 1 : staged(n)) <= budget_bytes;
  };
  // Fewer tokens may need more memory, because packets have tails only where these save some.
  const uint32_t least = given != 0 && fits(wanted) ? wanted : 1;
  const uint32_t tiles = largest(tiles_of(kMaxTokens), fits, least);
  return {tiles, longest_window(tiles)};
}

// Token blocks that are staged at once, with what else there is no use for. Where there are many domains, each gets few
// of a token's rows, so that the rings hold more tokens than if all rows go to one.
uint32_t staged_blocks(const Layouts& layouts, const Lengths& lengths, const RegionNeeds& needs,
                       uint64_t budget_bytes) {
  constexpr uint32_t kLonger = 8, kBlocks = kTileTokens / kTokenBlock;
  const uint32_t times = std::clamp(layouts.shapes().front().domains / kUsualRanks, 1u, kLonger);
  const uint32_t wanted = needs.window_tokens == 0 ? lengths.tiles : tiles_of(needs.window_tokens);
  const uint32_t most = std::min(lengths.window * times, std::min(wanted, lengths.tiles) * kBlocks);
  return largest(
      std::max(most, lengths.window),
      [&](uint32_t n) { return layouts.bytes(lengths.tiles, lengths.window, n) <= budget_bytes; }, lengths.window);
}

}  // namespace

uint64_t least_budget_bytes(const Topology& topo, const RegionNeeds& needs) {
  Layouts layouts(topo, needs);
  layouts.take_least_room();
  return layouts.bytes(tiles_of(std::max(needs.window_tokens, 1u)), 1);
}

// Weights' gradients go in windows of their own, which take a turn more, if rows' windows are an eighth longer then, or
// if there is room for more tokens: in as long windows, or for all in three quarters.
DeviceRegionLayout make_layout(const Topology& topo, int domain, const RegionNeeds& needs, uint64_t budget_bytes) {
  budget_bytes = std::min(budget_bytes, kMostRegionBytes);
  Layouts layouts(topo, needs), apart(topo, needs);
  Lengths lengths{};
  // As many pairs as leave room for all tokens.
  std::vector<uint32_t> fulls = {kUsualTokens};
  if (needs.window_tokens > kUsualTokens) fulls = {kMaxTokens, needs.window_tokens, kUsualTokens};
  for (const uint32_t full : fulls) {
    if (!layouts.take_room(full, budget_bytes)) continue;
    lengths = lengths_of(layouts, needs, budget_bytes);
    if (lengths.tiles == tiles_of(kMaxTokens)) break;
  }
  const Layouts* best = &layouts;
  if (layouts.weights_go_with_rows() && lengths.window * kTokenBlock < kUsualTokens) {
    apart.take_room_with_weights_apart(budget_bytes);
    const Lengths its = lengths_of(apart, needs, budget_bytes);
    const bool holds_all = its.tiles == tiles_of(kMaxTokens);
    if (its.window >= lengths.window + std::max(lengths.window / 8, 1u) ||
        (its.tiles > lengths.tiles && its.window >= lengths.window - (holds_all ? lengths.window / 4 : 0))) {
      best = &apart;
      lengths = its;
    }
  }
  const uint32_t staged = staged_blocks(*best, lengths, needs, budget_bytes);
  DeviceRegionLayout own;
  uint64_t hash = 0xCBF29CE484222325u;
  for (const Shape& shape : best->shapes()) {
    DeviceRegionLayout l = best->of(shape, lengths.tiles, lengths.window, staged);
    const uint64_t unused = round_up(l.total_bytes, kDevicePage) - l.total_bytes;
    l.entries.emplace_back("unused", unused);
    l.total_bytes += unused;
    hash = hash_of(l, hash);
    if (static_cast<int>(shape.members) == topo.size_of(domain)) own = std::move(l);
  }
  own.group_hash = hash;
  return own;
}

}  // namespace uccl_ep::gpu
