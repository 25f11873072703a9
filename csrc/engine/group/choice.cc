#include "engine/group/choice.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "common/error.h"

namespace uccl_ep {
namespace {

// Transports that reach other hosts, the better first.
constexpr const char* kNetworks[] = {"verbs", "ofi"};

template <typename Key>
using Grouped = std::vector<std::pair<Key, std::vector<int>>>;

// The ranks by what `key_of` says of each, in the order of the first.
template <typename KeyOf>
auto grouped(const std::vector<int>& ranks, KeyOf key_of) {
  Grouped<decltype(key_of(0))> groups;
  for (int rank : ranks) {
    const auto key = key_of(rank);
    auto it = std::find_if(groups.begin(), groups.end(), [&](auto& group) { return group.first == key; });
    if (it == groups.end()) it = groups.insert(it, {key, {}});
    it->second.push_back(rank);
  }
  return groups;
}

// A transport on every rank.
class Offered {
 public:
  Offered(const std::string& name, const std::vector<Place>& places, const std::vector<Offers>& offers)
      : name_(name), places_(places) {
    for (const Offers& of : offers) {
      const auto it = of.find(name);
      probes_.push_back(it != of.end() ? it->second
                                       : Probe{false, "this rank says nothing of it: does it run another version?"});
    }
  }

  const Probe& first() const { return probes_.front(); }
  bool any_tcp() const {
    return !those([](const Probe& probe) { return probe.link == LinkKind::kTcp; }).empty();
  }

  // Why it cannot connect all ranks; "" if it can.
  std::string problem(bool on_gpu) const {
    if (const auto lacking = those([](const Probe& probe) { return !probe.usable; }); !lacking.empty())
      return texts_of(grouped(lacking, [this](int rank) { return of(rank).text; }));
    if (on_gpu && any_tcp()) {
      const auto ranks = those([](const Probe& probe) { return probe.link == LinkKind::kTcp; });
      return ranks_on(ranks, places_) + ": TCP cannot read the memory of a GPU (" + of(ranks[0]).text + ")";
    }
    const auto efa = those([](const Probe& probe) { return probe.link == LinkKind::kEfa; });
    const auto others = those([](const Probe& probe) { return probe.link != LinkKind::kEfa; });
    if (name_ != "verbs" || efa.empty() || others.empty()) return "";
    return "EFA reaches EFA only, and " + ranks_on(efa, places_) + " would use it, " + ranks_on(others, places_) +
           " another";
  }

  std::string mixed_providers() const {
    const auto kinds =
        grouped(those([](const Probe&) { return true; }), [this](int rank) { return of(rank).link == LinkKind::kTcp; });
    if (kinds.size() == 1) return "";
    std::string each;
    for (const auto& [tcp, ranks] : kinds)
      each += (each.empty() ? "" : "; ") + ranks_on(ranks, places_) + ": " + of(ranks[0]).text;
    return "ranks would take providers that cannot talk (" + each + "); set ofi_provider";
  }

 private:
  const Probe& of(int rank) const { return probes_[static_cast<size_t>(rank)]; }
  std::vector<int> those(const std::function<bool(const Probe&)>& holds) const {
    std::vector<int> ranks;
    for (size_t rank = 0; rank < probes_.size(); ++rank)
      if (holds(probes_[rank])) ranks.push_back(static_cast<int>(rank));
    return ranks;
  }
  std::string texts_of(const Grouped<std::string>& groups) const {
    std::string all;
    for (const auto& [text, ranks] : groups) all += (all.empty() ? "" : "; ") + ranks_on(ranks, places_) + ": " + text;
    return all;
  }

  const std::string name_;
  const std::vector<Place>& places_;
  std::vector<Probe> probes_;  // [rank]
};

[[noreturn]] void refuse(const std::string& text) { throw UsageFailure(UsageKind::kConfig, text); }

std::vector<int> all_ranks(const std::vector<Place>& places) {
  std::vector<int> ranks(places.size());
  for (size_t rank = 0; rank < ranks.size(); ++rank) ranks[rank] = static_cast<int>(rank);
  return ranks;
}

Grouped<std::string> by_memory(const std::vector<Place>& places) {
  return grouped(all_ranks(places), [&](int rank) { return places[static_cast<size_t>(rank)].memory; });
}

std::string hosts_of(const std::vector<Place>& places) {
  std::string all;
  for (const auto& [memory, ranks] : by_memory(places)) all += (all.empty() ? "" : "; ") + ranks_on(ranks, places);
  return all;
}

TransportChoice choose_network(const std::vector<Place>& places, const std::vector<Offers>& offers, bool on_gpu) {
  std::string better, lacks;
  for (const std::string name : kNetworks) {
    const Offered offered(name, places, offers);
    if (const std::string problem = offered.problem(on_gpu); !problem.empty()) {
      better += "; not " + name + ": " + problem;
      lacks += name + ": " + problem + "; ";
      continue;
    }
    const bool tcp = name == "ofi" && offered.any_tcp();
    const bool efa = name == "verbs" && offered.first().link == LinkKind::kEfa;
    const std::string what = tcp ? "over TCP, which every rank has" : efa ? "EFA on every rank" : "every rank has it";
    return {name, what + " (rank 0: " + offered.first().text + ")" + better, tcp ? "tcp" : ""};
  }
  refuse("transport = 'auto': nothing connects the hosts of the group (" + hosts_of(places) + "); " + lacks +
         "loop: it copies inside one host");
}

}  // namespace

std::string ranks_on(const std::vector<int>& ranks, const std::vector<Place>& places) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += (text.empty() ? "" : ", ") + std::to_string(ranks[i]);
    if (last > i) text += "-" + std::to_string(ranks[last]);
    i = last + 1;
  }
  const auto hosts = grouped(ranks, [&](int rank) { return places[static_cast<size_t>(rank)].host; });
  std::string names = std::to_string(hosts.size()) + " hosts";
  if (hosts.size() == 1) names = hosts[0].first;
  if (hosts.size() == 2) names = hosts[0].first + " and " + hosts[1].first;
  return std::string(ranks.size() > 1 ? "ranks " : "rank ") + text + " on " + names;
}

TransportChoice choose_transport(const std::string& wanted, const std::vector<Place>& places,
                                 const std::vector<Offers>& offers, int num_domains, bool on_gpu) {
  if (std::find(std::begin(kNetworks), std::end(kNetworks), wanted) != std::end(kNetworks)) {
    const Offered offered(wanted, places, offers);
    std::string problem = offered.problem(on_gpu);
    if (problem.empty()) problem = offered.mixed_providers();
    if (!problem.empty()) refuse("transport = '" + wanted + "': " + problem);
    return {wanted, "it was asked for", ""};
  }
  if (num_domains == 1) return {"loop", "there is one domain, and no row leaves it", ""};
  if (by_memory(places).size() == 1)
    return {"loop",
            "all " + std::to_string(places.size()) + " ranks are on one host, " + places[0].host +
                ": copies in its memory beat the loopback of a NIC",
            ""};
  if (wanted == "loop")
    refuse(
        "transport = 'loop': it copies inside one host, and the ranks are on several, or in containers that share no "
        "memory: " +
        hosts_of(places) + "; allowed is auto, verbs or ofi");
  return choose_network(places, offers, on_gpu);
}

}  // namespace uccl_ep
