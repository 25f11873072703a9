// What a test can tell the stand-in for libibverbs (fake_verbs.cc), and ask it. One instance per process.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>

namespace uccl_ep {

struct FakeVerbs {
  // Set before NICs are opened.
  int num_devices = 2;  // "fake0", "fake1" ...
  bool is_efa = false;
  bool can_write = true, can_receive_unsolicited = true;  // of EFA
  bool port_active = true;
  int num_gids = 3;
  int registration_error = 0;  // an errno
  uint64_t seed = 0;  // the order of deliveries; 0: as posted. Connections keep their own
  // At any time.
  uint32_t cut_qp = 0;  // what is posted by this queue pair is not acknowledged, then its retries are exceeded
  bool holds = false;   // nothing moves
  double datagram_loss = 0, datagram_duplicates = 0;  // shares of unreliable ones
  // What the NICs of `event_device` tell next, once each: an ibv_event_type; -1: nothing.
  int event = -1, event_device = 0;
  uint8_t event_port = 1;

  // What happened.
  uint32_t queue_pairs = 0;  // alive
  uint32_t datagram_pairs = 0;  // of them
  uint32_t registrations = 0, dmabuf_registrations = 0;  // alive
  uint32_t receives = 0;  // posted, without those of datagrams
  uint64_t doorbells = 0, writes = 0, signalled = 0;  // of writes
  uint64_t datagrams = 0, lost_datagrams = 0;
  uint64_t largest_registration_bytes = 0;
  uint64_t queue_bytes = 0;  // of queues that are alive: 64 for each entry, 32 for one of a receive queue
  uint64_t outside = 0;  // writes that met no registered memory
  uint64_t wrong_order = 0;  // objects destroyed before those that need them
  uint64_t events_read = 0, events_acknowledged = 0;
  uint64_t blocked = 0;  // asked for events that there were not, and would have had to wait
  uint64_t to_cut_ones = 0;  // writes that reached memory after their queue pair was put in the error state
  uint8_t service_level = 0, traffic_class = 0, timeout = 0;  // of the last connection
};

inline FakeVerbs& fake_verbs() {
  static auto* const found = static_cast<FakeVerbs*>(dlsym(dlopen("libibverbs.so.1", RTLD_NOW), "fake_verbs_state"));
  if (found == nullptr) throw std::logic_error("libibverbs.so.1 is not the stand-in: LD_LIBRARY_PATH");
  return *found;
}

}  // namespace uccl_ep
