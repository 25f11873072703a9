// One rank's end of a buffer whose tensors lie on a GPU. Operations are launched by the caller's thread on a stream of
// this engine; what watches over the other ranks (heartbeats, errors, the end) is an Engine of the host backend that
// moves no rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backend/cuda/memory.h"
#include "backend/cuda/steps.h"
#include "engine/engine.h"

namespace uccl_ep {

// A plan in device memory that the caller allocated: `storage_bytes` once the counts are known.
struct CudaPlan {
  uint64_t plan_id = 0;
  uint64_t engine_generation = 0;
  RoutingKind routing_kind = RoutingKind::kTopk;
  uint32_t routing_width = 0;
  uint32_t expert_alignment = 1;
  uint64_t storage_bytes = 0;
  std::vector<uint64_t> tokens_per_expert, tokens_per_expert_exact;
  cuda::PlanView view;  // sizes when the counts are known, pointers when the memory was given
};

struct CudaOp {
  uint64_t epoch = 0;
  OpSignature signature{};
  std::shared_ptr<CudaPlan> plan;
  bool counts_known = false;
  const float* values_in = nullptr;
  cudaEvent_t done = nullptr;
  bool launched = false;
  ~CudaOp() {
    if (done != nullptr) cudaEventDestroy(done);
  }
};

struct CudaDispatchArgs {
  const uint8_t* x = nullptr;  // [T, H]
  uint64_t num_tokens = 0;
  uint32_t hidden = 0;
  Dtype dtype = Dtype::kBf16, wire = Dtype::kBf16;
  bool fp8_pow2 = true;
  bool has_routing = false;  // false: `plan` is used
  Routing routing;           // on the device
  const float* values = nullptr;
  std::shared_ptr<CudaPlan> plan;
  uint32_t expert_alignment = 1;
  cudaStream_t stream = nullptr;  // the caller's: what it has queued comes first
};
struct CudaOutput {
  uint8_t* rows = nullptr;
  float* scales = nullptr;  // FP8 rows go out as codes and scales
  float* values = nullptr;
  uint8_t* plan = nullptr;  // memory of a new plan
  cudaStream_t stream = nullptr;
};
struct CudaCombineArgs {
  const uint8_t* rows = nullptr;  // [num_rows, H]
  uint32_t hidden = 0;
  Dtype dtype = Dtype::kBf16, wire = Dtype::kBf16;
  std::shared_ptr<CudaPlan> plan;
  const float* values = nullptr;  // [num_rows]
  uint8_t* out = nullptr;         // [T, H]
  float* values_out = nullptr;    // [T, width], zeroed
  cudaStream_t stream = nullptr;
};

class CudaEngine {
 public:
  // Allocates the region on `device`. Throws UsageFailure for a configuration that cannot work.
  CudaEngine(const EngineConfig& config, int device, uint32_t num_sms);
  ~CudaEngine();

  std::string export_handle() const;
  void connect(const std::vector<std::string>& handles);
  void start();

  std::shared_ptr<CudaOp> dispatch(const CudaDispatchArgs& args);
  // True when the counts of a new plan have arrived.
  bool poll_counts(CudaOp& op);
  void give_output(CudaOp& op, const CudaOutput& output);
  std::shared_ptr<CudaOp> combine(const CudaCombineArgs& args);
  // What the caller queues on `stream` from now on runs after the operation.
  void wait(CudaOp& op, cudaStream_t stream) const;

  void fail(const std::string& text) { life_.fail(text); }
  // Throws the error that reached this rank, one that its kernels have found but nobody has heard of included.
  void check() const;
  void close(bool abort);
  std::vector<std::pair<std::string, double>> stats() const;

 private:
  std::shared_ptr<CudaOp> new_op(const OpSignature& signature, std::shared_ptr<CudaPlan> plan);
  void check_usable() const;
  void check_row(uint32_t hidden, Dtype dtype) const;
  void follow(cudaStream_t stream);   // our stream waits for what the caller has queued
  void fold_and_merge(cuda::FoldArgs fold, cuda::MergeArgs merge, const cuda::PlanView& plan);
  void finish(CudaOp& op);
  bool tell_fault() const;
  void watch();
  ErrorRecord record_of(const cuda::HostError& error) const;
  std::string text_of(const cuda::HostError& error) const;

  const EngineConfig config_;
  const int device_;
  const uint32_t num_sms_;
  uint32_t all_sms_ = 0;
  Engine life_;
  cuda::RegionLayout layout_;
  cuda::Domain domain_{};
  cuda::DescriptorSocket socket_;
  std::vector<cuda::DeviceMapping> regions_;
  std::vector<uint64_t> region_bytes_;
  cudaStream_t stream_ = nullptr, merge_stream_ = nullptr, control_stream_ = nullptr;
  cudaEvent_t inputs_ready_ = nullptr, merged_ = nullptr;
  uint8_t* pinned_ = nullptr;  // HostError, HostCounts, and the word that stops kernels
  uint64_t* stop_word_ = nullptr;
  mutable std::mutex mutex_;   // one launch at a time
  uint64_t epoch_ = 0;
  uint64_t num_dispatches_ = 0, num_combines_ = 0;
  bool started_ = false, closed_ = false;
  Flag leaving_;
  std::thread watcher_;
};

// What memory_plan() shows for a buffer of CUDA tensors.
std::vector<std::pair<std::string, uint64_t>> cuda_memory_entries(const EngineConfig& config);
uint64_t cuda_least_budget_bytes(const EngineConfig& config);

}  // namespace uccl_ep
