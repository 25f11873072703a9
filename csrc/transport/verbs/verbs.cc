#include "transport/verbs/verbs.h"

#include <endian.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "sync/flag.h"
#include "transport/registry.h"

namespace uccl_ep {
namespace verbs {
namespace {

constexpr uint32_t kMostWrites = 256;     // in flight to a peer
constexpr uint32_t kLeastWrites = 8;
constexpr uint32_t kMostArrivals = 4096;  // between two polls
constexpr int kCompletionsPerPoll = 64;
// No bell announces arrivals: the longer the idle time, the longer the proxy may nap.
constexpr uint64_t kLeastNapUsec = 20, kMostNapUsec = 1000, kNapsPerPause = 30;
constexpr uint64_t kEventsPeriodUsec = 50'000;

}  // namespace

VerbsTransport::VerbsTransport(const TransportSetup& setup, const NicOptions& options)
    : setup_(setup),
      options_(options),
      processes_(static_cast<size_t>(setup.num_ranks)),
      peer_idx_(static_cast<size_t>(setup.num_ranks), SIZE_MAX) {
  for (size_t i = 0; i < setup.peers.size(); ++i) peer_idx_[static_cast<size_t>(setup.peers[i])] = i;
  for (const HostNic& chosen : nics_of_rank(setup, options, device_names())) open(chosen);
}

void VerbsTransport::open(const HostNic& chosen) {
  const std::string& name = chosen.name;
  auto rail = std::make_unique<Rail>();
  rail->options = with_defaults(options_, chosen.family);
  rail->nic = std::make_unique<Nic>(name, rail->options, setup_, chosen.port);
  Nic& nic = *rail->nic;
  nic.register_memory(Memory::kHost, setup_.region, setup_.largest_write_bytes);
  const QueueSizes sizes = sizes_for(nic);
  const uint32_t room = sizes.writes * static_cast<uint32_t>(setup_.peers.size()) + sizes.arrivals;
  rail->completions.reset(ibv_create_cq(nic.context(), static_cast<int>(room), nullptr, nullptr, 0));
  if (!rail->completions)
    fail(setup_.rank, -1,
         "NIC " + name + " gives no completion queue of " + std::to_string(room) + ": " + std::strerror(errno));
  const QueuePairOptions options{&rail->options, &setup_, sizes, rail->completions.get()};
  rail->pairs = nic.port().is_efa ? make_srd(nic, options) : make_rc(nic, options);
  rail->load = NicLoad(rail->options.window_bytes, rail->options.window_ops);
  rails_.push_back(std::move(rail));
}

// The completion queue has an entry for everything that may be in flight, so that no completion is ever lost.
QueueSizes VerbsTransport::sizes_for(const Nic& nic) const {
  const auto& limits = nic.limits();
  const uint32_t peers = std::max<uint32_t>(1, static_cast<uint32_t>(setup_.peers.size()));
  QueueSizes sizes;
  sizes.arrivals = std::min({kMostArrivals, static_cast<uint32_t>(limits.max_cqe) / 2,
                             limits.max_srq_wr > 0 ? static_cast<uint32_t>(limits.max_srq_wr) : kMostArrivals});
  const uint32_t left = (static_cast<uint32_t>(limits.max_cqe) - sizes.arrivals) / peers;
  sizes.writes = std::min({kMostWrites, left, static_cast<uint32_t>(limits.max_qp_wr)});
  if (sizes.writes < kLeastWrites)
    throw UsageFailure(UsageKind::kConfig, "verbs: NIC " + nic.name() + " has room for " +
                                               std::to_string(sizes.writes) + " writes to each of " +
                                               std::to_string(peers) + " peers, at least " +
                                               std::to_string(kLeastWrites) + " are needed");
  return sizes;
}

void VerbsTransport::register_device(const RegisteredRegion& region) {
  for (auto& rail : rails_) rail->nic->register_memory(Memory::kDevice, region, setup_.largest_write_bytes);
  has_device_ = true;
}

std::string VerbsTransport::address() const {
  Address a;
  a.rank = setup_.rank;
  a.generation = setup_.generation;
  a.pid = getpid();
  a.pid_namespace = pid_namespace();
  a.boot_id = host_boot_id();
  a.policy = rails_[0]->pairs->completes_in_order() ? "rc" : "srd";
  for (auto& rail : rails_) {
    a.nics.push_back(rail->nic->address());
    rail->pairs->describe(a.nics.back());
  }
  return encode_address(a);
}

void VerbsTransport::check(int peer, const Address& address) const {
  const std::string who = "rank " + std::to_string(peer);
  if (address.rank != peer)
    fail(setup_.rank, peer, "the address of " + who + " names rank " + std::to_string(address.rank));
  if (address.generation != setup_.generation) fail(setup_.rank, peer, who + " belongs to another engine");
  if (address.nics.size() != rails_.size())
    fail(setup_.rank, peer,
         who + " has " + std::to_string(address.nics.size()) + " NICs, rank " + std::to_string(setup_.rank) + " has " +
             std::to_string(rails_.size()) + ": all ranks need as many");
  const std::string policy = rails_[0]->pairs->completes_in_order() ? "rc" : "srd";
  if (address.policy != policy)
    fail(setup_.rank, peer, who + " speaks " + address.policy + ", rank " + std::to_string(setup_.rank) + " " + policy);
  for (size_t n = 0; n < rails_.size(); ++n)
    if (address.nics[n].is_ethernet != rails_[n]->nic->port().is_ethernet)
      fail(setup_.rank, peer, "NIC " + rails_[n]->nic->name() + " and that of " + who + " are of different networks");
}

void VerbsTransport::connect(const std::vector<std::string>& addresses) {
  std::vector<Address> peers;
  const std::string boot_id = host_boot_id();
  for (int peer : setup_.peers) {
    peers.push_back(decode_address(addresses.at(static_cast<size_t>(peer))));
    check(peer, peers.back());
    if (peers.back().boot_id == boot_id)
      processes_[static_cast<size_t>(peer)] = ProcessWatch(peers.back().pid, peers.back().pid_namespace);
  }
  size_t most = 0;
  for (auto& rail : rails_) {
    make_links(*rail, peers);
    most += setup_.peers.size() * kMostWrites + kMostArrivals;
  }
  ready_.reserve(most);
  last_event_usec_ = now_usec();
}

void VerbsTransport::make_links(Rail& rail, const std::vector<Address>& addresses) {
  const size_t n = static_cast<size_t>(
      std::find_if(rails_.begin(), rails_.end(), [&](auto& r) { return r.get() == &rail; }) - rails_.begin());
  const uint32_t depth = sizes_for(*rail.nic).writes;
  for (size_t i = 0; i < addresses.size(); ++i) {
    const NicAddress& remote = addresses[i].nics[n];
    const Outlet outlet = rail.pairs->connect(setup_.peers[i], remote);
    auto shared = std::find_if(rail.doorbells.begin(), rail.doorbells.end(),
                               [&](auto& doorbell) { return doorbell->qp == outlet.qp; });
    if (shared == rail.doorbells.end())
      shared = rail.doorbells.insert(shared, std::make_unique<Doorbell>(Doorbell{outlet.qp}));
    rail.links.emplace_back(static_cast<uint32_t>(i), setup_.peers[i], depth, rail.pairs->completes_in_order(), outlet,
                            shared->get());
    rail.remotes.push_back(remote);
  }
  rail.waiting.reserve(rail.links.size());
}

void VerbsTransport::attach_device(DeviceRegions device) {
  if (!has_device_) fail(setup_.rank, -1, "GPU memory was not registered with the NICs");
  device_ = std::move(device);
}

bool VerbsTransport::has_room(uint64_t num_bytes) const {
  return std::any_of(rails_.begin(), rails_.end(), [&](auto& rail) { return rail->load.has_room(num_bytes); });
}

size_t VerbsTransport::peer_index(int peer) const {
  const bool known = peer >= 0 && static_cast<size_t>(peer) < peer_idx_.size();
  const size_t idx = known ? peer_idx_[static_cast<size_t>(peer)] : SIZE_MAX;
  if (idx == SIZE_MAX) fail(setup_.rank, peer, "rank " + std::to_string(peer) + " is not connected");
  return idx;
}

// NICs take turns, so that chunks spread. A NIC without room, or with a broken or full link, is passed over.
VerbsTransport::Rail* VerbsTransport::choose_rail(const WriteRequest& request, size_t peer_idx) {
  Rail* broken = nullptr;
  for (size_t i = 0; i < rails_.size(); ++i) {
    Rail& rail = *rails_[(next_rail_ + i) % rails_.size()];
    const Link& link = rail.links[peer_idx];
    if (link.broken() != nullptr) broken = &rail;
    if (link.broken() != nullptr || link.full() || rail.in_flight >= rail.pairs->most_writes() ||
        (request.limited && !rail.load.has_room(request.num_bytes)))
      continue;
    next_rail_ = (next_rail_ + i + 1) % rails_.size();
    return &rail;
  }
  // If all links are broken, one of them is chosen, and the write fails at once.
  const bool all_broken =
      std::all_of(rails_.begin(), rails_.end(), [&](auto& rail) { return rail->links[peer_idx].broken() != nullptr; });
  return all_broken ? broken : nullptr;
}

Write VerbsTransport::write_of(const Rail& rail, size_t peer_idx, const WriteRequest& request) const {
  const RegisteredMemory& ours = rail.nic->memory(request.memory);
  const NicAddress& remote = rail.remotes[peer_idx];
  const MemoryAddress& theirs = request.memory == Memory::kHost ? remote.host : remote.device;
  auto outside = [&](uint64_t offset, uint64_t bytes) {
    return request.num_bytes > bytes || offset > bytes - request.num_bytes;
  };
  if (request.num_bytes > setup_.largest_write_bytes ||
      (request.num_bytes != 0 &&
       (outside(request.local_offset, ours.num_bytes()) || outside(request.remote_offset, theirs.num_bytes))))
    fail(setup_.rank, request.peer,
         "a write of " + std::to_string(request.num_bytes) + " bytes leaves the " +
             (request.memory == Memory::kHost ? "region" : "device region") + ": local offset " +
             std::to_string(request.local_offset) + ", remote " + std::to_string(request.remote_offset));
  Write write;
  write.cookie = request.cookie;
  write.num_bytes = request.num_bytes;
  write.immediate = request.immediate;
  write.limited = request.limited;
  // Even a write without bytes needs a valid address.
  const MemoryAddress& target = request.num_bytes != 0 ? theirs : remote.host;
  const uint64_t offset = request.num_bytes != 0 ? request.remote_offset : 0;
  write.to = target.base + offset;
  write.remote_key = target.key_of(offset);
  if (request.num_bytes != 0) {
    write.from = ours.at(request.local_offset);
    write.local_key = ours.local_key_of(request.local_offset);
  }
  return write;
}

PostResult VerbsTransport::post_write(const WriteRequest& request) {
  const size_t idx = peer_index(request.peer);
  const Write write = write_of(*rails_[0], idx, request);  // checks, before anything is taken
  Rail* const rail = choose_rail(request, idx);
  if (rail == nullptr) return PostResult::kAgain;
  Link& link = rail->links[idx];
  ++rail->in_flight;
  if (write.limited) rail->load.take(write.num_bytes);
  if (link.broken() != nullptr)
    tell(*rail, request.peer, write, link.broken());
  else if (link.post(rail == rails_[0].get() ? write : write_of(*rail, idx, request)))
    rail->waiting.push_back(static_cast<uint32_t>(idx));
  return PostResult::kPosted;
}

void VerbsTransport::flush() {
  for (auto& rail : rails_) {
    for (uint32_t idx : rail->waiting) rail->links[idx].build_last();
    for (auto& doorbell : rail->doorbells) {
      if (!doorbell->open) continue;
      const int error = doorbell->ring();
      if (error == 0) continue;
      for (uint32_t idx : rail->waiting)
        if (rail->links[idx].doorbell() == doorbell.get()) break_off(*rail, rail->links[idx], std::strerror(error));
    }
    rail->waiting.clear();
  }
}

size_t VerbsTransport::poll(std::span<Completion> out) {
  if (first_ready_ == ready_.size()) {
    ready_.clear();
    first_ready_ = 0;
    read_events();
    for (auto& rail : rails_) harvest(*rail);
    if (device_.nic_writes != nullptr && !ready_.empty()) device_.nic_writes->flush();
  }
  const size_t count = std::min(out.size(), ready_.size() - first_ready_);
  std::copy_n(ready_.begin() + static_cast<ptrdiff_t>(first_ready_), count, out.begin());
  first_ready_ += count;
  if (count != 0) last_event_usec_ = now_usec();
  return count;
}

void VerbsTransport::read_events() {
  const uint64_t now = now_usec();
  if (now < next_events_usec_) return;
  next_events_usec_ = now + kEventsPeriodUsec;
  for (auto& rail : rails_) rail->nic->read_events();
}

std::string VerbsTransport::trouble() const {
  std::string all;
  for (auto& rail : rails_)
    if (const std::string its = rail->nic->trouble(); !its.empty()) all += (all.empty() ? "" : ", ") + its;
  return all;
}

void VerbsTransport::harvest(Rail& rail) {
  ibv_wc completions[kCompletionsPerPoll];
  const int count = ibv_poll_cq(rail.completions.get(), kCompletionsPerPoll, completions);
  if (count < 0) fail(setup_.rank, -1, "the completion queue of NIC " + rail.nic->name() + " cannot be polled");
  for (int i = 0; i < count; ++i) {
    const ibv_wc& completion = completions[i];
    if (completion.wr_id == kReceive || (completion.status == IBV_WC_SUCCESS && (completion.opcode & IBV_WC_RECV) != 0))
      arrived(rail, completion);
    else
      completed(rail, completion);
  }
  if (rail.taken != 0) rail.pairs->give_back(rail.taken);
  rail.taken = 0;
}

void VerbsTransport::arrived(Rail& rail, const ibv_wc& completion) {
  ++rail.taken;
  if (completion.status != IBV_WC_SUCCESS) return;  // a queue pair that ends takes its receives with it
  const int sender = rail.pairs->sender_of(completion);
  if (sender < 0 || completion.opcode != IBV_WC_RECV_RDMA_WITH_IMM) {
    ++strangers_;
    return;
  }
  ready_.push_back({Completion::Kind::kArrival, sender, be32toh(completion.imm_data), completion.byte_len, 0, nullptr});
}

void VerbsTransport::completed(Rail& rail, const ibv_wc& completion) {
  const uint32_t idx = Link::index_of(completion.wr_id);
  if (idx >= rail.links.size()) return;
  Link& link = rail.links[idx];
  const char* const reason = completion.status == IBV_WC_SUCCESS ? nullptr : reason_for(rail, link.peer(), completion);
  const bool broke = link.complete(completion, [&](const Write& write, bool delivered) {
    tell(rail, link.peer(), write, delivered ? nullptr : reason);
  });
  if (broke) break_off(rail, link, reason);
}

void VerbsTransport::break_off(Rail& rail, Link& link, const char* reason) {
  rail.pairs->cut(link.peer());
  const char* const kept = reasons_.try_emplace({link.peer(), reason}, std::string(reason)).first->second.c_str();
  link.break_off(kept, [&](const Write& write, bool) { tell(rail, link.peer(), write, kept); });
}

void VerbsTransport::tell(Rail& rail, int peer, const Write& write, const char* reason) {
  --rail.in_flight;
  if (write.limited) rail.load.give_back(write.num_bytes);
  ready_.push_back({reason == nullptr ? Completion::Kind::kWriteDone : Completion::Kind::kFailure, peer, 0,
                    write.num_bytes, write.cookie, reason});
}

const char* VerbsTransport::reason_for(const Rail& rail, int peer, const ibv_wc& completion) {
  std::string text = std::string(ibv_wc_status_str(completion.status)) + " (NIC " + rail.nic->name() +
                     ", vendor error " + std::to_string(completion.vendor_err) + ")";
  if (completion.status == IBV_WC_RETRY_EXC_ERR) {
    const std::string trouble = rail.nic->trouble();
    text += ": " + (trouble.empty() ? "the peer is gone, its link is cut, or too much was in flight "
                                      "(UCCL_IB_MAX_INFLIGHT_BYTES)"
                                    : trouble);
  }
  return reasons_.try_emplace({peer, text}, text).first->second.c_str();
}

uint64_t VerbsTransport::idle_usec() const {
  if (first_ready_ != ready_.size()) return 0;
  return std::clamp((now_usec() - last_event_usec_) / kNapsPerPause, kLeastNapUsec, kMostNapUsec);
}

namespace {

uint64_t memory_bytes(const TransportOptions&, size_t) { return 0; }

std::unique_ptr<Transport> make(const TransportSetup& setup, const TransportOptions& options) {
  return std::make_unique<VerbsTransport>(setup, options.nic);
}

Probe probe(const TransportOptions& options) {
  try {
    std::vector<std::string> names = options.nic.devices.empty() ? device_names() : options.nic.devices;
    if (names.empty()) return {false, "this host has no RDMA NIC"};
    std::string usable, why;
    LinkKind link = LinkKind::kRdma;
    for (const std::string& name : names) {
      try {
        const Nic nic(name, options.nic, {});
        if (nic.port().is_efa) link = LinkKind::kEfa;
        usable += (usable.empty() ? "" : ", ") + name + (nic.port().is_efa ? " (EFA SRD)" : " (RC)");
      } catch (const std::exception& failure) {
        why += (why.empty() ? "" : "; ") + std::string(failure.what());
      }
    }
    // All NICs that the options name must be usable.
    if (usable.empty() || (!options.nic.devices.empty() && !why.empty())) return {false, why};
    return {true, usable, link};
  } catch (const std::exception& failure) {
    return {false, failure.what()};
  }
}

const RegisterTransport registered({"verbs", make, memory_bytes, probe});

}  // namespace
}  // namespace verbs
}  // namespace uccl_ep
