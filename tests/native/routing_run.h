// One rank's routing on the stand-in for GPUs, with either kind of tiles: what it leaves in the rank's memory. And an
// oracle, which goes through the rank's pairs in their order and writes the same into memory of its own.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "backend/gpu/exchange.cuh"
#include "block_rows.h"
#include "claims.h"
#include "routing_input.h"

namespace uccl_ep {

using gpu::TileKind;

// A pair, in the order in which packets have them.
struct RoutedPair {
  uint32_t number, token, expert, column;  // of its rank; expert and column: as the caller names them
  auto key() const { return std::tuple(number, token, expert); }
};

// A rank's memory as far as routing reads and writes it, and where things lie there.
class RoutingMemory {
 public:
  static constexpr uint64_t kEpoch = 1;
  RoutingMemory(const RoutingRun& run, const RoutingInput& in)
      : run_(run), in_(in), topo_(Topology::from_labels(run.domain_of)), numbers_(topo_) {
    for (uint32_t t = 0; t < run.num_tokens; ++t)
      for (uint32_t column = 0; column < run.width(); ++column) {
        const uint64_t place = uint64_t{t} * run.width() + column;
        if (run.topk == 0 ? in.map[place] == 0 : in.topk[place] < 0) continue;
        const uint32_t expert = run.topk == 0 ? column : static_cast<uint32_t>(in.topk[place]);
        pairs_.push_back({numbers_.number_of[expert / run.experts_per_rank], t, expert, column});
      }
    std::sort(pairs_.begin(), pairs_.end(), [](const auto& a, const auto& b) { return a.key() < b.key(); });
    lay_out();
    fill();
  }

  // By blocks of the stand-in. What lies behind a block's shared memory stays as it is.
  template <typename Tile>
  void route() {
    const gpu::PlanView plan;
    const gpu::KernelOp op{kEpoch, 1};
    gpu::PlaceArgs args;
    args.signature = signature();
    args.routing = {run_.topk == 0 ? static_cast<const void*>(in_.map.data()) : in_.topk.data(), in_.weights.data(),
                    run_.topk == 0, run_.width()};
    args.stage.num_tokens = run_.num_tokens;
    args.kept_tiles = run_.kept_tiles;
    args.tells_spans = run_.tells_spans;
    const uint32_t threads = run_.warps * gpu::kWarp;
    const uint32_t shared_bytes = group_.table_bytes + gpu::tiles_bytes(group_.map, Tile::kKind, run_.kept_tiles);
    EXPECT(shared_bytes <= gpu::kMostSharedBytes - gpu::kStaticSharedBytes);
    std::atomic<uint32_t> wrong{0};
    gpu_on_cpu::run_grid({run_.blocks + gpu::has_net(group_), threads, shared_bytes}, [&] {
      __shared__ uint32_t totals;
      gpu::load_rank_tables(group_, threads);
      __syncthreads();
      if (blockIdx.x == gpu::workers(group_)) return;  // it would see to the network
      const gpu::DispatchKernel kernel{{group_, plan, op, gpu::Crew::of(1, 0, run_.warps)}, args};
      bool good = gpu::route<Tile>(kernel, gpu_on_cpu::dynamic_memory() + group_.table_bytes, &totals);
      __syncthreads();
      if (threadIdx.x != 0) return;
      good &= totals == (blockIdx.x == 0);
      const uint8_t *const behind = gpu_on_cpu::dynamic_memory() + shared_bytes, *const end =
                                                                                     gpu_on_cpu::dynamic_memory() +
                                                                                     gpu::kMostSharedBytes;
      good &= std::all_of(behind, end, [](uint8_t byte) { return byte == 0; });
      if (!good) wrong.fetch_add(1);
    });
    EXPECT_EQ(wrong.load(), 0u);
    EXPECT_EQ(error_.claim, uint64_t{0});
  }
  // By the oracle.
  void write_expected();

