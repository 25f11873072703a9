// A step of an operation on the host backend. Steps of one operation run side by side: the worker calls advance() of
// each in turn, and a step never blocks, so none can keep another from running while it waits (contract 11).
#pragma once

#include <memory>

#include "backend/host/context.h"
#include "backend/op.h"
#include "layout/chunk.h"

namespace uccl_ep::host {

class HostStep {
 public:
  HostStep(HostContext& context, Op& op) : context_(context), op_(op) {}
  virtual ~HostStep() = default;
  // Does all work that is possible without waiting. True if anything moved. Throws CommunicationFailure.
  virtual bool advance() = 0;
  virtual bool done() const = 0;
  // Meaningful after an advance() that moved nothing.
  virtual WaitingOn waiting_on() const = 0;
  virtual Step step() const = 0;

 protected:
  HostContext& context_;
  Op& op_;
};

// Header and routing of our rows to every domain.
std::unique_ptr<HostStep> make_exchange(HostContext& context, Op& op);

// Headers and routing of all sources: checks that all calls are equal, publishes the counts, builds the plan.
class PlanStep : public HostStep {
 public:
  using HostStep::HostStep;
  virtual const std::vector<int>& not_entered() const = 0;  // sources whose header has not arrived, ascending
  virtual bool stream_planned(int src) const = 0;  // it is known where all its rows go
};
std::unique_ptr<PlanStep> make_plan(HostContext& context, Op& op);

// Dispatch: our rows into the send staging, quantised.
std::unique_ptr<HostStep> make_stage(HostContext& context, Op& op);
// Dispatch: rows from staging and landing into the output.
std::unique_ptr<HostStep> make_place(HostContext& context, Op& op, const PlanStep& plan);
// Combine: sums of this rank's experts, to the rank that merges the row.
std::unique_ptr<HostStep> make_fold(HostContext& context, Op& op);
// Combine: sums of our domain for rows of a source elsewhere, shipped back to it.
std::unique_ptr<HostStep> make_merge_relayed(HostContext& context, Op& op, size_t merged_idx);
// Combine: the output.
std::unique_ptr<HostStep> make_merge_output(HostContext& context, Op& op);

// How the rows of `op` are cut into chunks.
StreamFormat stream_format(const Op& op);

}  // namespace uccl_ep::host
