// How many chunk commands a proxy thread takes, posts, and completes in a second through the loop transport, and how
// many arrivals a proxy thread handles. Chunks are empty: what is measured is the proxy and the transport, not memcpy.
//   posting_rate SECONDS WINDOW_CHUNKS      prints: commands, seconds in the sender, seconds in the receiver
//
// Two threads, each with a rank: one fills the command ring and makes passes of the sender's proxy in turns, the other
// makes passes of the receiver's proxy and frees what arrived. Only passes of the proxies are timed, idle ones too. The
// sender's takes commands, checks credits and the window, posts, flushes, delivers as loop does, polls its completions,
// stamps the flushed slots, and takes in credits; the receiver's polls arrivals, stamps their slots, returns credits.
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "proxy_world.h"

using namespace uccl_ep;

namespace {

struct Measured {
  uint64_t commands = 0;
  uint64_t sender_nsec = 0, receiver_nsec = 0;
};

uint64_t timed_step(Proxy& proxy) {
  const uint64_t started = now_nsec();
  proxy.step();
  return now_nsec() - started;
}

Measured measure(World& world, uint64_t usec) {
  const uint32_t channel = out_channel(world.nodes[0], RingKind::kRows, 1);
  Source source(world.nodes[0], channel);
  Sink sink(world.nodes[1], world.nodes[0].channels.out[channel].peer_channel, 0);
  Measured sum;
  Flag over;
  std::thread receiver([&] {
    while (over.read() == 0) {
      sum.receiver_nsec += timed_step(*world.nodes[1].proxy);
      while (sink.ready()) sink.release();
    }
  });
  const uint64_t deadline = now_usec() + usec;
  while (now_usec() < deadline) {
    while (source.free() && source.push(0)) continue;
    sum.sender_nsec += timed_step(*world.nodes[0].proxy);
  }
  over.publish(1);
  receiver.join();
  sum.commands = world.nodes[0].proxy->stats().ships[static_cast<size_t>(RingKind::kRows)].chunks;
  return sum;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "posting_rate SECONDS WINDOW_CHUNKS\n");
    return 2;
  }
  WorldOptions options;
  options.window = {64, 64, static_cast<uint32_t>(std::strtoul(argv[2], nullptr, 10)), 16};
  World world(options);
  const Measured found = measure(world, static_cast<uint64_t>(1e6 * std::strtod(argv[1], nullptr)));
  if (world.nodes[0].has_error() || found.commands == 0) {
    std::fprintf(stderr, "failed: %s\n", world.nodes[0].control().error.message);
    return 1;
  }
  std::printf("%lu %.9f %.9f\n", found.commands, 1e-9 * static_cast<double>(found.sender_nsec),
              1e-9 * static_cast<double>(found.receiver_nsec));
  return 0;
}