  const std::vector<RoutedPair>& pairs() const { return pairs_; }
  const gpu::DeviceMap& map() const { return group_.map; }
  // The same, but for what the kernel's blocks tell each other.
  void expect_like(const RoutingMemory& expected) const {
    uint64_t hash = 0;
    for (uint32_t b = 0; b < run_.blocks; ++b) hash += local().block_hash[b];
    EXPECT_EQ(hash, expected.local().block_hash[0]);
    expect_bytes(expected, results_);
  }
  // All of it, counts of tiles and hashes too.
  void expect_equal(const RoutingMemory& other) const { expect_bytes(other, 0); }

 private:
  using Words = std::vector<uint32_t>;
  struct Reached;
  struct Member {
    uint32_t number, member;  // of the rank: in the group, and in its domain
  };
  static OpSignature signature() {
    OpSignature signature{};
    signature.hidden = 77;
    return signature;
  }
  void lay_out();
  void fill();
  uint32_t write_expected_addends(const Reached& reached, uint32_t t, uint32_t to, uint32_t num_addends);
  gpu::SpanRows expected_span_rows(const Reached& reached) const;
  uint64_t write_expected_packet(const Reached& reached, uint32_t to);  // its bytes
  void write_expected_rows(const Reached& reached, uint8_t* bytes, const gpu::PacketParts& parts, const Member& to,
                           uint32_t& rows, uint32_t& pairs);
  gpu::Local& local() const { return gpu::local(group_); }
  uint32_t domain_of(const RoutedPair& pair) const { return numbers_.domain_of[pair.number]; }
  void expect_bytes(const RoutingMemory& other, uint64_t begin) const {
    EXPECT_EQ(used_, other.used_);
    for (uint64_t i = begin; i < used_; ++i)
      if (group_.own[i] != other.group_.own[i])
        throw std::logic_error("the first of " + std::to_string(used_) + " bytes that differs is " + std::to_string(i) +
                               ", in " + std::prev(parts_.upper_bound(i))->second);
  }

