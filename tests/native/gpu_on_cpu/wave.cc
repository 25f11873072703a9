// Lanes in lock step.
#include <atomic>

#include "block.h"

namespace gpu_on_cpu {
namespace {

std::atomic<int64_t> most_standing_msec{30'000};

}  // namespace

bool in_lock_step() { return kWave > 1; }
void stand_at_most(std::chrono::milliseconds time) { most_standing_msec.store(time.count()); }

// Lock step, at its strictest: a wait runs to its end before any other code of its wave. A lane that looks at flags
// joins those of its wave that do. One that is through, or comes to anything else, stands still until all of them are
// through.
void Block::enter_wait() {
  if constexpr (kWave == 1) return;
  const uint32_t first = running_->index.x / kWave * kWave;
  Wave& wave = waves_[first / kWave];
  if (wave.looking == 0) wave = {0, 0, std::chrono::steady_clock::now()};
  wave.looking |= uint64_t{1} << running_->index.x % kWave;
  if (++wave.looks % 64 != 0) return;
  const std::chrono::milliseconds most{most_standing_msec.load(std::memory_order_relaxed)};
  if (std::chrono::steady_clock::now() - wave.since < most) return;
  for (uint32_t i = first; i < first + kWave && i < lanes_.size(); ++i)
    if (lanes_[i].state == State::kWaitsForWave)
      fail("lanes of a wave wait while others of it stand still, in all blocks:\n" + gpu_on_cpu::report() + "here:");
}
void Block::leave_wait() {
  if constexpr (kWave == 1) return;
  const uint32_t first = running_->index.x / kWave * kWave;
  Wave& wave = waves_[first / kWave];
  if (wave.looking == 0) return;
  wave.looking &= ~(uint64_t{1} << running_->index.x % kWave);
  if (wave.looking == 0) return wake_wave(first);
  while (wave.looking != 0) park(State::kWaitsForWave, "its wave", nullptr);
}
void Block::wake_wave(uint32_t first) {
  for (uint32_t i = first; i < first + kWave && i < lanes_.size(); ++i) {
    Lane& lane = lanes_[i];
    if (lane.state != State::kWaitsForWave) continue;
    lane.state = State::kReady;
    ready_.push_back(&lane);
  }
}

}  // namespace gpu_on_cpu
