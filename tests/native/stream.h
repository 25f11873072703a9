// A stream of rows through proxies, with readers that find what was overwritten.
#pragma once

#include <unistd.h>

#include <random>
#include <thread>
#include <vector>

#include "common/clock.h"
#include "proxy_world.h"

namespace uccl_ep {

struct StreamResult {
  uint64_t broken = 0;  // chunks that a reader found to be something else
  bool complete = true;
};

// Rows from rank 0 to its rail in domain 1, whose readers look at each chunk twice, with pauses. `rewritten`: the
// transport may write a chunk's bytes again while they are read.
inline StreamResult stream(World& world, uint64_t num_chunks, uint64_t num_bytes,
                           uint64_t patience_usec = kPatienceUsec, bool rewritten = false) {
  const int rail = world.topo.rail(0, 1);
  const uint32_t channel = out_channel(world.nodes[0], RingKind::kRows, rail);
  Source source(world.nodes[0], channel);
  Node& landing = world.nodes[static_cast<size_t>(rail)];
  const uint32_t in = world.nodes[0].channels.out[channel].peer_channel;
  const uint32_t num_readers = landing.channels.in[in].landing.num_readers;
  std::vector<StreamResult> results(num_readers);
  const uint64_t deadline = now_usec() + patience_usec;
  std::vector<std::thread> readers;
  for (uint32_t reader = 0; reader < num_readers; ++reader)
    readers.emplace_back([&, reader] {
      std::mt19937 random(reader + 1);
      Sink sink(landing, in, reader);
      auto intact = [&] { return rewritten ? sink.intact_while_rewritten(num_bytes) : sink.intact(num_bytes); };
      while (sink.serial() < num_chunks) {
        if (!sink.ready()) {
          if (now_usec() > deadline || landing.has_error()) break;
          sched_yield();
          continue;
        }
        const bool first = intact();
        if (random() % 16 == 0)
          usleep(random() % 200);  // slow, so that a chunk without credit would overwrite this one
        results[reader].broken += !first || !intact();
        sink.release();
      }
      results[reader].complete = sink.serial() == num_chunks;
    });
  while (source.serial() < num_chunks && now_usec() < deadline && !world.nodes[0].has_error())
    if (!source.try_send(num_bytes)) sched_yield();
  for (auto& reader : readers) reader.join();
  StreamResult all;
  for (auto& result : results) {
    all.broken += result.broken;
    all.complete &= result.complete;
  }
  return all;
}

}  // namespace uccl_ep