  const RoutingRun run_;
  const RoutingInput& in_;
  const Topology topo_;
  const RankNumbers numbers_;
  std::vector<RoutedPair> pairs_;
  std::vector<uint64_t> memory_;
  uint64_t packet_units_ = 0;  // where they lie
  std::map<uint64_t, std::string> parts_;  // by offset
  uint64_t used_ = 0, results_ = 0;  // bytes; what lies before the second only blocks of the kernel read
  gpu::Group group_{};
  gpu::HostError error_{};
  gpu::HostPulse pulse_{};
};

inline void RoutingMemory::lay_out() {
  gpu::DeviceMap& map = group_.map;
  const uint64_t domains = static_cast<uint64_t>(topo_.num_domains()), tiles = (run_.num_tokens + 63) / 64;
  map.num_ranks = run_.num_ranks();
  map.num_domains = static_cast<uint32_t>(domains);
  map.num_experts = run_.num_experts();
  map.max_tokens = static_cast<uint32_t>(std::max<uint64_t>(tiles, 1)) * gpu::kTileTokens;
  map.max_pairs = static_cast<uint32_t>(pairs_.size());
  const auto take_bytes = [&](const std::string& name, uint64_t bytes) {
    const uint64_t at = used_;
    parts_[at] = name;
    used_ += (bytes + 15) / 16 * 16 + 16;  // bytes between parts belong to nobody
    return at;
  };
  const auto take = [&]<typename T>(gpu::Part<T>& part, const std::string& name, uint64_t count) {
    part.offset = take_bytes(name, sizeof(T) * count);
  };
  const int own = topo_.domain_of[static_cast<size_t>(run_.rank)];
  take(map.local, "local", 1);
  take(map.read, "read", static_cast<uint64_t>(topo_.size_of(own)));
  take(map.tables, "tables", 4 * map.num_ranks + domains + 2);
  take(map.tile_counts, "tile_counts", tiles * gpu::tile_words(map));
  results_ = used_;
  take(map.token_addends, "token_addends", run_.num_tokens + 1);
  take(map.addends, "addends", pairs_.size());
  take(map.sent_token_blocks, "sent_token_blocks", domains * gpu::BlockRows::groups(map.max_tokens / gpu::kTokenBlock));
  take(map.pair_origin, "pair_origin", pairs_.size());
  packet_units_ = take_bytes("packet_units", sizeof(uint32_t) * domains);
  uint64_t shipped = 0;  // bytes of packets for other domains
  for (uint32_t to = 0; to < domains; ++to) {
    gpu::PacketSizes most{static_cast<uint32_t>(topo_.size_of(static_cast<int>(to))),
                          run_.experts_per_rank,
                          run_.num_tokens,
                          0,
                          0,
                          run_.num_tokens,
                          true};
    for (const RoutedPair& pair : pairs_) most.pairs += domain_of(pair) == to;
    most.rows = most.pairs;
    if (to == static_cast<uint32_t>(own))
      map.packets.offset = take_bytes("packet for us", gpu::packet_parts(most).end);
    else
      shipped += round_up(gpu::packet_parts(most).end, gpu::kPacketUnit);
  }
  group_.net.packets = take_bytes("packets", shipped);
}

// Garbage, but for flags, the state of earlier operations, and the tables of ranks.
inline void RoutingMemory::fill() {
  const gpu::DeviceMap& map = group_.map;
  const auto own = static_cast<size_t>(topo_.domain_of[static_cast<size_t>(run_.rank)]);
  memory_.assign(used_ / 8, 0xA5A5A5A5A5A5A5A5);
  group_.own = group_.base[0] = reinterpret_cast<uint8_t*>(memory_.data());
  for (uint8_t*& base : group_.base) base = group_.own;
  std::memset(static_cast<void*>(&gpu::local(group_)), 0, sizeof(gpu::Local));
  std::memset(group_.own + map.read.offset, 0,
              sizeof(uint64_t) * static_cast<size_t>(topo_.size_of(static_cast<int>(own))));
  uint16_t* entries = map.tables.in(group_.own);
  for (auto [table, numbers] : {std::pair{&group_.number_of, &numbers_.number_of},
                                {&group_.rank_of, &numbers_.rank_of},
                                {&group_.domain_of, &numbers_.domain_of},
                                {&group_.first_of, &numbers_.first_of}}) {
    table->entries = entries;
    entries = std::copy(numbers->begin(), numbers->end(), entries);
  }
  group_.rank = numbers_.number_of[static_cast<size_t>(run_.rank)];
  group_.first = numbers_.first_of[own];
  group_.end = numbers_.first_of[own + 1];
  group_.experts_per_rank = run_.experts_per_rank;
  group_.arrival_nsec = group_.progress_nsec = uint64_t{60} * 1'000'000'000;
  group_.table_bytes = gpu::rank_table_bytes(map);
  group_.net_state.packet_unit = reinterpret_cast<uint32_t*>(group_.own + packet_units_);
  group_.net.domain = static_cast<uint32_t>(own);
  group_.error = &error_;
  pulse_.alive_nsec = pulse_.still_nsec = gpu::kMostLivedNsec;
  group_.pulse = &pulse_;
}

// The ranks that tokens reach in each domain, and what earlier tokens have there.
struct RoutingMemory::Reached {
  std::vector<std::map<uint32_t, std::set<uint32_t>>> ranks;  // by domain and token
  std::vector<Words> pieces_before, rows_before;              // [domains][tokens + 1]; rows: of the stream
  gpu::BlockMost most;                                        // of a token block

