#include "backend/host/context.h"

#include <algorithm>

namespace uccl_ep::host {
namespace {

class Builder {
 public:
  Builder(HostContext& context, const Layout& layout, const std::vector<uint8_t*>& regions, const ProxyQueue& proxy)
      : context_(context), channels_(layout.channels), regions_(regions), proxy_(proxy) {
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
      MergedPorts ports;
      ports.src = stream == 0 ? rank : mine.incoming[stream - 1];
      for (size_t q = 0; q < mine.pieces[stream].size(); ++q)
        ports.pieces.push_back(InPort(regions_[rank], mine.pieces[stream][q], 0,
                                      &control(context_.members()[q])->worker_bell, context_.bells));
      if (stream > 0) ports.returned = send(mine.return_send[stream - 1]);
      context_.merged.push_back(std::move(ports));
    }
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

  OutgoingPorts outgoing(int d) {
    const RegionLayout& mine = layout_of(context_.rank);
    if (d != context_.domain)
      return {send(mine.header_send[d]), send(mine.meta_send[d]), send(mine.rows_send[d]),
              InPort(regions_[context_.rank], mine.return_landing[d], 0, &control(context_.rank)->proxy_bell,
                     context_.bells)};
    std::vector<Bell*> readers;
    for (int rank : context_.members()) readers.push_back(&control(rank)->worker_bell);
    auto out = [&](const RingLayout& ring) {
      return OutPort(regions_[context_.rank], ring, readers, context_.counters.ports, context_.bells);
    };
    return {out(mine.own_header), out(mine.own_meta), out(mine.own_rows), InPort()};
  }

  IncomingPorts incoming(int src) {
    const int holder = context_.holder(src);
    const RegionLayout& theirs = layout_of(holder);
    uint8_t* region = regions_[holder];
    const bool own_domain = holder == src;
    const size_t i =
        own_domain ? 0 : std::find(theirs.incoming.begin(), theirs.incoming.end(), src) - theirs.incoming.begin();
    // What we consume frees a slot of the source's worker, or a credit of the holder's proxy.
    Bell* waker = own_domain ? &control(holder)->worker_bell : &control(holder)->proxy_bell;
    auto in = [&](const RingLayout& ring) { return InPort(region, ring, context_.member, waker, context_.bells); };
    return {in(own_domain ? theirs.own_header : theirs.header_landing[i]),
            in(own_domain ? theirs.own_meta : theirs.meta_landing[i]),
            in(own_domain ? theirs.own_rows : theirs.rows_landing[i]),
            OutPort(region, theirs.pieces[own_domain ? 0 : 1 + i][context_.member], {&control(holder)->worker_bell},
                    context_.counters.ports, context_.bells)};
  }

  HostContext& context_;
  const Channels& channels_;
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
