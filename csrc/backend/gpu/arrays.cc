// Arrays of a plan, and of what kernels know of other domains, one behind the other.
#include "backend/gpu/layout.h"
#include "backend/gpu/low_latency_net.h"
#include "backend/gpu/net.h"
#include "backend/gpu/words.h"
#include "common/units.h"

namespace uccl_ep::gpu {
namespace {

// Points arrays into memory, one behind the other; null: only counts their bytes.
class Arrays {
 public:
  explicit Arrays(uint8_t* memory) : memory_(memory) {}
  template <typename T>
  void take(T*& pointer, uint64_t count) {
    pointer = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += sizeof(T) * count;
  }
  uint64_t bytes() const { return bytes_; }

 private:
  uint8_t* const memory_;
  uint64_t bytes_ = 0;
};

// What high throughput and low latency both have: where the transport's rings lie, and chunks by channel.
template <typename AnyNet, typename AnyState>
Arrays take_channels(AnyNet& net, AnyState& state, uint8_t* memory, const DeviceMap& map) {
  Arrays arrays(memory);
  arrays.take(net.to, map.num_domains);
  arrays.take(net.from, map.num_ranks);
  arrays.take(net.relayed, map.num_streams);
  arrays.take(net.followed.rings, Followed::most_rings(map));
  arrays.take(net.followed.seen, Followed::most_rings(map));
  arrays.take(net.followed.words, AnyNet::most_words(map));
  arrays.take(state.sent, map.num_domains);
  arrays.take(state.received, map.num_ranks);
  arrays.take(state.returned, map.num_domains);
  arrays.take(state.relayed, map.num_streams);
  return arrays;
}

}  // namespace

uint64_t lay_out_net(Net& net, NetState& state, uint8_t* memory, const DeviceMap& map) {
  Arrays arrays = take_channels(net, state, memory, map);
  arrays.take(state.tails_sent, map.num_domains);
  arrays.take(state.tails_read, map.num_ranks);
  arrays.take(state.ended, 1);
  arrays.take(state.producer, 1);
  arrays.take(state.rows_there, map.num_ranks);
  arrays.take(state.returns_there, map.num_domains);
  arrays.take(state.packets_gone, map.num_domains);
  arrays.take(state.tails_there, map.num_ranks);
  arrays.take(state.tails_gone, map.num_domains);
  arrays.take(state.rows_gone, map.num_domains);
  arrays.take(state.returns_gone, map.num_streams);
  arrays.take(state.packet_unit, map.num_domains);
  return arrays.bytes();
}

uint64_t lay_out_slot_net(SlotNet& net, SlotNetState& state, uint8_t* memory, const DeviceMap& map) {
  Arrays arrays = take_channels(net, state, memory, map);
  arrays.take(state.routing_there, map.num_ranks);
  arrays.take(state.rows_there, map.num_ranks);
  arrays.take(state.weights_there, map.num_ranks);
  arrays.take(state.sums_there, map.num_domains);
  arrays.take(state.routing_gone, map.num_domains);
  arrays.take(state.rows_gone, map.num_domains);
  arrays.take(state.weights_gone, map.num_domains);
  arrays.take(state.sums_gone, map.num_streams);
  return arrays.bytes();
}

uint64_t lay_out_plan(PlanView& view, const PlanSizes& sizes, uint8_t* memory, const DeviceMap& of) {
  Arrays arrays(memory);
  const auto take = [&](auto*& pointer, uint64_t count) { arrays.take(pointer, count); };
  const uint64_t ranks = of.num_ranks, experts = of.num_experts / of.num_ranks;
  const uint64_t groups = BlockRows::groups(view.num_token_blocks);
  take(view.routing_hash, 1);
  take(view.tokens_per_expert, experts);
  take(view.overflow, 1);
  take(view.most_tokens, 1);
  take(view.row_begin, ranks);
  take(view.row_end, ranks);
  take(view.weight_begin, ranks);
  take(view.token_block_rows, ranks * groups);
  take(view.token_blocks, ranks);
  take(view.padding, 2 * experts);
  take(view.row_piece, sizes.received_rows);
  take(view.row_pair_begin, uint64_t{sizes.received_rows} + 1);
  take(view.out_rows, sizes.received_pairs);
  take(view.addend_begin, uint64_t{view.num_tokens} + 1);
  take(view.pair_begin, ranks + 1);
  take(view.pair_place, sizes.sent_pairs);
  if (of.num_domains == 1) {
    take(view.row_token, sizes.received_rows);
    return arrays.bytes();
  }
  take(view.token_block_streams, ranks * groups);
  take(view.sent_token_blocks, of.num_domains * groups);
  take(view.addends, sizes.sent_addends);
  take(view.relayed_begin, of.num_streams);
  take(view.relayed_pairs, of.num_streams);
  take(view.relayed_piece, uint64_t{sizes.relayed_rows} + of.num_streams);
  take(view.row_token, sizes.received_rows);
  take(view.row_position, sizes.received_rows);
  return arrays.bytes();
}

}  // namespace uccl_ep::gpu
