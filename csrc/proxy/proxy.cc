#include "proxy/proxy.h"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <exception>

#include "common/clock.h"
#include "common/thread.h"
#include "layout/words.h"
#include "proxy/board.h"
#include "proxy/health.h"
#include "proxy/lander.h"
#include "proxy/post.h"
#include "proxy/shipper.h"

namespace uccl_ep {
namespace {

constexpr size_t kCompletionsPerPass = 64;
// Idle passes before sleeping, if they take no longer: a few microseconds, because many hosts have more threads than
// cores. Where another thread takes the core meanwhile, to come back and look costs as much as to be woken.
constexpr uint32_t kEmptyPasses = 50;
constexpr uint64_t kMostEmptyNsec = 10'000;
// Shorter sleeps cost more than they save.
constexpr uint64_t kLeastSleepUsec = 20;
// No bell announces that a refused post would be accepted.
constexpr uint64_t kRefusedRetryUsec = 50;
constexpr uint64_t kFailedRetryUsec = 10'000;
// A GPU does not ring. While no operation is under way there, the proxy stays awake for this long, and then it naps.
// Naps grow with the pause: the first chunk after it is late by 100 us, or by a thirtieth of the pause. On a virtual
// machine each nap may cost 40 us of a core.
constexpr uint64_t kAwakeUsec = 500;
// With graphs the proxy learns of an operation only when its kernels run. Waking the thread then takes 100 us or more,
// so it stays awake from one layer to the next.
constexpr uint64_t kAwakeForReplaysUsec = 10'000;
constexpr uint64_t kLeastNapUsec = 100;
constexpr uint64_t kMostNapUsec = 5000;
constexpr uint64_t kNapsPerPause = 30;
// A thread that never sleeps still reports its time.
constexpr uint64_t kPassesPerAccount = 1024;

// The remaining check of field limits: a cookie can name every channel and rank.
static_assert(kMaxChannels - 1 <= kMaxCookieIndex && kMaxRanks - 1 <= kMaxCookieIndex);

bool is_of_chunk(const Completion& completion) {
  if (completion.kind != Completion::Kind::kArrival) return decode_cookie(completion.cookie).kind == PostKind::kData;
  const ImmType type = decode_imm(completion.immediate).type;
  return type == ImmType::kData || type == ImmType::kCredit;
}

}  // namespace

Proxy::Proxy(ProxyContext context) : context_(std::move(context)), completions_(kCompletionsPerPass) {
  uint64_t largest_chunk_bytes = 0;
  for (auto& out : context_.channels->out) largest_chunk_bytes = std::max(largest_chunk_bytes, out.send.slot_bytes);
  CommandRing::check_limits(context_.channels->out.size(), largest_chunk_bytes, context_.channels->shared_bytes());
  if (context_.channels->out.size() > kMaxChannels || context_.channels->in.size() > kMaxChannels)
    throw UsageFailure(UsageKind::kConfig, "proxy: more than " + std::to_string(kMaxChannels) + " channels");
  if (static_cast<uint32_t>(context_.topo->num_ranks) > kMaxRanks)
    throw UsageFailure(UsageKind::kConfig, "proxy: more than " + std::to_string(kMaxRanks) + " ranks");
  board_ = std::make_unique<Board>(context_);
  shipper_ = std::make_unique<Shipper>(context_, *board_);
  lander_ = std::make_unique<Lander>(context_, *board_);
  health_ = std::make_unique<Health>(context_);
}

Proxy::~Proxy() { stop(); }

void Proxy::start() {
  thread_ = start_thread("the proxy", [this] { run(); });
}

void Proxy::stop() {
  stopping_.publish(1);
  context_.control->proxy_bell.ring();
  if (thread_.joinable()) thread_.join();
}

void Proxy::run() {
  pthread_setname_np(pthread_self(), "uccl_ep_proxy");
  prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);  // nanoseconds: a link's next delivery is due in microseconds
  awake_since_usec_ = last_chunk_usec_ = now_usec();
  while (stopping_.read() == 0) {
    const uint32_t ticket = context_.control->proxy_bell.ticket();  // before the pass that may find nothing
    const Pass pass = make_pass();
    if (pass == Pass::kFailed)
      context_.control->proxy_bell.wait(ticket, kFailedRetryUsec);
    else
      rest(pass == Pass::kMoved, ticket);
  }
}

