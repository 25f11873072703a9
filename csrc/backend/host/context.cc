#include "backend/host/context.h"

#include <algorithm>

namespace uccl_ep::host {
namespace {

class Builder {
 public:
  Builder(HostContext& context, const Layout& layout, const std::vector<uint8_t*>& regions, const ProxyQueue& proxy)
      : context_(context),
        channels_(layout.channels),
        max_tokens_(layout.rings.slots.max_tokens),
        regions_(regions),
        proxy_(proxy) {
    for (int rank : context.members())
      layouts_.push_back(make_member_layout(layout.topo, layout.rings, layout.own, rank));
  }
  explicit Builder(const Builder&) = delete;

  void build() {
    const int rank = context_.rank;
    for (int d = 0; d < context_.topo.num_domains(); ++d) context_.outgoing.push_back(outgoing(d));
    for (int src = 0; src < context_.topo.num_ranks; ++src) context_.incoming.push_back(incoming(src));
    const RegionLayout& mine = layout_of(rank);
    for (size_t stream = 0; stream < mine.pieces.size(); ++stream) {
      MergedPorts ports = merged_of(mine, stream, mine.pieces[stream]);
      if (stream > 0) ports.returned = send(mine.return_send[stream - 1]);
      context_.merged.push_back(std::move(ports));
    }
    if (mine.slots.pieces.empty()) return;
    context_.slots = std::make_unique<SlotPorts>();
    build_slots(*context_.slots);
    if (mine.votes_offset != 0) build_votes(*context_.slots);
  }

 private:
  const RegionLayout& layout_of(int member) const {
    return layouts_[static_cast<size_t>(context_.topo.local_of[static_cast<size_t>(member)])];
  }
  ControlBlock* control(int rank) const { return reinterpret_cast<ControlBlock*>(regions_[rank]); }

  OutPort send(const RingLayout& ring) const {
    return OutPort(regions_[context_.rank], ring, proxy_, channels_.out_of(ring), context_.counters.ports,
                   context_.bells);
  }

  OutPort to_domain(const RingLayout& ring) const {
    std::vector<Bell*> readers;
    for (int rank : context_.members()) readers.push_back(&control(rank)->worker_bell);
    return OutPort(regions_[context_.rank], ring, readers, context_.counters.ports, context_.bells);
  }
  InPort returned(const RingLayout& ring) const {
    return InPort(regions_[context_.rank], ring, 0, &control(context_.rank)->proxy_bell, context_.bells);
  }
  // Where a stream lies: at its source, or at our rail for it, whose incoming[i] it is.
  struct Held {
    int holder;
    bool own;
    size_t i;
  };
  Held held_of(int src) const {
    const int holder = context_.holder(src);
    const std::vector<int>& incoming = layout_of(holder).incoming;
    const bool own = holder == src;
    return {holder, own,
            own ? 0 : static_cast<size_t>(std::find(incoming.begin(), incoming.end(), src) - incoming.begin())};
  }
  // What we consume frees a slot of the source's worker, or a credit of the holder's proxy.
  InPort from(const Held& held, const RingLayout& ring) const {
    ControlBlock* const holder = control(held.holder);
    return InPort(regions_[held.holder], ring, context_.member, held.own ? &holder->worker_bell : &holder->proxy_bell,
                  context_.bells);
  }
  OutPort to_merger(const Held& held, const RingLayout& ring) const {
    return OutPort(regions_[held.holder], ring, {&control(held.holder)->worker_bell}, context_.counters.ports,
                   context_.bells);
  }
  // A stream that we merge, by its number among those.
  MergedPorts merged_of(const RegionLayout& mine, size_t stream, const std::vector<RingLayout>& pieces) const {
    MergedPorts ports;
    ports.src = stream == 0 ? context_.rank : mine.incoming[stream - 1];
    for (size_t q = 0; q < pieces.size(); ++q)
      ports.pieces.push_back(
          InPort(regions_[context_.rank], pieces[q], 0, &control(context_.members()[q])->worker_bell, context_.bells));
    return ports;
  }

