// Turns a kernel's fault into an error.
#include "backend/cuda/packet.h"
#include "engine/cuda/engine.h"

namespace uccl_ep {

ErrorRecord CudaEngine::record_of(const cuda::HostError& error) const {
  ErrorRecord record;
  record.kind = static_cast<ErrorKind>(error.kind);
  record.step = static_cast<Step>(error.step);
  record.rank = config_.rank;
  record.peer = rank_of(error.peer);
  record.epoch = error.epoch;
  record.chunk = error.chunk;
  record.expected = error.expected;
  record.seen = error.seen;
  if (static_cast<cuda::DeviceFault>(error.code) == cuda::DeviceFault::kMismatch) {
    tell_mismatch(error, record);
    return record;
  }
  // Data of a rank may pass through another rank's proxy.
  if (record.kind == ErrorKind::kArrivalTimeout || record.kind == ErrorKind::kProgressTimeout)
    plane_.blame(record, text_of(error));
  else
    record.set_message(text_of(error));
  return record;
}

// In the group, of a rank as kernels number it.
int CudaEngine::rank_of(int number) const {
  for (int rank = 0; rank < config_.num_ranks; ++rank)
    if (group_.number_of[rank] == number) return rank;
  return -1;
}

// Of the operation `epoch` of the rank that kernels number so.
cuda::DeviceHeader CudaEngine::header_of(int number, uint64_t epoch) const {
  const auto rank = static_cast<uint32_t>(number);
  const bool near = rank >= group_.first && rank < group_.end;
  const uint8_t* const packets = near ? layout_.packets.in(group_.base[rank]) : network_->packets_of(group_, rank);
  cuda::DeviceHeader header{};
  cudaMemcpyAsync(&header, packets + cuda::packet_half(epoch) * layout_.packet_bytes, sizeof(header),
                  cudaMemcpyDeviceToHost, control_stream_);
  cudaStreamSynchronize(control_stream_);
  return header;
}

// Expected and seen are the calls that either has refused.
void CudaEngine::tell_mismatch(const cuda::HostError& error, ErrorRecord& record) const {
  const auto called = [&](int number) {
    const cuda::DeviceHeader header = header_of(number, error.epoch);
    return Called{rank_of(number), header.signature, header.num_refused};
  };
  const Called own = called(static_cast<int>(group_.rank)), other = called(error.peer);
  record.expected = own.num_refused;
  record.seen = other.num_refused;
  record.set_message(describe_mismatch(error.epoch, own, other,
                                       own.num_refused > other.num_refused ? plane_.refusal(own.num_refused) : ""));
}

std::string CudaEngine::text_of(const cuda::HostError& error) const {
  const std::string own = "rank " + std::to_string(config_.rank);
  const std::string peer = "rank " + std::to_string(rank_of(error.peer));
  const uint64_t number = error.epoch + error.num_refused;
  const std::string call = "call " + std::to_string(number) + " on the buffer: ";
  const bool arrival = error.kind == static_cast<uint32_t>(ErrorKind::kArrivalTimeout);
  switch (static_cast<cuda::DeviceFault>(error.code)) {
    case cuda::DeviceFault::kTimeout:
      return call + own + " waited in " + step_name(static_cast<Step>(error.step)) + " for " + peer +
             (arrival ? " to enter the operation" + plane_.refused_since(rank_of(error.peer), number, error.num_refused)
                      : "");
    case cuda::DeviceFault::kPlanDiffers:
      return call + own + " used plan " + std::to_string(error.seen) + " with another routing than it was made for";
    case cuda::DeviceFault::kExpertRange:
      return call + own + ": topk_idx names expert " + std::to_string(static_cast<int64_t>(error.seen)) +
             " for token " + std::to_string(error.chunk) + "; allowed is -1 .. " + std::to_string(error.expected - 1);
    case cuda::DeviceFault::kExpertTwice:
      return call + own + ": topk_idx names expert " + std::to_string(error.seen) + " twice for token " +
             std::to_string(error.chunk);
    case cuda::DeviceFault::kTooManyPairs:
      return call + own + ": " + std::to_string(error.seen) + " pairs of token and expert; the buffer holds " +
             std::to_string(error.expected) + ": a larger budget_bytes holds more";
    default:
      return own + " failed";
  }
}

}  // namespace uccl_ep
