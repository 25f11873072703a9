#include "transport/verbs/verbs.h"

#include <endian.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "common/clock.h"
#include "sync/flag.h"
#include "transport/registry.h"

namespace uccl_ep {
namespace verbs {
namespace {

constexpr int kCompletionsPerPoll = 64;
// No bell announces arrivals: the longer the idle time, the longer the proxy may nap.
constexpr uint64_t kLeastNapUsec = 20, kMostNapUsec = 1000, kNapsPerPause = 30;
constexpr uint64_t kEventsPeriodUsec = 50'000;

}  // namespace

VerbsTransport::VerbsTransport(const TransportSetup& setup, const NicOptions& options)
    : setup_(setup),
      options_(options),
      processes_(static_cast<size_t>(setup.num_ranks)),
      rail_idx_(static_cast<size_t>(setup.num_ranks), SIZE_MAX) {
  for (size_t i = 0; i < setup.rails.size(); ++i) rail_idx_[static_cast<size_t>(setup.rails[i])] = i;
  const std::vector<HostNic> chosen = nics_of_rank(setup, options, device_names());
  for (const HostNic& nic : chosen) open(nic, chosen.size());
}

void VerbsTransport::open(const HostNic& chosen, size_t num_nics) {
  const std::string& name = chosen.name;
  auto end = std::make_unique<NicEnd>();
  end->options = with_defaults(options_, chosen.family);
  end->nic = std::make_unique<Nic>(name, end->options, setup_, chosen.port);
  Nic& nic = *end->nic;
  nic.register_memory(Memory::kHost, setup_.region, setup_.largest_write_bytes);
  const QueueSizes sizes = end->sizes = queue_sizes(nic, setup_.rails.size(), num_nics);
  const uint32_t room = sizes.writes * static_cast<uint32_t>(setup_.rails.size()) + sizes.arrivals;
  end->completions.reset(ibv_create_cq(nic.context(), static_cast<int>(room), nullptr, nullptr, 0));
  if (!end->completions)
    fail(setup_.rank, -1,
         "NIC " + name + " gives no completion queue of " + std::to_string(room) + ": " + std::strerror(errno));
  const QueuePairOptions options{&end->options, &setup_, sizes, end->completions.get()};
  end->pairs = nic.port().is_efa ? make_srd(nic, options) : make_rc(nic, options);
  end->datagrams = std::make_unique<Datagrams>(nic, end->options, setup_, num_nics);
  end->load = NicLoad(end->options.window_bytes, end->options.window_ops);
  ends_.push_back(std::move(end));
}

void VerbsTransport::register_device(const RegisteredRegion& region) {
  for (auto& end : ends_) end->nic->register_memory(Memory::kDevice, region, setup_.largest_write_bytes);
  has_device_ = true;
}

std::string VerbsTransport::address() const {
  Address a;
  a.rank = setup_.rank;
  a.generation = setup_.generation;
  a.pid = getpid();
  a.pid_namespace = pid_namespace();
  a.boot_id = host_boot_id();
  a.policy = ends_[0]->pairs->completes_in_order() ? "rc" : "srd";
  for (auto& end : ends_) {
    a.nics.push_back(end->nic->address());
    end->pairs->describe(a.nics.back());
    a.nics.back().datagram_pair = end->datagrams->number();
  }
  return encode_address(a);
}

void VerbsTransport::check(int peer, const Address& address) const {
  const std::string who = "rank " + std::to_string(peer);
  if (address.rank != peer)
    fail(setup_.rank, peer, "the address of " + who + " names rank " + std::to_string(address.rank));
  if (address.generation != setup_.generation) fail(setup_.rank, peer, who + " belongs to another engine");
  if (address.nics.size() != ends_.size())
    fail(setup_.rank, peer,
         who + " has " + std::to_string(address.nics.size()) + " NICs, rank " + std::to_string(setup_.rank) + " has " +
             std::to_string(ends_.size()) + ": all ranks need as many");
  const std::string policy = ends_[0]->pairs->completes_in_order() ? "rc" : "srd";
  if (address.policy != policy)
    fail(setup_.rank, peer, who + " speaks " + address.policy + ", rank " + std::to_string(setup_.rank) + " " + policy);
  for (size_t n = 0; n < ends_.size(); ++n)
    if (address.nics[n].is_ethernet != ends_[n]->nic->port().is_ethernet)
      fail(setup_.rank, peer, "NIC " + ends_[n]->nic->name() + " and that of " + who + " are of different networks");
}

void VerbsTransport::connect(const std::vector<std::string>& addresses) {
  std::vector<Address> of_rails(setup_.rails.size());
  const std::string boot_id = host_boot_id();
  for (int peer : setup_.all) {
    Address address = decode_address(addresses.at(static_cast<size_t>(peer)));
    check(peer, address);
    if (address.boot_id == boot_id)
      processes_[static_cast<size_t>(peer)] = ProcessWatch(address.pid, address.pid_namespace);
    for (size_t n = 0; n < ends_.size(); ++n) ends_[n]->datagrams->connect(peer, address.nics[n]);
    if (const size_t idx = rail_idx_[static_cast<size_t>(peer)]; idx != SIZE_MAX) of_rails[idx] = std::move(address);
  }
  size_t most = 0;
  for (auto& end : ends_) {
    make_links(*end, of_rails);
    most += setup_.rails.size() * end->sizes.writes + end->sizes.arrivals;
  }
  ready_.reserve(most);
  last_event_usec_ = now_usec();
}

void VerbsTransport::make_links(NicEnd& end, const std::vector<Address>& rails) {
  const size_t n = static_cast<size_t>(
      std::find_if(ends_.begin(), ends_.end(), [&](auto& r) { return r.get() == &end; }) - ends_.begin());
  for (size_t i = 0; i < rails.size(); ++i) {
    const NicAddress& remote = rails[i].nics[n];
    const Outlet outlet = end.pairs->connect(setup_.rails[i], remote);
    auto shared = std::find_if(end.doorbells.begin(), end.doorbells.end(),
                               [&](auto& doorbell) { return doorbell->qp == outlet.qp; });
    if (shared == end.doorbells.end())
      shared = end.doorbells.insert(shared, std::make_unique<Doorbell>(Doorbell{outlet.qp}));
    end.links.emplace_back(static_cast<uint32_t>(i), setup_.rails[i], end.sizes.writes, end.pairs->completes_in_order(),
                           outlet, shared->get());
    end.remotes.push_back(remote);
  }
  end.waiting.reserve(end.links.size());
}

void VerbsTransport::attach_device(DeviceRegions device) {
  if (!has_device_) fail(setup_.rank, -1, "GPU memory was not registered with the NICs");
  device_ = std::move(device);
}

bool VerbsTransport::has_room(uint64_t num_bytes) const {
  return std::any_of(ends_.begin(), ends_.end(), [&](auto& end) { return end->load.has_room(num_bytes); });
}

size_t VerbsTransport::rail_index(int peer) const {
  const bool known = peer >= 0 && static_cast<size_t>(peer) < rail_idx_.size();
  const size_t idx = known ? rail_idx_[static_cast<size_t>(peer)] : SIZE_MAX;
  if (idx == SIZE_MAX)
    fail(setup_.rank, peer, "rank " + std::to_string(peer) + " is no rail of rank " + std::to_string(setup_.rank));
  return idx;
}

// NICs take turns, so that chunks spread. A NIC without room, or with a broken or full link, is passed over.
VerbsTransport::NicEnd* VerbsTransport::choose_end(const WriteRequest& request, size_t rail_idx) {
  NicEnd* broken = nullptr;
  for (size_t i = 0; i < ends_.size(); ++i) {
    NicEnd& end = *ends_[(next_end_ + i) % ends_.size()];
    const Link& link = end.links[rail_idx];
    if (link.broken() != nullptr) broken = &end;
    if (link.broken() != nullptr || link.full() || end.in_flight >= end.pairs->most_writes() ||
        (request.limited && !end.load.has_room(request.num_bytes)))
      continue;
    next_end_ = (next_end_ + i + 1) % ends_.size();
    return &end;
  }
  // If all links are broken, one of them is chosen, and the write fails at once.
  const bool all_broken =
      std::all_of(ends_.begin(), ends_.end(), [&](auto& end) { return end->links[rail_idx].broken() != nullptr; });
  return all_broken ? broken : nullptr;
}

Write VerbsTransport::write_of(const NicEnd& end, size_t rail_idx, const WriteRequest& request) const {
  const RegisteredMemory& ours = end.nic->memory(request.memory);
  const NicAddress& remote = end.remotes[rail_idx];
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
  const size_t idx = rail_index(request.peer);
  const Write write = write_of(*ends_[0], idx, request);  // checks, before anything is taken
  NicEnd* const end = choose_end(request, idx);
  if (end == nullptr) return PostResult::kAgain;
  Link& link = end->links[idx];
  ++end->in_flight;
  if (write.limited) end->load.take(write.num_bytes);
  if (link.broken() != nullptr)
    tell(*end, request.peer, write, link.broken());
  else if (link.post(end == ends_[0].get() ? write : write_of(*end, idx, request)))
    end->waiting.push_back(static_cast<uint32_t>(idx));
  return PostResult::kPosted;
}

void VerbsTransport::flush() {
  for (auto& end : ends_) {
    for (uint32_t idx : end->waiting) end->links[idx].build_last();
    for (auto& doorbell : end->doorbells) {
      if (!doorbell->open) continue;
      const int error = doorbell->ring();
      if (error == 0) continue;
      for (uint32_t idx : end->waiting)
        if (end->links[idx].doorbell() == doorbell.get()) break_off(*end, end->links[idx], std::strerror(error));
    }
    end->waiting.clear();
  }
}

// NICs take turns, so that a message that is repeated gets through where one of them does not.
PostResult VerbsTransport::send_datagram(int peer, std::span<const uint8_t> bytes) {
  if (bytes.empty() || bytes.size() > kMaxDatagramBytes)
    fail(setup_.rank, peer, "a datagram of " + std::to_string(bytes.size()) + " bytes");
  for (size_t i = 0; i < ends_.size(); ++i) {
    NicEnd& end = *ends_[next_sender_++ % ends_.size()];
    if (end.datagrams->send(peer, bytes)) return PostResult::kPosted;
  }
  const auto failed = [](auto& end) { return !end->datagrams->failure().empty(); };
  if (std::all_of(ends_.begin(), ends_.end(), failed))
    fail(setup_.rank, peer, "no NIC sends datagrams any more: " + ends_[0]->datagrams->failure());
  return PostResult::kAgain;
}

size_t VerbsTransport::receive_datagram(std::span<uint8_t> out) {
  for (size_t i = 0; i < ends_.size(); ++i) {
    const size_t num_bytes = ends_[next_receiver_ % ends_.size()]->datagrams->receive(out);
    if (num_bytes != 0) return num_bytes;
    ++next_receiver_;
  }
  return 0;
}

size_t VerbsTransport::poll(std::span<Completion> out) {
  if (first_ready_ == ready_.size()) {
    ready_.clear();
    first_ready_ = 0;
    read_events();
    for (auto& end : ends_) harvest(*end);
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
  for (auto& end : ends_) end->nic->read_events();
}

std::string VerbsTransport::trouble() const {
  std::string all;
  for (auto& end : ends_)
    if (const std::string its = end->nic->trouble(); !its.empty()) all += (all.empty() ? "" : ", ") + its;
  return all;
}

void VerbsTransport::harvest(NicEnd& end) {
  ibv_wc completions[kCompletionsPerPoll];
  const int count = ibv_poll_cq(end.completions.get(), kCompletionsPerPoll, completions);
  if (count < 0) fail(setup_.rank, -1, "the completion queue of NIC " + end.nic->name() + " cannot be polled");
  for (int i = 0; i < count; ++i) {
    const ibv_wc& completion = completions[i];
    if (completion.wr_id == kReceive || (completion.status == IBV_WC_SUCCESS && (completion.opcode & IBV_WC_RECV) != 0))
      arrived(end, completion);
    else
      completed(end, completion);
  }
  if (end.taken != 0) end.pairs->give_back(end.taken);
  end.taken = 0;
}

void VerbsTransport::arrived(NicEnd& end, const ibv_wc& completion) {
  ++end.taken;
  if (completion.status != IBV_WC_SUCCESS) return;  // a queue pair that ends takes its receives with it
  const int sender = end.pairs->sender_of(completion);
  if (sender < 0 || completion.opcode != IBV_WC_RECV_RDMA_WITH_IMM) {
    ++strangers_;
    return;
  }
  ready_.push_back({Completion::Kind::kArrival, sender, be32toh(completion.imm_data), completion.byte_len, 0, nullptr});
}

void VerbsTransport::completed(NicEnd& end, const ibv_wc& completion) {
  const uint32_t idx = Link::index_of(completion.wr_id);
  if (idx >= end.links.size()) return;
  Link& link = end.links[idx];
  const char* const reason = completion.status == IBV_WC_SUCCESS ? nullptr : reason_for(end, link.peer(), completion);
  const bool broke = link.complete(completion, [&](const Write& write, bool delivered) {
    tell(end, link.peer(), write, delivered ? nullptr : reason);
  });
  if (broke) break_off(end, link, reason);
}

void VerbsTransport::break_off(NicEnd& end, Link& link, const char* reason) {
  end.pairs->cut(link.peer());
  const char* const kept = reasons_.try_emplace({link.peer(), reason}, std::string(reason)).first->second.c_str();
  link.break_off(kept, [&](const Write& write, bool) { tell(end, link.peer(), write, kept); });
}

void VerbsTransport::tell(NicEnd& end, int peer, const Write& write, const char* reason) {
  --end.in_flight;
  if (write.limited) end.load.give_back(write.num_bytes);
  ready_.push_back({reason == nullptr ? Completion::Kind::kWriteDone : Completion::Kind::kFailure, peer, 0,
                    write.num_bytes, write.cookie, reason});
}

const char* VerbsTransport::reason_for(const NicEnd& end, int peer, const ibv_wc& completion) {
  std::string text = std::string(ibv_wc_status_str(completion.status)) + " (NIC " + end.nic->name() +
                     ", vendor error " + std::to_string(completion.vendor_err) + ")";
  if (completion.status == IBV_WC_RETRY_EXC_ERR) {
    const std::string trouble = end.nic->trouble();
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

uint64_t memory_bytes(const TransportOptions&, size_t num_rails, size_t num_all) {
  return queue_bytes(num_rails, num_all);
}

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
