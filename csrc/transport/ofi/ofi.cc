#include "transport/ofi/ofi.h"

#include <unistd.h>

#include <algorithm>
#include <random>

#include "common/clock.h"
#include "transport/registry.h"

namespace uccl_ep {
namespace ofi {
namespace {

// Arrivals that may wait to be polled; a full queue stalls its provider.
constexpr uint32_t kQueuedArrivals = 4096;
// No bell announces arrivals: the longer the idle time, the longer the proxy may nap.
constexpr uint64_t kNapsPerPause = 30;
constexpr uint64_t kLeastNapUsec = 20;
constexpr uint64_t kMostNapUsec = 1000;
constexpr uint64_t kParkedRetryUsec = 50;
// Our bytes in flight move only while we poll. If no peer takes any for longer than this, the proxy may nap.
constexpr uint64_t kAwakeUsec = 2000;

uint64_t random_bits() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

Naming naming_of(const fi_info& info, Naming wanted, const TransportSetup& setup) {
  const bool tags = info.domain_attr->cq_data_size >= sizeof(uint64_t) &&
                    Tags::suffice(setup.largest_write_bytes, static_cast<uint32_t>(setup.num_ranks));
  if (wanted == Naming::kTag && !tags) return Naming::kMessage;
  if (wanted == Naming::kSource && (info.caps & kFiSource) == 0) return Naming::kMessage;
  return wanted;
}

bool leaves(uint64_t offset, uint64_t num_bytes, uint64_t bytes) {
  return num_bytes > bytes || offset > bytes - num_bytes;
}

bool in_one_piece(uint64_t offset, uint64_t num_bytes, uint64_t bytes, uint64_t stride_bytes) {
  return bytes <= kMaxPieceBytes || offset % stride_bytes + num_bytes <= kMaxPieceBytes;
}

}  // namespace

OfiTransport::OfiTransport(const TransportSetup& setup, const NicOptions& options, const Naming* naming)
    : setup_(setup),
      options_(options),
      latest_usec_(now_usec()),
      ops_(std::make_unique<Post[]>(kNumOps)),
      receives_(std::make_unique<Receive[]>(kNumReceives)),
      sends_(std::make_unique<Send[]>(kNumSends)) {
  if (setup.region.bytes == 0) fail(setup.rank, -1, "a region without bytes cannot be registered");
  for (uint32_t idx = 0; idx < kNumOps; ++idx) push(free_, idx);
  auto offers = choose_offers({&options_, !setup.near_pci.empty(), setup.near_pci, setup.local_idx});
  if (offers.size() > kMaxNics) offers.resize(kMaxNics);
  own_.rank = setup.rank;
  own_.generation = setup.generation;
  own_.provider = offers[0].provider();
  own_.pid = static_cast<int>(getpid());
  own_.pid_namespace = pid_namespace();
  own_.boot_id = host_boot_id();
  own_.naming = naming_of(*offers[0].info, naming != nullptr ? *naming : offers[0].family.naming, setup);
  own_.secret = random_bits();
  if (own_.naming == Naming::kTag) own_.size_bits = Tags::size_bits_for(setup.largest_write_bytes);
  tags_ = Tags(own_.size_bits, own_.secret);
  open(std::move(offers));
}

OfiTransport::~OfiTransport() = default;

void OfiTransport::open(std::vector<Offer> offers) {
  for (Offer& offer : offers) {
    Nic nic;
    nic.endpoint = std::make_unique<Endpoint>(std::move(offer), setup_.rank, kQueuedArrivals);
    nic.region = &nic.endpoint->add_host(setup_.region, setup_.largest_write_bytes);
    nic.op_desc = nic.endpoint->add_private(ops_.get(), kNumOps * sizeof(Post)).desc(0);
    nic.receive_desc = nic.endpoint->add_private(receives_.get(), kNumReceives * sizeof(Receive)).desc(0);
    nic.send_desc = nic.endpoint->add_private(sends_.get(), kNumSends * sizeof(Send)).desc(0);
    nic.load = {options_.window_bytes, options_.window_ops};
    own_.nics.push_back({nic.endpoint->name(), nic.region->remote(), {}});
    nics_.push_back(std::move(nic));
  }
  open_datagrams();
}

void OfiTransport::register_device(const RegisteredRegion& region) {
  for (size_t i = 0; i < nics_.size(); ++i) {
    nics_[i].device = &nics_[i].endpoint->add_device(region, setup_.largest_write_bytes);
    own_.nics[i].device = nics_[i].device->remote();
  }
}

void OfiTransport::connect(const std::vector<std::string>& addresses) {
  peers_ = std::vector<Peer>(addresses.size());
  for (int peer : setup_.all) {
    if (peer < 0 || static_cast<size_t>(peer) >= addresses.size() || peer == own_.rank)
      fail(own_.rank, peer, "rank " + std::to_string(peer) + " is no peer of rank " + std::to_string(own_.rank));
    connect_peer(peer, addresses[static_cast<size_t>(peer)]);
  }
}

void OfiTransport::connect_peer(int rank, const std::string& text) {
  Address address = decode_address(text);
  const std::string who = "the address of rank " + std::to_string(rank);
  if (address.rank != rank) fail(own_.rank, rank, who + " names rank " + std::to_string(address.rank));
  if (address.generation != own_.generation)
    fail(own_.rank, rank,
         who + " is of another engine: its generation is " + std::to_string(address.generation) + ", ours " +
             std::to_string(own_.generation));
  if (address.provider != own_.provider)
    fail(own_.rank, rank, who + " is of provider " + address.provider + ", ours is " + own_.provider);
  Peer& peer = peers_[static_cast<size_t>(rank)];
  peer.is_rail = std::find(setup_.rails.begin(), setup_.rails.end(), rank) != setup_.rails.end();
  connect_nics(rank, address);
  if (address.boot_id == own_.boot_id && address.boot_id != "unknown")
    peer.process = ProcessWatch(address.pid, address.pid_namespace);
  peer.tags = Tags(address.size_bits, address.secret);
  peer.address = std::move(address);
  peer.connected = true;
}

void OfiTransport::connect_nics(int rank, const Address& address) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  for (Nic& nic : nics_) {
    const NicAddress& theirs = address.nics[peer.endpoints.size() % address.nics.size()];
    const fi_addr_t endpoint = nic.endpoint->insert(theirs.name, rank);
    peer.endpoints.push_back(endpoint);
    if (!peer.is_rail) continue;
    // Any NIC of a rail may write to this NIC.
    for (const NicAddress& other : address.nics) {
      const fi_addr_t source = &other == &theirs ? endpoint : nic.endpoint->insert(other.name, rank);
      if (nic.rank_of.size() <= source) nic.rank_of.resize(source + 1, -1);
      nic.rank_of[source] = rank;
    }
  }
}

bool OfiTransport::peer_alive(int peer) const { return peers_[static_cast<size_t>(peer)].process.alive(); }

const RemoteMemory& OfiTransport::remote_of(const Peer& peer, uint32_t nic, Memory memory) const {
  const NicAddress& theirs = peer.address.nics[nic % peer.address.nics.size()];
  return memory == Memory::kHost ? theirs.region : theirs.device;
}

OfiTransport::Peer& OfiTransport::checked_peer(const WriteRequest& request) {
  const bool known = request.peer >= 0 && static_cast<size_t>(request.peer) < peers_.size() &&
                     peers_[static_cast<size_t>(request.peer)].is_rail;
  if (!known)
    fail(own_.rank, request.peer,
         "rank " + std::to_string(request.peer) + " is no rail of rank " + std::to_string(own_.rank));
  Peer& peer = peers_[static_cast<size_t>(request.peer)];
  if (request.num_bytes == 0) return peer;
  const RegisteredMemory* local = request.memory == Memory::kHost ? nics_[0].region : nics_[0].device;
  const RemoteMemory& remote = remote_of(peer, 0, request.memory);
  auto refuse = [&](const char* why) {
    fail(own_.rank, request.peer,
         "a write of " + std::to_string(request.num_bytes) + " bytes " + why +
             (request.memory == Memory::kHost ? " the region" : " the device region") + ": local offset " +
             std::to_string(request.local_offset) + ", remote " + std::to_string(request.remote_offset));
  };
  if (local == nullptr || leaves(request.local_offset, request.num_bytes, local->bytes()) ||
      leaves(request.remote_offset, request.num_bytes, remote.bytes))
    refuse("leaves");
  const bool tellable = peer.address.naming != Naming::kTag || request.num_bytes >> peer.address.size_bits == 0;
  if (!tellable ||
      !in_one_piece(request.local_offset, request.num_bytes, local->bytes(), local->remote().stride_bytes) ||
      !in_one_piece(request.remote_offset, request.num_bytes, remote.bytes, remote.stride_bytes))
    refuse("is larger than was announced for");
  return peer;
}

bool OfiTransport::has_room(uint64_t num_bytes) const {
  return std::any_of(nics_.begin(), nics_.end(), [&](const Nic& nic) { return nic.load.has_room(num_bytes); });
}

// NICs take turns; a limited write goes to the next one with room, if there is one.
uint32_t OfiTransport::choose_nic(const WriteRequest& request) {
  const uint32_t count = static_cast<uint32_t>(nics_.size());
  uint32_t chosen = next_nic_ % count;
  for (uint32_t i = 0; request.limited && i < count; ++i) {
    const uint32_t candidate = (next_nic_ + i) % count;
    if (!nics_[candidate].load.has_room(request.num_bytes)) continue;
    chosen = candidate;
    break;
  }
  next_nic_ = chosen + 1;
  return chosen;
}

PostResult OfiTransport::post_write(const WriteRequest& request) {
  Peer& peer = checked_peer(request);
  if (!peer.parked.empty() || free_.empty()) return PostResult::kAgain;
  const uint32_t nic_idx = choose_nic(request);
  Nic& nic = nics_[nic_idx];
  submit_held(nic, kFiMore);
  if (!peer.parked.empty()) return PostResult::kAgain;
  const uint32_t idx = pop(free_);
  Post& op = ops_[idx];
  op.request = request;
  op.refused_since_usec = 0;
  op.nic = nic_idx;
  op.written = false;
  op.reason = nullptr;
  if (request.limited) nic.load.take(request.num_bytes);
  ++num_in_flight_;
  nic.held = idx;
  return PostResult::kPosted;
}

uint64_t OfiTransport::idle_usec() const {
  if (!failed_.empty()) return 0;
  const uint64_t quiet_usec = now_usec() - latest_usec_;
  if (num_parked_ != 0) return kParkedRetryUsec;
  if (num_in_flight_ != 0 && quiet_usec < kAwakeUsec) return 0;
  return std::clamp(quiet_usec / kNapsPerPause, kLeastNapUsec, kMostNapUsec);
}

uint64_t OfiTransport::memory_bytes(size_t num_all) {
  return kNumOps * sizeof(Post) + kNumReceives * sizeof(Receive) + kNumSends * sizeof(Send) + num_all * sizeof(Peer);
}

}  // namespace ofi

namespace {

// libfabric says nothing of what its providers allocate.
uint64_t memory_bytes(const TransportOptions&, size_t, size_t num_all) {
  return ofi::OfiTransport::memory_bytes(num_all);
}

std::unique_ptr<Transport> make(const TransportSetup& setup, const TransportOptions& options) {
  return std::make_unique<ofi::OfiTransport>(setup, options.nic);
}

// An unknown provider was requested by name and counts as a NIC's.
LinkKind link_of(const std::string& provider) {
  const std::string core = provider.substr(0, provider.find(';'));
  if (core == "efa") return LinkKind::kEfa;
  return core == "tcp" || core == "sockets" || core == "udp" ? LinkKind::kTcp : LinkKind::kRdma;
}

Probe probe(const TransportOptions& options) {
  try {
    const auto offers = ofi::choose_offers({&options.nic, false, "", 0});
    return {true, ofi::offers_text(offers), link_of(offers[0].provider())};
  } catch (const UsageFailure& failure) {
    return {false, failure.what()};
  }
}

const RegisterTransport registered({"ofi", make, memory_bytes, probe});

}  // namespace
}  // namespace uccl_ep
