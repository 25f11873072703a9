// A block: its lanes, what they wait for, and who runs next. By one thread.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "fiber.h"
#include "lanes.h"

namespace gpu_on_cpu {

// Neighbouring lanes that go in lock step, as those of a wave do on a GPU without an instruction pointer for each lane;
// 1: every lane is free.
#ifndef GPU_ON_CPU_WAVE
#define GPU_ON_CPU_WAVE 1
#endif
constexpr uint32_t kWave = GPU_ON_CPU_WAVE;
static_assert(kWave == 1 || kWave == 32 || kWave == 64);
constexpr uint32_t kBarriers = 16;
constexpr uint32_t kSharedBytes = 232448;
// A block whose lanes have done nothing but look at flags for so many turns gives its core away.
constexpr uint32_t kQuietTurns = 8;

extern std::atomic<uint64_t> seed_of_all, times_disturbed, threads_so_far;
extern thread_local uint8_t dynamic_bytes[kSharedBytes];

// Of a thread; what it gives follows from the seed and from how many threads came before.
struct Random {
  uint64_t disturbed = 0;
  std::mt19937_64 engine;
  uint64_t next() {
    const uint64_t now = seed_of_all.load(std::memory_order_relaxed);
    if (now == 0) return 0;
    if (const uint64_t times = times_disturbed.load(std::memory_order_relaxed); times != disturbed) {
      disturbed = times;
      engine.seed(now * 0x9E3779B97F4A7C15ull + threads_so_far.fetch_add(1));
    }
    return engine();
  }
  bool one_in(uint32_t n) { return seed_of_all.load(std::memory_order_relaxed) != 0 && next() % n == 0; }
};
extern thread_local Random random_of_thread;

// What a lane has asked for by bulk copies of stores.
struct BulkStore {
  uint8_t* to;
  const uint8_t* from;
  uint32_t num_bytes;
  std::string bytes;  // when they have been read
  bool is_read = false, is_complete = false;
};
using Group = std::vector<std::shared_ptr<BulkStore>>;
struct BulkLoad {
  uint8_t* to;
  const uint8_t* from;
  uint32_t num_bytes;
  uint64_t* barrier;
};

enum class State : uint32_t { kReady, kWaitsForWarp, kWaitsForBlock, kWaitsForWave, kLeft };

struct Lane {
  Context context;
  std::unique_ptr<Stack> stack;
  Index index;
  State state = State::kReady;
  uint32_t turns_since_look = kQuietTurns;  // it has work at first
  const char* waits_for = "";
  const void* waits_at = nullptr;
  Group open_group;
  std::deque<Group> groups;
#ifdef GPU_ON_CPU_ADDRESS
  void* fake_stack = nullptr;
#endif
};

struct Warp {
  LaneMask left = 0;  // lanes that have
  LaneMask arrived = 0, mask = 0;
  uint32_t number = 0;
  Meeting kind = Meeting::kSync;
  uint64_t values[2][kWarp] = {};
};
// Lanes in lock step: those that look at flags, and since when some have.
struct Wave {
  uint64_t looking = 0;
  uint32_t looks = 0;
  std::chrono::steady_clock::time_point since;
};
struct Barrier {
  uint32_t size = 0, arrived = 0, number = 0;
  bool all = true, result[2] = {};
};

class Block {
 public:
  // `given_up`: by a block of the grid that found a fault.
  Block(const Grid& grid, uint32_t number, const std::function<void()>& body, std::atomic<bool>& given_up)
      : grid_(grid),
        body_(body),
        given_up_(given_up),
        lanes_(grid.threads),
        warps_((grid.threads + kWarp - 1) / kWarp),
        waves_((grid.threads + kWave - 1) / kWave),
        number_(number) {}

  void run();
  const uint64_t* meet(Meeting kind, LaneMask mask, uint64_t value, const void* at);
  bool meet_block(uint32_t id, uint32_t size, bool yes, const void* at);
  void look(const void* at);
  void act();
  void leave();
  uint32_t size() const { return grid_.threads; }
  Lane& lane() { return *running_; }
  void begin(const BulkLoad& load) { loads_.push_back(load); }
  void store(const BulkStore& store) {
    auto shared = std::make_shared<BulkStore>(store);
    running_->open_group.push_back(shared);
    stores_.push_back(std::move(shared));
  }
  void commit();
  void wait_stores(uint32_t groups, bool only_read, const void* at);
  const std::function<void()>& body() const { return body_; }
  // Until it is its turn again, or for good.
  void suspend(bool for_good = false);
  std::string report() const;
  [[noreturn]] void fail(const std::string& what);
  bool one_in(uint32_t n) { return random_of_thread.one_in(n); }

 private:
  void schedule();
  void resume(Lane& lane);
  void park(State state, const char* what, const void* at);
  void wake(uint32_t first, LaneMask mask);
  void enter_wait();
  void leave_wait();
  void wake_wave(uint32_t first);
  void wake_barrier(uint32_t id);
  bool move_bulk(bool all);
  void idle();
  uint32_t number_of(const Lane& lane) const { return static_cast<uint32_t>(&lane - lanes_.data()); }

  const Grid grid_;
  const std::function<void()>& body_;
  std::atomic<bool>& given_up_;
  std::vector<Lane> lanes_;
  std::vector<Warp> warps_;
  std::vector<Wave> waves_;
  Barrier barriers_[kBarriers];
  std::deque<Lane*> ready_;
  Lane* running_ = nullptr;
  Context scheduler_;
  uint32_t num_left_ = 0;
  const uint32_t number_;
  uint32_t turns_since_work_ = 0, idle_rounds_ = 0;
  std::string fault_;
  std::deque<BulkLoad> loads_;
  std::deque<std::shared_ptr<BulkStore>> stores_;
#ifdef GPU_ON_CPU_ADDRESS
  void* scheduler_fake_stack_ = nullptr;
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_stack_bytes_ = 0;
#endif
};

// A lane unwinds its stack by it when a Fault is known.
struct GivenUp {};

// That the calling lane belongs to.
Block& current_block();

}  // namespace gpu_on_cpu
