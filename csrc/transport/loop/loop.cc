#include "transport/loop/loop.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "common/clock.h"
#include "transport/failure.h"
#include "transport/registry.h"

namespace uccl_ep {
namespace loop {
namespace {

// A poll copies no more than this, so that the proxy's other duties wait for microseconds only.
constexpr uint64_t kCopyBytesPerPoll = 1 << 20;
// A full inbox is checked again after this time, because its owner cannot notify waiting senders.
constexpr uint64_t kStalledRetryUsec = 200;
constexpr uint64_t kDisorderNsec = 100'000;

[[noreturn]] void fail(int rank, int peer, const std::string& text) { fail_transport("loop", rank, peer, text); }

}  // namespace

LoopTransport::LoopTransport(const TransportSetup& setup, const TransportOptions& options)
    : region_(setup.region),
      options_(options.loop),
      inbox_(Mapping::create()),
      load_(options.nic.window_bytes, options.nic.window_ops),
      rails_(setup.rails),
      all_(setup.all),
      link_(options_.gbytes_per_s),
      random_(options_.seed * 1000003 + static_cast<uint64_t>(setup.rank)),
      progress_timeout_usec_(setup.progress_timeout_usec) {
  options_.queue_depth = std::max(options_.queue_depth, 1u);
  own_ = {setup.rank,      setup.generation, static_cast<int>(getpid()),
          pid_namespace(), host_boot_id(),   region_.name,
          region_.bytes,   inbox_.name(),    std::bit_ceil(options_.queue_depth)};
}

void LoopTransport::connect(const std::vector<std::string>& addresses) {
  inbox_.grow(inbox_bytes(own_.inbox_slots, addresses.size()));
  inbox_.reserve(0, kInboxMarksBytes);
  marks_ = reinterpret_cast<InboxMarks*>(inbox_.base());
  peers_.resize(addresses.size());
  for (int peer : all_)
    if (peer < 0 || static_cast<size_t>(peer) >= addresses.size() || peer == own_.rank)
      fail(own_.rank, peer, "rank " + std::to_string(peer) + " is no peer of rank " + std::to_string(own_.rank));
  reserve_mail(addresses.size());
  // Who has sent something may be listed twice, behind those that are looked at.
  for (std::vector<int>* list : {&arrived_, &mail_}) list->reserve(2 * all_.size());
  ring_due_.reserve(rails_.size());
  late_mail_.reserve(all_.size());
  for (int peer : all_) connect_peer(peer, addresses[static_cast<size_t>(peer)], addresses.size());
}

// Queues of neighbours lie side by side: they are reserved at once.
void LoopTransport::reserve_mail(size_t num_ranks) {
  for (size_t first = 0, end = 0; first < all_.size(); first = end) {
    for (end = first + 1; end < all_.size() && all_[end] == all_[end - 1] + 1;) ++end;
    inbox_.reserve(mail_queue_offset(own_.inbox_slots, num_ranks, all_[first]), (end - first) * sizeof(MailQueue));
  }
}

void LoopTransport::connect_peer(int rank, const std::string& text, size_t num_ranks) {
  const Address address = decode_address(text);
  if (address.rank != rank)
    fail(own_.rank, rank,
         "the address of rank " + std::to_string(rank) + " names rank " + std::to_string(address.rank));
  if (address.generation != own_.generation)
    fail(own_.rank, rank,
         "rank " + std::to_string(rank) + " is of generation " + std::to_string(address.generation) + ", not of " +
             std::to_string(own_.generation));
  if (address.boot_id != own_.boot_id)
    fail(own_.rank, rank, "rank " + std::to_string(rank) + " is on another host: this transport works inside one");
  Peer& peer = peers_[static_cast<size_t>(rank)];
  peer.process = ProcessWatch(address.pid, address.pid_namespace);
  peer.region = Mapping::open_shared(address.region_name, address.region_bytes);
  peer.inbox = Mapping::open_and_grow(address.inbox_name, inbox_bytes(address.inbox_slots, num_ranks));
  peer.control = reinterpret_cast<ControlBlock*>(peer.region.base());
  peer.marks = reinterpret_cast<InboxMarks*>(peer.inbox.base());
  peer.lost = options_.drop_peer == rank || options_.drop_peer == own_.rank;
  const uint64_t mail_offset = mail_queue_offset(own_.inbox_slots, num_ranks, rank);
  peer.mail_reader = MailReader(inbox_.base() + mail_offset);
  peer.mail_writer = MailWriter(peer.inbox.base() + mail_queue_offset(address.inbox_slots, num_ranks, own_.rank));
  if (std::find(rails_.begin(), rails_.end(), rank) == rails_.end()) return;
  const uint64_t offset = inbox_queue_offset(own_.inbox_slots, rank);
  inbox_.reserve(offset, inbox_queue_bytes(own_.inbox_slots));
  peer.reader = {inbox_.base() + offset, own_.inbox_slots};
  peer.writer = {peer.inbox.base() + inbox_queue_offset(address.inbox_slots, own_.rank), address.inbox_slots};
  peer.is_rail = true;
}

void LoopTransport::attach_device(DeviceRegions device) {
  device_ = std::move(device);
  copying_.reserve(rails_.size() * options_.queue_depth);
}

bool LoopTransport::peer_alive(int peer) const { return peers_[static_cast<size_t>(peer)].process.alive(); }

LoopTransport::Peer& LoopTransport::checked_peer(const WriteRequest& request) {
  const bool known = request.peer >= 0 && static_cast<size_t>(request.peer) < peers_.size() &&
                     peers_[static_cast<size_t>(request.peer)].is_rail;
  if (!known)
    fail(own_.rank, request.peer,
         "rank " + std::to_string(request.peer) + " is no rail of rank " + std::to_string(own_.rank));
  Peer& peer = peers_[static_cast<size_t>(request.peer)];
  auto outside = [&](uint64_t offset, uint64_t bytes) {
    return request.num_bytes > bytes || offset > bytes - request.num_bytes;
  };
  auto bytes_of = [&](int rank) -> uint64_t {
    if (request.memory == Memory::kHost) return rank == own_.rank ? region_.bytes : peer.region.num_bytes();
    const bool attached = device_.copies != nullptr && static_cast<size_t>(rank) < device_.regions.size();
    return attached ? device_.regions[static_cast<size_t>(rank)].bytes : 0;
  };
  if (request.num_bytes != 0 &&
      (outside(request.local_offset, bytes_of(own_.rank)) || outside(request.remote_offset, bytes_of(request.peer))))
    fail(own_.rank, request.peer,
         "a write of " + std::to_string(request.num_bytes) + " bytes leaves the " +
             (request.memory == Memory::kHost ? "region" : "device region") + ": local offset " +
             std::to_string(request.local_offset) + ", remote " + std::to_string(request.remote_offset));
  return peer;
}

PostResult LoopTransport::post_write(const WriteRequest& request) {
  Peer& peer = checked_peer(request);
  if (peer.outstanding >= options_.queue_depth || chance(options_.refuse_rate)) return PostResult::kAgain;
  Write next{request, chance(options_.duplicate_rate)};
  if (next.has_copy() && !peer.lost) next.copy = start_copy(request);  // if it throws, nothing was posted
  ++peer.outstanding;
  if (request.limited) load_.take(request.num_bytes);
  if (peer.lost) return PostResult::kPosted;
  const uint32_t write = take_write_slot();
  writes_[write] = next;
  const uint64_t left = link_.send(clock(), request.num_bytes);
  const uint64_t latency = static_cast<uint64_t>(options_.latency_usec * 1000);
  schedule(left + latency + (options_.seed != 0 ? disorder_nsec(request.num_bytes) : 0), write, Act::kDeliver);
  return PostResult::kPosted;
}

uint64_t LoopTransport::start_copy(const WriteRequest& request) {
  auto at = [&](int rank, uint64_t offset) {
    return static_cast<uint8_t*>(device_.regions[static_cast<size_t>(rank)].base) + offset;
  };
  return device_.copies->start(at(request.peer, request.remote_offset), at(own_.rank, request.local_offset),
                               request.num_bytes);
}

// Up to several chunks' time, so that a slow link is disordered as well.
uint64_t LoopTransport::disorder_nsec(uint64_t num_bytes) {
  const uint64_t range = kDisorderNsec + static_cast<uint64_t>(4 * link_.transmission_nsec(num_bytes));
  return std::uniform_int_distribution<uint64_t>(0, range)(random_);
}

uint32_t LoopTransport::take_write_slot() {
  if (free_writes_.empty()) {
    writes_.emplace_back();
    return static_cast<uint32_t>(writes_.size() - 1);
  }
  const uint32_t write = free_writes_.back();
  free_writes_.pop_back();
  return write;
}

void LoopTransport::schedule(uint64_t when_nsec, uint32_t write, Act act) {
  due_.push_back({when_nsec, num_scheduled_++, write, act});
  std::push_heap(due_.begin(), due_.end(), Later{});
}

size_t LoopTransport::poll(std::span<Completion> out) {
  size_t count = 0;
  more_now_ = false;
  copied_bytes_ = 0;
  const uint64_t now = clock();
  if (link_holds(now)) {
    harvest(out, count);
    return count;
  }
  moved_bytes_ = link_.left_bytes(now);
  if (num_stalled_ != 0) retry_stalled(now);
  if (!late_mail_.empty()) deliver_late_mail(now);
  if (!copying_.empty()) look_at_copies(now);
  // Half of the room for each, so that completions and arrivals do not starve each other.
  perform_due(now, out.first((out.size() + 1) / 2), count);
  ring_receivers();
  harvest(out, count);
  return count;
}

bool LoopTransport::link_holds(uint64_t now_nsec) {
  if (options_.cut == nullptr || options_.cut->read() % 2 == 0) {
    is_cut_ = false;
    return false;
  }
  const uint64_t patient_usec = patience_.at(now_nsec / 1000);
  if (!is_cut_) cut_since_usec_ = patient_usec;
  is_cut_ = true;
  if (patient_usec - cut_since_usec_ <= progress_timeout_usec_) return true;
  if (failure_.empty())
    failure_ = "the link was cut for " + std::to_string((patient_usec - cut_since_usec_) / 1000) + " ms";
  fail_pending(now_nsec);
  return false;
}

void LoopTransport::fail_pending(uint64_t now_nsec) {
  for (Due& due : due_) due = {now_nsec, due.order, due.write, Act::kReportFailure};
  std::make_heap(due_.begin(), due_.end(), Later{});
  for (uint32_t write : copying_) schedule(now_nsec, write, Act::kReportFailure);
  copying_.clear();
  for (int rank : rails_) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    for (uint32_t write : peer.stalled) schedule(now_nsec, write, Act::kReportFailure);
    num_stalled_ -= peer.stalled.size();
    peer.stalled.clear();
  }
}

void LoopTransport::perform_due(uint64_t now_nsec, std::span<Completion> out, size_t& count) {
  while (!due_.empty() && due_.front().when_nsec <= now_nsec) {
    if (count == out.size() || copied_bytes_ >= kCopyBytesPerPoll) {
      more_now_ = true;
      break;
    }
    std::pop_heap(due_.begin(), due_.end(), Later{});
    const Due due = due_.back();
    due_.pop_back();
    if (due.act == Act::kReport || due.act == Act::kReportFailure) {
      out[count++] =
          report(due.write, due.act == Act::kReport ? Completion::Kind::kWriteDone : Completion::Kind::kFailure);
      continue;
    }
    if (!settle_copy(due.write, now_nsec)) copying_.push_back(due.write);
  }
}

void LoopTransport::ring_receivers() {
  for (int rank : ring_due_) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    peer.marks->arrivals.set(static_cast<uint32_t>(own_.rank));
    peer.control->proxy_bell.ring();
    peer.ring_due = false;
  }
  ring_due_.clear();
}

