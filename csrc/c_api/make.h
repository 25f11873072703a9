// Defaults of the C interface, and the engine behind it.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/engine.h"
#include "engine/host/engine.h"
#ifdef UCCL_EP_CUDA
#include "engine/gpu/engine.h"
#endif

namespace uccl_ep {

constexpr uint64_t kDefaultBudgetBytes = 512ull << 20;
constexpr uint32_t kDefaultSms = 24;
constexpr uint32_t kMostRanks = 1u << 16;
constexpr uint32_t kMostTopk = 32;
constexpr uint64_t kMostCapacity = (1ull << 31) - 1;  // rows
constexpr uint64_t kRowAlign = 16;
constexpr uint64_t kMostTimeoutUsec = 1'000'000'000'000;  // of a call: 11 days
constexpr size_t kMostStructBytes = 4096;
constexpr uint64_t kMostGatheredBytes = 64ull << 20;  // of a rank

// Throws UsageFailure.
inline std::unique_ptr<Engine> make_engine(const EngineConfig& config, bool on_gpu, int device, uint32_t num_sms) {
  if (!on_gpu) return std::make_unique<HostEngine>(config);
#ifdef UCCL_EP_CUDA
  return std::make_unique<GpuEngine>(config, device, num_sms, 0);
#else
  throw UsageFailure(UsageKind::kConfig, "on_gpu = 1, device = " + std::to_string(device) + ", num_sms = " +
                                             std::to_string(num_sms) + ": this library was built without kernels");
#endif
}

}  // namespace uccl_ep
