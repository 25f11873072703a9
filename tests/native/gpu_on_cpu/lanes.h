// A GPU's blocks on a CPU: each is a thread of the system, its lanes are fibers of that thread, which switch where they
// wait for each other or look at a flag. Collectives wait for exactly the lanes of their mask. What no GPU would bear
// is a Fault: lanes of a warp in different collectives, a lane that has left, lanes that all wait, flags that go back.
//
// Not emulated: weak memory (an x86 is stronger than a GPU), caches, time. See docs/gpu_on_cpu.md.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>

// Of a program: lanes of a warp, 32 or 64. tests/native/building.py says it where it is not 32.
#ifndef GPU_ON_CPU_LANES
#define GPU_ON_CPU_LANES 32
#endif

namespace gpu_on_cpu {

constexpr uint32_t kWarp = GPU_ON_CPU_LANES;
static_assert(kWarp == 32 || kWarp == 64);
using LaneMask = std::conditional_t<kWarp == 64, uint64_t, uint32_t>;  // a bit each

struct Index {
  uint32_t x = 0, y = 0, z = 0;
};

class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Grid {
  uint32_t blocks = 1, threads = 1, shared_bytes = 0;
};
// Runs `lane` in every lane of every block, all blocks at a time. Throws the first Fault.
void run_grid(const Grid& grid, const std::function<void()>& lane);

// From now on lanes, warps and blocks are interrupted and chosen at random; 0: they are not.
void disturb(uint64_t seed);
// A number that follows from the seed, the thread and the calls so far; 0 while nothing is disturbed.
uint64_t random_number();

// Called where a lane goes on with work, if it is set. Only while there is no lane.
inline void (*on_work)() = nullptr;

// Whether the lanes of a wave share an instruction pointer: one that waits keeps the others from running. That some
// have waited for so long, while others of their wave stand still, is a Fault; 30 s at first.
bool in_lock_step();
void stand_at_most(std::chrono::milliseconds time);

// Where the lanes of all blocks are now, one line for those that wait alike: for a test that runs out of time.
std::string report();

// ---- by a lane ------------------------------------------------------------------------------------------------------
extern thread_local Index thread_index, block_index, grid_size;  // thread_index: of the lane that runs
uint8_t* dynamic_memory();

enum class Meeting : uint32_t { kSync, kShuffle, kVote, kReduce };
// By the lanes of a warp in `mask`: everybody's values, by lane.
const uint64_t* meet(Meeting kind, LaneMask mask, uint64_t value);
// By `size` threads of a block: whether all have said yes.
bool meet_block(uint32_t id, uint32_t size, bool yes);
void meet_whole_block();
// Lets others run: before a look at what others change.
void look();
// Where another might run; what the lane does next is work, which others may wait for.
void act();
// By a lane: what it did is a Fault.
[[noreturn]] void fail(const std::string& what);

// ---- bulk copies ----------------------------------------------------------------------------------------------------
// Addresses in shared memory are 32 bits wide.
uint32_t shared_address(const void* p);
void* shared_pointer(uint32_t address);
void init_barrier(uint32_t barrier, uint32_t arrivals);
void load_bulk(uint32_t to, const void* from, uint32_t num_bytes, uint32_t barrier);
void wait_barrier(uint32_t barrier, uint32_t parity);
void store_bulk(void* to, uint32_t from, uint32_t num_bytes);
void commit_stores();
// At most `groups` of this lane's groups are left that are not complete, or have not been read from shared memory.
void wait_stores(uint32_t groups, bool only_read);

}  // namespace gpu_on_cpu
