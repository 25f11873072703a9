#include "proxy/board.h"

#include <bit>

namespace uccl_ep {

Board::Board(const ProxyContext& context) {
  const RegionLayout& layout = *context.layout;
  if (layout.board_offset == 0) return;
  board_ = reinterpret_cast<Flag*>(context.region + layout.board_offset);
  words_.resize(context.channels->in.size() + context.channels->out.size());
  for (uint32_t ring = 0; ring < kNumEventRings; ++ring) {
    const RegionLayout::Events& events = layout.events[ring];
    events_[ring] = {reinterpret_cast<Flag*>(context.region + events.offset),
                     static_cast<uint32_t>(std::countr_zero(events.capacity)), 0};
    uint32_t number = 0;
    for (uint32_t word : context.channels->board_of(static_cast<EventRing>(ring))) words_[word] = {ring, number++};
  }
}

void Board::publish(size_t idx, uint64_t count) {
  const Word word = words_[idx];
  Events& events = events_[word.ring];
  board_[idx].publish(count);  // first: who has been overtaken reads it after a later event
  events.slots[event_slot(events.next, events.capacity_bits)].publish(
      encode_event(events.next, events.capacity_bits, word.number, count));
  ++events.next;
}

}  // namespace uccl_ep