Pass Proxy::make_pass() {
  try {
    return step() ? Pass::kMoved : Pass::kIdle;
  } catch (const CommunicationFailure& failure) {
    fail(failure.record());
  } catch (const std::exception& failure) {
    fail(make_error(ErrorKind::kTransport, context_.rank, -1, failure.what()));
  }
  return Pass::kFailed;
}

void Proxy::rest(bool moved, uint32_t ticket) {
  if (passes_.value() % kPassesPerAccount == 0) account();
  if (chunks_moved_) empty_passes_ = 0;
  if (moved || is_to_look_again()) return;
  if (stays_awake()) {
    if (empty_passes_ % 8 == 0) sched_yield();
    return;
  }
  sleep(ticket);
}

// After a pass that found nothing.
bool Proxy::is_to_look_again() {
  if (++empty_passes_ >= kEmptyPasses) return false;
  if (empty_passes_ == 1) empty_since_nsec_ = now_nsec();
  if (empty_passes_ % 8 != 0) return true;
  sched_yield();
  return now_nsec() - empty_since_nsec_ < kMostEmptyNsec;
}

// After an error nothing more is shipped, even if operations are running.
bool Proxy::stays_awake() {
  if (context_.launched == nullptr || context_.control->error_claim.claimed()) return false;
  if (const uint64_t awaited = context_.awaited->read(); awaited != awaited_) {
    awaited_ = awaited;
    last_chunk_usec_ = now_usec();
  }
  return context_.launched->read() > context_.ended->read() ||
         now_usec() - last_chunk_usec_ < (awaited_ != 0 ? kAwakeForReplaysUsec : kAwakeUsec);
}

// Events after the ticket was taken end the sleep at once.
void Proxy::sleep(uint32_t ticket) {
  const uint64_t usec = sleep_usec();
  if (usec < kLeastSleepUsec) {
    sched_yield();
    return;
  }
  account();
  context_.control->proxy_bell.wait(ticket, usec);
  awake_since_usec_ = now_usec();
  wakeups_.add(1);
  // One pass is enough until chunks move: most find nothing, or messages.
  empty_passes_ = kEmptyPasses;
}

void Proxy::account() {
  const uint64_t now = now_usec();
  busy_usec_.add(now - awake_since_usec_);
  awake_since_usec_ = now;
}

uint64_t Proxy::sleep_usec() const {
  if (shipper_->refused() || lander_->refused() || health_->refused()) return kRefusedRetryUsec;
  const uint64_t now = now_usec();
  const uint64_t next = health_->next_usec();
  const uint64_t usec = std::min(context_.transport->idle_usec(), next > now ? next - now : 0);
  if (context_.launched == nullptr) return usec;
  return std::min(usec, std::clamp((now - last_chunk_usec_) / kNapsPerPause, kLeastNapUsec, kMostNapUsec));
}

bool Proxy::step() {
  passes_.add(1);
  const uint64_t now = now_usec();
  // After an error only the error, byes and heartbeats are sent; other data has no reader.
  const bool usable = !failed_ && !context_.control->error_claim.claimed();
  const bool exchanged = health_->exchange(now);
  chunks_moved_ = false;
  if (usable) {
    const bool drained = shipper_->drain();
    const bool posted = shipper_->post(now);
    if (drained || posted) last_chunk_usec_ = now;
    chunks_moved_ = drained || posted;
  }
  context_.transport->flush();
  chunks_moved_ |= poll_transport();
  if (usable) {
    chunks_moved_ |= lander_->return_credits(!chunks_moved_, now);
    context_.transport->flush();
  }
  health_->housekeeping(now, settled_bytes_ + context_.transport->moved_bytes());
  return exchanged || chunks_moved_;
}

