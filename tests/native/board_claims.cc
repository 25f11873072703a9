// The board and the events of a proxy of a GPU buffer: what they say of chunks that come and go in any order.
#include <algorithm>
#include <bit>

#include "claims.h"
#include "device_world.h"

using namespace uccl_ep;

namespace {

// The word is the longest prefix that the stamps allow. `ahead`: counts the times when a later chunk was there.
void check_prefix(const Node& node, const RingLayout& ring, uint64_t word, uint64_t& ahead) {
  const Flag* stamps = reinterpret_cast<const Flag*>(node.region->base() + ring.stamps_offset);
  for (uint64_t s = word < ring.num_slots ? 0 : word - ring.num_slots; s < word; ++s)
    EXPECT(stamps[s % ring.num_slots].read() > s);
  EXPECT(stamps[word % ring.num_slots].read() <= word);
  for (uint64_t s = word + 1; s < word + ring.num_slots; ++s) ahead += stamps[s % ring.num_slots].read() == s + 1;
}

CLAIM("a word is the number of chunks such that none before them is missing, whatever the order") {
  WorldOptions options = device_options();
  options.loop.seed = 3;
  options.loop.duplicate_rate = 0.3;
  options.copy_usec = 100;
  World world(options);
  Ends ends = ends_of(world, RingKind::kRows);
  Node &from = world.nodes[0], &to = world.nodes[1];
  Sink sink(to, ends.in, 0);
  const uint32_t channel = to.channels.in[ends.in].peer_channel;
  uint64_t arrived_ahead = 0, flushed_ahead = 0;
  const uint64_t deadline = now_usec() + kPatienceUsec;
  while (sink.serial() < 300 && now_usec() < deadline) {
    if (ends.source.serial() < 300) ends.source.try_send(kBytes);
    world.step();
    check_prefix(to, to.channels.in[ends.in].landing, to.arrived(ends.in).read(), arrived_ahead);
    check_prefix(from, from.channels.out[channel].send, from.flushed(channel).read(), flushed_ahead);
    while (sink.ready()) sink.release();
  }
  EXPECT_EQ(sink.serial(), uint64_t{300});
  EXPECT(arrived_ahead > 20 && flushed_ahead > 20);
}

// Reads the rings of events of a rank, as a GPU does.
class Log {
 public:
  explicit Log(const Node& node) : node_(node), counts_(node.channels.in.size() + node.channels.out.size()) {}
  // What is new; the board is never behind it.
  void read() {
    for (uint32_t ring = 0; ring < kNumEventRings; ++ring) {
      const RegionLayout::Events& events = node_.layout.events[ring];
      const std::vector<uint32_t> words = node_.channels.board_of(static_cast<EventRing>(ring));
      const auto bits = static_cast<uint32_t>(std::countr_zero(events.capacity));
      for (uint64_t& next = next_[ring]; events.capacity > 0; ++next) {
        const auto* slots = reinterpret_cast<const Flag*>(node_.region->base() + events.offset);
        const uint64_t event = slots[event_slot(next, bits)].read();
        if (event_ahead(event, next, bits) == kNoEvent) break;
        EXPECT_EQ(event_ahead(event, next, bits), uint64_t{0});
        const uint32_t idx = words[EventNumber::get(event)];
        const uint64_t count = event_count(event, counts_[idx]);
        EXPECT(count > counts_[idx] && count <= node_.arrived(idx).read());
        counts_[idx] = count;
      }
    }
  }
  bool is_the_board() const {
    for (uint32_t idx = 0; idx < counts_.size(); ++idx)
      if (counts_[idx] != node_.arrived(idx).read()) return false;
    return true;
  }
  uint64_t num_events(EventRing ring) const { return next_[static_cast<uint32_t>(ring)]; }

 private:
  const Node& node_;
  std::vector<uint64_t> counts_;
  uint64_t next_[kNumEventRings] = {};
};

CLAIM("every word of the board is in one ring of events, which says what the word says, one step after the other") {
  WorldOptions options = device_options({0, 0, 1, 1, 1});
  options.loop.seed = 4;
  options.loop.duplicate_rate = 0.3;
  World world(options);
  std::vector<Source> sources;
  std::vector<Sink> sinks;
  std::vector<Log> logs(world.nodes.begin(), world.nodes.end());
  for (Node& node : world.nodes) {
    for (uint32_t c = 0; c < node.channels.out.size(); ++c) sources.emplace_back(node, c);
    for (uint32_t c = 0; c < node.channels.in.size(); ++c)
      for (uint32_t reader = 0; reader < node.channels.in[c].landing.num_readers; ++reader)
        sinks.emplace_back(node, c, reader);
    size_t in_rings = 0;
    for (uint32_t ring = 0; ring < kNumEventRings; ++ring)
      in_rings += node.channels.board_of(static_cast<EventRing>(ring)).size();
    EXPECT_EQ(in_rings, node.channels.in.size() + node.channels.out.size());
  }
  constexpr uint64_t kChunks = 40;  // of each channel: some laps of a ring
  const auto is_over = [&] {
    return std::all_of(sinks.begin(), sinks.end(), [](const Sink& sink) { return sink.serial() == kChunks; });
  };
  const uint64_t deadline = now_usec() + kPatienceUsec;
  while (!is_over() && now_usec() < deadline) {
    for (Source& source : sources)
      if (source.serial() < kChunks) source.try_send(256);
    world.step();
    for (Sink& sink : sinks)
      while (sink.ready()) sink.release();
    for (Log& log : logs) {
      log.read();
      EXPECT(log.is_the_board());
    }
  }
  EXPECT(is_over());
  EXPECT(logs[0].num_events(EventRing::kDomain) > world.nodes[0].layout.events[0].capacity);
  for (EventRing ring : {EventRing::kOwn, EventRing::kSlotDomain, EventRing::kSlotOwn})
    EXPECT(logs[0].num_events(ring) > 0);
}

}  // namespace

int main(int argc, char** argv) { return claims::main(argc, argv); }
