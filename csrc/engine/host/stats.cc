// What the steps count, under the names that Buffer.stats() documents.
#include "engine/stats.h"

#include "engine/host/engine.h"

namespace uccl_ep {
namespace {

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

}  // namespace

Stats HostEngine::stats() const {
  Stats out;
  {
    const std::lock_guard lock(mutex_);
    put(out, "dispatch.calls", counters_.dispatches);
    put(out, "combine.calls", counters_.combines);
    put(out, "dispatch.seconds", static_cast<double>(counters_.dispatch_usec) * 1e-6);
    put(out, "combine.seconds", static_cast<double>(counters_.combine_usec) * 1e-6);
  }
  const Stats shared = plane_.stats();
  if (shared.empty()) return out;  // it has not started
  put_ports(out, context_->counters);
  if (slots_ != nullptr) slots_->add_stats(out);
  for (Step step : {Step::kExchange, Step::kPlan, Step::kStage, Step::kPlace, Step::kFold, Step::kMerge}) {
    const auto seconds = [&](const char* what, const Counter* of, double unit) {
      put(out, std::string(what) + step_name(step), static_cast<double>(of[static_cast<size_t>(step)].value()) * unit);
    };
    seconds("busy_seconds.", busy_nsec_, 1e-9);
    seconds("blocked_seconds.", blocked_usec_, 1e-6);
  }
  std::vector<uint64_t> waited_usec;
  for (const Counter& rank : waited_usec_) waited_usec.push_back(rank.value());
  put_straggler(out, waited_usec, config_.rank);
  out.insert(out.end(), shared.begin(), shared.end());
  put(out, "memory.chunk_bytes", rings_.slot_bytes);
  put(out, "memory.window_chunks", rings_.num_slots);
  return out;
}

}  // namespace uccl_ep