  OutgoingPorts outgoing(int d) {
    const RegionLayout& mine = layout_of(context_.rank);
    if (d != context_.domain)
      return {send(mine.header_send[d]), send(mine.meta_send[d]), send(mine.rows_send[d]),
              returned(mine.return_landing[d])};
    return {to_domain(mine.own_header), to_domain(mine.own_meta), to_domain(mine.own_rows), InPort()};
  }

  IncomingPorts incoming(int src) {
    const Held held = held_of(src);
    const RegionLayout& theirs = layout_of(held.holder);
    return {from(held, held.own ? theirs.own_header : theirs.header_landing[held.i]),
            from(held, held.own ? theirs.own_meta : theirs.meta_landing[held.i]),
            from(held, held.own ? theirs.own_rows : theirs.rows_landing[held.i]),
            to_merger(held, theirs.pieces[held.own ? 0 : 1 + held.i][context_.member])};
  }

  // ---- low latency
  void build_slots(SlotPorts& ports) {
    const RegionLayout& mine = layout_of(context_.rank);
    ports.max_tokens = max_tokens_;
    ports.masked.assign(static_cast<size_t>(context_.topo.num_ranks), false);
    ports.returned.resize(context_.topo.members.size());
    for (int d = 0; d < context_.topo.num_domains(); ++d) {
      const bool own = d == context_.domain;
      const size_t domain = static_cast<size_t>(d);
      ports.rows.push_back(own ? to_domain(mine.slots.own_rows) : send(mine.slots.rows_send[domain]));
      ports.weights.push_back(own ? to_domain(mine.slots.own_weights) : send(mine.slots.weights_send[domain]));
      if (!own) ports.returned[domain] = returned(mine.slots.sums_landing[domain]);
    }
    for (int src = 0; src < context_.topo.num_ranks; ++src) {
      const Held held = held_of(src);
      const RegionLayout::Slots& theirs = layout_of(held.holder).slots;
      ports.rows_of.push_back(from(held, held.own ? theirs.own_rows : theirs.rows_landing[held.i]));
      ports.weights_of.push_back(from(held, held.own ? theirs.own_weights : theirs.weights_landing[held.i]));
      ports.pieces.push_back(to_merger(held, theirs.pieces[held.own ? 0 : 1 + held.i][context_.member]));
    }
    for (size_t stream = 0; stream < mine.slots.pieces.size(); ++stream) {
      MergedPorts merged = merged_of(mine, stream, mine.slots.pieces[stream]);
      if (stream > 0) merged.returned = send(mine.slots.sums_send[stream - 1]);
      ports.merged.push_back(std::move(merged));
    }
  }

  void build_votes(SlotPorts& ports) const {
    const auto votes_in = [&](int rank) {
      return reinterpret_cast<SharedVotes*>(regions_[rank] + layout_of(rank).votes_offset);
    };
    ports.own_votes = votes_in(context_.rank);
    for (int rank = 0; rank < context_.topo.num_ranks; ++rank)
      ports.votes_of.push_back(context_.topo.domain_of[rank] == context_.domain ? votes_in(rank)
                                                                                : ports.own_votes + 1 + rank);
    for (int rank : context_.members()) ports.voters.push_back(&control(rank)->worker_bell);
    ports.voters.push_back(&control(context_.rank)->proxy_bell);
  }

  HostContext& context_;
  const Channels& channels_;
  const uint32_t max_tokens_;  // of low latency
  const std::vector<uint8_t*>& regions_;
  const ProxyQueue proxy_;
  std::vector<RegionLayout> layouts_;  // by member
};

}  // namespace

std::unique_ptr<HostContext> make_context(const Layout& layout, OwnRank own, const std::vector<uint8_t*>& regions,
                                          const ProxyQueue& proxy) {
  const Topology& topo = layout.topo;
  const int rank = own.rank;
  auto context = std::make_unique<HostContext>();
  context->rank = rank;
  context->domain = topo.domain_of[rank];
  context->member = static_cast<uint32_t>(topo.local_of[rank]);
  context->topo = topo;
  context->num_experts = layout.rings.num_experts;
  context->experts_per_rank = layout.rings.num_experts / static_cast<uint32_t>(topo.num_ranks);
  context->source_order = std::move(own.source_order);
  Builder(*context, layout, regions, proxy).build();
  return context;
}

}  // namespace uccl_ep::host
