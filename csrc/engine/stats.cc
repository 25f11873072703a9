// What the engine counts, under the names that Buffer.stats() documents.
#include "engine/engine.h"

namespace uccl_ep {

std::vector<std::pair<std::string, double>> Engine::stats() const {
  std::vector<std::pair<std::string, double>> out;
  auto put = [&](const std::string& name, uint64_t value) { out.emplace_back(name, static_cast<double>(value)); };
  {
    std::lock_guard lock(mutex_);
    put("dispatch.calls", counters_.dispatches);
    put("combine.calls", counters_.combines);
    out.emplace_back("dispatch.seconds", static_cast<double>(counters_.dispatch_usec) * 1e-6);
    out.emplace_back("combine.seconds", static_cast<double>(counters_.combine_usec) * 1e-6);
    if (!started_) return out;
  }
  const host::StepCounters& c = context_->counters;
  put("rows.staged", c.rows_staged.value());
  put("rows.shipped", c.rows_shipped.value());
  put("rows.placed", c.rows_placed.value());
  put("rows.folded", c.rows_folded.value());
  put("rows.relayed", c.rows_relayed.value());
  put("rows.merged", c.rows_merged.value());
  put("pairs.shipped", c.pairs_shipped.value());
  put("pairs.relayed", c.pairs_relayed.value());
  for (uint32_t kind = 0; kind < kNumRingKinds; ++kind) {
    const std::string ring = std::string("ring.") + ring_name(static_cast<RingKind>(kind));
    put(ring + ".chunks", c.ports[kind].chunks.value());
    put(ring + ".waits", c.ports[kind].waits.value());
    put(ring + ".laps", c.ports[kind].laps.value());
  }
  for (Step step : {Step::kExchange, Step::kPlan, Step::kStage, Step::kPlace, Step::kFold, Step::kMerge}) {
    const auto seconds = [&](const char* what, const Counter* of, double unit) {
      out.emplace_back(std::string(what) + step_name(step),
                       static_cast<double>(of[static_cast<size_t>(step)].value()) * unit);
    };
    seconds("busy_seconds.", busy_nsec_, 1e-9);
    seconds("blocked_seconds.", blocked_usec_, 1e-6);
  }
  const ProxyStats proxy = proxy_->stats();
  for (const ShipStats& ship : proxy.ships) {
    const std::string name = std::string("ship.") + ring_name(ship.kind) + ".domain" + std::to_string(ship.domain);
    put(name + ".chunks", ship.chunks);
    put(name + ".bytes", ship.bytes);
  }
  put("credit.waits", proxy.credit_waits);
  out.emplace_back("credit.wait_seconds", static_cast<double>(proxy.credit_wait_usec) * 1e-6);
  put("credit.sent", proxy.credits_sent);
  put("proxy.refused_posts", proxy.refused_posts);
  put("proxy.peak_in_flight_bytes", proxy.peak_in_flight_bytes);
  put("proxy.arrivals", proxy.arrivals);
  put("proxy.arrived_bytes", proxy.arrived_bytes);
  put("proxy.duplicates_dropped", proxy.duplicates_dropped);
  put("proxy.heartbeats_sent", proxy.heartbeats_sent);
  put("proxy.wakeups", proxy.wakeups);
  out.emplace_back("proxy.busy_seconds", static_cast<double>(proxy.busy_usec) * 1e-6);
  uint64_t allocated = 0;
  for (auto& entry : memory_entries(config_)) allocated += entry.second;
  put("memory.allocated_bytes", allocated);
  put("memory.chunk_bytes", window_.slot_bytes);
  put("memory.window_chunks", window_.num_slots);
  return out;
}

}  // namespace uccl_ep