  explicit Reached(const RoutingMemory& of)
      : ranks(of.map().num_domains),
        pieces_before(ranks.size(), Words(of.run_.num_tokens + 1, 0)),
        rows_before(pieces_before) {
    for (const RoutedPair& pair : of.pairs_) ranks[of.domain_of(pair)][pair.token].insert(pair.number);
    for (size_t to = 0; to < ranks.size(); ++to) {
      for (uint32_t t = 0; t < of.run_.num_tokens; ++t) {
        const auto found = ranks[to].find(t);
        const size_t pieces = found == ranks[to].end() ? 0 : found->second.size();
        pieces_before[to][t + 1] = pieces_before[to][t] + static_cast<uint32_t>(pieces);
        rows_before[to][t + 1] = rows_before[to][t] + (pieces > 0);
      }
      const bool is_own = of.map().num_domains == 1 || to == of.group_.net.domain;
      for (uint32_t t = 0; t < of.run_.num_tokens; t += 32) {
        const uint32_t end = std::min(t + 32, of.run_.num_tokens);
        const uint32_t rows = is_own ? 0 : rows_before[to][end] - rows_before[to][t];
        most = most.with(gpu::BlockMost::of(pieces_before[to][end] - pieces_before[to][t], rows));
      }
    }
  }
};

inline void RoutingMemory::write_expected() {
  const Reached reached(*this);
  uint64_t hash = 0;
  for (size_t i = 0; i < pairs_.size(); ++i) {
    const uint32_t place = pairs_[i].token * run_.width() + pairs_[i].column;
    gpu::own_part(group_, map().pair_origin)[i] = place;
    hash += gpu::hash_pair(place, pairs_[i].expert);
  }
  local().block_hash[0] = hash;
  uint32_t num_addends = 0;
  for (uint32_t t = 0; t < run_.num_tokens; ++t) {
    gpu::own_part(group_, map().token_addends)[t] = num_addends;
    for (uint32_t to = 0; to < map().num_domains; ++to)
      num_addends = write_expected_addends(reached, t, to, num_addends);
  }
  gpu::own_part(group_, map().token_addends)[run_.num_tokens] = num_addends;
  uint32_t units = 0;
  for (uint32_t to = 0; to < map().num_domains; ++to) {
    if (gpu::has_net(group_)) group_.net_state.packet_unit[to] = units;
    const uint64_t bytes = write_expected_packet(reached, to);
    if (to != group_.net.domain) units += static_cast<uint32_t>((bytes + gpu::kPacketUnit - 1) / gpu::kPacketUnit);
  }
}

// The addends of a token from a domain; the number of addends until then.
inline uint32_t RoutingMemory::write_expected_addends(const Reached& reached, uint32_t t, uint32_t to,
                                                      uint32_t num_addends) {
  const auto found = reached.ranks[to].find(t);
  if (found == reached.ranks[to].end()) return num_addends;
  gpu::Addend* const addends = gpu::own_part(group_, map().addends);
  if (to != group_.net.domain) {
    addends[num_addends] = gpu::Addend::of_domain(to, reached.rows_before[to][t]);
    return num_addends + 1;
  }
  const auto pieces = static_cast<uint32_t>(found->second.size());
  for (uint32_t i = 0; i < pieces && gpu::has_net(group_); ++i)
    addends[num_addends + i] = gpu::Addend::of_piece(reached.pieces_before[to][t] + i);
  return num_addends + pieces;
}

inline gpu::SpanRows RoutingMemory::expected_span_rows(const Reached& reached) const {
  gpu::SpanRows most;
  for (uint32_t to = 0; to < map().num_domains; ++to)
    for (uint32_t i = 0; i < gpu::SpanRows::kLengths && to != group_.net.domain; ++i) {
      const uint32_t tokens = gpu::SpanRows::blocks(i) * 32;
      for (uint32_t first = 0; first < run_.num_tokens; first += tokens) {
        const Words& before = reached.rows_before[to];
        const uint32_t rows = before[std::min(first + tokens, run_.num_tokens)] - before[first];
        most.most[i] = std::max(most.most[i], static_cast<uint16_t>(rows));
      }
    }
  return most;
}

inline uint64_t RoutingMemory::write_expected_packet(const Reached& reached, uint32_t to) {
  const uint32_t tokens = run_.num_tokens, blocks = (tokens + 31) / 32, experts = run_.experts_per_rank;
  const uint32_t first = numbers_.first_of[to], members = numbers_.first_of[to + 1] - first;
  const bool own = to == group_.net.domain;
  const Words &pieces_before = reached.pieces_before[to], &rows_before = reached.rows_before[to];
  uint8_t* const bytes = gpu::own_packet(group_, to, kEpoch);
  gpu::PacketSizes sizes{members, experts, tokens, pieces_before[tokens], 0, own ? 0 : rows_before[tokens], true};
  for (const RoutedPair& pair : pairs_) sizes.pairs += domain_of(pair) == to;
  const gpu::PacketParts parts = gpu::packet_parts(sizes);
  const auto words = [&](uint64_t part) { return reinterpret_cast<uint32_t*>(bytes + part); };
  auto& head = *reinterpret_cast<gpu::DeviceHeader*>(bytes);
  head.epoch = kEpoch;
  head.signature = signature();
  head.num_tokens = tokens;
  head.num_refused = 0;
  head.num_pairs = sizes.pairs;
  head.num_rows = sizes.rows;
  head.stream_rows = sizes.stream_rows;
  head.most_of_block = reached.most.with(gpu::BlockMost::of_pairs(static_cast<uint32_t>(pairs_.size()))).word;
  head.span_rows = run_.tells_spans ? expected_span_rows(reached) : gpu::SpanRows{};
  const auto until = [&](uint32_t block) { return rows_before[std::min(32 * block, tokens)]; };
  auto* const sent =
      gpu::own_part(group_, map().sent_token_blocks) + to * gpu::BlockRows::groups(map().max_tokens / 32);
  if (!own) write_blocks(reinterpret_cast<gpu::BlockRows*>(bytes + parts.token_block_streams), blocks, until);
  if (!own) write_blocks(sent, blocks, until);
  for (uint32_t t = 0; t <= tokens && !own; ++t)
    if (t == tokens || rows_before[t + 1] > rows_before[t])
      words(parts.stream_pieces)[rows_before[t]] = pieces_before[t];
  std::fill_n(words(parts.counts), members * experts, 0u);
  uint32_t rows = 0, pairs = 0;
  for (uint32_t member = 0; member < members; ++member) {
    words(parts.row_begin)[member] = rows;
    words(parts.pair_begin)[member] = pairs;
    write_expected_rows(reached, bytes, parts, {first + member, member}, rows, pairs);
  }
  words(parts.row_begin)[members] = rows;
  words(parts.pair_begin)[members] = pairs;
  return parts.end;
}

// Behind `rows` rows and `pairs` pairs of lower members: those of a rank, which are added to the numbers.
inline void RoutingMemory::write_expected_rows(const Reached& reached, uint8_t* bytes, const gpu::PacketParts& parts,
                                               const Member& to, uint32_t& rows, uint32_t& pairs) {
  const uint32_t experts = run_.experts_per_rank, blocks = (run_.num_tokens + 31) / 32, pair_begin = pairs;
  const uint32_t domain = numbers_.domain_of[to.number];
  Words before(blocks + 1);
  std::map<uint32_t, uint32_t> pairs_of_expert;
  gpu::ListEntry* row = nullptr;
  for (const RoutedPair& pair : pairs_) {
    if (pair.number != to.number) continue;
    const uint32_t t = pair.token, expert = pair.expert % experts;
    if (row == nullptr || row->token != t) {
      const std::set<uint32_t>& ranks = reached.ranks[domain].at(t);
      const auto lower = static_cast<uint32_t>(std::distance(ranks.begin(), ranks.find(pair.number)));
      row = reinterpret_cast<gpu::ListEntry*>(bytes + parts.lists) + rows++;
      *row = {pairs - pair_begin, reached.pieces_before[domain][t] + lower,
              domain == group_.net.domain ? t : reached.rows_before[domain][t], static_cast<uint16_t>(t), 0};
      for (uint32_t c = t / 32 + 1; c <= blocks; ++c) ++before[c];
    }
    ++row->num_pairs;
    ++reinterpret_cast<uint32_t*>(bytes + parts.counts)[to.member * experts + expert];
    reinterpret_cast<float*>(bytes + parts.weights)[pairs] = in_.weights[uint64_t{t} * run_.width() + pair.column];
    reinterpret_cast<gpu::PairEntry*>(bytes + parts.pairs)[pairs++] = {
        static_cast<uint16_t>(expert), static_cast<uint16_t>(pairs_of_expert[expert]++)};
  }
  auto* const rows_of = reinterpret_cast<gpu::BlockRows*>(bytes + parts.token_block_rows);
  write_blocks(rows_of + to.member * gpu::BlockRows::groups(blocks), blocks, [&](uint32_t b) { return before[b]; });
}

}  // namespace uccl_ep
