// The stand-in for a GPU itself: what lanes do together, and that it finds what no GPU would bear.
#include <cuda_runtime.h>

#include "claims.h"
#include "device/barrier.cuh"
#include "device/bulk.cuh"
#include "device/convert.cuh"
#include "device/warp.cuh"
#include "device/words.cuh"

using gpu_on_cpu::Fault;
using gpu_on_cpu::run_grid;
using uccl_ep::gpu::kWarp;
using uccl_ep::gpu::warp_max;
using uccl_ep::gpu::warp_min;

namespace {

constexpr gpu_on_cpu::LaneMask kAll = ~gpu_on_cpu::LaneMask{0};

// The Fault that a grid ends with.
std::string fault_of(const gpu_on_cpu::Grid& grid, const std::function<void()>& lane) {
  try {
    run_grid(grid, lane);
  } catch (const Fault& fault) {
    return fault.what();
  }
  return "";
}
bool says(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace

CLAIM("lanes of a warp exchange values, vote and reduce, whatever order they run in") {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    gpu_on_cpu::disturb(seed);
    std::atomic<uint32_t> wrong{0};
    run_grid({2, 3 * kWarp}, [&] {
      const uint32_t lane = threadIdx.x % kWarp;
      bool good = __shfl_sync(kAll, lane * 3, 5u) == 15 && __shfl_xor_sync(kAll, lane, 1u) == (lane ^ 1);
      good &= __shfl_sync(kAll, lane, 1u, 8) == lane / 8 * 8 + 1 &&
              __shfl_up_sync(kAll, lane, 2u) + 2 == std::max(lane, 2u) + (lane < 2 ? lane : 0);
      good &= __ballot_sync(kAll, lane % 2 != 0) == kAll / 3 * 2 && __any_sync(kAll, lane == kWarp - 1) &&
              !__all_sync(kAll, lane != kWarp - 1);
      good &= warp_max(lane) == kWarp - 1 && warp_min(lane + 7) == 7;
      if (!good) wrong.fetch_add(1);
    });
    EXPECT_EQ(wrong.load(), 0u);
  }
  gpu_on_cpu::disturb(0);
}

CLAIM("blocks run at the same time: each waits for what the others say") {
  uint32_t arrived = 0;
  run_grid({4, kWarp}, [&] {
    if (threadIdx.x == 0) uccl_ep::gpu::device::add_one_acq_rel_gpu(&arrived);
    __syncwarp();
    while (uccl_ep::gpu::device::load_acquire_gpu(&arrived) < 4) continue;
    __syncthreads();
  });
  EXPECT_EQ(arrived, 4u);
}

CLAIM("lanes of a warp in different collectives are a fault") {
  EXPECT(says(fault_of({1, kWarp},
                       [] {
                         if (threadIdx.x == 7)
                           __ballot_sync(kAll, true);
                         else
                           __syncwarp();
                       }),
              "others of its warp are in"));
}

CLAIM("a flag that goes back is a fault") {
  using namespace uccl_ep::gpu::device;
  for (void (*store)(uint64_t*, uint64_t) : {store_release_system, store_relaxed_system, store_release_gpu}) {
    uint64_t flag = 6;
    const auto fault_after = [&](uint64_t value) { return fault_of({1, 1}, [&] { store(&flag, value); }); };
    EXPECT(fault_after(6).empty() && fault_after(7).empty());
    EXPECT(says(fault_after(6), "a flag goes back from 7 to 6") && flag == 7);
  }
}

CLAIM("a collective that a lane has left before is a fault") {
  EXPECT(says(fault_of({1, kWarp},
                       [] {
                         if (threadIdx.x == kWarp - 1) return;
                         __syncwarp();
                       }),
              "left"));
}

CLAIM("a barrier that some threads never reach is a fault that says where all lanes are") {
  const std::string text =
      fault_of({1, 2 * kWarp}, [] { uccl_ep::gpu::device::barrier(threadIdx.x < kWarp ? 1 : 2, 2 * kWarp); });
  EXPECT(says(text, "all lanes wait") && says(text, "barrier 1") && says(text, "barrier 2") &&
         says(text, kWarp == 32 ? ": 0-31" : ": 0-63"));
}

CLAIM("a fault of one block ends the others, whatever they wait for") {
  const uint32_t never = 0;
  EXPECT(says(fault_of({3, kWarp},
                       [&] {
                         if (blockIdx.x == 1 && threadIdx.x == 0) return;
                         if (blockIdx.x == 1) __syncwarp();
                         while (uccl_ep::gpu::device::load_acquire_gpu(&never) == 0) continue;
                       }),
              "block 1"));
}

CLAIM("threads that disagree about the size of a barrier are a fault") {
  EXPECT(
      says(fault_of({1, 2 * kWarp}, [] { uccl_ep::gpu::device::barrier(1, threadIdx.x < kWarp ? 2 * kWarp : kWarp); }),
           "others have"));
}

namespace {

// Lane `waits` waits for what lane `publishes` says afterwards, or (`meets`) before the lanes of a warp meet.
std::string fault_of_waiting(uint32_t waits, uint32_t publishes, bool meets) {
  using namespace uccl_ep::gpu;
  uint32_t flag = 0;
  gpu_on_cpu::stand_at_most(std::chrono::milliseconds(300));
  const std::string fault = fault_of({1, 2 * kWarp}, [&] {
    if (threadIdx.x == publishes && meets) device::add_one_acq_rel_gpu(&flag);
    if (meets) __syncwarp();
    if (threadIdx.x == waits)
      while (device::load_acquire_gpu(&flag) == 0) continue;
    if (threadIdx.x == publishes && !meets) device::add_one_acq_rel_gpu(&flag);
  });
  gpu_on_cpu::stand_at_most(std::chrono::seconds(30));
  return fault;
}

}  // namespace

CLAIM("a lane that waits for another of its wave is a fault in lock step, and not where lanes are free") {
  const std::string text = fault_of_waiting(0, kWarp - 1, false);
  EXPECT_EQ(says(text, "stand still") && says(text, "its wave"), gpu_on_cpu::in_lock_step());
}

CLAIM("what a lane publishes before a __syncwarp its wave may wait for") {
  EXPECT_EQ(fault_of_waiting(0, kWarp - 1, true).size(), 0u);
}

CLAIM("a lane may wait for one of another wave") { EXPECT_EQ(fault_of_waiting(0, kWarp, false).size(), 0u); }

namespace {

// Loads 64 bytes to shared memory and stores them again; `waits`: as one has to.
void copy_by_bulk(const uint8_t* from, uint8_t* to, bool waits) {
  uint8_t* const shared = gpu_on_cpu::dynamic_memory();
  static thread_local uint64_t barrier;
  if (threadIdx.x == 0) {
    uccl_ep::gpu::init_barrier(&barrier);
    uccl_ep::gpu::load_bulk(shared, from, 64, &barrier);
  }
  __syncwarp();
  uccl_ep::gpu::wait_barrier(&barrier, 0);
  if (threadIdx.x != 0) return;
  uccl_ep::gpu::store_bulk(to, shared, 64);
  uccl_ep::gpu::commit_stores();
  if (waits) uccl_ep::gpu::wait_stores_read<0>();
  std::memset(shared, 0, 64);
  uccl_ep::gpu::wait_stores<0>();
}

bool copies_right(bool waits) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    gpu_on_cpu::disturb(seed);
    alignas(16) uint8_t from[64], to[64] = {};
    for (size_t i = 0; i < sizeof(from); ++i) from[i] = static_cast<uint8_t>(i + seed);
    run_grid({1, kWarp, 64}, [&] { copy_by_bulk(from, to, waits); });
    if (std::memcmp(from, to, sizeof(from)) != 0) return false;
  }
  return true;
}

}  // namespace