void LoopTransport::look_at_copies(uint64_t now_nsec) {
  std::erase_if(copying_, [&](uint32_t write) { return settle_copy(write, now_nsec); });
}

// A write is due: delivers it unless its copy is still under way.
bool LoopTransport::settle_copy(uint32_t write, uint64_t now_nsec) {
  try {
    if (writes_[write].has_copy() && !device_.copies->done(writes_[write].copy)) return false;
  } catch (const CommunicationFailure& failure) {
    return copy_failed(write, failure, now_nsec);
  }
  deliver_or_stall(write, now_nsec);
  return true;
}

// Not thrown from a poll, because errors and byes, which need no copy, must still be sent.
bool LoopTransport::copy_failed(uint32_t write, const CommunicationFailure& failure, uint64_t now_nsec) {
  if (failure_.empty()) failure_ = failure.what();
  schedule(now_nsec, write, Act::kReportFailure);
  return true;
}

void LoopTransport::deliver_or_stall(uint32_t write, uint64_t now_nsec) {
  Peer& peer = peers_[static_cast<size_t>(writes_[write].request.peer)];
  if (peer.stalled.empty() && !peer.writer.full()) return deliver(write, now_nsec);
  peer.stalled.push_back(write);
  ++num_stalled_;
}

void LoopTransport::retry_stalled(uint64_t now_nsec) {
  for (int rank : rails_) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    size_t done = 0;
    while (done < peer.stalled.size() && copied_bytes_ < kCopyBytesPerPoll && !peer.writer.full())
      deliver(peer.stalled[done++], now_nsec);
    peer.stalled.erase(peer.stalled.begin(), peer.stalled.begin() + static_cast<ptrdiff_t>(done));
    num_stalled_ -= done;
  }
}

