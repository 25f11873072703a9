// Holds up a stream of the stand-in for GPUs.
#pragma once

#include <cuda_runtime.h>
#include <unistd.h>

#include "claims.h"
#include "sync/flag.h"

namespace uccl_ep {

// A stream that gets no further until it goes.
class Blocked {
 public:
  explicit Blocked(cudaStream_t stream) : stream_(stream) {
    const auto wait = [](void* flag) {
      while (static_cast<Flag*>(flag)->read() == 0) usleep(100);
    };
    EXPECT(cudaLaunchHostFunc(stream, wait, &over_) == cudaSuccess);
  }
  ~Blocked() {
    end();
    cudaStreamSynchronize(stream_);  // it looks no more
  }
  void end() { over_.publish(1); }

 private:
  const cudaStream_t stream_;
  Flag over_;
};

}  // namespace uccl_ep
