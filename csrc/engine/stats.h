// Counters of engines.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace uccl_ep {

// Numbers by the names that Buffer.stats() documents.
using Stats = std::vector<std::pair<std::string, double>>;

template <typename Number>
void put(Stats& out, const std::string& name, Number value) {
  out.emplace_back(name, static_cast<double>(value));
}
// The rank that was waited for longest, from the time per rank; -1: none.
void put_straggler(Stats& out, const std::vector<uint64_t>& waited_usec, int own_rank);

// Bytes by purpose.
using MemoryEntries = std::vector<std::pair<std::string, uint64_t>>;

}  // namespace uccl_ep