CLAIM("bulk copies are over when they are waited for, and not before") {
  EXPECT(copies_right(true));
  EXPECT(!copies_right(false));  // control: shared memory that is written again too early
  gpu_on_cpu::disturb(0);
}

CLAIM("conversions to E4M3 and BF16 give back every code and round to nearest even") {
  using namespace uccl_ep::gpu;
  for (uint32_t code = 0; code < 256; ++code) {
    if ((code & 0x7F) == 0x7F) continue;
    const float2 value = device::from_e4m3(static_cast<uint16_t>(code | code << 8));
    EXPECT_EQ(static_cast<uint32_t>(device::to_e4m3(value.x, value.y)), code | code << 8);
  }
  EXPECT_EQ(static_cast<uint32_t>(device::to_e4m3(1000.0f, -1000.0f)), 0xFE7Eu);
  EXPECT_EQ(static_cast<uint32_t>(device::to_e4m3(1.0625f, 1.1875f)), 0x3A38u);  // ties, to even
  EXPECT_EQ(device::to_bf16(1.00390625f, 1.01171875f), 0x3F823F80u);
  EXPECT_EQ(__byte_perm(0x44332211u, 0, 0x3424u), 0x44003300u);
}

int main(int argc, char** argv) { return claims::main(argc, argv); }
