#include "proxy/shipper.h"

#include <algorithm>

#include "common/clock.h"
#include "layout/words.h"

namespace uccl_ep {
namespace {

// Limit per pass, so that arrivals do not wait.
constexpr int kCommandsPerPass = 256;

}  // namespace

Shipper::Shipper(const ProxyContext& context, Board& board)
    : context_(context),
      memory_(context.layout->board_offset != 0 ? Memory::kDevice : Memory::kHost),
      turns_(context.channels->out.size()) {
  channels_.resize(context.channels->out.size());
  std::vector<std::pair<RingKind, int>> keys;
  for (auto& out : context.channels->out)
    keys.emplace_back(out.send.kind, context.topo->domain_of[static_cast<size_t>(out.peer)]);
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  for (auto& [kind, domain] : keys) totals_.push_back(std::make_unique<Totals>(kind, domain));
  for (size_t c = 0; c < channels_.size(); ++c) {
    const OutChannel& out = context.channels->out[c];
    const std::pair key{out.send.kind, context.topo->domain_of[static_cast<size_t>(out.peer)]};
    channels_[c].out = &out;
    channels_[c].slots.resize(out.send.num_slots);
    channels_[c].flushed = Prefix(context, out.send, board, context.channels->in.size() + c);
    channels_[c].stats = static_cast<size_t>(std::lower_bound(keys.begin(), keys.end(), key) - keys.begin());
  }
}

void Shipper::fail(int peer, const std::string& text) const {
  throw CommunicationFailure(make_error(ErrorKind::kTransport, context_.rank, peer, text));
}

bool Shipper::drain() {
  Command command;
  int taken = 0;
  uint64_t taken_nsec = 0;  // one for all commands, except in a trace: reading the clock would cost more than the rest
  while (taken < kCommandsPerPass && context_.commands->pop(command)) {
    if (taken++ == 0 || traces()) taken_nsec = now_nsec();
    take(command, taken_nsec);
  }
  return taken != 0;
}

void Shipper::take(const Command& command, uint64_t taken_nsec) {
  if (command.channel >= channels_.size()) fail(-1, "a command names channel " + std::to_string(command.channel));
  Channel& channel = channels_[command.channel];
  const RingLayout& send = channel.out->send;
  Slot& slot = channel.slots[command.serial % send.num_slots];
  // The producer goes in order and waits for the slot's stamp, so a chunk always finds its slot empty.
  if (command.serial != channel.queued || channel.queued - channel.posted >= send.num_slots || slot.in_flight)
    fail(channel.out->peer, std::string("chunk ") + std::to_string(command.serial) + " of a " + ring_name(send.kind) +
                                " channel came instead of " + std::to_string(channel.queued) +
                                ", or before its slot was free");
  if (command.num_bytes > send.slot_bytes)
    fail(channel.out->peer,
         "a chunk of " + std::to_string(command.num_bytes) + " bytes in slots of " + std::to_string(send.slot_bytes));
  const uint64_t shared_offset = command.unit * kSharedUnitBytes;
  if (shared_offset + (send.shared_bytes == 0 ? 0 : command.num_bytes) > send.shared_bytes)
    fail(channel.out->peer, "a chunk of " + std::to_string(command.num_bytes) + " bytes begins at " +
                                std::to_string(shared_offset) + " of " + std::to_string(send.shared_bytes) +
                                " that rings share");
  slot = {command.serial, command.num_bytes, taken_nsec, false, shared_offset};
  commands_.add(1);
  trace(TraceKind::kTaken, channel, slot, taken_nsec, taken_nsec);
  if (channel.queued++ == channel.posted) turns_.push(command.channel);
}

bool Shipper::has_room(const Channel& channel) const {
  return context_.transport->has_room(channel.slots[channel.posted % channel.out->send.num_slots].num_bytes);
}

bool Shipper::post(uint64_t now_usec) {
  refused_ = false;
  ++pass_;
  bool any = false;
  for (size_t fruitless = 0; fruitless < turns_.size();) {
    const uint32_t index = turns_.front();
    Channel& channel = channels_[index];
    if (!has_room(channel)) break;  // keeps its turn: this channel gets the next room
    turns_.pop();
    if (try_post(index, now_usec)) {
      any = true;
      fruitless = 0;
    } else {
      ++fruitless;
    }
    if (channel.posted != channel.queued) turns_.push(index);
  }
  return any;
}

bool Shipper::has_credit(Channel& channel, uint64_t now_usec) {
  if (!channel.out->credited || channel.posted < channel.credited + channel.out->remote_slots) return true;
  if (channel.wait_since_usec == 0) {
    channel.wait_since_usec = now_usec;
    credit_waits_.add(1);
  }
  return false;
}

bool Shipper::try_post(uint32_t index, uint64_t now_usec) {
  Channel& channel = channels_[index];
  if (channel.refused_pass == pass_ || !has_credit(channel, now_usec)) return false;
  const OutChannel& out = *channel.out;
  const uint64_t serial = channel.posted;
  const uint32_t slot_idx = static_cast<uint32_t>(serial % out.send.num_slots);
  Slot& slot = channel.slots[slot_idx];
  WriteRequest request;
  request.peer = out.peer;
  request.local_offset =
      out.send.shared_bytes == 0 ? out.send.slot_offset(serial) : out.send.slots_offset + slot.shared_offset;
  request.remote_offset = out.remote_slots_offset + serial % out.remote_slots * out.send.slot_bytes;
  request.num_bytes = slot.num_bytes;
  request.immediate = encode_imm(ImmType::kData, out.peer_channel, serial);
  request.cookie = encode_cookie({PostKind::kData, index, slot_idx});
  request.memory = memory_;
  request.limited = true;
  const uint64_t posted_nsec = traces() ? now_nsec() : 0;  // read before the post: the peer may have the chunk at once
  if (context_.transport->post_write(request) == PostResult::kAgain) {
    refused_ = true;
    refused_posts_.add(1);
    channel.refused_pass = pass_;
    channel.refusal.note(now_usec, context_.progress_timeout_usec, context_.rank, out.peer, "a chunk");
    return false;
  }
  channel.refusal.clear();
  trace(TraceKind::kPosted, channel, slot, posted_nsec, posted_nsec);
  if (channel.wait_since_usec != 0) {
    credit_wait_usec_.add(now_usec - channel.wait_since_usec);
    trace(TraceKind::kCreditWait, channel, slot, 1000 * channel.wait_since_usec, posted_nsec);
  }
  channel.wait_since_usec = 0;
  ++channel.posted;
  slot.in_flight = true;
  peak_ops_.raise_to(++in_flight_ops_);
  peak_bytes_.raise_to(in_flight_bytes_ += slot.num_bytes);
  totals_[channel.stats]->writes.add(1);
  totals_[channel.stats]->bytes.add(slot.num_bytes);
  return true;
}

void Shipper::credit(uint32_t index, uint32_t serial_low, int peer) {
  if (index >= channels_.size() || channels_[index].out->peer != peer)
    fail(peer, "a credit of rank " + std::to_string(peer) + " names channel " + std::to_string(index));
  Channel& channel = channels_[index];
  const uint64_t consumed = widen_serial(serial_low, channel.credited);
  if (consumed > channel.posted)
    fail(peer,
         "a credit for " + std::to_string(consumed) + " chunks of " + std::to_string(channel.posted) + " posted ones");
  channel.credited = std::max(channel.credited, consumed);  // credits may overtake each other
  const uint64_t now = traces() ? now_nsec() : 0;
  trace(TraceKind::kCreditReceived, channel, {consumed}, now, now);
}

void Shipper::flushed(const Cookie& cookie, bool delivered, uint64_t flushed_nsec) {
  if (cookie.index >= channels_.size() || cookie.slot >= channels_[cookie.index].slots.size())
    fail(-1, "the transport completed a post that was never made");
  Channel& channel = channels_[cookie.index];
  Slot& slot = channel.slots[cookie.slot];
  if (!slot.in_flight)
    fail(channel.out->peer, "the transport completed chunk " + std::to_string(slot.serial) + " twice");
  slot.in_flight = false;
  --in_flight_ops_;
  in_flight_bytes_ -= slot.num_bytes;
  if (!delivered) return;
  latencies_.add(flushed_nsec - slot.taken_nsec);
  trace(TraceKind::kFlushed, channel, slot, flushed_nsec, flushed_nsec);
  totals_[channel.stats]->chunks.add(1);
  reinterpret_cast<Flag*>(context_.region + channel.out->send.stamps_offset)[cookie.slot].publish(slot.serial + 1);
  channel.flushed.advance();
  ring_due_ = memory_ == Memory::kHost;  // a GPU polls
}

void Shipper::trace(TraceKind kind, const Channel& channel, const Slot& slot, uint64_t begin_nsec,
                    uint64_t end_nsec) const {
  if (!traces() || end_nsec == 0) return;  // the trace was switched on meanwhile
  context_.trace->add({begin_nsec, end_nsec, slot.serial, slot.num_bytes, kind, channel.out->send.kind, Step::kShip,
                       channel.out->peer, static_cast<uint32_t>(&channel - channels_.data())});
}

void Shipper::ring_producer() {
  if (ring_due_) context_.control->worker_bell.ring();
  ring_due_ = false;
}

void Shipper::add_stats(ProxyStats& stats) const {
  for (auto& totals : totals_)
    stats.ships.push_back(
        {totals->kind, totals->domain, totals->chunks.value(), totals->writes.value(), totals->bytes.value()});
  stats.commands = commands_.value();
  stats.command_nsec_p50 = latencies_.percentile_nsec(50);
  stats.command_nsec_p99 = latencies_.percentile_nsec(99);
  stats.credit_waits = credit_waits_.value();
  stats.credit_wait_usec = credit_wait_usec_.value();
  stats.refused_posts = refused_posts_.value();
  stats.peak_in_flight_ops = peak_ops_.value();
  stats.peak_in_flight_bytes = peak_bytes_.value();
}

}  // namespace uccl_ep
