// Calls that this rank refused, in the order of its operations on the GPU.
#include "engine/cuda/engine.h"

namespace uccl_ep {
namespace {

using cuda::must;

// While a graph is being captured from another stream.
cudaError_t synchronise_beside_capture(cudaStream_t stream) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  const cudaError_t status = cudaStreamSynchronize(stream);
  cudaThreadExchangeStreamCaptureMode(&mode);
  return status;
}

}  // namespace

void CudaEngine::refused(const std::string& why, Stream caller) {
  const cudaStream_t stream = cuda_stream(caller);
  const std::lock_guard lock(mutex_);
  if (closed_ || !started_ || plane_.failed() || read_device_flag(&group_.error->published.value) != 0) return;
  try {
    const cuda::OnDevice guard(device_);
    plane_.refused(why);
    const bool captured = captured_graph(stream) != nullptr;
    const cudaStream_t own = captured ? refusal_stream_ : stream;
    if (last_stream_ != own) must(cudaStreamWaitEvent(own, last_done_, 0), "cudaStreamWaitEvent");
    must(launch_refusal(group_, own), "refusal");
    note_last(own);
    // Whoever replays a graph knows of no stream of ours: what comes later comes after it.
    if (captured) must(synchronise_beside_capture(own), "cudaStreamSynchronize");
  } catch (const std::exception& failure) {
    fail("could not count a refused call (" + why + "): " + failure.what());
  }
}

}  // namespace uccl_ep
