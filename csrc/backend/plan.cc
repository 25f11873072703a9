#include "backend/plan.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace uccl_ep {

std::string describe(const OpSignature& s) {
  std::string text =
      s.kind == OpKind::kLowLatencyDispatch || s.kind == OpKind::kLowLatencyCombine ? "low-latency " : "";
  text += s.kind == OpKind::kDispatch || s.kind == OpKind::kLowLatencyDispatch ? "dispatch(" : "combine(";
  text += std::string(dtype_name(s.dtype)) + " as " + dtype_name(s.wire) + ", H=" + std::to_string(s.hidden);
  if (s.topk != 0) text += ", top-" + std::to_string(s.topk);
  if (s.plan_use != PlanUse::kNew) text += ", plan " + std::to_string(s.plan_id);
  if (s.expert_alignment != 1) text += ", alignment " + std::to_string(s.expert_alignment);
  if (s.num_metadata != 0) text += ", " + std::to_string(s.num_metadata) + " words of metadata";
  if (s.with_capacity != 0) text += ", a capacity";
  if (s.max_tokens != 0) text += ", max_tokens " + std::to_string(s.max_tokens);
  if (s.compact_width != 0) text += ", compact rows of " + std::to_string(s.compact_width) + " weights";
  return text + (s.with_weights ? ", weights)" : ")");
}

std::string differences(const OpSignature& one, const OpSignature& other) {
  std::string names;
  const auto look = [&](const auto& field) {
    if (one.*field.member != other.*field.member) names += std::string(names.empty() ? "" : ", ") + field.name;
  };
  std::apply([&](const auto&... field) { (look(field), ...); }, kFields<OpSignature>);
  return names;
}

std::string describe_refusals(int rank, uint64_t first, uint64_t count, const std::string& why) {
  const std::string text = "rank " + std::to_string(rank) + " refused call" + (count > 1 ? "s " : " ") +
                           std::to_string(first) + (count > 1 ? " to " + std::to_string(first + count - 1) : "");
  if (why.empty()) return text;
  return text + (count > 1 ? ", the last: " : ": ") + why;
}

std::string describe_mismatch(uint64_t epoch, const Called& one, const Called& other, const std::string& why) {
  const auto rank = [](const Called& of) { return "rank " + std::to_string(of.rank); };
  const std::string named = differences(one.signature, other.signature);
  const std::string said = named.empty() ? "" : " (different: " + named + ")";
  if (one.num_refused == other.num_refused)
    return "call " + std::to_string(epoch + one.num_refused) + " on the buffer: " + rank(one) + " called " +
           describe(one.signature) + ", " + rank(other) + " called " + describe(other.signature) + said;
  const auto call = [&](const Called& of) {
    return "call " + std::to_string(epoch + of.num_refused) + " of " + rank(of) + ", " + describe(of.signature);
  };
  const Called& behind = one.num_refused < other.num_refused ? one : other;
  const Called& ahead = one.num_refused < other.num_refused ? other : one;
  // They agreed on the operation before: all that was refused since follows it.
  return call(behind) + ", met " + call(ahead) + ": " +
         describe_refusals(ahead.rank, epoch + behind.num_refused, ahead.num_refused - behind.num_refused, why);
}

std::string describe_masked(int rank, int peer) {
  const std::string text = "rank " + std::to_string(rank) + " was masked: ";
  if (peer == rank) return text + "others did not hear of it within mask_timeout_s";
  return text + "rank " + std::to_string(peer) + ", of its domain, did not come within mask_timeout_s";
}

