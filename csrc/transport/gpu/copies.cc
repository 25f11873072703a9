#include "transport/gpu/copies.h"

#include <stdexcept>
#include <string>

#include "common/clock.h"
#include "common/units.h"
#include "sync/flag.h"

namespace uccl_ep::gpu {
namespace {

constexpr size_t kEvents = 256;
// A context that broke writes no word: the streams are asked now and then.
constexpr uint64_t kQueryNsec = 20'000'000;
// After a pause of milliseconds a call to the driver takes 20 to 50 us. This one is made meanwhile.
constexpr uint64_t kWarmNsec = 100'000;

[[noreturn]] void fail(const std::string& why) {
  ErrorRecord record;
  record.kind = ErrorKind::kTransport;
  record.step = Step::kShip;
  record.set_message("copy between GPUs: " + why);
  throw CommunicationFailure(record);
}
// What the device layer throws becomes an error of the transport.
template <typename Do>
void as_transport(const Do& what) try {
  what();
} catch (const std::runtime_error& failure) {
  fail(failure.what());
}

}  // namespace

GpuCopies::GpuCopies(int device) try : context_(device) {
  try {
    create_lanes();
  } catch (...) {
    destroy_lanes();
    throw;
  }
} catch (const std::runtime_error& failure) {
  fail(failure.what());
}

GpuCopies::~GpuCopies() { destroy_lanes(); }

void GpuCopies::create_lanes() {
  const CopyContext::Guard guard(context_);
  words_ = PinnedMemory(kLanes * kLineBytes);
  for (size_t i = 0; i < kLanes; ++i) {
    Lane& lane = lanes_[i];
    lane.word = reinterpret_cast<uint64_t*>(words_.base() + i * kLineBytes);
    lane.stream = make_stream();
    if (context_.writes_words()) continue;
    lane.tickets.resize(kEvents);
    while (lane.events.size() < kEvents) lane.events.push_back(make_event());
  }
}

// Of a context that cannot be entered nothing can be given back but itself.
void GpuCopies::destroy_lanes() try {
  const CopyContext::Guard guard(context_);
  for (Lane& lane : lanes_) {
    if (lane.stream != nullptr) synchronize(lane.stream, std::nothrow);
    lane = Lane{};
  }
  words_ = PinnedMemory();
} catch (const std::runtime_error&) {
}

void GpuCopies::enter_thread() {
  as_transport([&] { context_.enter_thread(); });
}

void GpuCopies::hand_over(std::span<const Copy> copies, uint64_t last) {
  static_assert(kGroup <= CopyContext::kMostAtOnce);
  Lane& lane = lanes_[lane_of(last)];
  as_transport([&] {
    context_.copy(copies, lane.stream);
    mark(lane, last);
  });
}

// The copies so far of a lane.
void GpuCopies::mark(Lane& lane, uint64_t last) {
  lane.last = last;
  if (context_.writes_words()) return write(lane);
  while (lane.num_events - lane.num_over == kEvents) look_at_events(lane);
  record(lane.events[lane.num_events % kEvents], lane.stream);
  lane.tickets[lane.num_events++ % kEvents] = last;
}

void GpuCopies::write(const Lane& lane) {
  context_.write_word(lane.word, lane.last, lane.stream);
  last_call_nsec_ = now_nsec();
}

bool GpuCopies::done(uint64_t ticket) const { return read_device_flag(lanes_[lane_of(ticket)].word) >= ticket; }

void GpuCopies::look() {
  as_transport([&] { look_at_lanes(); });
}

void GpuCopies::look_at_lanes() {
  if (!context_.writes_words())
    for (Lane& lane : lanes_) look_at_events(lane);
  const uint64_t now = now_nsec();
  if (context_.writes_words() && now - last_call_nsec_ > kWarmNsec &&
      read_device_flag(lanes_[0].word) == lanes_[0].last)
    write(lanes_[0]);  // not behind copies that hang
  if (now < next_query_nsec_) return;
  next_query_nsec_ = now + kQueryNsec;
  for (Lane& lane : lanes_) {
    if (read_device_flag(lane.word) == lane.last) continue;
    if (const std::string why = failure_of(lane.stream); !why.empty()) throw std::runtime_error(why);
  }
}

void GpuCopies::look_at_events(Lane& lane) {
  for (; lane.num_over < lane.num_events; ++lane.num_over) {
    if (!is_over_well(lane.events[lane.num_over % kEvents])) return;
    reinterpret_cast<Flag*>(lane.word)->publish(lane.tickets[lane.num_over % kEvents]);
  }
}

}  // namespace uccl_ep::gpu