// The payload first; the event that reports it releases it.
void LoopTransport::deliver(uint32_t write, uint64_t now_nsec) {
  Write& w = writes_[write];
  Peer& peer = peers_[static_cast<size_t>(w.request.peer)];
  if (w.request.memory == Memory::kHost && w.request.num_bytes != 0) {
    std::memcpy(peer.region.base() + w.request.remote_offset,
                static_cast<const uint8_t*>(region_.base) + w.request.local_offset, w.request.num_bytes);
    copied_bytes_ += w.request.num_bytes;
  }
  peer.writer.put({w.request.num_bytes, w.request.immediate, 0});
  if (!peer.ring_due) ring_due_.push_back(w.request.peer);
  peer.ring_due = true;
  if (w.again) {
    w.again = false;
    try {
      if (w.has_copy()) w.copy = start_copy(w.request);
    } catch (const CommunicationFailure& failure) {
      copy_failed(write, failure, now_nsec);
      return;
    }
    schedule(now_nsec + disorder_nsec(w.request.num_bytes), write, Act::kDeliverAgain);
    return;
  }
  // The peer's acknowledgement needs the same latency.
  const uint64_t latency = static_cast<uint64_t>(options_.latency_usec * 1000);
  schedule(now_nsec + latency + (options_.seed != 0 ? disorder_nsec(w.request.num_bytes) : 0), write, Act::kReport);
}

