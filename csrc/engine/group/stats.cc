// What the proxy counts, under the names that Buffer.stats() documents.
#include "engine/stats.h"

#include "engine/group/control_plane.h"

namespace uccl_ep {
namespace {

void put_proxy(Stats& out, const ProxyStats& proxy) {
  for (const ShipStats& ship : proxy.ships) {
    const std::string name = std::string("ship.") + ring_name(ship.kind) + ".domain" + std::to_string(ship.domain);
    put(out, name + ".chunks", ship.chunks);
    put(out, name + ".bytes", ship.bytes);
  }
  put(out, "credit.waits", proxy.credit_waits);
  put(out, "credit.wait_seconds", static_cast<double>(proxy.credit_wait_usec) * 1e-6);
  put(out, "credit.sent", proxy.credits_sent);
  put(out, "proxy.refused_posts", proxy.refused_posts);
  put(out, "proxy.command_usec.p50", static_cast<double>(proxy.command_nsec_p50) * 1e-3);
  put(out, "proxy.command_usec.p99", static_cast<double>(proxy.command_nsec_p99) * 1e-3);
  put(out, "proxy.peak_in_flight_bytes", proxy.peak_in_flight_bytes);
  put(out, "proxy.commands", proxy.commands);
  put(out, "proxy.arrivals", proxy.arrivals);
  put(out, "proxy.arrived_bytes", proxy.arrived_bytes);
  put(out, "proxy.duplicates_dropped", proxy.duplicates_dropped);
  put(out, "messages.sent", proxy.messages.sent);
  put(out, "messages.repeated", proxy.messages.repeated);
  put(out, "messages.acknowledged", proxy.messages.acknowledged);
  put(out, "messages.taken", proxy.messages.taken);
  put(out, "messages.duplicates", proxy.messages.duplicates);
  put(out, "messages.strangers", proxy.messages.strangers);
  put(out, "proxy.wakeups", proxy.wakeups);
  put(out, "proxy.busy_seconds", static_cast<double>(proxy.busy_usec) * 1e-6);
}

}  // namespace

Stats ControlPlane::stats() const {
  Stats out;
  {
    std::lock_guard lock(mutex_);
    if (!started_) return out;
  }
  const std::shared_lock held(memory_mutex_);
  if (given_back_) return last_stats_;
  put_proxy(out, proxy_->stats());
  put(out, "memory.allocated_bytes", layout_.total_bytes + transport_bytes(config_, topo_, config_.rank));
  return out;
}

}  // namespace uccl_ep
