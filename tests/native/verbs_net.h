// Ranks of one process that the stand-in for libibverbs connects.
#pragma once

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/units.h"
#include "fake_verbs.h"
#include "fixture.h"

namespace uccl_ep {

constexpr uint64_t kRegionBytes = 1 << 20;
constexpr uint64_t kLargestWrite = 16 << 10;

struct Net {
  explicit Net(size_t num_ranks, NicOptions nic = {}) {
    if (nic.devices.empty()) nic.devices = {"fake0"};
    for (size_t r = 0; r < num_ranks; ++r) {
      regions.push_back(std::make_unique<TestRegion>(kRegionBytes));
      setups.push_back(setup_of(static_cast<int>(r), num_ranks, regions.back()->registered()));
      setups.back().largest_write_bytes = kLargestWrite;
      transports.push_back(transport_named("verbs").make(setups.back(), {{}, nic}));
      addresses.push_back(transports.back()->address());
    }
    for (auto& transport : transports) transport->connect(addresses);
  }
  Transport& operator[](size_t rank) { return *transports[rank]; }
  std::vector<Completion> poll(size_t rank) {
    std::vector<Completion> out(64);
    out.resize(transports[rank]->poll(out));
    return out;
  }

  std::vector<std::unique_ptr<TestRegion>> regions;
  std::vector<TransportSetup> setups;
  std::vector<std::unique_ptr<Transport>> transports;
  std::vector<std::string> addresses;
};

inline WriteRequest small(int peer, uint32_t number, uint64_t num_bytes = 8) {
  return {peer, kPageBytes, kPageBytes, num_bytes, number, number, Memory::kHost, false};
}

template <typename Kind>
std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Kind& failure) {
    return failure.what();
  }
  return "nothing was thrown";
}
inline bool says(const std::string& text, const std::string& part) {
  if (text.find(part) == std::string::npos) throw std::logic_error("'" + text + "' lacks '" + part + "'");
  return true;
}

}  // namespace uccl_ep
