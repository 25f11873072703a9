// From the structs of a C program to what engines take. What cannot be right is refused by UsageFailure.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "c_api/make.h"
#include "c_api/uccl_ep.h"
#include "engine/group/setup.h"

struct uccl_ep_group {
  std::unique_ptr<uccl_ep::Engine> engine;
  bool on_gpu = false;
  uint32_t num_experts = 0, num_local_experts = 0;
};
// A routing that a dispatch has sent.
struct SentRouting {
  std::shared_ptr<uccl_ep::SavedPlan> saved;
  bool is_complete = false;  // its sizes are known, and it has its memory
};
struct uccl_ep_plan {
  uccl_ep_group* group = nullptr;
  uccl_ep_routing routing{};
  std::shared_ptr<SentRouting> sent;  // null before its first dispatch
};
struct uccl_ep_op {
  uccl_ep_group* group = nullptr;
  std::shared_ptr<uccl_ep::Operation> operation;
  // Of a dispatch.
  std::shared_ptr<SentRouting> sent;  // null: it is a combine
  bool has_weights = false, has_metadata = false, is_quantised = false, is_complete = false;
  bool has_codes = false;  // of the caller: they come out as codes
};

namespace uccl_ep {

[[noreturn]] inline void refuse(const std::string& text) { throw UsageFailure(UsageKind::kInput, text); }

template <typename T>
T& there(T* object, const char* name) {
  if (object == nullptr) refuse(std::string(name) + " is NULL");
  return *object;
}

// A struct of a program of this version, or of another: fields that it lacks are 0, and fields that we lack must be.
template <typename T>
T taken(const T* given, const char* name) {
  constexpr size_t kLeast = offsetof(T, magic) + sizeof(uint32_t);
  const T& head = there(given, name);
  if (head.magic != UCCL_EP_MAGIC || head.size < kLeast)
    refuse(std::string(name) + " was not set to UCCL_EP_INIT: its size is " + std::to_string(head.size));
  if (head.size > kMostStructBytes)
    refuse(std::string(name) + " has the size " + std::to_string(head.size) + ": allowed are up to " +
           std::to_string(kMostStructBytes));
  const auto* const bytes = reinterpret_cast<const uint8_t*>(given);
  if (head.size > sizeof(T) && std::any_of(bytes + sizeof(T), bytes + head.size, [](uint8_t byte) { return byte; }))
    refuse(std::string(name) + " has fields of a later version than " + std::to_string(UCCL_EP_VERSION));
  T copy{};
  std::memcpy(static_cast<void*>(&copy), given, std::min(head.size, sizeof(T)));
  return copy;
}

// The program's all-gather, which gathers the same number of bytes of each rank: the sizes go first.
AllGather all_gather_of(const uccl_ep_group_config& config);
EngineConfig config_of(const uccl_ep_group_config& given);
uccl_ep_routing routing_of(const uccl_ep_group& group, const uccl_ep_routing* given);
DispatchArgs dispatch_args_of(const uccl_ep_plan& plan, const uccl_ep_dispatch_args& given);
// Of a dispatch, once.
DispatchOutput output_of(const uccl_ep_op& op, const uccl_ep_output& given);
CombineArgs combine_args_of(const uccl_ep_plan& plan, const uccl_ep_combine_args& given);

}  // namespace uccl_ep
