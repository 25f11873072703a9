#include "proxy/lander.h"

#include <algorithm>

#include "common/clock.h"
#include "layout/words.h"

namespace uccl_ep {

Lander::Lander(const ProxyContext& context, Board& board) : context_(context) {
  channels_.resize(context.channels->in.size());
  for (size_t c = 0; c < channels_.size(); ++c) {
    channels_[c].in = &context.channels->in[c];
    channels_[c].arrived = Prefix(context, channels_[c].in->landing, board, c);
  }
  open_.reserve(channels_.size());
}

void Lander::fail(int peer, const std::string& text) const {
  throw CommunicationFailure(make_error(ErrorKind::kTransport, context_.rank, peer, text));
}

void Lander::arrive(const Completion& completion) {
  const Imm imm = decode_imm(completion.immediate);
  if (imm.channel >= channels_.size() || channels_[imm.channel].in->peer != completion.peer)
    fail(completion.peer,
         "a chunk of rank " + std::to_string(completion.peer) + " names channel " + std::to_string(imm.channel));
  Channel& channel = channels_[imm.channel];
  const RingLayout& landing = channel.in->landing;
  const uint64_t serial = widen_serial(imm.serial, channel.end);
  Flag& stamp = reinterpret_cast<Flag*>(context_.region + landing.stamps_offset)[serial % landing.num_slots];
  if (stamp.own() > serial) {  // a repeat, or of an earlier lap
    duplicates_.add(1);
    return;
  }
  if (channel.in->credited && serial >= channel.returned + landing.num_slots)
    fail(completion.peer, "chunk " + std::to_string(serial) + " of a " + ring_name(landing.kind) +
                              " channel arrived, but only " + std::to_string(channel.returned + landing.num_slots) +
                              " have credit");
  // A sender writes a slot again only after the slot's last chunk was consumed. A serial of another lap gets no stamp:
  // the stamp of a later lap would stand for all the chunks before it.
  const uint64_t lap_before = serial < landing.num_slots ? 0 : serial + 1 - landing.num_slots;
  if (stamp.own() != lap_before)
    fail(completion.peer, "chunk " + std::to_string(serial) + " of a " + ring_name(landing.kind) +
                              " channel arrived in a slot whose last one is " + std::to_string(stamp.own()) +
                              " instead of " + std::to_string(lap_before));
  stamp.publish(serial + 1);
  channel.arrived.advance();
  channel.end = std::max(channel.end, serial + 1);
  arrivals_.add(1);
  arrived_bytes_.add(completion.num_bytes);
  trace(TraceKind::kArrived, imm.channel, serial, completion.num_bytes);
  (landing.kind == RingKind::kReturn ? ring_own_ : ring_domain_) = true;
  if (channel.in->credited && !channel.open) {
    channel.open = true;
    open_.push_back(imm.channel);
  }
}

void Lander::ring_readers() {
  if (context_.layout->board_offset != 0) return;  // a GPU polls
  if (ring_domain_) {
    for (ControlBlock* control : context_.domain_controls)
      if (control != nullptr) control->worker_bell.ring();
  } else if (ring_own_) {
    context_.control->worker_bell.ring();
  }
  ring_own_ = ring_domain_ = false;
}

uint64_t Lander::consumed(Channel& channel, uint64_t wanted) const {
  const RingLayout& landing = channel.in->landing;
  const FlagLine* consumed = reinterpret_cast<const FlagLine*>(context_.region + landing.consumed_offset);
  uint64_t least = UINT64_MAX;
  for (uint32_t left = landing.num_readers; left > 0; --left) {
    least = std::min(least, consumed[channel.laggard].flag.read());
    if (least < wanted) return least;
    channel.laggard = (channel.laggard + 1) % landing.num_readers;
  }
  return least;
}

bool Lander::return_credits(bool now_all, uint64_t now_usec) {
  const uint32_t ticket = context_.control->proxy_bell.ticket();
  if (now_all && settled_ && ticket == settled_ticket_) return false;
  refused_ = false;
  bool any = false;
  for (size_t i = 0; i < open_.size();) {
    const uint32_t index = open_[i];
    Channel& channel = channels_[index];
    const uint64_t batch = now_all ? 1 : std::max(1u, channel.in->landing.num_slots / 2);
    const uint64_t wanted = channel.returned + batch, num_consumed = consumed(channel, wanted);
    const bool tellable = num_consumed - channel.credit_base < kMaxRingSlots;
    if (num_consumed >= wanted && tellable) any |= post_credit(index, num_consumed, now_usec);
    if (channel.returned == channel.end) {
      channel.open = false;
      open_[i] = open_.back();
      open_.pop_back();
    } else {
      ++i;
    }
  }
  settled_ = now_all && !any && !refused_ && context_.launched == nullptr;
  settled_ticket_ = ticket;
  return any;
}

bool Lander::post_credit(uint32_t index, uint64_t num_consumed, uint64_t now_usec) {
  Channel& channel = channels_[index];
  WriteRequest request{};
  request.peer = channel.in->peer;
  request.immediate = encode_imm(ImmType::kCredit, channel.in->peer_channel, num_consumed);
  request.cookie = encode_cookie({PostKind::kCredit, index});
  if (context_.transport->post_write(request) == PostResult::kAgain) {
    refused_ = true;
    refused_posts_.add(1);
    channel.refusal.note(now_usec, context_.progress_timeout_usec, context_.rank, channel.in->peer, "a credit");
    return false;
  }
  channel.refusal.clear();
  channel.returned = num_consumed;
  ++channel.credits_in_flight;
  credits_.add(1);
  trace(TraceKind::kCreditSent, index, num_consumed, 0);
  return true;
}

void Lander::credit_flushed(uint32_t index) {
  if (index >= channels_.size() || channels_[index].credits_in_flight == 0)
    fail(-1, "the transport completed a credit that was never posted");
  Channel& channel = channels_[index];
  if (--channel.credits_in_flight == 0) channel.credit_base = channel.returned;
}

void Lander::trace(TraceKind kind, uint32_t index, uint64_t serial, uint64_t num_bytes) const {
  if (context_.trace == nullptr || !context_.trace->on()) return;
  const uint64_t now = now_nsec();
  const InChannel& in = *channels_[index].in;
  context_.trace->add({now, now, serial, num_bytes, kind, in.landing.kind, Step::kShip, in.peer, index});
}

void Lander::add_stats(ProxyStats& stats) const {
  stats.arrivals = arrivals_.value();
  stats.arrived_bytes = arrived_bytes_.value();
  stats.duplicates_dropped = duplicates_.value();
  stats.credits_sent = credits_.value();
  stats.refused_posts += refused_posts_.value();
}

}  // namespace uccl_ep
