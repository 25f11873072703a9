// A rank's address, as one line of text.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>

#include "transport/failure.h"

namespace uccl_ep::loop {

struct Address {
  int rank = -1;
  uint64_t generation = 0;  // of the engine
  int pid = 0;
  uint64_t pid_namespace = 0;
  std::string boot_id;  // of the host
  std::string region_name;
  uint64_t region_bytes = 0;
  std::string inbox_name;
  uint32_t inbox_slots = 0;  // per sender
};

inline std::string encode_address(const Address& a) {
  std::ostringstream text;
  text << "loop3 " << a.rank << ' ' << a.generation << ' ' << a.pid << ' ' << a.pid_namespace << ' ' << a.boot_id << ' '
       << a.region_name << ' ' << a.region_bytes << ' ' << a.inbox_name << ' ' << a.inbox_slots;
  return text.str();
}

// Throws CommunicationFailure(kTransport) for anything that encode_address cannot have written.
inline Address decode_address(const std::string& text) {
  Address a;
  std::string tag;
  std::istringstream in(text);
  in >> tag >> a.rank >> a.generation >> a.pid >> a.pid_namespace >> a.boot_id >> a.region_name >> a.region_bytes >>
      a.inbox_name >> a.inbox_slots;
  // Accept only text that encodes back to itself: streams accept signs, spaces and trailing text, and wrap negatives.
  if (!in || tag != "loop3" || a.rank < 0 || a.region_bytes == 0 || a.inbox_slots == 0 || encode_address(a) != text)
    fail_address("loop", text);
  return a;
}

}  // namespace uccl_ep::loop
