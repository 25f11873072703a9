// Calls that this rank refused, in the order of its operations on the GPU.
#include "engine/gpu/engine.h"

namespace uccl_ep {

void GpuEngine::refused(const std::string& why, Stream caller) {
  const gpu::StreamHandle stream = stream_of(caller);
  const std::lock_guard lock(mutex_);
  if (closed_ || !started_ || plane_.failed() || read_device_flag(&group_.error->published.value) != 0) return;
  try {
    const gpu::OnDevice guard(device_);
    plane_.refused(why);
    const bool captured = gpu::captured_graph(stream) != nullptr;
    const gpu::StreamHandle own = captured ? refusal_stream_ : stream;
    if (last_stream_ != own) gpu::follow(own, last_done_);
    gpu::must(launch_refusal(group_, own), "refusal");
    note_last(own);
    // Whoever replays a graph knows of no stream of ours. So this waits, and what comes later comes after the refusal.
    if (!captured) return;
    const gpu::RelaxedCapture relaxed;
    gpu::synchronize(own);
  } catch (const std::exception& failure) {
    fail("could not count a refused call (" + why + "): " + failure.what());
  }
}

}  // namespace uccl_ep
