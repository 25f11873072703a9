// What a GPU engine has in addition with several domains: the host memory that its kernels poll and write, and what
// they know of the transport's rings.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/gpu/group.h"
#include "device/memory.h"
#include "engine/group/control_plane.h"
#include "transport/gpu/copies.h"
#include "transport/gpu/visibility.h"

namespace uccl_ep {

// Lets the NICs of `plane` reach our device memory. To be called before its handle is exported.
void register_with_nics(ControlPlane& plane, const gpu::DeviceMapping& own);

class Network {
 public:
  // `plane` is connected. `regions`: by rank; without NICs those of other domains, too. Both outlive this.
  Network(ControlPlane& plane, const gpu::DeviceRegionLayout& layout, int rank, int device, bool has_nics,
          const std::vector<gpu::DeviceMapping>& regions);

  // Writes what kernels are told into device memory, and into `group`, which is complete except for this.
  void fill(gpu::Group& group, const RankNumbers& numbers);
  // By any thread: tells the copier that an operation is to come.
  void wake() {
    if (copies_ != nullptr) copies_->wake();
  }
  // Ends its threads. Kernels may still use what they know of.
  void stop() {
    copies_.reset();
    visibility_.reset();
  }
  // What the words mean that kernels follow: those of Net, then of SlotNet.
  struct Seen {
    TraceKind kind;
    RingKind ring;
    int peer;    // whose chunks arrive; to whom ours leave
    int member;  // where
  };
  const std::vector<Seen>& seen() const { return seen_; }
  // Where the packets of a rank of another domain land, by the number that kernels use.
  const uint8_t* packets_of(const gpu::Group& group, uint32_t number) const;

 private:
  // Memory of a member's host, as our GPU sees it.
  uint8_t* host(int rank) const { return hosts_[static_cast<size_t>(rank)].on_device(); }
  void fill_sources(const RankNumbers& numbers);
  void fill_destinations(gpu::Net& net);
  size_t stream_of(int source) const;
  // That follow a word; the second may be nullptr.
  using Flags = std::pair<uint64_t*, uint64_t*>;
  template <typename FlagsOf>
  void follow(gpu::Followed& followed, EventRing of_domain, EventRing of_ours, FlagsOf flags_of);
  void follow_events(const gpu::Group& group, gpu::Followed& followed, const RankNumbers& numbers);
  void fill_slots(gpu::SlotNet& net, const RankNumbers& numbers);
  void follow_slot_events(const gpu::Group& group, gpu::Followed& followed, const RankNumbers& numbers);
  // A member's host's count of consumed chunks of `ring`, which lands there: ours.
  uint64_t* consumed_by_us(int holder, const RingLayout& ring) const;

  const ControlPlane& plane_;
  const gpu::DeviceRegionLayout& layout_;
  const Topology& topo_;
  const int rank_;
  std::vector<gpu::HostMapping> hosts_;  // by rank
  std::unique_ptr<Copier> copies_;                    // only without NICs
  std::unique_ptr<gpu::GpuVisibility> visibility_;  // only where a NIC writes
  std::vector<RegionLayout> layouts_;      // by member of our domain
  std::vector<gpu::Net::To> to_;           // as in Net
  std::vector<gpu::Net::From> from_;
  std::vector<gpu::Net::Relayed> relayed_;
  std::vector<Seen> seen_;
};

}  // namespace uccl_ep