namespace {

[[noreturn]] void refuse(const std::string& text) { throw UsageFailure(UsageKind::kRouting, text); }

// Expert in the high half, its place in the caller's weights in the low half: sorting pairs sorts by expert.
using Pair = uint64_t;
constexpr Pair make_pair(uint32_t expert, uint32_t source) { return uint64_t{expert} << 32 | source; }
constexpr uint32_t expert_of(Pair pair) { return static_cast<uint32_t>(pair >> 32); }
constexpr uint32_t source_of(Pair pair) { return static_cast<uint32_t>(pair); }

// The pairs of a token, experts ascending.
void pairs_of_topk(const int64_t* idx, uint32_t width, uint32_t token, uint32_t num_experts, std::vector<Pair>& pairs) {
  pairs.clear();
  for (uint32_t k = 0; k < width; ++k) {
    const int64_t expert = idx[uint64_t{token} * width + k];
    if (expert == -1) continue;
    if (expert < 0 || expert >= num_experts)
      refuse("topk_idx[" + std::to_string(token) + ", " + std::to_string(k) + "] = " + std::to_string(expert) +
             ": allowed are 0 to " + std::to_string(num_experts - 1) + " and -1 (dropped)");
    // Inserted in order: a token has few, and a call of std::sort costs more than all of this.
    const Pair pair = make_pair(static_cast<uint32_t>(expert), token * width + k);
    size_t at = pairs.size();
    pairs.push_back(pair);
    for (; at > 0 && pairs[at - 1] > pair; --at) pairs[at] = pairs[at - 1];
    pairs[at] = pair;
  }
  for (size_t i = 1; i < pairs.size(); ++i)
    if (expert_of(pairs[i]) == expert_of(pairs[i - 1]))
      refuse("topk_idx[" + std::to_string(token) + "] names expert " + std::to_string(expert_of(pairs[i])) +
             " twice: a token may name an expert once");
}

void pairs_of_map(const uint8_t* map, uint32_t width, uint32_t token, std::vector<Pair>& pairs) {
  pairs.clear();
  const uint8_t* const row = map + uint64_t{token} * width;
  for (uint32_t begin = 0; begin < width; begin += sizeof(uint64_t)) {
    static_assert(std::endian::native == std::endian::little);
    uint64_t eight = 0;  // most of a map is false
    std::memcpy(&eight, row + begin, std::min<size_t>(width - begin, sizeof(eight)));
    while (eight != 0) {
      const uint32_t byte = static_cast<uint32_t>(std::countr_zero(eight)) / 8;
      pairs.push_back(make_pair(begin + byte, token * width + begin + byte));
      eight &= ~(uint64_t{0xFF} << 8 * byte);
    }
  }
}

// Where an expert is: its domain, and its index among the domain's experts. Members ascend with their ranks, so a
// domain's pairs stay in the order of their experts.
struct Place {
  uint32_t domain;
  uint32_t index;
};

std::vector<Place> places_of(const Topology& topo, uint32_t num_experts) {
  const uint32_t experts_per_rank = num_experts / static_cast<uint32_t>(topo.num_ranks);
  std::vector<Place> places(num_experts);
  for (uint32_t expert = 0; expert < num_experts; ++expert) {
    const uint32_t rank = expert / experts_per_rank;
    places[expert] = {static_cast<uint32_t>(topo.domain_of[rank]),
                      static_cast<uint32_t>(topo.local_of[rank]) * experts_per_rank + expert % experts_per_rank};
  }
  return places;
}

}  // namespace

void check_topk(const Routing& routing, uint32_t num_tokens, uint32_t num_experts) {
  std::vector<Pair> pairs;
  for (uint32_t token = 0; token < num_tokens; ++token)
    pairs_of_topk(static_cast<const int64_t*>(routing.data), routing.width, token, num_experts, pairs);
}

void plan_source(const Topology& topo, uint32_t num_experts, uint32_t num_tokens, const Routing& routing, Plan& plan) {
  if (uint64_t{num_tokens} * routing.width >= UINT32_MAX)
    refuse(std::to_string(num_tokens) + " tokens x " + std::to_string(routing.width) +
           " routing columns: allowed are fewer than 2^32 places");
  plan.routing_kind = routing.kind;
  plan.routing_width = routing.width;
  plan.num_tokens = num_tokens;
  plan.num_experts = num_experts;
  plan.source.assign(topo.members.size(), {});
  for (auto& stream : plan.source) stream.row_pair_begin.push_back(0);
  const std::vector<Place> places = places_of(topo, num_experts);
  std::vector<Pair> pairs;
  for (uint32_t token = 0; token < num_tokens; ++token) {
    if (routing.kind == RoutingKind::kTopk)
      pairs_of_topk(static_cast<const int64_t*>(routing.data), routing.width, token, num_experts, pairs);
    else
      pairs_of_map(static_cast<const uint8_t*>(routing.data), routing.width, token, pairs);
    for (const Pair pair : pairs) {
      const Place place = places[expert_of(pair)];
      SourceStream& stream = plan.source[place.domain];
      if (stream.row_token.empty() || stream.row_token.back() != token) {
        stream.row_token.push_back(token);
        stream.row_pair_begin.push_back(stream.row_pair_begin.back());
      }
      stream.pair_expert.push_back(place.index);
      stream.pair_source.push_back(source_of(pair));
      ++stream.row_pair_begin.back();
    }
  }
}

uint64_t Plan::num_bytes() const {
  auto bytes = [](const auto& v) { return v.size() * sizeof(v[0]); };
  uint64_t total = sizeof(Plan) + bytes(tokens_per_expert) + bytes(tokens_per_expert_exact);
  for (auto& s : source)
    total += bytes(s.row_token) + bytes(s.row_pair_begin) + bytes(s.pair_expert) + bytes(s.pair_source);
  for (auto& s : incoming)
    total += bytes(s.row_pair_begin) + bytes(s.my_row) + bytes(s.my_first_pair) + bytes(s.my_out_begin) +
             bytes(s.my_out) + bytes(s.my_expert) + bytes(s.pair_member);
  return total;
}

}  // namespace uccl_ep
