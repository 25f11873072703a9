// What a run of the conformance suite was asked for, and what its claims say beyond holding or failing.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "claims.h"
#include "common/clock.h"
#include "transport/transport.h"

namespace conformance {

struct Suite {
  std::string kind;  // of the transport
  double patience = 1;  // every deadline of the claims is so many times longer: for emulated machines
  uccl_ep::NicOptions nic;
  std::vector<std::string> devices;  // rank r uses the (r mod n)-th alone; empty: what the transport chooses
  uint32_t num_nics = 1;  // that a rank uses
  // Commands of the shell that cut and heal the link between the ranks; empty: there is none.
  std::string cut_command, heal_command;
  // Of the shell, too: a port of a NIC goes down and comes back.
  std::string down_command, up_command;

  std::vector<std::string> devices_of(int rank) const {
    return devices.empty() ? nic.devices : std::vector{devices[static_cast<size_t>(rank) % devices.size()]};
  }
  uint64_t patient_usec(uint64_t usec) const { return static_cast<uint64_t>(patience * static_cast<double>(usec)); }
};

inline Suite& suite() {
  static Suite the_suite;
  return the_suite;
}

constexpr uint64_t kPatientUsec = 20'000'000;  // what should take far less

class Deadline {
 public:
  explicit Deadline(uint64_t usec = kPatientUsec) : end_usec_(uccl_ep::now_usec() + suite().patient_usec(usec)) {}
  bool over() const { return uccl_ep::now_usec() > end_usec_; }

 private:
  uint64_t end_usec_;
};

// Thrown by a claim that cannot be tried here, with the reason.
struct Skipped : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Sentences that run only when they are asked for.
inline std::set<std::string>& slow_sentences() {
  static std::set<std::string> sentences;
  return sentences;
}
struct Slow {
  explicit Slow(const char* sentence) { slow_sentences().insert(sentence); }
};

// loop as it is, and loop as bad as a network can be; other transports as they are.
struct Variant {
  const char* name;
  uccl_ep::LoopOptions loop;
};
inline std::vector<Variant> variants() {
  std::vector<Variant> all = {{"plain", {}}};
  if (suite().kind != "loop") return all;
  uccl_ep::LoopOptions bad;
  bad.seed = 17;
  bad.refuse_rate = 0.2;
  bad.duplicate_rate = 0.2;
  all.push_back({"disordered", bad});
  return all;
}

// At least `bytes` are free, else the claim is skipped.
void need_memory(uint64_t bytes);

// Runs `from` to `to` of the seeds over loop, one stream each. True if all hold. `broken`: with a transport that loses
// a write now and then.
bool run_seeds(uint64_t from, uint64_t to, bool broken);

}  // namespace conformance

#define SLOW_CLAIM(sentence)                                            \
  static const conformance::Slow CLAIM_JOIN(slow_, __LINE__){sentence}; \
  CLAIM(sentence)
