// Turns a kernel's fault into an error.
#include "backend/gpu/packet.h"
#include "engine/gpu/engine.h"

namespace uccl_ep {

ErrorRecord GpuEngine::record_of(const gpu::HostError& error) const {
  ErrorRecord record;
  record.kind = static_cast<ErrorKind>(error.kind);
  record.step = static_cast<Step>(error.step);
  record.rank = config_.rank;
  record.peer = rank_of(error.peer);
  record.epoch = error.epoch & ~gpu::kLowLatencyEpoch;
  record.chunk = error.chunk;
  record.expected = error.expected;
  record.seen = error.seen;
  if (static_cast<gpu::DeviceFault>(error.code) == gpu::DeviceFault::kMismatch) {
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

// The rank in the group whose number in kernels is `number`.
int GpuEngine::rank_of(int number) const {
  return number < 0 || number >= config_.num_ranks ? -1 : numbers_.rank_of[static_cast<size_t>(number)];
}

// The header of operation `epoch` of the rank whose number in kernels is `number`.
gpu::DeviceHeader GpuEngine::header_of(int number, uint64_t epoch) const {
  const auto rank = static_cast<uint32_t>(number);
  const bool near = rank >= group_.first && rank < group_.end;
  const uint8_t* const packets =
      near ? layout_.packets.in(group_.base[rank - group_.first]) : network_->packets_of(group_, rank);
  gpu::DeviceHeader header{};
  gpu::copy_to_host(&header, packets + gpu::packet_half(epoch) * (near ? layout_.packet_bytes : layout_.head_bytes),
                    sizeof(header), control_stream_, std::nothrow);
  gpu::synchronize(control_stream_, std::nothrow);
  return header;
}

// As header_of(), of the low-latency operation that an error names. `chunk` says which kind it is.
gpu::SlotHeader GpuEngine::slot_header_of(int number, const gpu::HostError& error) const {
  const uint64_t half = (error.epoch & ~gpu::kLowLatencyEpoch) % gpu::kHalves;
  const uint64_t index = (static_cast<uint64_t>(error.chunk) * gpu::kHalves + half) * layout_.num_ranks;
  gpu::SlotHeader header{};
  const gpu::SlotHeader* const headers = layout_.low_latency.headers.in(group_.own);
  gpu::copy_to_host(&header, headers + index + static_cast<uint64_t>(number), sizeof(header), control_stream_,
                    std::nothrow);
  gpu::synchronize(control_stream_, std::nothrow);
  return header;
}

// `expected` and `seen` become the numbers of calls that we and the peer have refused.
void GpuEngine::tell_mismatch(const gpu::HostError& error, ErrorRecord& record) const {
  const auto called = [&](int number) {
    if ((error.epoch & gpu::kLowLatencyEpoch) != 0) {
      const gpu::SlotHeader header = slot_header_of(number, error);
      return Called{rank_of(number), header.signature, header.num_refused};
    }
    const gpu::DeviceHeader header = header_of(number, error.epoch);
    return Called{rank_of(number), header.signature, header.num_refused};
  };
  const Called own = called(static_cast<int>(group_.rank)), other = called(error.peer);
  record.expected = own.num_refused;
  record.seen = other.num_refused;
  record.set_message(describe_mismatch(error.epoch & ~gpu::kLowLatencyEpoch, own, other,
                                       own.num_refused > other.num_refused ? plane_.refusal(own.num_refused) : ""));
}

std::string GpuEngine::text_of(const gpu::HostError& error) const {
  const std::string own = "rank " + std::to_string(config_.rank);
  const std::string peer = "rank " + std::to_string(rank_of(error.peer));
  const bool slots = (error.epoch & gpu::kLowLatencyEpoch) != 0;
  const uint64_t number = (error.epoch & ~gpu::kLowLatencyEpoch) + error.num_refused;
  const std::string call = (slots ? "low-latency call " : "call ") + std::to_string(number) + " on the buffer: ";
  const bool arrival = error.kind == static_cast<uint32_t>(ErrorKind::kArrivalTimeout);
  switch (static_cast<gpu::DeviceFault>(error.code)) {
    case gpu::DeviceFault::kTimeout:
      return call + own + " waited in " + step_name(static_cast<Step>(error.step)) + " for " + peer +
             (arrival ? " to enter the operation" + plane_.refused_since(rank_of(error.peer), number, error.num_refused)
                      : "");
    case gpu::DeviceFault::kPlanDiffers:
      return call + own + " used plan " + std::to_string(error.seen) + " with another routing than it was made for";
    case gpu::DeviceFault::kExpertRange:
      return call + own + ": topk_idx names expert " + std::to_string(static_cast<int64_t>(error.seen)) +
             " for token " + std::to_string(error.chunk) + "; allowed is -1 .. " + std::to_string(error.expected - 1);
    case gpu::DeviceFault::kExpertTwice:
      return call + own + ": topk_idx names expert " + std::to_string(error.seen) + " twice for token " +
             std::to_string(error.chunk);
    case gpu::DeviceFault::kTooManyPairs:
      return call + own + ": " + std::to_string(error.seen) + " pairs of token and expert; the buffer holds " +
             std::to_string(error.expected) + ": a larger budget_bytes holds more";
    case gpu::DeviceFault::kTooManyTokens:
      return call + peer + " has " + std::to_string(error.seen) + " tokens; with a capacity " + own + " holds " +
             std::to_string(error.expected) +
             ", which go in one window: give every rank the same max_tokens, or the buffer a larger budget_bytes";
    case gpu::DeviceFault::kMasked:
      return call + describe_masked(config_.rank, rank_of(error.peer));
    default:
      return own + " failed";
  }
}

}  // namespace uccl_ep
