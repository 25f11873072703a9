#include "backend/gpu/queue_probe.h"

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <new>
#include <stdexcept>

#include "common/clock.h"
#include "common/units.h"
#include "device/launch.cuh"
#include "device/memory.h"
#include "queue/device.cuh"

namespace uccl_ep::gpu {
namespace {

constexpr uint64_t kLimitNsec = 5'000'000'000;  // for the next command, and for its answer
constexpr uint32_t kRoundTrips = 1000;

// A command whose fields use all their bits.
constexpr __host__ __device__ Command command_of(uint64_t serial) {
  return {static_cast<uint32_t>(serial) & kCommandMaxChannel, serial * 0x9E3779B97F4A7C15ull & kCommandMaxBytes, serial,
          static_cast<uint32_t>(serial * 0x9E3779B9u) & kCommandMaxUnit};
}

// False: the ring has been full for too long.
__device__ bool push_in_time(CommandProducer& producer, uint64_t serial) {
  const uint64_t started = now_nsec();
  while (!producer.push(command_of(serial)))
    if (now_nsec() - started > kLimitNsec) return false;
  return true;
}

__global__ void push_many(const CommandQueue queue, uint64_t commands) {
  CommandProducer producer(queue);
  for (uint64_t i = 0; i < commands && push_in_time(producer, i); ++i) continue;
  producer.keep();
}

// `answers`: a pinned word, in which the host says how many it has taken.
__global__ void go_round(const CommandQueue queue, uint64_t first, const uint64_t* answers, uint64_t* nsec) {
  CommandProducer producer(queue);
  for (uint64_t i = 0; i < kRoundTrips; ++i) {
    const uint64_t started = now_nsec();
    if (!push_in_time(producer, first + i)) break;
    while (read_flag(answers) <= i && now_nsec() - started < kLimitNsec) continue;
    if (read_flag(answers) <= i) break;
    nsec[i] = now_nsec() - started;
  }
  producer.keep();
}

class Consumer {
 public:
  Consumer(void* memory, uint32_t capacity, uint64_t first) : ring_(memory, capacity), next_(first) {}
  // Throws when none comes.
  void take() {
    Command command{};
    for (const uint64_t started = uccl_ep::now_nsec(); !ring_.pop(command);)
      if (uccl_ep::now_nsec() - started > kLimitNsec) throw std::runtime_error("the GPU's commands stopped coming");
    const Command wanted = command_of(next_++);
    wrong_ += command.channel != wanted.channel || command.num_bytes != wanted.num_bytes ||
              command.serial != wanted.serial || command.unit != wanted.unit;
  }
  uint64_t wrong() const { return wrong_; }

 private:
  CommandRing ring_;
  uint64_t next_, wrong_ = 0;
};

}  // namespace

QueueMeasured measure_queue(int device, uint32_t capacity, uint64_t commands, uint64_t first, uint32_t pause_usec) {
  const OnDevice guard(device);
  const uint64_t ring_bytes = round_up(CommandRing::bytes_for(capacity), kLineBytes);
  const PinnedMemory pinned(ring_bytes + kLineBytes);
  const uint64_t nsec_bytes = kRoundTrips * sizeof(uint64_t);
  const DeviceMapping memory = DeviceMapping::create(device, sizeof(ProducerState) + nsec_bytes);
  const CommandQueue queue{reinterpret_cast<uint64_t*>(pinned.base()), capacity,
                           reinterpret_cast<ProducerState*>(memory.base())};
  Flag* const answers = new (pinned.base() + ring_bytes) Flag;
  uint64_t* const nsec = reinterpret_cast<uint64_t*>(memory.base() + sizeof(ProducerState));

  QueueMeasured found;
  Consumer consumer(pinned.base(), capacity, first);
  launch_kernel(push_many, {1, 1}, queue, commands);
  must(launch_status(), "push_many");
  uint64_t started = 0;
  for (uint64_t i = 0; i < commands; ++i) {
    consumer.take();
    if (i == 0) started = uccl_ep::now_nsec();
    if (pause_usec > 0 && i % capacity == capacity - 1) usleep(pause_usec);
  }
  if (commands > 1)
    found.commands_per_s = 1e9 * static_cast<double>(commands - 1) / static_cast<double>(uccl_ep::now_nsec() - started);
  launch_kernel(go_round, {1, 1}, queue, commands, reinterpret_cast<const uint64_t*>(answers), nsec);
  must(launch_status(), "go_round");
  for (uint64_t i = 0; i < kRoundTrips; ++i) {
    consumer.take();
    answers->publish(i + 1);
  }
  found.wrong = consumer.wrong();
  std::vector<uint64_t> trips(kRoundTrips);
  copy_now(trips.data(), nsec, nsec_bytes);
  for (uint64_t trip : trips) found.round_trip_usec.push_back(1e-3 * static_cast<double>(trip));
  return found;
}

}  // namespace uccl_ep::gpu
