#include "engine/group/setup.h"

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <exception>
#include <map>
#include <optional>
#include <type_traits>
#include <utility>

#include "common/error.h"
#include "common/process.h"
#include "engine/group/domains.h"
#include "engine/group/handle.h"

namespace uccl_ep {
namespace {

constexpr char kGood = '+', kFailed = '-';
constexpr const char* kFirstStep = "configuration";

using Settings = std::map<std::string, std::string>;

// What a rank says of itself.
struct Introduction {
  uint64_t generation = 0;
  Place place;
  Settings settings;  // that all ranks must have alike
  Offers offers;
  std::string domain_offer;  // of its DomainProbe; empty where the domains are set
};

template <typename T>
std::string text_of(const T& value) {
  if constexpr (std::is_same_v<T, std::string>) {
    return value;
  } else if constexpr (std::is_arithmetic_v<T>) {
    return std::to_string(value);
  } else {
    std::string text;
    for (const auto& entry : value) text += (text.empty() ? "" : ", ") + text_of(entry);
    return "(" + text + ")";
  }
}

// All but the rank itself, the generation, and the NICs, which are each host's own.
Settings settings_of(const EngineConfig& config) {
  Settings settings;
  const auto add = [&](const auto& structure, const std::string& prefix, const auto& field) {
    const auto& value = structure.*field.member;
    if constexpr (!std::is_same_v<std::decay_t<decltype(value)>, LoopOptions> &&
                  !std::is_same_v<std::decay_t<decltype(value)>, NicOptions>)
      settings[prefix + field.name] = text_of(value);
  };
  std::apply([&](const auto&... field) { (add(config, "", field), ...); }, kFields<EngineConfig>);
  std::apply([&](const auto&... field) { (add(config.loop, "loop.", field), ...); }, kFields<LoopOptions>);
  for (const char* own : {"rank", "generation", "host_of"}) settings.erase(own);
  return settings;
}

std::string encode(const Introduction& said) {
  std::string bytes;
  detail::put(bytes, said.generation);
  detail::put(bytes, said.place.host);
  detail::put(bytes, said.place.memory);
  detail::put(bytes, said.settings.size());
  for (const auto& [name, value] : said.settings) {
    detail::put(bytes, name);
    detail::put(bytes, value);
  }
  detail::put(bytes, said.offers.size());
  for (const auto& [name, probe] : said.offers) {
    detail::put(bytes, name);
    detail::put(bytes, uint64_t{probe.usable});
    detail::put(bytes, probe.text);
    detail::put(bytes, static_cast<uint64_t>(probe.link));
  }
  detail::put(bytes, said.domain_offer);
  return bytes;
}

Introduction decode(const std::string& bytes) {
  detail::Fields fields(bytes);
  Introduction said;
  said.generation = fields.number();
  said.place.host = fields.text();
  said.place.memory = fields.text();
  for (uint64_t left = fields.number(); left > 0; --left) {
    const std::string name = fields.text();
    said.settings[name] = fields.text();
  }
  for (uint64_t left = fields.number(); left > 0; --left) {
    Probe& probe = said.offers[fields.text()];
    probe.usable = fields.number() != 0;
    probe.text = fields.text();
    const uint64_t link = fields.number();
    if (link > static_cast<uint64_t>(LinkKind::kTcp)) throw UsageFailure(UsageKind::kConfig, "no kind of link");
    probe.link = static_cast<LinkKind>(link);
  }
  said.domain_offer = fields.text();
  fields.end();
  return said;
}

uint64_t new_generation() {
  uint64_t generation = 0;
  while (generation == 0)
    if (getrandom(&generation, sizeof(generation), 0) != sizeof(generation)) generation = 0;
  return generation;
}

std::string this_host() {
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  return name;
}

// Where there is no boot id, the host's name has to do.
std::string this_kernel() {
  const std::string boot_id = host_boot_id();
  return boot_id == "unknown" ? this_host() : boot_id;
}

Place this_place() {
  struct stat mount{};
  const bool has = stat("/dev/shm", &mount) == 0;
  return {this_host(), this_kernel() + " " + std::to_string(has ? mount.st_dev : 0)};
}

// Where no row leaves a domain or host, the name is not looked up later.
void check_transport(const std::string& wanted) {
  std::string names = "auto";
  bool is_known = wanted == names;
  for (const TransportKind& kind : transports()) {
    is_known = is_known || wanted == kind.name;
    names += " | " + std::string(kind.name);
  }
  if (is_known) return;
  char shown[32];
  copy_text(shown, wanted);
  throw UsageFailure(UsageKind::kConfig, "transport = '" + std::string(shown) + "': allowed is " + names);
}

// What the steps before the engine's own checks rely on.
void check_group(const EngineConfig& wanted) {
  const auto refuse = [](const std::string& text) { throw UsageFailure(UsageKind::kConfig, text); };
  if (wanted.num_ranks < 1 || wanted.rank < 0 || wanted.rank >= wanted.num_ranks)
    refuse("rank = " + std::to_string(wanted.rank) + " of num_ranks = " + std::to_string(wanted.num_ranks) +
           ": allowed is 0 to num_ranks - 1");
  if (!wanted.domain_of.empty() && wanted.domain_of.size() != static_cast<size_t>(wanted.num_ranks))
    refuse("domain_of = " + text_of(wanted.domain_of) + ": allowed is a domain for each of the " +
           std::to_string(wanted.num_ranks) + " ranks, or none");
  check_transport(wanted.transport);
}

Introduction introduction_of(const EngineConfig& wanted, std::optional<DomainProbe>& probe) {
  check_group(wanted);
  Introduction said;
  said.generation = new_generation();
  said.place = this_place();
  said.settings = settings_of(wanted);
  for (const TransportKind& kind : transports())
    if (wanted.transport == kind.name || (wanted.transport == "auto" && std::string("loop") != kind.name))
      said.offers[kind.name] = kind.probe({wanted.loop, wanted.nic});
  if (wanted.domain_of.empty()) said.domain_offer = probe.emplace(this_kernel()).offer();
  return said;
}

void check_agreement(int rank, const std::vector<Introduction>& said) {
  for (size_t peer = 1; peer < said.size(); ++peer)
    for (const auto& [name, value] : said[0].settings) {
      const auto theirs = said[peer].settings.find(name);
      if (theirs != said[peer].settings.end() && theirs->second == value) continue;
      ErrorRecord record;
      record.kind = ErrorKind::kRankMismatch;
      record.rank = rank;
      record.peer = static_cast<int>(peer);
      record.set_message("ranks disagree on the configuration: rank 0 has " + name + " = " + value + ", rank " +
                         std::to_string(peer) + " has " +
                         (theirs == said[peer].settings.end() ? "no " + name : name + " = " + theirs->second));
      throw CommunicationFailure(record);
    }
}

// Domains that were set have to be such that their ranks can map each other's memory.
void check_domains(const std::vector<int>& domain_of, const std::vector<int>& host_of) {
  std::map<int, size_t> first;  // rank of each domain
  for (size_t rank = 0; rank < host_of.size(); ++rank)
    if (const size_t peer = first.try_emplace(domain_of[rank], rank).first->second; host_of[peer] != host_of[rank])
      throw UsageFailure(UsageKind::kConfig, "domain_of: ranks " + std::to_string(peer) + " and " +
                                                 std::to_string(rank) + " would be of one domain and share no memory");
}

// The probe's segment may go after this step, which a rank leaves only when all have looked.
std::vector<int> find_domains(int rank, const AllGather& all_gather, const DomainProbe& probe,
                              const std::vector<Introduction>& said) {
  std::vector<std::string> offers;
  for (const Introduction& of : said) offers.push_back(of.domain_offer);
  return domains_of(rank, exchange(rank, all_gather, "topology: reach", [&] { return probe.reach(rank, offers); }));
}

// The host of each rank: ranks of one host can map each other's memory.
std::vector<int> hosts_of(const std::vector<Place>& places) {
  std::map<std::string, int> known;
  std::vector<int> host_of;
  for (const Place& place : places)
    host_of.push_back(known.try_emplace(place.memory, static_cast<int>(known.size())).first->second);
  return host_of;
}

int num_domains(const std::vector<int>& domain_of) { return Topology::from_labels(domain_of).num_domains(); }

}  // namespace

std::vector<std::string> exchange(int rank, const AllGather& all_gather, const std::string& step,
                                  const std::function<std::string()>& produce) {
  std::exception_ptr failure;
  std::string mine;
  try {
    mine = kGood + produce();
  } catch (const std::exception& error) {
    failure = std::current_exception();
    mine = kFailed + std::string(error_name(error)) + ": " + error.what();
  }
  std::vector<std::string> said;
  try {
    said = all_gather(mine, step);
  } catch (...) {
    if (failure == nullptr) throw;
  }
  if (failure != nullptr) std::rethrow_exception(failure);
  for (int peer = 0; peer < static_cast<int>(said.size()); ++peer) {
    std::string& theirs = said[static_cast<size_t>(peer)];
    if (theirs.empty() || (theirs[0] != kGood && theirs[0] != kFailed)) malformed(rank, step, peer, theirs);
    if (theirs[0] == kFailed) {
      ErrorRecord record;
      record.kind = ErrorKind::kPeerFailed;
      record.rank = rank;
      record.peer = peer;
      record.set_message("creation, " + step + ": rank " + std::to_string(peer) + " failed with " + theirs.substr(1));
      throw CommunicationFailure(record);
    }
    theirs.erase(0, 1);
  }
  return said;
}

void refuse_creation(int rank, const AllGather& all_gather, const std::exception_ptr& why) {
  exchange(rank, all_gather, kFirstStep, [&]() -> std::string { std::rethrow_exception(why); });
  std::rethrow_exception(why);  // not reached: the step throws it
}

SetUp set_up(const EngineConfig& wanted, bool on_gpu, const AllGather& all_gather,
             const std::function<std::unique_ptr<Engine>(const EngineConfig&)>& make) {
  const int rank = wanted.rank;
  std::vector<Introduction> said;
  std::vector<Place> places;
  std::vector<Offers> offers;
  std::optional<DomainProbe> probe;
  const auto all = exchange(rank, all_gather, kFirstStep, [&] { return encode(introduction_of(wanted, probe)); });
  if (all.size() != static_cast<size_t>(wanted.num_ranks))
    throw UsageFailure(UsageKind::kConfig, "the all-gather gave the bytes of " + std::to_string(all.size()) +
                                               " ranks: allowed are num_ranks = " + std::to_string(wanted.num_ranks));
  for (int peer = 0; peer < wanted.num_ranks; ++peer) {
    try {
      said.push_back(decode(all[static_cast<size_t>(peer)]));
    } catch (const UsageFailure&) {
      malformed(rank, kFirstStep, peer, all[static_cast<size_t>(peer)]);
    }
    places.push_back(said.back().place);
    offers.push_back(said.back().offers);
  }
  check_agreement(rank, said);

  SetUp made{nullptr, wanted, {}};
  EngineConfig& config = made.config;
  config.generation = said[0].generation;
  config.host_of = hosts_of(places);
  if (config.domain_of.empty())
    config.domain_of = find_domains(rank, all_gather, *probe, said);
  else
    check_domains(config.domain_of, config.host_of);
  probe.reset();
  made.transport = choose_transport(config.transport, places, offers, num_domains(config.domain_of), on_gpu);
  config.transport = made.transport.name;
  if (config.nic.provider.empty()) config.nic.provider = made.transport.provider;

  std::vector<std::string> handles;
  const auto step = [&](const char* name, const std::function<void()>& act) {
    exchange(rank, all_gather, name, [&] {
      act();
      return std::string();
    });
  };
  try {
    handles = exchange(rank, all_gather, "allocate", [&] {
      made.engine = make(config);
      return made.engine->export_handle();
    });
    step("connect", [&] { made.engine->connect(handles); });
    // It waits for peers, so it begins when all have connected.
    if (on_gpu) step("share memory", [&] { made.engine->share_memory([] {}); });
    // It removes the names under which peers find the memory: only now has everybody mapped it.
    step("start", [&] { made.engine->start(); });
  } catch (...) {
    if (made.engine != nullptr) made.engine->close(true);
    throw;
  }
  return made;
}

}  // namespace uccl_ep
