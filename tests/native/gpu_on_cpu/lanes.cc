#include "lanes.h"

#include <dlfcn.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <random>
#include <thread>

#include "block.h"

#ifdef __x86_64__
// What a call keeps goes to the stack, and comes back from the other one.
asm(R"(
.text
.globl gpu_on_cpu_switch
.type gpu_on_cpu_switch,@function
gpu_on_cpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size gpu_on_cpu_switch,.-gpu_on_cpu_switch
)");
#endif

// Of the whole program, proxies included. Where threads by the dozen do nothing but yield to each other, Linux 6.18
// lets others of the machine wait for seconds (12 were seen), and a deadline of 40 s has run out; so every fourth one
// sleeps.
extern "C" int sched_yield() noexcept {
  thread_local uint32_t yields = 0;
  if (++yields % 4 != 0) return static_cast<int>(syscall(SYS_sched_yield));
  const timespec moment{0, 20'000};
  return nanosleep(&moment, nullptr);
}

namespace gpu_on_cpu {

thread_local Index thread_index, block_index, grid_size;
std::atomic<uint64_t> seed_of_all{0}, times_disturbed{0}, threads_so_far{0};
alignas(128) thread_local uint8_t dynamic_bytes[kSharedBytes];
thread_local Random random_of_thread;

namespace {

constexpr uint8_t kGarbage = 0xA5;

// An offset in the program, as addr2line takes it.
std::string place_of(const void* at) {
  Dl_info program{};
  if (at != nullptr) dladdr(at, &program);
  char text[64];
  std::snprintf(text, sizeof(text), " at +0x%zx",
                static_cast<size_t>(static_cast<const char*>(at) - static_cast<char*>(program.dli_fbase)));
  return text;
}
const char* name_of(Meeting kind) {
  static const char* const names[] = {"__syncwarp", "a shuffle", "a vote", "a reduction"};
  return names[static_cast<uint32_t>(kind)];
}

std::mutex blocks_mutex;
std::vector<Block*> all_blocks;
std::atomic<uint32_t> num_blocks{0};
thread_local Block* own_block = nullptr;

void enter_lane() {
#ifdef GPU_ON_CPU_ADDRESS
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  try {
    own_block->body()();
    own_block->leave();
  } catch (const GivenUp&) {  // and nobody waits for it
  }
  own_block->suspend(true);
}

}  // namespace

void Block::resume(Lane& lane) {
  running_ = &lane;
  thread_index = lane.index;
#ifdef GPU_ON_CPU_ADDRESS
  void* own = nullptr;
  __sanitizer_start_switch_fiber(&own, lane.stack->base(), kStackBytes);
#endif
  Context::change(scheduler_, lane.context);
#ifdef GPU_ON_CPU_ADDRESS
  __sanitizer_finish_switch_fiber(own, nullptr, nullptr);
#endif
  running_ = nullptr;
}

void Block::suspend([[maybe_unused]] bool for_good) {
  Lane& lane = *running_;
#ifdef GPU_ON_CPU_ADDRESS
  __sanitizer_start_switch_fiber(for_good ? nullptr : &lane.fake_stack, scheduler_stack_, scheduler_stack_bytes_);
#endif
  Context::change(lane.context, scheduler_);
#ifdef GPU_ON_CPU_ADDRESS
  __sanitizer_finish_switch_fiber(lane.fake_stack, nullptr, nullptr);
#endif
}

void Block::run() {
  own_block = this;
  block_index = {number_, 0, 0};
  grid_size = {grid_.blocks, 1, 1};
  std::memset(dynamic_bytes, kGarbage, grid_.shared_bytes);
#ifdef GPU_ON_CPU_ADDRESS
  pthread_attr_t attributes;
  void* base = nullptr;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &base, &scheduler_stack_bytes_);
  pthread_attr_destroy(&attributes);
  scheduler_stack_ = base;
#endif
  for (uint32_t i = 0; i < grid_.threads; ++i) {
    Lane& lane = lanes_[i];
    lane.index = {i, 0, 0};
    lane.stack = std::make_unique<Stack>();
    lane.context.make(lane.stack->base(), enter_lane);
    ready_.push_back(&lane);
  }
  {
    const std::lock_guard lock(blocks_mutex);
    all_blocks.push_back(this);
    num_blocks = static_cast<uint32_t>(all_blocks.size());
  }
  schedule();
  if (!fault_.empty()) given_up_.store(true);
  {
    const std::lock_guard lock(blocks_mutex);
    std::erase(all_blocks, this);
    num_blocks = static_cast<uint32_t>(all_blocks.size());
  }
  if (fault_.empty() && !given_up_.load() && !loads_.empty())
    fault_ = "a block has left while a bulk load was under way";
  while (move_bulk(true)) continue;
  own_block = nullptr;
  if (!fault_.empty()) throw Fault("block " + std::to_string(number_) + ": " + fault_);
}

void Block::schedule() {
  while (num_left_ < lanes_.size() && fault_.empty() && !given_up_.load()) {
    if (ready_.empty()) {
      if (move_bulk(true)) continue;
      fault_ = "all lanes wait:\n" + report();
      return;
    }
    if (one_in(8)) move_bulk(false);
    if (one_in(4)) std::swap(ready_.front(), ready_[random_of_thread.next() % ready_.size()]);
    if (one_in(20000)) usleep(static_cast<useconds_t>(random_of_thread.next() % 300));
    Lane& next = *ready_.front();
    ready_.pop_front();
    if (++next.turns_since_look <= kQuietTurns && turns_since_work_ > ready_.size()) idle();
    ++turns_since_work_;
    if (next.turns_since_look > kQuietTurns) turns_since_work_ = idle_rounds_ = 0;
    resume(next);
  }
}

// Every lane that is not parked looks at flags. The more blocks there are, the more rarely: they share few cores.
void Block::idle() {
  turns_since_work_ = 0;
  if (move_bulk(true)) return;
  if (++idle_rounds_ < 4)
    sched_yield();
  else
    usleep(std::min(idle_rounds_ * idle_rounds_, std::max(200u, 20 * num_blocks)));
}

void Block::leave() {
  leave_wait();
  Lane& lane = *running_;
  Warp& warp = warps_[lane.index.x / kWarp];
  if (!lane.groups.empty() || !lane.open_group.empty())
    for (const Group& group : lane.groups)
      for (const auto& store : group)
        if (!store->is_read) fail("a lane has left while a bulk store reads shared memory");
  warp.left |= LaneMask{1} << lane.index.x % kWarp;
  lane.state = State::kLeft;
  ++num_left_;
  if (warp.arrived != 0 && (warp.mask & warp.left) != 0)
    fail("lane " + std::to_string(lane.index.x) + " has left, for which others wait in " + name_of(warp.kind));
  if (barriers_[0].arrived != 0)
    fail("lane " + std::to_string(lane.index.x) + " has left, for which others wait in __syncthreads");
  suspend(true);
}

void Block::fail(const std::string& what) {
  if (fault_.empty()) fault_ = what + "\n" + report();
  throw GivenUp{};
}

void Block::park(State state, const char* what, const void* at) {
  running_->state = state;
  running_->waits_for = what;
  running_->waits_at = at;
  suspend();
}

void Block::wake(uint32_t first, LaneMask mask) {
  const size_t before = ready_.size();
  for (uint32_t i = 0; i < kWarp && first + i < lanes_.size(); ++i) {
    Lane& lane = lanes_[first + i];
    if ((mask >> i & 1) == 0 || lane.state != State::kWaitsForWarp) continue;
    lane.state = State::kReady;
    ready_.push_back(&lane);
  }
  if (one_in(4)) std::shuffle(ready_.begin() + static_cast<ptrdiff_t>(before), ready_.end(), random_of_thread.engine);
}

const uint64_t* Block::meet(Meeting kind, LaneMask mask, uint64_t value, const void* at) {
  leave_wait();
  Lane& lane = *running_;
  const uint32_t place = lane.index.x % kWarp, first = lane.index.x - place;
  Warp& warp = warps_[first / kWarp];
  if ((mask >> place & 1) == 0) fail("a lane that is not in its own mask");
  if ((mask & warp.left) != 0) fail(std::string(name_of(kind)) + " waits for a lane that has left");
  if (warp.arrived != 0 && (warp.kind != kind || warp.mask != mask))
    fail("lane " + std::to_string(lane.index.x) + " is in " + name_of(kind) + place_of(at) +
         ", others of its warp are in " + name_of(warp.kind) + "\n" + report());
  warp.kind = kind;
  warp.mask = mask;
  const uint32_t number = warp.number;
  warp.values[number % 2][place] = value;
  warp.arrived |= LaneMask{1} << place;
  if (warp.arrived == mask) {
    warp.arrived = 0;
    ++warp.number;
    wake(first, mask);
    act();
  } else {
    park(State::kWaitsForWarp, name_of(kind), at);
  }
  return warp.values[number % 2];
}

bool Block::meet_block(uint32_t id, uint32_t size, bool yes, const void* at) {
  leave_wait();
  Barrier& barrier = barriers_[id];
  if (barrier.arrived != 0 && barrier.size != size)
    fail("barrier " + std::to_string(id) + " of " + std::to_string(size) + " threads, others have " +
         std::to_string(barrier.size));
  if (id == 0 && num_left_ != 0) fail("__syncthreads waits for a lane that has left");
  const uint32_t number = barrier.number;
  barrier.size = size;
  barrier.all = (barrier.arrived == 0 || barrier.all) && yes;
  if (++barrier.arrived < size) {
    static const char* const names[kBarriers] = {"__syncthreads", "barrier 1", "barrier 2", "barrier 3"};
    park(State::kWaitsForBlock, id < 4 ? names[id] : "a barrier", at);
    while (barrier.number == number) park(State::kWaitsForBlock, names[id & 3], at);
  } else {
    barrier.arrived = 0;
    barrier.result[number % 2] = barrier.all;
    ++barrier.number;
    wake_barrier(id);
    turns_since_work_ = 0;
    act();
  }
  return barrier.result[number % 2];
}

void Block::wake_barrier(uint32_t) {
  // Those of other barriers look again and wait on.
  for (Lane& lane : lanes_)
    if (lane.state == State::kWaitsForBlock) {
      lane.state = State::kReady;
      ready_.push_back(&lane);
    }
}

void Block::look(const void* at) {
  enter_wait();
  running_->turns_since_look = 0;
  running_->waits_for = "a flag";
  running_->waits_at = at;
  ready_.push_back(running_);
  suspend();
}

void Block::act() {
  leave_wait();
  if (!one_in(4)) return;
  running_->waits_for = "its turn";
  ready_.push_back(running_);
  suspend();
}

// ---- what is known of a block ---------------------------------------------------------------------------------------

std::string Block::report() const {
  std::map<std::string, std::vector<uint32_t>> alike;
  for (const Lane& lane : lanes_)
    alike[lane.state == State::kLeft ? "has left" : lane.waits_for + place_of(lane.waits_at)].push_back(
        number_of(lane));
  std::string text;
  for (auto& [what, lanes] : alike) {
    text += "  block " + std::to_string(number_) + ", " + what + ":";
    for (size_t i = 0; i < lanes.size();) {
      size_t end = i + 1;
      while (end < lanes.size() && lanes[end] == lanes[end - 1] + 1) ++end;
      text += " " + std::to_string(lanes[i]) + (end - i > 1 ? "-" + std::to_string(lanes[end - 1]) : "");
      i = end;
    }
    text += "\n";
  }
  return text;
}

Block& current_block() {
  if (own_block == nullptr) throw Fault("only a lane may do this");
  return *own_block;
}

void run_grid(const Grid& grid, const std::function<void()>& lane) {
  if (grid.blocks == 0 || grid.threads == 0 || grid.threads > 1024 || grid.shared_bytes > kSharedBytes)
    throw Fault("a launch of " + std::to_string(grid.blocks) + " blocks of " + std::to_string(grid.threads) +
                " threads with " + std::to_string(grid.shared_bytes) + " bytes");
  std::vector<std::exception_ptr> faults(grid.blocks);
  std::atomic<bool> given_up{false};
  std::vector<std::thread> threads;
  std::vector<uint32_t> order(grid.blocks);
  for (uint32_t b = 0; b < grid.blocks; ++b) order[b] = b;
  if (random_number() != 0) std::shuffle(order.begin(), order.end(), random_of_thread.engine);
  for (uint32_t b : order)
    threads.emplace_back([&, b] {
      try {
        Block(grid, b, lane, given_up).run();
      } catch (...) {
        faults[b] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const auto& fault : faults)
    if (fault) std::rethrow_exception(fault);
}

void disturb(uint64_t seed) {
  seed_of_all.store(seed);
  threads_so_far.store(0);
  ++times_disturbed;
}
uint64_t random_number() { return random_of_thread.next(); }

std::string report() {
  const std::lock_guard lock(blocks_mutex);
  std::string text;
  for (const Block* block : all_blocks) text += block->report();
  return text;
}

uint8_t* dynamic_memory() { return dynamic_bytes; }

const uint64_t* meet(Meeting kind, LaneMask mask, uint64_t value) {
  return current_block().meet(kind, mask, value, __builtin_return_address(0));
}
bool meet_block(uint32_t id, uint32_t size, bool yes) {
  return current_block().meet_block(id, size, yes, __builtin_return_address(0));
}
void meet_whole_block() { current_block().meet_block(0, current_block().size(), true, __builtin_return_address(0)); }
void fail(const std::string& what) { current_block().fail(what); }
void look() { current_block().look(__builtin_return_address(0)); }
void act() {
  if (on_work != nullptr) on_work();
  current_block().act();
}

}  // namespace gpu_on_cpu
