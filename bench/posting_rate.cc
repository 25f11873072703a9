// How many chunk commands a proxy thread takes, posts, and completes in a second through the loop transport, and how
// many arrivals a proxy thread handles. Chunks are empty: what is measured is the proxy and the transport, not memcpy.
//   posting_rate SECONDS WINDOW_CHUNKS THREADS      prints: commands, seconds in the sender, seconds in the receiver
//
// The sending rank fills the command ring and makes a pass of its proxy in turns; the receiving rank makes passes of
// its proxy and frees what arrived. THREADS = 2: each rank has a thread, so what they share goes from core to core, but
// on a busy host passes find little to do. THREADS = 1: both in turns in one thread. Timed are the passes of the
// proxies that moved anything, in processor time of their thread: other programs on the host do not count. The sender's
// passes take commands, check credits and the window, post, flush, deliver as loop does, poll completions, stamp the
// flushed slots, and take in credits; the receiver's poll arrivals, stamp their slots, and return credits.
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <thread>

#include "proxy_world.h"

using namespace uccl_ep;

namespace {

struct Measured {
  uint64_t commands = 0;
  uint64_t sender_nsec = 0, receiver_nsec = 0;
};

uint64_t thread_nsec() {
  timespec ts;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
  return static_cast<uint64_t>(ts.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(ts.tv_nsec);
}

uint64_t timed_step(Proxy& proxy) {
  const uint64_t started = thread_nsec();
  return proxy.step() ? thread_nsec() - started : 0;
}

Measured measure(World& world, uint64_t usec, bool two_threads) {
  const uint32_t channel = out_channel(world.nodes[0], RingKind::kRows, 1);
  Source source(world.nodes[0], channel);
  Sink sink(world.nodes[1], world.nodes[0].channels.out[channel].peer_channel, 0);
  Measured sum;
  auto send = [&] {
    while (source.free() && source.push(0)) continue;
    sum.sender_nsec += timed_step(*world.nodes[0].proxy);
  };
  auto receive = [&] {
    sum.receiver_nsec += timed_step(*world.nodes[1].proxy);
    while (sink.ready()) sink.release();
  };
  Flag over;
  std::thread receiver;
  if (two_threads)
    receiver = std::thread([&] {
      while (over.read() == 0) receive();
    });
  const uint64_t deadline = now_usec() + usec;
  while (now_usec() < deadline) {
    send();
    if (!two_threads) receive();
  }
  over.publish(1);
  if (two_threads) receiver.join();
  sum.commands = world.nodes[0].proxy->stats().ships[static_cast<size_t>(RingKind::kRows)].chunks;
  return sum;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "posting_rate SECONDS WINDOW_CHUNKS THREADS\n");
    return 2;
  }
  WorldOptions options;
  options.rings = {64, 64, static_cast<uint32_t>(std::strtoul(argv[2], nullptr, 10)), 16};
  World world(options);
  const Measured found = measure(world, static_cast<uint64_t>(1e6 * std::strtod(argv[1], nullptr)),
                                 std::strtoul(argv[3], nullptr, 10) == 2);
  if (world.nodes[0].has_error() || found.commands == 0) {
    std::fprintf(stderr, "failed: %s\n", world.nodes[0].control().error.message);
    return 1;
  }
  std::printf("%lu %.9f %.9f\n", found.commands, 1e-9 * static_cast<double>(found.sender_nsec),
              1e-9 * static_cast<double>(found.receiver_nsec));
  return 0;
}
