// Copy engines made of memcpy: a copy happens only when the test lets it be over, in any order, as late as possible.
#pragma once

#include <cstring>
#include <random>
#include <vector>

#include "common/clock.h"
#include "common/mapping.h"
#include "sync/flag.h"
#include "sync/word.h"
#include "transport/transport.h"

namespace uccl_ep {

class FakeCopies final : public DeviceCopies {
 public:
  // Each copy takes a random time of up to `most_usec`.
  explicit FakeCopies(uint64_t most_usec = 0, uint64_t seed = 0) : most_usec_(most_usec), random_(seed) {}

  uint64_t start(void* to, const void* from, uint64_t num_bytes) override {
    if (start_fails.read() != 0) fail("the copy engine would not start");
    copies_.push_back({to, from, num_bytes, now_usec() + (most_usec_ != 0 ? random_() % most_usec_ : 0)});
    started.add(1);
    return copies_.size() - 1;
  }
  void flush() override { flushed_ = copies_.size(); }
  bool done(uint64_t ticket) override {
    if (fails.read() != 0) fail("the copy engine broke");
    Copy& copy = copies_[ticket];
    if (copy.over) asked_again.add(1);
    if (held.read() > ticket || ticket >= flushed_ || now_usec() < copy.over_usec) return false;
    std::memcpy(copy.to, copy.from, copy.num_bytes);
    return copy.over = true;
  }

  Flag held;  // copies with smaller tickets stay under way
  Flag fails, start_fails;
  Counter started, asked_again;

 private:
  struct Copy {
    void* to;
    const void* from;
    uint64_t num_bytes;
    uint64_t over_usec;
    bool over = false;
  };
  [[noreturn]] static void fail(const char* text) {
    ErrorRecord record;
    record.kind = ErrorKind::kTransport;
    record.set_message(text);
    throw CommunicationFailure(record);
  }

  const uint64_t most_usec_;
  std::mt19937_64 random_;
  std::vector<Copy> copies_;  // by ticket
  size_t flushed_ = 0;
};

// "Device regions" of ordinary memory, as one rank has mapped them: every rank at addresses of its own.
inline std::vector<Mapping> map_devices(const std::vector<Mapping>& owned) {
  std::vector<Mapping> mapped;
  for (const Mapping& of : owned) mapped.push_back(Mapping::open(of.name(), of.num_bytes()));
  return mapped;
}
inline DeviceRegions device_regions(const std::vector<Mapping>& mapped, DeviceCopies* copies) {
  DeviceRegions device{{}, copies};
  for (const Mapping& of : mapped) device.regions.push_back({of.base(), of.num_bytes(), ""});
  return device;
}

}  // namespace uccl_ep