Completion LoopTransport::report(uint32_t write, Completion::Kind kind) {
  const WriteRequest& request = writes_[write].request;
  --peers_[static_cast<size_t>(request.peer)].outstanding;
  if (request.limited) load_.give_back(request.num_bytes);
  free_writes_.push_back(write);
  const char* reason = kind == Completion::Kind::kFailure ? failure_.c_str() : nullptr;
  return {kind, request.peer, 0, request.num_bytes, request.cookie, reason};
}

void LoopTransport::take_marks(MarkLine& marks, bool Peer::* has, std::vector<int>& list) {
  marks.take([&](uint32_t mark) {
    for (size_t rank = mark; rank < peers_.size(); rank += MarkLine::kMarks) {
      Peer& peer = peers_[rank];
      if (peer.control == nullptr || peer.*has) continue;
      peer.*has = true;
      list.push_back(static_cast<int>(rank));
    }
  });
}

void LoopTransport::harvest(std::span<Completion> out, size_t& count) {
  take_marks(marks_->arrivals, &Peer::has_arrivals, arrived_);
  size_t looked = 0;
  for (const size_t all = arrived_.size(); looked < all && count < out.size(); ++looked) {
    const int rank = arrived_[looked];
    if (harvest_of(rank, out, count))
      arrived_.push_back(rank);
    else
      peers_[static_cast<size_t>(rank)].has_arrivals = false;
  }
  arrived_.erase(arrived_.begin(), arrived_.begin() + static_cast<ptrdiff_t>(looked));
  if (!arrived_.empty()) more_now_ = true;
}

// True: it has more.
bool LoopTransport::harvest_of(int rank, std::span<Completion> out, size_t& count) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (!peer.is_rail) return false;
  uint64_t available = peer.reader.available();
  if (available == 0) return false;
  for (; available != 0 && count < out.size(); --available) {
    const ArrivalEvent event = peer.reader.take();
    if (!peer.lost) out[count++] = {Completion::Kind::kArrival, rank, event.immediate, event.num_bytes, 0, nullptr};
  }
  peer.reader.give_back();
  return available != 0;
}

uint64_t LoopTransport::idle_usec() const {
  if (is_cut_) return kStalledRetryUsec;
  if (more_now_ || !copying_.empty()) return 0;  // no bell announces the end of a copy
  uint64_t usec = num_stalled_ != 0 ? kStalledRetryUsec : UINT64_MAX;
  if (due_.empty() && late_mail_.empty()) return usec;
  const uint64_t now = clock();
  uint64_t next = due_.empty() ? UINT64_MAX : due_.front().when_nsec;
  for (const LateMail& late : late_mail_) next = std::min(next, late.when_nsec);
  return std::min(usec, next > now ? (next - now) / 1000 : 0);
}

}  // namespace loop

namespace {

uint64_t memory_bytes(const TransportOptions& options, size_t num_rails, size_t num_all) {
  const uint32_t num_slots = std::bit_ceil(std::max(options.loop.queue_depth, 1u));
  return loop::kInboxMarksBytes + loop::inbox_queue_bytes(num_slots) * num_rails + sizeof(loop::MailQueue) * num_all;
}

std::unique_ptr<Transport> make(const TransportSetup& setup, const TransportOptions& options) {
  return std::make_unique<loop::LoopTransport>(setup, options);
}

Probe probe(const TransportOptions&) {
  return {true, "shared memory of host " + host_boot_id().substr(0, 8), LinkKind::kMemory};
}

const RegisterTransport registered({"loop", make, memory_bytes, probe});

}  // namespace
}  // namespace uccl_ep