bool Proxy::poll_transport() {
  const size_t count = context_.transport->poll(completions_);
  const uint64_t polled_nsec = count != 0 ? now_nsec() : 0;
  std::exception_ptr first;
  for (size_t i = 0; i < count; ++i) {
    try {
      take(completions_[i], polled_nsec);
    } catch (...) {  // take the others first: each is reported only once
      if (!first) first = std::current_exception();
    }
  }
  shipper_->ring_producer();
  lander_->ring_readers();
  if (first) std::rethrow_exception(first);
  return count != 0;
}

void Proxy::take(const Completion& completion, uint64_t polled_nsec) {
  if (completion.peer < 0 || completion.peer >= context_.topo->num_ranks)
    throw CommunicationFailure(make_error(ErrorKind::kTransport, context_.rank, -1,
                                          "the transport names rank " + std::to_string(completion.peer) + " of " +
                                              std::to_string(context_.topo->num_ranks)));
  const uint64_t now_usec = polled_nsec / 1000;
  if (is_of_chunk(completion)) {
    last_chunk_usec_ = now_usec;
    if (completion.kind != Completion::Kind::kFailure) settled_bytes_ += completion.num_bytes;
  }
  if (completion.kind == Completion::Kind::kArrival) {
    health_->heard(completion.peer, now_usec);
    const Imm imm = decode_imm(completion.immediate);
    if (imm.type == ImmType::kProbe || failed_) {
      return;
    } else if (imm.type == ImmType::kData) {
      lander_->arrive(completion);
    } else if (imm.type == ImmType::kCredit) {
      shipper_->credit(imm.channel, imm.serial, completion.peer);
    } else {
      throw CommunicationFailure(
          make_error(ErrorKind::kTransport, context_.rank, completion.peer,
                     "an immediate of unknown type from rank " + std::to_string(completion.peer)));
    }
    return;
  }
  const bool delivered = completion.kind == Completion::Kind::kWriteDone;
  const Cookie cookie = decode_cookie(completion.cookie);
  // A failed post to a rank that left is no error.
  if (!delivered && !context_.outlives_ranks && !health_->closed(completion.peer))
    fail(make_error(ErrorKind::kTransport, context_.rank, completion.peer,
                    "a write to rank " + std::to_string(completion.peer) +
                        " failed: " + (completion.reason ? completion.reason : "no reason given")));
  if (cookie.kind == PostKind::kData)
    shipper_->flushed(cookie, delivered, polled_nsec);
  else if (cookie.kind == PostKind::kCredit)
    lander_->credit_flushed(cookie.index);
  else
    health_->probed(cookie);
}

void Proxy::fail(const ErrorRecord& record) {
  failed_ = true;
  ErrorRecord ours = record;
  ours.rank = context_.rank;
  health_->spread(ours);
}

ProxyStats Proxy::stats() const {
  ProxyStats stats;
  shipper_->add_stats(stats);
  lander_->add_stats(stats);
  health_->add_stats(stats);
  stats.wakeups = wakeups_.value();
  stats.passes = passes_.value();
  stats.busy_usec = busy_usec_.value();
  return stats;
}

uint64_t Proxy::last_heard_usec(int rank) const { return health_->last_heard_usec(rank); }
uint64_t Proxy::silent_usec(int rank) const { return health_->silent_usec(rank); }
uint64_t Proxy::last_moved_usec(int rank) const { return health_->last_moved_usec(rank); }
uint64_t Proxy::num_refused(int rank) const { return health_->num_refused(rank); }
bool Proxy::remote_closed(int rank) const { return health_->closed(rank); }
void Proxy::announce_close() { health_->announce_close(); }
bool Proxy::all_closed() const { return health_->all_closed(); }
bool Proxy::error_delivered() const { return health_->error_delivered(); }

}  // namespace uccl_ep
