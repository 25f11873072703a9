// What the engine counts, under the names that Buffer.stats() documents.
#include "engine/engine.h"

namespace uccl_ep {

namespace {

void put(Stats& out, const std::string& name, uint64_t value) { out.emplace_back(name, static_cast<double>(value)); }

void put_ports(Stats& out, const host::StepCounters& c) {
  put(out, "rows.staged", c.rows_staged.value());
  put(out, "rows.shipped", c.rows_shipped.value());
  put(out, "rows.placed", c.rows_placed.value());
  put(out, "rows.folded", c.rows_folded.value());
  put(out, "rows.relayed", c.rows_relayed.value());
  put(out, "rows.merged", c.rows_merged.value());
  put(out, "pairs.shipped", c.pairs_shipped.value());
  put(out, "pairs.relayed", c.pairs_relayed.value());
  for (uint32_t kind = 0; kind < kNumRingKinds; ++kind) {
    const std::string ring = std::string("ring.") + ring_name(static_cast<RingKind>(kind));
    put(out, ring + ".chunks", c.ports[kind].chunks.value());
    put(out, ring + ".waits", c.ports[kind].waits.value());
    put(out, ring + ".laps", c.ports[kind].laps.value());
  }
}

void put_proxy(Stats& out, const ProxyStats& proxy) {
  for (const ShipStats& ship : proxy.ships) {
    const std::string name = std::string("ship.") + ring_name(ship.kind) + ".domain" + std::to_string(ship.domain);
    put(out, name + ".chunks", ship.chunks);
    put(out, name + ".bytes", ship.bytes);
  }
  put(out, "credit.waits", proxy.credit_waits);
  out.emplace_back("credit.wait_seconds", static_cast<double>(proxy.credit_wait_usec) * 1e-6);
  put(out, "credit.sent", proxy.credits_sent);
  put(out, "proxy.refused_posts", proxy.refused_posts);
  out.emplace_back("proxy.command_usec.p50", static_cast<double>(proxy.command_nsec_p50) * 1e-3);
  out.emplace_back("proxy.command_usec.p99", static_cast<double>(proxy.command_nsec_p99) * 1e-3);
  put(out, "proxy.peak_in_flight_bytes", proxy.peak_in_flight_bytes);
  put(out, "proxy.commands", proxy.commands);
  put(out, "proxy.arrivals", proxy.arrivals);
  put(out, "proxy.arrived_bytes", proxy.arrived_bytes);
  put(out, "proxy.duplicates_dropped", proxy.duplicates_dropped);
  put(out, "proxy.heartbeats_sent", proxy.heartbeats_sent);
  put(out, "proxy.wakeups", proxy.wakeups);
  out.emplace_back("proxy.busy_seconds", static_cast<double>(proxy.busy_usec) * 1e-6);
}

}  // namespace

void put_straggler(Stats& out, const std::vector<uint64_t>& waited_usec, int own_rank) {
  int straggler = -1;
  uint64_t most_usec = 0;
  for (size_t rank = 0; rank < waited_usec.size(); ++rank) {
    if (static_cast<int>(rank) == own_rank || waited_usec[rank] <= most_usec) continue;
    most_usec = waited_usec[rank];
    straggler = static_cast<int>(rank);
  }
  out.emplace_back("straggler.rank", straggler);
  out.emplace_back("straggler.wait_seconds", static_cast<double>(most_usec) * 1e-6);
}

Stats Engine::stats() const {
  Stats out;
  {
    std::lock_guard lock(mutex_);
    if (!config_.device_rings) {
      put(out, "dispatch.calls", counters_.dispatches);
      put(out, "combine.calls", counters_.combines);
      out.emplace_back("dispatch.seconds", static_cast<double>(counters_.dispatch_usec) * 1e-6);
      out.emplace_back("combine.seconds", static_cast<double>(counters_.combine_usec) * 1e-6);
    }
    if (!started_) return out;
  }
  const std::shared_lock held(memory_mutex_);
  if (given_back_) return last_stats_;
  if (context_ != nullptr) {
    put_ports(out, context_->counters);
    for (Step step : {Step::kExchange, Step::kPlan, Step::kStage, Step::kPlace, Step::kFold, Step::kMerge}) {
      const auto seconds = [&](const char* what, const Counter* of, double unit) {
        out.emplace_back(std::string(what) + step_name(step),
                         static_cast<double>(of[static_cast<size_t>(step)].value()) * unit);
      };
      seconds("busy_seconds.", busy_nsec_, 1e-9);
      seconds("blocked_seconds.", blocked_usec_, 1e-6);
    }
    std::vector<uint64_t> waited_usec;
    for (const Counter& rank : waited_usec_) waited_usec.push_back(rank.value());
    put_straggler(out, waited_usec, config_.rank);
  }
  put_proxy(out, proxy_->stats());
  uint64_t allocated = 0;
  for (auto& entry : memory_entries(config_)) allocated += entry.second;
  put(out, "memory.allocated_bytes", allocated);
  if (!config_.device_rings) {
    put(out, "memory.chunk_bytes", ring_params_.slot_bytes);
    put(out, "memory.window_chunks", ring_params_.num_slots);
  }
  return out;
}

}  // namespace uccl_ep
